// Backward on matrix units: one block per tile of keys of one strand, looping over the queries that attend to it.
//   a warp   16 keys; S^T = K Q^T and dP^T = V dO^T, so that P^T and dS^T are, packed, the A operands of dV and dK
//   shared   K, V [keys][columns]; Q, dO [queries][columns] twice (the next tile loads under this one); dS^T, through
//            which the warps share dS for dQ = dS K
//   dq       added to float32 accumulators by reductions, whose order is the only thing not fixed here
#pragma once

#include "kernels/cuda/tile.cuh"
#include "util/philox.h"

namespace longspan::cuda {

template <class T, int kColumnsValue, bool kFeaturesValue>
struct BackwardShape {
  using Element = T;
  static constexpr int kColumns = kColumnsValue;
  static constexpr bool kFeatures = kFeaturesValue;
  static constexpr int kWarps = 8, kThreads = kWarps * kWarpThreads;
  static constexpr int kKeys = 16 * kWarps, kQueries = 64;
  static constexpr int kTileBytes = kQueries * kColumns * 2;  // of Q or dO
  static constexpr int kSharedBytes =
      2 * kKeys * kColumns * 2 + 4 * kTileBytes + kKeys * kQueries * 2 + 2 * kQueries * 8;
};

/// Adds a warp's 16 x 8 accumulators to rows of float32 sums; pairs of lanes swap halves so that each adds four
/// columns.
///   row_target(row) is the address of row `row` (0..15), or null where there is none.
template <int kBlocks, class RowTarget>
__device__ __forceinline__ void add_rows(const float (&sums)[kBlocks][4], int columns, int first_column,
                                         RowTarget&& row_target) {
  const int lane = threadIdx.x % kWarpThreads;
  const bool odd = lane & 1;
  float* const target = row_target(lane / 4 + (odd ? 8 : 0));
#pragma unroll
  for (int n = 0; n < kBlocks; ++n) {
    const float give0 = odd ? sums[n][0] : sums[n][2], give1 = odd ? sums[n][1] : sums[n][3];
    const float take0 = __shfl_xor_sync(~0u, give0, 1), take1 = __shfl_xor_sync(~0u, give1, 1);
    const float4 four =
        odd ? make_float4(take0, take1, sums[n][2], sums[n][3]) : make_float4(sums[n][0], sums[n][1], take0, take1);
    const int column = first_column + n * 8 + (lane % 4 / 2) * 4;
    if (target && column < columns) add_four(target + column, four);
  }
}

template <class T, int kColumns>
__device__ __forceinline__ void multiply_rows(float (&sums)[8][4], std::uint32_t a_tile, int a_row,
                                              std::uint32_t b_tile) {
#pragma unroll
  for (int n = 0; n < 8; ++n)
#pragma unroll
    for (int i = 0; i < 4; ++i) sums[n][i] = 0.0f;
#pragma unroll
  for (int step = 0; step < kColumns / 16; ++step) {
    Fragment a;
    load_a<kColumns>(a, a_tile, a_row, step);
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      Fragment b;
      load_b_transposed<kColumns>(b, b_tile, n * 16, step);
      multiply_add<T>(sums[2 * n], a, b[0], b[1]);
      multiply_add<T>(sums[2 * n + 1], a, b[2], b[3]);
    }
  }
}

/// gradient += weights * tile, where weights are 16 keys x 64 queries in accumulator order, packed.
template <class T, int kColumns>
__device__ __forceinline__ void accumulate(float (&gradient)[kColumns / 8][4], const std::uint32_t (&weights)[4][4],
                                           std::uint32_t tile) {
#pragma unroll
  for (int step = 0; step < 4; ++step) {
#pragma unroll
    for (int n = 0; n < kColumns / 16; ++n) {
      Fragment b;
      load_b<kColumns>(b, tile, step * 16, n);
      multiply_add<T>(gradient[2 * n], weights[step], b[0], b[1]);
      multiply_add<T>(gradient[2 * n + 1], weights[step], b[2], b[3]);
    }
  }
}

