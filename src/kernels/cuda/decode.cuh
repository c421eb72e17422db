// Forward of few query rows: bound by memory, so every warp streams a chunk of keys of its own and waits for nobody.
// See decode.h for the grid.
//   shared   Q [16 pairs][columns], for each warp kStages steps of 16 rows of K and of V, swizzled
//   a warp   one chunk, 16 keys at a time, for the 16 pairs of a tile: maximum, sum and output in registers
// Where pairs make several tiles, the warps of a block have a tile each and the same chunk, of which each warp loads a
// part: what a warp computes is the same, but keys are read once.
// Code is kept short: a block runs most of it once, and fetching instructions costs more than executing them. So there
// is one copy of each loop's body, and key_mask, pieces, ALiBi and unaligned rows have instantiations of their own.
#pragma once

#include <algorithm>
#include <climits>

#include "kernels/cuda/decode.h"
#include "kernels/cuda/tile.cuh"
#include "kernels/ptx/streams.cuh"

namespace longspan::cuda {

inline constexpr int kMergeThreads = kDecodeFan * kWarpThreads;

__device__ __forceinline__ float decode_base(float largest) { return largest == -LONGSPAN_INFINITY ? 0.0f : largest; }

/// Maximum, sum and output of one pair, spread over a warp: a lane has four neighbouring columns of each 128.
template <int kQuadsValue>
struct DecodeState {
  static constexpr int kQuads = kQuadsValue;
  float largest, sum = 0.0f;
  float out[kQuads][4] = {};

  __device__ __forceinline__ DecodeState() { largest = -LONGSPAN_INFINITY; }
  __device__ __forceinline__ static int column(int quad) {
    return static_cast<int>(threadIdx.x) % kWarpThreads * 4 + quad * 128;
  }
  /// Adds `count` <= 32 states at once; lane c knows the maximum and sum of state c, quad(c, j) has its columns.
  template <int kMost, class Quad>
  __device__ __forceinline__ void merge(float own_largest, float own_sum, int count, int columns, Quad&& quad) {
    float highest = own_largest;
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2)
      highest = fmaxf(highest, __shfl_xor_sync(~0u, highest, distance));
    const float weight = fast_exp2(own_largest - decode_base(highest));
    float total = __fmul_rn(weight, own_sum);
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) total += __shfl_xor_sync(~0u, total, distance);
    largest = highest;
    sum = total;
    constexpr int kAtOnce = kMost < 8 ? kMost : 8;  // loads in flight
#pragma unroll 1
    for (int first = 0; first < count; first += kAtOnce) {
      float4 values[kAtOnce][kQuads];
#pragma unroll
      for (int c = 0; c < kAtOnce; ++c)
#pragma unroll
        for (int j = 0; j < kQuads; ++j)
          if (first + c < count && column(j) < columns) values[c][j] = quad(first + c, column(j));
#pragma unroll
      for (int c = 0; c < kAtOnce; ++c) {
        const float factor = __shfl_sync(~0u, weight, first + c);
        if (first + c >= count) continue;
#pragma unroll
        for (int j = 0; j < kQuads; ++j) {
          out[j][0] = fmaf(factor, values[c][j].x, out[j][0]);
          out[j][1] = fmaf(factor, values[c][j].y, out[j][1]);
          out[j][2] = fmaf(factor, values[c][j].z, out[j][2]);
          out[j][3] = fmaf(factor, values[c][j].w, out[j][3]);
        }
      }
    }
  }
  /// `count` <= kMost states, `pitch` floats apart.
  template <int kMost>
  __device__ __forceinline__ static DecodeState of_records(const float* records, int pitch, int count, int columns) {
    const int lane = threadIdx.x % kWarpThreads;
    const float2 own =
        lane < count ? *reinterpret_cast<const float2*>(records + lane * pitch) : make_float2(-LONGSPAN_INFINITY, 0.0f);
    DecodeState state;
    state.template merge<kMost>(own.x, own.y, count, columns, [&](int c, int at) {
      return *reinterpret_cast<const float4*>(records + c * pitch + 4 + at);
    });
    return state;
  }
  __device__ __forceinline__ void put(float* record, int columns) const {
    if (threadIdx.x % kWarpThreads == 0) *reinterpret_cast<float2*>(record) = make_float2(largest, sum);
#pragma unroll
    for (int j = 0; j < kQuads; ++j) {
      if (column(j) < columns)
        *reinterpret_cast<float4*>(record + 4 + column(j)) = make_float4(out[j][0], out[j][1], out[j][2], out[j][3]);
    }
  }
  __device__ __forceinline__ void add(const DecodeState& more) {
    const float highest = fmaxf(largest, more.largest), base = decode_base(highest);
    const float own = fast_exp2(largest - base), other = fast_exp2(more.largest - base);
    largest = highest;
    sum = fmaf(more.sum, other, __fmul_rn(sum, own));
#pragma unroll
    for (int j = 0; j < kQuads; ++j)
#pragma unroll
      for (int i = 0; i < 4; ++i) out[j][i] = fmaf(more.out[j][i], other, __fmul_rn(out[j][i], own));
  }
};

