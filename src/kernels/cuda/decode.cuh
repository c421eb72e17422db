// Forward of few query rows: bound by memory, so every warp streams keys of its own and waits for nobody until the end
// of a chunk. See decode.h for the grid.
//   shared   Q [16 pairs][columns], for each warp kStages steps of 16 rows of K and of V, swizzled
//   a warp   every kWarps-th step of 16 keys, all 16 pairs, its own maximum, sum and output
// Code is kept short: a block runs most of it once, and fetching instructions costs more than executing them. So there
// is one copy of each loop's body, and key_mask, pieces, ALiBi and unaligned rows have instantiations of their own.
#pragma once

#include "kernels/cuda/decode.h"
#include "kernels/cuda/tile.cuh"

namespace longspan::cuda {

template <class MathValue, int kColumnsValue, bool kFeaturesValue>
struct DecodeShape {
  using Math = MathValue;
  static constexpr int kColumns = kColumnsValue, kPairs = 16, kStepKeys = 16;
  static constexpr bool kFeatures = kFeaturesValue;
  static constexpr DecodeMemory kMemory{kWide<Math>, kColumns};
  static constexpr int kPitch = kMemory.pitch, kStepBytes = kMemory.step, kStages = kMemory.stages;
  static constexpr int kWarps = kMemory.warps, kThreads = kWarps * kWarpThreads, kSharedBytes = kMemory.bytes;
  static constexpr int kBlocksPerSm = kSharedBytes <= 72 * 1024 ? 3 : 2;
  static constexpr int kStatePitch = kMemory.state_pitch;  // floats of a warp's state of one pair
  static_assert(kPitch == pitch_of<Math>(kColumns) && kWarps * 8 * kStatePitch * 4 <= kMemory.ring);
};

__device__ __forceinline__ float decode_base(float largest) { return largest == -LONGSPAN_INFINITY ? 0.0f : largest; }

/// Maximum, sum and output of one pair, spread over a warp: a lane has four neighbouring columns of each 128.
template <class Shape>
struct DecodeState {
  static constexpr int kQuads = (Shape::kColumns + 127) / 128;
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
  /// Records that other blocks wrote.
  __device__ __forceinline__ static DecodeState of_records(const float* records, int count, int columns) {
    const int lane = threadIdx.x % kWarpThreads;
    const float2 own = lane < count ? __ldcg(reinterpret_cast<const float2*>(records + lane * (columns + 4)))
                                    : make_float2(-LONGSPAN_INFINITY, 0.0f);
    DecodeState state;
    state.template merge<kDecodeFan>(own.x, own.y, count, columns, [&](int c, int at) {
      return __ldcg(reinterpret_cast<const float4*>(records + c * (columns + 4) + 4 + at));
    });
    return state;
  }
  __device__ __forceinline__ void put(float* record, int columns) const {
    if (threadIdx.x % kWarpThreads == 0) __stcg(reinterpret_cast<float2*>(record), make_float2(largest, sum));
#pragma unroll
    for (int j = 0; j < kQuads; ++j) {
      if (column(j) < columns)
        __stcg(reinterpret_cast<float4*>(record + 4 + column(j)),
               make_float4(out[j][0], out[j][1], out[j][2], out[j][3]));
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

/// The pairs of a block's tile, in order.
struct DecodePairs {
  int count, end;  // end: of the keys that some pair attends to
  int row[16], head[16], own[16];
};

__device__ __forceinline__ void find_pairs(const Decode& a, const DecodePlace& p, const StrandRows& strand, int length,
                                           DecodePairs& pairs) {
  const int lane = threadIdx.x;
  int found = 0, end = 0;
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
      }
      found += __popc(all);
    }
  }
  end = static_cast<int>(__reduce_max_sync(~0u, static_cast<unsigned>(end)));
  if (lane == 0) pairs.count = min(max(found - 16 * p.tile, 0), 16), pairs.end = end;
}

/// The keys of a chunk as a warp loads and reads them.
template <class Shape>
struct DecodeKeys {
  using T = Element<typename Shape::Math>;
  static constexpr int kPlaces = Shape::kPitch / 16, kTimes = Shape::kStepKeys * kPlaces / kWarpThreads;
  const Decode& a;
  const DecodePlace& p;
  const StrandRows& strand;
  std::uint32_t ring;
  int begin, stop;  // of the chunk
  const char *k_base, *v_base;
  std::int64_t k_step, v_step;