template <class Shape>
__global__ void __launch_bounds__(Shape::kThreads, 1) backward_mma(const __grid_constant__ Launch a) {
  using T = typename Shape::Element;
  constexpr int kColumns = Shape::kColumns, kKeys = Shape::kKeys, kQueries = Shape::kQueries,
                kThreads = Shape::kThreads;
  constexpr bool kFeatures = Shape::kFeatures;
  extern __shared__ __align__(1024) char shared[];
  const Item item = a.decode(blockIdx.x);
  const DeviceBranch& branch = a.branches[item.branch];
  const int length = a.length(item.entry);
  const StrandRows strand = branch.strand(item.head, item.segment, length);
  const StrandQueries queries = queries_of(strand, a.ranges[item.range]);
  const int first_key = item.tile * kKeys;
  const int keys = min(kKeys, strand.count - first_key);
  // Under a causal mask queries before the first key see none of these keys.
  const int skipped = a.causal ? max(0, first_key - queries.begin) / kQueries : 0;
  const int tiles = (queries.count + kQueries - 1) / kQueries;
  if (keys <= 0 || tiles <= skipped) return;

  const int kv_head = item.head / (a.heads / a.kv_heads);
  const int warp = threadIdx.x / kWarpThreads, lane = threadIdx.x % kWarpThreads;
  const std::uint32_t k_tile = shared_address(shared), v_tile = k_tile + kKeys * kColumns * 2,
                      q_tiles = v_tile + kKeys * kColumns * 2, do_tiles = q_tiles + 2 * Shape::kTileBytes,
                      ds_tile = do_tiles + 2 * Shape::kTileBytes, rows_offset = ds_tile + kKeys * kQueries * 2;
  const float2* const row_values = reinterpret_cast<const float2*>(shared + (rows_offset - k_tile));

  const std::int64_t q_step = a.q.row * strand.stride * 2, do_step = a.dout.row * strand.stride * 2;
  const char* const q_base = a.q.data + a.q.offset(item.entry, queries.q_row, item.head) * 2;
  const char* const do_base = a.dout.data + a.dout.offset(item.entry, queries.q_row, item.head) * 2;
  const float2* const values_base =
      reinterpret_cast<const float2*>(a.delta) + a.packed_row(item.entry, queries.q_row, item.head);
  const auto load_queries = [&](int tile) {
    const int stage = tile & 1;
    load_rows<kColumns, kQueries, kThreads, kFeatures>(q_tiles + stage * Shape::kTileBytes, q_base, q_step,
                                                       tile * kQueries, queries.count, a.columns, a.aligned);
    load_rows<kColumns, kQueries, kThreads, kFeatures>(do_tiles + stage * Shape::kTileBytes, do_base, do_step,
                                                       tile * kQueries, queries.count, a.columns, a.aligned);
    if (threadIdx.x < kQueries) {
      const int query = tile * kQueries + threadIdx.x;
      const bool valid = query < queries.count;
      copy_async_pair(rows_offset + (stage * kQueries + threadIdx.x) * 8,
                      valid ? values_base + static_cast<std::int64_t>(query) * strand.stride : values_base, valid);
    }
    copy_commit();
  };

  {
    constexpr int kChunks = kColumns / 8, kStep = kThreads / kChunks;
    const int chunk = threadIdx.x % kChunks;
#pragma unroll 4
    for (int row = threadIdx.x / kChunks; row < kKeys; row += kStep) {
      const int key = first_key + row, position = strand.start + key * strand.stride;
      bool valid = key < strand.count;
      const char *k_row = a.q.data, *v_row = a.q.data;
      if constexpr (kFeatures) {
        valid = valid && a.allowed(item.entry, position);
        if (valid) a.key_row(item.entry, kv_head, position, 2, k_row, v_row);
        if (!k_row) {
          valid = false;
          k_row = v_row = a.q.data;
        }
      } else if (valid) {
        k_row = a.k.data + a.k.offset(item.entry, position, kv_head) * 2;
        v_row = a.v.data + a.v.offset(item.entry, position, kv_head) * 2;
      }
      load_chunk<kFeatures>(k_tile + chunk_offset<kColumns>(row, chunk), k_row, chunk, valid, a.columns, a.aligned);
      load_chunk<kFeatures>(v_tile + chunk_offset<kColumns>(row, chunk), v_row, chunk, valid, a.columns, a.aligned);
    }
  }
  load_queries(skipped);

  float dk[kColumns / 8][4], dv[kColumns / 8][4];
#pragma unroll
  for (int n = 0; n < kColumns / 8; ++n)
#pragma unroll
    for (int i = 0; i < 4; ++i) dk[n][i] = dv[n][i] = 0.0f;

  const int warp_key = warp * 16;
  const int own_keys[2] = {first_key + warp_key + lane / 4, first_key + warp_key + lane / 4 + 8};
  bool open[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    open[half] = own_keys[half] < strand.count;
    if constexpr (kFeatures) {
      const int position = strand.start + own_keys[half] * strand.stride;
      open[half] = open[half] && a.allowed(item.entry, position);
      if (open[half]) {
        const char *k_row, *v_row;
        a.key_row(item.entry, kv_head, position, 2, k_row, v_row);
        open[half] = k_row != nullptr;
      }
    }
  }
  const bool ragged = keys < kKeys;
  const float scale_log2 = a.scale * kLog2E, dweight_scale = a.output_scale * a.dscore_scale;
  const float slope = kFeatures && a.alibi ? a.alibi[item.head * a.alibi_head] * kLog2E : 0.0f;
  DropoutRule dropout(0.0, kFeatures && a.seed_pointer ? *a.seed_pointer : a.seed);
  dropout.threshold = a.drop_threshold;

  for (int tile = skipped; tile < tiles; ++tile) {
    copy_wait<0>();
    __syncthreads();
    if (tile + 1 < tiles) load_queries(tile + 1);
    const int stage = tile & 1, first_query = queries.begin + tile * kQueries;
    const std::uint32_t q_tile = q_tiles + stage * Shape::kTileBytes, do_tile = do_tiles + stage * Shape::kTileBytes;
    const float2* const values = row_values + stage * kQueries;

    float p[8][4], ds[8][4];
    multiply_rows<T, kColumns>(p, k_tile, warp_key, q_tile);
    const bool masked = kFeatures || ragged || (a.causal && first_query < first_key + warp_key + 15);
#pragma unroll
    for (int n = 0; n < 8; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int local = n * 8 + (lane % 4) * 2 + i % 2, key = own_keys[i / 2];
        float exponent = fmaf(p[n][i], scale_log2, -values[local].x);
        if constexpr (kFeatures) {
          if (a.alibi) {
            exponent -=
                slope * static_cast<float>(abs(first_query + local - key) * static_cast<std::int64_t>(strand.stride));
          }
        }
        p[n][i] = fast_exp2(exponent);
        if (masked && (!open[i / 2] || (a.causal && key > first_query + local))) p[n][i] = 0.0f;
      }
    multiply_rows<T, kColumns>(ds, v_tile, warp_key, do_tile);
    std::uint32_t packed[4][4];
#pragma unroll
    for (int n = 0; n < 8; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int local = n * 8 + (lane % 4) * 2 + i % 2;
        float factor = 1.0f;
        if constexpr (kFeatures) {
          if (a.dropout) {
            const int position = strand.start + (first_query + local) * strand.stride, key = own_keys[i / 2];
            const PhiloxBlock words = dropout.words(position, key / 4, item.branch * a.heads + item.head, item.entry);
            const int which = key % 4;
            const std::uint32_t word = which == 0 ? words[0] : which == 1 ? words[1] : which == 2 ? words[2] : words[3];
            factor = word >= dropout.threshold ? a.keep_factor : 0.0f;
          }
        }
        ds[n][i] = p[n][i] * fmaf(dweight_scale * factor, ds[n][i], -values[local].y);
        p[n][i] *= factor;
      }
    }
#pragma unroll
    for (int n = 0; n < 8; ++n) {
      packed[n / 2][n % 2 * 2] = pack<T>(p[n][0], p[n][1]);
      packed[n / 2][n % 2 * 2 + 1] = pack<T>(p[n][2], p[n][3]);
    }
    accumulate<T, kColumns>(dv, packed, do_tile);
#pragma unroll
    for (int n = 0; n < 8; ++n) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const std::uint32_t pair = pack<T>(ds[n][2 * half], ds[n][2 * half + 1]);
        packed[n / 2][n % 2 * 2 + half] = pair;
        asm volatile("st.shared.b32 [%0], %1;\n" ::"r"(
                         ds_tile + chunk_offset<kQueries>(warp_key + lane / 4 + 8 * half, n) + (lane % 4) * 4),
                     "r"(pair)
                     : "memory");
      }
    }
    accumulate<T, kColumns>(dk, packed, q_tile);
    __syncthreads();

    // dQ: 64 queries by kColumns over 8 warps.
    constexpr int kBlocks = kColumns / 16;
    const int query_block = warp % 4, first_column = warp / 4 * (kColumns / 2);
    float dq[kBlocks][4];