template <class MathValue, int kColumnsValue, bool kFeaturesValue, bool kSharedValue>
struct DecodeShape {
  using Math = MathValue;
  static constexpr int kColumns = kColumnsValue;
  static constexpr bool kFeatures = kFeaturesValue;
  static constexpr DecodeMemory kMemory{kWide<Math>, kColumns};
  static constexpr int kPitch = kMemory.pitch, kStepKeys = kMemory.keys, kStepBytes = kMemory.step;
  static constexpr int kStages = kMemory.stages;
  static constexpr int kWarps = kMemory.warps, kThreads = kWarps * kWarpThreads;
  static constexpr int kTiles = kSharedValue ? kWarps : 1, kTileBytes = 16 * kPitch;  // of Q, in a block
  static constexpr int kSharedBytes = kMemory.bytes + (kTiles - 1) * kTileBytes;
  static constexpr int kBlocksPerSm = kSharedBytes <= 72 * 1024 ? 3 : 2;
  static_assert(kPitch == pitch_of<Math>(kColumns));
};

/// The pairs of a warp's tile, in order.
struct DecodePairs {
  int count, begin, end;  // every pair attends to keys before `begin`, some to those before `end`
  int row[16], head[16], own[16];
};

__device__ __forceinline__ void find_pairs(const Decode& a, const DecodePlace& p, const StrandRows& strand, int length,
                                           DecodePairs& pairs) {
  const int lane = threadIdx.x % kWarpThreads;
  int found = 0, end = 0, begin = INT_MAX;
  if (strand.count > 0 && a.grid.leads(p)) {
#pragma unroll 1
    for (int first = 0; first < a.grid.rows * a.grid.group; first += kWarpThreads) {
      const int pair = first + lane;
      const int own = pair < a.grid.rows * a.grid.group ? a.grid.find(p, strand, pair) : -1;
      const unsigned all = __ballot_sync(~0u, own >= 0);
      const int place = found + __popc(all & ((1u << lane) - 1)) - 16 * p.tile;
      if (own >= 0 && place >= 0 && place < 16) {
        pairs.row[place] = a.grid.row_of(pair);
        pairs.head[place] = p.kv_head * a.grid.group + a.grid.head_of(pair);
        pairs.own[place] = own;
        end = max(end, a.grid.keys(strand, own));
        begin = min(begin, a.grid.keys(strand, own));
      }
      found += __popc(all);
    }
  }
  end = static_cast<int>(__reduce_max_sync(~0u, static_cast<unsigned>(end)));
  begin = static_cast<int>(__reduce_min_sync(~0u, static_cast<unsigned>(begin)));
  if (lane == 0) pairs.count = min(max(found - 16 * p.tile, 0), 16), pairs.begin = begin, pairs.end = end;
}

/// The keys of a chunk as warps load and read them.
template <class Shape>
struct DecodeKeys {
  using T = Element<typename Shape::Math>;
  static constexpr int kPlaces = Shape::kPitch / 16, kTimes = Shape::kStepKeys * kPlaces / kWarpThreads;
  static constexpr int kRows = std::max(kWarpThreads / kPlaces, 1);   // that a warp loads at once
  static constexpr int kParts = std::max(kPlaces / kWarpThreads, 1);  // or how many loads a row takes
  static constexpr unsigned kAll = ~0u >> (32 - Shape::kStepKeys);
  const Decode& a;
  const DecodePlace& p;
  const StrandRows& strand;
  std::uint32_t ring;  // of all warps
  std::uint64_t policy;
  int begin, stop;  // of the chunk
  const char *k_base, *v_base;
  std::int64_t k_step, v_step;

