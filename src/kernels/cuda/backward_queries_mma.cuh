// dq in a pass of its own, for gradients whose bits must not depend on timing: one block per tile of query rows of one
// strand, looping over its keys. A row has one writer in a launch, and branches are launched one after the other.
//   shared   Q, dO [rows][columns], K and V [keys][columns]
//   a warp   16 query rows; dS stays in registers and is, packed, the A operand of dQ = dS K
#pragma once

#include "kernels/cuda/backward_mma.cuh"

namespace longspan::cuda {

template <class MathValue, int kColumnsValue, bool kFeaturesValue>
struct QueryShape {
  using Math = MathValue;
  static constexpr bool kFeatures = kFeaturesValue;
  static constexpr int kColumns = kColumnsValue, kWarps = 4, kThreads = kWarps * kWarpThreads;
  static constexpr int kBlocksPerSm = kWide<Math> || kColumns > 128 ? 1 : kColumns > 64 ? 2 : 3;
  static constexpr int kRows = 16 * kWarps, kKeys = 64, kPitch = pitch_of<Math>(kColumns);
  static constexpr int kSharedBytes = 2 * (kRows + kKeys) * kPitch;
};

template <class Shape>
__global__ void __launch_bounds__(Shape::kThreads, Shape::kBlocksPerSm)
    backward_queries_mma(const __grid_constant__ Launch a) {
  using Math = typename Shape::Math;
  using T = Element<Math>;
  constexpr int kSize = sizeof(T), kColumns = Shape::kColumns, kRows = Shape::kRows, kKeys = Shape::kKeys;
  constexpr int kThreads = Shape::kThreads, kPitch = Shape::kPitch, kBlocks = kKeys / 8;
  constexpr bool kFeatures = Shape::kFeatures;
  extern __shared__ __align__(128) char shared[];
  __shared__ std::uint8_t allowed[kFeatures ? kKeys : 1];
  const Item item = a.schedule.decode(blockIdx.x);
  const StrandRows strand =
      a.schedule.branches[item.branch].strand(item.head, item.segment, a.tensors.length(item.entry));
  const StrandQueries queries = a.schedule.ranges[item.range].of(strand);
  const bool listed = kFeatures && a.schedule.lists[item.branch].places;
  const int first_query = listed ? max(queries.begin, item.tile * kRows) : queries.begin + item.tile * kRows;
  const int rows =
      min(queries.begin + queries.count, listed ? (item.tile + 1) * kRows : first_query + kRows) - first_query;
  if (rows <= 0) return;
  const std::int64_t q_row = queries.q_row + static_cast<std::int64_t>(first_query - queries.begin) * strand.stride;
  const int warp_row = threadIdx.x / kWarpThreads * 16, lane = threadIdx.x % kWarpThreads;
  const std::uint32_t q_tile = shared_address(shared), do_tile = q_tile + kRows * kPitch,
                      k_tile = do_tile + kRows * kPitch, v_tile = k_tile + kKeys * kPitch;
  const auto load_queries = [&](std::uint32_t tile, const Rows& from) {
    load_rows<Math, kColumns, kRows, kThreads, true>(
        tile, from.data + from.offset(item.entry, q_row, item.head) * kSize, from.row * strand.stride * kSize, 0, rows,
        a.tensors.columns, a.tensors.aligned);
  };
  const int kv_head = item.head / (a.tensors.heads / a.tensors.kv_heads);
  const auto load_keys = [&](std::uint32_t tile, const Rows& from, int first) {
    load_rows<Math, kColumns, kKeys, kThreads, false>(
        tile, from.data + from.offset(item.entry, strand.start, kv_head) * kSize, from.row * strand.stride * kSize,
        first, strand.count, a.tensors.columns, true);
  };
  load_queries(q_tile, a.tensors.q);
  load_queries(do_tile, a.gradients.dout);

  const auto row_at = [&](int row) { return q_row + static_cast<std::int64_t>(row) * strand.stride; };
  float2 values[2];  // {lse, delta} of this thread's rows
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = warp_row + lane / 4 + 8 * half;
    values[half] = make_float2(LONGSPAN_INFINITY, 0.0f);
    if (row < rows)
      values[half] = reinterpret_cast<const float2*>(
          a.gradients.delta)[a.delta_row(item.branch, item.entry, row_at(row), item.head)];
  }
  const float scale_log2 = a.rules.scale * kLog2E, dweight_scale = a.rules.output_scale * a.gradients.dscore_scale;
  const PairRules rules(a, item, strand);
  auto keys =
      RowSequence<kFeatures>::range(0, a.rules.causal ? min(strand.count, first_query + rows) : strand.count, 0);
  if constexpr (kFeatures) {
    if (listed) {
      const BlockLists& lists = a.schedule.lists[item.branch];
      keys = RowSequence<kFeatures>::blocks(lists.walk(lists.place(item.entry, item.head, item.tile), 0, strand.count),
                                            strand.count);
    }
  }
  float dq[1][kColumns / 8][4];
  clear(dq);
  const auto add_queries = [&] {
    add_rows(dq[0], a.tensors.columns, 0, [&](int row) -> float* {
      if (warp_row + row >= rows) return nullptr;
      return a.gradients.dq_sum +
             a.tensors.packed_row(item.entry, row_at(warp_row + row), item.head) * a.tensors.columns;
    });
  };