#pragma unroll
    for (int n = 0; n < kBlocks; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) dq[n][i] = 0.0f;
#pragma unroll
    for (int step = 0; step < kKeys / 16; ++step) {
      Fragment weights;
      load_a_transposed<kQueries>(weights, ds_tile, step * 16, query_block);
#pragma unroll
      for (int n = 0; n < kBlocks / 2; ++n) {
        Fragment b;
        load_b<kColumns>(b, k_tile, step * 16, first_column / 16 + n);
        multiply_add<T>(dq[2 * n], weights, b[0], b[1]);
        multiply_add<T>(dq[2 * n + 1], weights, b[2], b[3]);
      }
    }
    add_rows(dq, a.columns, first_column, [&](int row) -> float* {
      const int query = tile * kQueries + query_block * 16 + row;
      if (query >= queries.count) return nullptr;
      return a.dq_sum +
             a.packed_row(item.entry, queries.q_row + static_cast<std::int64_t>(query) * strand.stride, item.head) *
                 a.columns;
    });
  }

  const float scales[2] = {a.sum_scale, a.output_scale};
#pragma unroll
  for (int which = 0; which < 2; ++which) {
    auto& sums = which == 0 ? dk : dv;
    const Rows& target = which == 0 ? a.dk : a.dv;
#pragma unroll
    for (int n = 0; n < kColumns / 8; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) sums[n][i] *= scales[which];
    if (a.sum_keys) {
      add_rows(sums, a.columns, 0, [&](int row) -> float* {
        const int key = first_key + warp_key + row;
        if (key >= strand.count) return nullptr;
        const std::int64_t packed_row = (static_cast<std::int64_t>(item.entry) * a.kv_heads + kv_head) * a.tokens +
                                        strand.start + key * strand.stride;
        return (which == 0 ? a.dk_sum : a.dv_sum) + packed_row * a.columns;
      });
      continue;
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (own_keys[half] >= strand.count) continue;
      T* const row = reinterpret_cast<T*>(target.data) +
                     target.offset(item.entry, strand.start + own_keys[half] * strand.stride, item.head);
#pragma unroll
      for (int n = 0; n < kColumns / 8; ++n) {
        const int column = n * 8 + (lane % 4) * 2;
        if (column >= a.columns) continue;
        const std::uint32_t pair = pack<T>(sums[n][2 * half], sums[n][2 * half + 1]);
        if (!kFeatures || a.aligned) {
          *reinterpret_cast<std::uint32_t*>(row + column) = pair;
        } else {
          row[column] = from_float<T>(sums[n][2 * half]);
          row[column + 1] = from_float<T>(sums[n][2 * half + 1]);
        }
      }
    }
  }
}

}  // namespace longspan::cuda