  __device__ __forceinline__ DecodeKeys(const Decode& decode, const DecodePlace& place, const StrandRows& rows,
                                        std::uint32_t memory)
      : a(decode),
        p(place),
        strand(rows),
        ring(memory),
        policy(cache_policy(decode.grid.branches[place.branch].block_tiles == 1)) {
    begin = chunk_begin(p.chunk);
    stop = chunk_end(p.chunk, min(strand.count, a.grid.rows_before_end(strand)));
    const auto first = [&](const Rows& of) {
      return of.data + of.offset(p.entry, strand.start, p.kv_head) * static_cast<std::int64_t>(sizeof(T));
    };
    k_base = first(a.tensors.k), v_base = first(a.tensors.v);
    k_step = a.tensors.k.row * strand.stride * static_cast<std::int64_t>(sizeof(T));
    v_step = a.tensors.v.row * strand.stride * static_cast<std::int64_t>(sizeof(T));
  }
  /// Where a warp loads the keys of a step to, and which ones.
  __device__ __forceinline__ std::uint32_t stage(int warp, int step) const {
    return ring + static_cast<std::uint32_t>((warp * Shape::kStages + step % Shape::kStages) * Shape::kStepBytes);
  }
  __device__ __forceinline__ int first(int warp, int step) const {
    return begin + (step * Shape::kTiles + (Shape::kTiles > 1 ? warp : 0)) * Shape::kStepKeys;
  }
  /// Of those keys that lie before `end`.
  __device__ __forceinline__ int steps(int end) const {
    constexpr int kKeys = Shape::kTiles * Shape::kStepKeys;
    return max(min(stop, end) - begin + kKeys - 1, 0) / kKeys;
  }
  /// Starts loading; says which of the keys there are.
  __device__ __forceinline__ unsigned load(int warp, int step) const {
    const int key = first(warp, step);
    if (key >= stop) return 0;
    const std::uint32_t k_tile = stage(warp, step), v_tile = k_tile + Shape::kStepBytes / 2;
    const int lane = threadIdx.x % kWarpThreads;
    if constexpr (!Shape::kFeatures) {
      // There are many copies, so addresses of a lane differ by constants: its rows lie kRows apart.
      const int left = stop - key, row = lane / kPlaces, column = lane % kPlaces;
      const char* k_row = k_base + (key + row) * k_step + column * 16;
      const char* v_row = v_base + (key + row) * v_step + column * 16;
#pragma unroll
      for (int i = 0; i < kTimes; ++i) {
        const int more = i / kParts * kRows, beside = i % kParts * kWarpThreads;
        const bool valid =
            row + more < left && (column + beside) * static_cast<int>(16 / sizeof(T)) < a.tensors.columns;
        const std::uint32_t offset =
            chunk_offset<Shape::kPitch>(row, (column + beside) ^ (more & 7)) + more * Shape::kPitch;
        copy_async(k_tile + offset, valid ? k_row + beside * 16 : k_base, valid, policy);
        copy_async(v_tile + offset, valid ? v_row + beside * 16 : v_base, valid, policy);
        if (i % kParts == kParts - 1) k_row += kRows * k_step, v_row += kRows * v_step;
      }
      return left >= Shape::kStepKeys ? kAll : (1u << left) - 1;
    } else {
      const int own = key + lane % Shape::kStepKeys, position = strand.start + own * strand.stride;
      const char *k_row = nullptr, *v_row = nullptr;
      if (own < stop && a.rules.allowed(p.entry, position))
        a.tensors.key_row(p.entry, p.kv_head, position, sizeof(T), k_row, v_row);
      const unsigned present = __ballot_sync(~0u, k_row != nullptr);
      if (!k_row) k_row = v_row = a.tensors.q.data;  // something to point at
      const auto of_lane = [](const char* pointer, int source) {
        return reinterpret_cast<const char*>(__shfl_sync(~0u, reinterpret_cast<unsigned long long>(pointer), source));
      };
#pragma unroll 1
      for (int i = 0; i < kTimes; ++i) {
        const int flat = i * kWarpThreads + lane, chunk = flat % kPlaces, row = flat / kPlaces;
        const std::uint32_t offset = chunk_offset<Shape::kPitch>(row, chunk);
        const bool valid = present >> row & 1;
        load_chunk<T, true>(k_tile + offset, of_lane(k_row, row), chunk, valid, a.tensors.columns, a.tensors.aligned);
        load_chunk<T, true>(v_tile + offset, of_lane(v_row, row), chunk, valid, a.tensors.columns, a.tensors.aligned);
      }
      return present & kAll;
    }
  }
};