  for (int first = 0; first < keys.count; first += kKeys) {
    if (first % kRowsOfSum == 0 && first > 0) {  // closed_sums.cuh
      add_queries();
      clear(dq);
    }
    __syncthreads();
    if constexpr (kFeatures) {
      for_each_chunk<Math, kColumns, kKeys, kThreads, false>([&](int row, int chunk) {
        const char *k_row, *v_row;
        const bool valid = find_key(a, item, kv_head, strand, keys.row(first + row), kSize, k_row, v_row);
        if (chunk == 0) allowed[row] = valid;
        load_chunk<T, true>(k_tile + chunk_offset<kPitch>(row, chunk), k_row, chunk, valid, a.tensors.columns,
                            a.tensors.aligned);
        load_chunk<T, true>(v_tile + chunk_offset<kPitch>(row, chunk), v_row, chunk, valid, a.tensors.columns,
                            a.tensors.aligned);
      });
    } else {
      load_keys(k_tile, a.tensors.k, first);
      load_keys(v_tile, a.tensors.v, first);
    }
    copy_commit();
    copy_wait<0>();
    __syncthreads();
    float p[1][kBlocks][4], ds[1][kBlocks][4];
    multiply_rows<Math, kColumns>(p, q_tile, warp_row, k_tile, 0);
    multiply_rows<Math, kColumns>(ds, do_tile, warp_row, v_tile, 0);
    const bool masked =
        kFeatures || first + kKeys > strand.count || (a.rules.causal && first + kKeys > first_query + warp_row + 1);
#pragma unroll
    for (int n = 0; n < kBlocks; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int own = first_query + warp_row + lane / 4 + i / 2 * 8, local = n * 8 + (lane % 4) * 2 + i % 2;
        const int key = keys.row(first + n * 8) + (lane % 4) * 2 + i % 2;
        const float2 value = values[i / 2];
        float exponent = fmaf(p[0][n][i], scale_log2, -value.x), factor = 1.0f;
        bool open = !masked || (key < strand.count && !(a.rules.causal && key > own));
        if constexpr (kFeatures) {
          exponent -= rules.bias(own, key);
          factor = rules.factor(own, key);
          open = open && allowed[local] && keys.meets(first + n * 8, own);
        }
        const float weight = open ? fast_exp2(least(exponent, 0.0f)) : 0.0f;
        ds[0][n][i] = weight * fmaf(dweight_scale * factor, ds[0][n][i], -value.y);
      }
    accumulate<Math, kPitch, kKeys / kStepSize<Math>>(
        dq, [&](Fragment& f, int, int step) { weights_of<Math>(f, ds[0], step); }, k_tile, 0, 0);
  }
  add_queries();
}

}  // namespace longspan::cuda