  __device__ __forceinline__ DecodeKeys(const Decode& decode, const DecodePlace& place, const StrandRows& rows,
                                        std::uint32_t memory, int end)
      : a(decode), p(place), strand(rows), ring(memory) {
    begin = chunk_begin(p.chunk);
    stop = chunk_end(p.chunk, end);
    const auto first = [&](const Rows& of) {
      return of.data + of.offset(p.entry, strand.start, p.kv_head) * static_cast<std::int64_t>(sizeof(T));
    };
    k_base = first(a.tensors.k), v_base = first(a.tensors.v);
    k_step = a.tensors.k.row * strand.stride * static_cast<std::int64_t>(sizeof(T));
    v_step = a.tensors.v.row * strand.stride * static_cast<std::int64_t>(sizeof(T));
  }
  __device__ __forceinline__ std::uint32_t stage(int step) const {
    return ring + static_cast<std::uint32_t>(step % Shape::kStages * Shape::kStepBytes);
  }
  /// Starts loading the 16 rows from `key` on; says which of them there are.
  __device__ __forceinline__ unsigned load(int step, int key) const {
    const std::uint32_t k_tile = stage(step), v_tile = k_tile + Shape::kStepBytes / 2;
    const int lane = threadIdx.x % kWarpThreads;
    if constexpr (!Shape::kFeatures) {
#pragma unroll
      for (int i = 0; i < kTimes; ++i) {
        const int flat = i * kWarpThreads + lane, chunk = flat % kPlaces, row = key + flat / kPlaces;
        const bool valid = row < stop && chunk * static_cast<int>(16 / sizeof(T)) < a.tensors.columns;
        const std::uint32_t offset = chunk_offset<Shape::kPitch>(flat / kPlaces, chunk);
        copy_async(k_tile + offset, valid ? k_base + row * k_step + chunk * 16 : k_base, valid);
        copy_async(v_tile + offset, valid ? v_base + row * v_step + chunk * 16 : v_base, valid);
      }
      return stop - key >= 16 ? 0xFFFFu : (1u << (stop - key)) - 1;
    } else {
      const int own = key + lane % 16, position = strand.start + own * strand.stride;
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
      return present & 0xFFFFu;
    }
  }
};

/// A warp's part of a chunk. At its end all warps put their states, of eight pairs at a time, where keys were, and
/// put(place, state) gets them merged, one pair in each warp.
template <class Shape, class Put>
__device__ __forceinline__ void stream_keys(const Decode& a, const DecodePlace& p, const StrandRows& strand,
                                            const DecodePairs& pairs, char* shared, Put&& put) {
  using Math = typename Shape::Math;
  constexpr int kColumns = Shape::kColumns, kStages = Shape::kStages, kEach = Shape::kWarps * Shape::kStepKeys;
  __shared__ unsigned present[Shape::kWarps][kStages];
  const int lane = threadIdx.x % kWarpThreads, warp = threadIdx.x / kWarpThreads;
  const std::uint32_t q_tile = shared_address(shared), ring = q_tile + 16 * Shape::kPitch;
  float* const states = reinterpret_cast<float*>(shared + 16 * Shape::kPitch);
  const DecodeKeys<Shape> keys(a, p, strand, ring + static_cast<std::uint32_t>(warp * kStages * Shape::kStepBytes),
                               pairs.end);
  const int first = keys.begin + warp * Shape::kStepKeys;
  const int steps = first < keys.stop ? (keys.stop - first + kEach - 1) / kEach : 0;

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

  const auto take = [&](int step) {
    const unsigned here = present[warp][step % kStages];
    float scores[1][2][4];
    const std::uint32_t k_tile = keys.stage(step), v_tile = k_tile + Shape::kStepBytes / 2;
    multiply_rows<Math, kColumns>(scores, q_tile, 0, k_tile, 0);
    float highest[2] = {-LONGSPAN_INFINITY, -LONGSPAN_INFINITY}, correction[2];
#pragma unroll
    for (int n = 0; n < 2; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int half = i / 2, local = n * 8 + (lane % 4) * 2 + i % 2, key = first + step * kEach + local;
        float& score = scores[0][n][i];
        score = __fmul_rn(score, scale_log2);
        if constexpr (Shape::kFeatures) {
          if (a.rules.alibi) {
            const int distance = abs(own[half] - key);
            score = fmaf(-slope[half], static_cast<float>(distance * static_cast<std::int64_t>(strand.stride)), score);
          }
        }
        if (!(here >> local & 1) || key > last[half]) score = -LONGSPAN_INFINITY;
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
    for (int n = 0; n < 2; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float& score = scores[0][n][i];
        score = fast_exp2(__fadd_rn(score, -decode_base(largest[i / 2])));
        sum[i / 2] = __fadd_rn(sum[i / 2], score);
      }
    accumulate<Math, Shape::kPitch, Shape::kStepKeys / kStepSize<Math>>(
        out, [&](Fragment& f, int m, int part) { weights_of<Math>(f, scores[m], part); }, v_tile, 0, 0);
  };
  // The first kStages - 1 turns only load. At step 0 Q is there too, which other warps have loaded parts of.
#pragma unroll 1
  for (int step = 1 - kStages; step < max(steps, 1); ++step) {
    if (step >= 0) copy_wait<kStages - 2>();
    if (step == 0) __syncthreads();
    else __syncwarp();
    const int next = step + kStages - 1;
    if (next < steps) {
      const unsigned found = keys.load(next, first + next * kEach);
      if (lane == 0) present[warp][next % kStages] = found;
    }
    copy_commit();
    if (step >= 0 && step < steps) take(step);
  }

  copy_wait<0>();
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    if (8 * half >= pairs.count) break;
    __syncthreads();
    sum[half] += __shfl_xor_sync(~0u, sum[half], 1);
    sum[half] += __shfl_xor_sync(~0u, sum[half], 2);
    if (8 * half + lane / 4 < pairs.count) {
      float* const state = states + (warp * 8 + lane / 4) * Shape::kStatePitch;
      if (lane % 4 == 0) *reinterpret_cast<float2*>(state) = make_float2(largest[half], sum[half]);
#pragma unroll
      for (int n = 0; n < kColumns / 8; ++n)
        *reinterpret_cast<float2*>(state + 4 + n * 8 + (lane % 4) * 2) =
            make_float2(out[0][n][2 * half], out[0][n][2 * half + 1]);
    }
    __syncthreads();
#pragma unroll 1
    for (int place = warp; place < min(pairs.count - 8 * half, 8); place += Shape::kWarps) {
      const float* const of_warps = states + place * Shape::kStatePitch;
      constexpr int kNext = 8 * Shape::kStatePitch;
      const float2 part = lane < Shape::kWarps ? *reinterpret_cast<const float2*>(of_warps + lane * kNext)
                                               : make_float2(-LONGSPAN_INFINITY, 0.0f);
      DecodeState<Shape> merged;
      merged.template merge<Shape::kWarps>(part.x, part.y, Shape::kWarps, a.tensors.columns, [&](int c, int at) {
        return *reinterpret_cast<const float4*>(of_warps + c * kNext + 4 + at);
      });
      put(8 * half + place, merged);
    }
  }
}

/// Whether this block is the last of `expected` to come to a counter, which it then leaves at zero. What the others
/// wrote before is then seen.
__device__ __forceinline__ bool last_to_come(unsigned* counter, unsigned expected) {
  __shared__ bool last;
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) {
    last = atomicAdd(counter, 1u) + 1 == expected;
    if (last) *counter = 0;
    __threadfence();
  }
  __syncthreads();
  return last;
}