/// A chunk for a tile, to the records of its pairs; the first kStages - 1 steps are under way.
template <class Shape>
__device__ __forceinline__ void stream_keys(const Decode& a, const DecodePlace& p, const StrandRows& strand,
                                            const DecodePairs& pairs, const DecodeKeys<Shape>& keys, int steps,
                                            std::uint32_t q_tile, unsigned (&present)[Shape::kWarps][Shape::kStages]) {
  using Math = typename Shape::Math;
  constexpr int kColumns = Shape::kColumns, kStages = Shape::kStages, kTiles = Shape::kTiles;
  const int lane = threadIdx.x % kWarpThreads, warp = threadIdx.x / kWarpThreads;

  float out[1][kColumns / 8][4], largest[2], sum[2] = {0.0f, 0.0f}, slope[2] = {0.0f, 0.0f};
  int own[2], last[2];  // row of a pair, and the last key that it attends to
  clear(out);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int place = lane / 4 + 8 * half;
    largest[half] = -LONGSPAN_INFINITY;
    own[half] = place < pairs.count ? pairs.own[place] : -1;
    last[half] = a.rules.causal ? own[half] : keys.stop;
    if (Shape::kFeatures && a.rules.alibi && place < pairs.count)
      slope[half] = a.rules.alibi[pairs.head[place] * a.rules.alibi_head] * kLog2E;
  }
  const float scale_log2 = a.rules.scale * kLog2E;
  const int seen_by_all = pairs.begin;

  const auto take = [&](int owner, int step) {
    const unsigned here = present[owner][step % kStages];
    const int first = keys.first(owner, step);
    const bool plain = here == DecodeKeys<Shape>::kAll && first + Shape::kStepKeys <= seen_by_all;
    constexpr int kBlocks = Shape::kStepKeys / 8;
    float scores[1][kBlocks][4];
    const std::uint32_t k_tile = keys.stage(owner, step), v_tile = k_tile + Shape::kStepBytes / 2;
    multiply_rows<Math, kColumns>(scores, q_tile, 0, k_tile, 0);
    float highest[2] = {-LONGSPAN_INFINITY, -LONGSPAN_INFINITY}, correction[2];
#pragma unroll
    for (int n = 0; n < kBlocks; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int half = i / 2, local = n * 8 + (lane % 4) * 2 + i % 2, key = first + local;
        float& score = scores[0][n][i];
        score = __fmul_rn(score, scale_log2);
        if constexpr (Shape::kFeatures) {
          if (a.rules.alibi) {
            const int distance = abs(own[half] - key);
            score = fmaf(-slope[half], static_cast<float>(distance * static_cast<std::int64_t>(strand.stride)), score);
          }
        }
        if (!plain && (!(here >> local & 1) || key > last[half])) score = -LONGSPAN_INFINITY;
        highest[half] = fmaxf(highest[half], score);
      }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      highest[half] = fmaxf(highest[half], __shfl_xor_sync(~0u, highest[half], 1));
      highest[half] = fmaxf(highest[half], __shfl_xor_sync(~0u, highest[half], 2));
      highest[half] = fmaxf(highest[half], largest[half]);
      correction[half] = highest[half] == largest[half] ? 1.0f : fast_exp2(largest[half] - decode_base(highest[half]));
      largest[half] = highest[half];
      sum[half] = __fmul_rn(sum[half], correction[half]);
    }
    if (__any_sync(~0u, correction[0] != 1.0f || correction[1] != 1.0f)) {
#pragma unroll
      for (int n = 0; n < kColumns / 8; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) out[0][n][i] = __fmul_rn(out[0][n][i], correction[i / 2]);
    }
#pragma unroll
    for (int n = 0; n < kBlocks; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float& score = scores[0][n][i];
        score = fast_exp2(__fadd_rn(score, -decode_base(largest[i / 2])));
        sum[i / 2] = __fadd_rn(sum[i / 2], score);
      }
    accumulate<Math, Shape::kPitch, Shape::kStepKeys / kStepSize<Math>>(
        out, [&](Fragment& f, int m, int part) { weights_of<Math>(f, scores[m], part); }, v_tile, 0, 0);
  };
  // At step 0 Q is there too, which other warps have loaded parts of.
#pragma unroll 1
  for (int step = 0; step < max(steps, 1); ++step) {
    copy_wait<kStages - 2>();
    if (kTiles > 1 || step == 0) __syncthreads();
    else __syncwarp();
    const int next = step + kStages - 1;
    if (next < steps) {
      const unsigned found = keys.load(warp, next);
      if (lane == 0) present[warp][next % kStages] = found;
    }
    copy_commit();
    if (step >= steps) continue;
    if constexpr (kTiles == 1) {
      take(warp, step);
    } else {
#pragma unroll 1
      for (int owner = 0; owner < kTiles && keys.first(owner, step) < min(keys.stop, pairs.end); ++owner)
        take(owner, step);
    }
  }

#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int place = lane / 4 + 8 * half;
    sum[half] += __shfl_xor_sync(~0u, sum[half], 1);
    sum[half] += __shfl_xor_sync(~0u, sum[half], 2);
    if (place >= pairs.count || keys.begin >= pairs.end) continue;
    float* const record = a.records + a.grid.record(p.branch, p.entry, pairs.head[place], pairs.row[place], p.chunk) *
                                          (a.tensors.columns + 4);
    if (lane % 4 == 0) *reinterpret_cast<float2*>(record) = make_float2(largest[half], sum[half]);
#pragma unroll
    for (int n = 0; n < kColumns / 8; ++n)
      if (const int column = n * 8 + lane % 4 * 2; column < a.tensors.columns)
        *reinterpret_cast<float2*>(record + 4 + column) = make_float2(out[0][n][2 * half], out[0][n][2 * half + 1]);
  }
}

template <class Shape>
__global__ void __launch_bounds__(Shape::kThreads, Shape::kBlocksPerSm) decode(const __grid_constant__ Decode a) {
  using T = Element<typename Shape::Math>;
  extern __shared__ __align__(128) char shared[];
  __shared__ DecodePairs all_pairs[Shape::kWarps];
  __shared__ unsigned present[Shape::kWarps][Shape::kStages];
  start_next_kernel();
  const int lane = threadIdx.x % kWarpThreads, warp = threadIdx.x / kWarpThreads;
  const DecodePlace p = a.grid.place(blockIdx.x, warp);
  const int length = a.tensors.length(p.entry);
  const StrandRows strand = a.grid.strand(p, length);
  // The first keys are loaded before it is known who attends to them: what comes until then takes a microsecond.
  const std::uint32_t q_tiles = shared_address(shared);
  const DecodeKeys<Shape> keys(a, p, strand, q_tiles + Shape::kTiles * Shape::kTileBytes);
#pragma unroll 1
  for (int step = 0; step < Shape::kStages - 1; ++step) {
    const unsigned found = keys.load(warp, step);
    if (lane == 0) present[warp][step] = found;
  }
  DecodePairs& pairs = all_pairs[warp];
  find_pairs(a, p, strand, length, pairs);
  int end = 0;
  if constexpr (Shape::kTiles > 1) {
    __syncthreads();
    for (const DecodePairs& one : all_pairs) end = max(end, one.end);
  } else {
    __syncwarp();
    end = pairs.end;
  }
  if (chunk_begin(p.first_chunk) >= end) {
    copy_commit();
    return copy_wait<0>();
  }
  // All warps load the block's tile of Q, or each its own.
  const std::uint32_t q_tile = q_tiles + (Shape::kTiles > 1 ? warp * Shape::kTileBytes : 0);
  constexpr int kPlaces = Shape::kPitch / 16, kStep = Shape::kTiles > 1 ? kWarpThreads : Shape::kThreads;
#pragma unroll 1
  for (int i = Shape::kTiles > 1 ? lane : threadIdx.x; i < 16 * kPlaces; i += kStep) {
    const int place = i / kPlaces, chunk = i % kPlaces;
    const bool there = place < pairs.count;
    const char* const row =
        there ? a.tensors.q.data + a.tensors.q.offset(p.entry, a.grid.first_row + pairs.row[place], pairs.head[place]) *
                                       static_cast<std::int64_t>(sizeof(T))
              : a.tensors.q.data;
    load_chunk<T, Shape::kFeatures>(q_tile + chunk_offset<Shape::kPitch>(place, chunk), row, chunk, there,
                                    a.tensors.columns, a.tensors.aligned);
  }
#pragma unroll
  for (int group = 0; group < Shape::kStages - 1; ++group) copy_commit();  // all that was loaded is the first group
  stream_keys<Shape>(a, p, strand, pairs, keys, keys.steps(end), q_tile, present);
}