/// The results of a key/value head's pairs, from the records of all branches.
template <class Shape>
__device__ __forceinline__ void finish_rows(const Decode& a, int entry, int kv_head, int length) {
  using T = Element<typename Shape::Math>;
  using State = DecodeState<Shape>;
  const int lane = threadIdx.x % kWarpThreads, columns = a.tensors.columns;
#pragma unroll 1
  for (int pair = threadIdx.x / kWarpThreads; pair < a.grid.rows * a.grid.group; pair += Shape::kWarps) {
    const int row = a.grid.row_of(pair), head = kv_head * a.grid.group + a.grid.head_of(pair);
    const int position = a.grid.positions[row];
    State total;
#pragma unroll 1
    for (int b = 0; b < a.grid.branch_count; ++b) {
      const DeviceBranch& branch = a.grid.rules[b];
      if (!branch.owns(head) || position >= length) continue;
      const StrandRows strand = branch.strand(head, position / branch.segment, length);
      const int own = strands::piece_row(strand.start, strand.stride, strand.count, position);
      if (own < 0) continue;
      const int chunks = chunks_of(a.grid.keys(strand, own));
      const bool grouped = a.grid.branches[b].groups > 0;
      const int parts = grouped ? strands::ceil_divide(chunks, kDecodeFan) : chunks;
      const float* const records =
          a.records + a.grid.record(b, entry, head, row, grouped ? a.grid.branches[b].chunks : 0) * (columns + 4);
#pragma unroll 1
      for (int first = 0; first < parts; first += kDecodeFan)
        total.add(State::of_records(records + static_cast<std::int64_t>(first) * (columns + 4),
                                    min(parts - first, kDecodeFan), columns));
      if (const int padding = branch.padding(strand.count, length, a.rules.causal); padding > 0) {
        State zeros;
        zeros.largest = 0.0f;
        zeros.sum = static_cast<float>(padding);
        total.add(zeros);
      }
    }
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
}

template <class Shape>
__global__ void __launch_bounds__(Shape::kThreads, Shape::kBlocksPerSm) decode(const __grid_constant__ Decode a) {
  using State = DecodeState<Shape>;
  using T = Element<typename Shape::Math>;
  extern __shared__ __align__(128) char shared[];
  __shared__ DecodePairs pairs;
  const DecodePlace p = a.grid.place(blockIdx.x);
  const DecodeBranch& of = a.grid.branches[p.branch];
  const int warp = threadIdx.x / kWarpThreads, columns = a.tensors.columns;
  const int length = a.tensors.length(p.entry);
  const StrandRows strand = a.grid.strand(p, length);
  if (warp == 0) find_pairs(a, p, strand, length, pairs);
  __syncthreads();
  const auto record = [&](int place, int index) {
    return a.records + a.grid.record(p.branch, p.entry, pairs.head[place], pairs.row[place], index) * (columns + 4);
  };

  if (chunk_begin(p.chunk) < pairs.end) {
    const std::uint32_t q_tile = shared_address(shared);
    constexpr int kPlaces = Shape::kPitch / 16;
#pragma unroll 1
    for (int i = threadIdx.x; i < 16 * kPlaces; i += Shape::kThreads) {
      const int place = i / kPlaces, chunk = i % kPlaces, from = min(place, pairs.count - 1);
      const char* const row =
          a.tensors.q.data + a.tensors.q.offset(p.entry, a.grid.first_row + pairs.row[from], pairs.head[from]) *
                                 static_cast<std::int64_t>(sizeof(T));
      load_chunk<T, Shape::kFeatures>(q_tile + chunk_offset<Shape::kPitch>(place, chunk), row, chunk,
                                      place < pairs.count, columns, a.tensors.aligned);
    }
    copy_commit();
    stream_keys<Shape>(a, p, strand, pairs, shared,
                       [&](int place, const State& state) { state.put(record(place, p.chunk), columns); });
  }

  if (of.groups > 0) {
    const int group = p.chunk / kDecodeFan, first = group * kDecodeFan, expected = min(of.chunks - first, kDecodeFan);
    if (!last_to_come(a.counters + p.group_counter + group, static_cast<unsigned>(expected))) return;
#pragma unroll 1
    for (int place = warp; place < pairs.count; place += Shape::kWarps) {
      const int keys = a.grid.keys(strand, pairs.own[place]);
      const int count = min(chunks_of(keys) - first, kDecodeFan);
      if (count > 0)
        State::of_records(record(place, first), count, columns).put(record(place, of.chunks + group), columns);
    }
  }
  if (last_to_come(a.counters + p.entry * a.grid.kv_heads + p.kv_head, a.grid.arrivals(p.kv_head)))
    finish_rows<Shape>(a, p.entry, p.kv_head, length);
}

}  // namespace longspan::cuda