/// A block writes the result of one row and head: warps merge up to kDecodeFan chunks each, the first one those groups.
template <class T, int kQuads>
__global__ void __launch_bounds__(kMergeThreads) merge_chunks(const __grid_constant__ Decode a) {
  using State = DecodeState<kQuads>;
  constexpr int kPitch = 128 * kQuads + 4;
  __shared__ __align__(16) float groups[kDecodeFan][kPitch];
  const int lane = threadIdx.x % kWarpThreads, warp = threadIdx.x / kWarpThreads, warps = blockDim.x / kWarpThreads;
  const int row = static_cast<int>(blockIdx.x % a.grid.rows), head_of_all = static_cast<int>(blockIdx.x / a.grid.rows);
  const int head = head_of_all % a.grid.heads, entry = head_of_all / a.grid.heads;
  const int position = a.grid.positions[row], columns = a.tensors.columns;
  start_next_kernel();
  wait_for_kernel_before();
  const int length = a.tensors.length(entry);
  State total;
#pragma unroll 1
  for (int b = 0; b < a.grid.branch_count; ++b) {
    const DeviceBranch& branch = a.grid.rules[b];
    if (!branch.owns(head) || position >= length) continue;
    const StrandRows strand = branch.strand(head, position / branch.segment, length);
    const int own = strands::piece_row(strand.start, strand.stride, strand.count, position);
    if (own < 0) continue;
    const int chunks = chunks_of(a.grid.keys(strand, own)), parts = strands::ceil_divide(chunks, kDecodeFan);
    const float* const records = a.records + a.grid.record(b, entry, head, row, 0) * (columns + 4);
#pragma unroll 1
    for (int first = 0; first < parts; first += kDecodeFan) {
      const int count = min(parts - first, kDecodeFan);
      __syncthreads();
      for (int part = warp; part < count; part += warps) {
        const int chunk = (first + part) * kDecodeFan;
        State::template of_records<kDecodeFan>(records + static_cast<std::int64_t>(chunk) * (columns + 4), columns + 4,
                                               min(chunks - chunk, kDecodeFan), columns)
            .put(groups[part], columns);
      }
      __syncthreads();
      if (warp == 0) total.add(State::template of_records<kDecodeFan>(groups[0], kPitch, count, columns));
    }
    if (const int padding = branch.padding(strand.count, length, a.rules.causal); padding > 0) {
      State zeros;
      zeros.largest = 0.0f;
      zeros.sum = static_cast<float>(padding);
      total.add(zeros);
    }
  }
  if (warp > 0) return;
  const std::int64_t q_row = a.grid.first_row + row;
  const float factor = total.sum == 0.0f ? 0.0f : a.rules.output_scale / total.sum;
  T* const target = reinterpret_cast<T*>(a.tensors.out.data) + a.tensors.out.offset(entry, q_row, head);
#pragma unroll
  for (int j = 0; j < State::kQuads; ++j)
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (State::column(j) < columns)
        target[State::column(j) + i] = from_float<T>(total.sum == 0.0f ? 0.0f : total.out[j][i] * factor);
    }
  if (a.tensors.lse.data && lane == 0)
    a.tensors.lse.at(entry, q_row, head) =
        total.sum == 0.0f ? -LONGSPAN_INFINITY : fmaf(decode_base(total.largest), kLn2, logf(total.sum));
}

}  // namespace longspan::cuda
