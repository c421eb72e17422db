// dq in a pass of its own, for gradients whose bits must not depend on timing: one block per tile of query rows of one
// strand, looping over its keys. A row has one writer in a launch, and branches are launched one after the other.
//   shared   Q, dO [rows][columns], K and V [keys][columns]
//   a warp   16 query rows; dS stays in registers and is, packed, the A operand of dQ = dS K
#pragma once

#include "kernels/cuda/backward_mma.cuh"

namespace longspan::cuda {

template <class MathValue, int kColumnsValue, class PairsValue, bool kListsValue>
struct QueryShape {
  using Math = MathValue;
  using Pairs = PairsValue;
  static constexpr bool kLists = kListsValue;
  static constexpr int kColumns = kColumnsValue, kWarps = 4, kThreads = kWarps * kWarpThreads;
  static constexpr int kBlocksPerSm = kWide<Math> || kColumns > 128 ? 1 : kColumns > 64 ? 2 : 3;
  static constexpr int kRows = 16 * kWarps, kKeys = 64, kPitch = pitch_of<Math>(kColumns);
  static constexpr int kSharedBytes = 2 * (kRows + kKeys) * kPitch;
};

template <class Shape>
struct QueryItem {
  using Math = typename Shape::Math;
  using Pairs = typename Shape::Pairs;
  static constexpr int kSize = sizeof(Element<Math>), kColumns = Shape::kColumns, kRows = Shape::kRows;
  static constexpr int kKeys = Shape::kKeys, kThreads = Shape::kThreads, kPitch = Shape::kPitch, kBlocks = kKeys / 8;
  static constexpr bool kRuled = Pairs::kRuled, kLists = Shape::kLists;

  const Launch& a;
  const Item& item;
  const StrandRows strand;
  const StrandQueries queries;
  const bool listed;
  const int first_query, rows;
  const std::int64_t q_row;
  const int kv_head, warp_row, own;
  const std::uint32_t q_tile, do_tile, k_tile, v_tile;
  Pairs pairs;
  RowSequence<kLists> keys;
  float2 values[2];  // {lse, delta} of this thread's rows
  float dq[1][kColumns / 8][4];

  __device__ __forceinline__ QueryItem(const Launch& launch, const Item& of, char* shared)
      : a(launch),
        item(of),
        strand(a.schedule.branches[item.branch].strand(item.head, item.segment, a.tensors.length(item.entry))),
        queries(a.schedule.ranges[item.range].of(strand)),
        listed(kLists && a.schedule.lists[item.branch].places),
        first_query(listed ? max(queries.begin, item.tile * kRows) : queries.begin + item.tile * kRows),
        rows(min(queries.begin + queries.count, listed ? (item.tile + 1) * kRows : first_query + kRows) - first_query),
        q_row(queries.q_row + static_cast<std::int64_t>(first_query - queries.begin) * strand.stride),
        kv_head(item.head / (a.tensors.heads / a.tensors.kv_heads)),
        warp_row(static_cast<int>(threadIdx.x) / kWarpThreads * 16),
        own(first_query + warp_row + static_cast<int>(threadIdx.x) % kWarpThreads / 4),
        q_tile(shared_address(shared)),
        do_tile(q_tile + kRows * kPitch),
        k_tile(do_tile + kRows * kPitch),
        v_tile(k_tile + kKeys * kPitch),
        pairs(a, item, strand, kv_head) {}

  __device__ __forceinline__ std::int64_t row_of_q(int row) const {
    return q_row + static_cast<std::int64_t>(row) * strand.stride;
  }
  __device__ __forceinline__ void load_queries(std::uint32_t tile, const Rows& from) const {
    load_rows<Math, kColumns, kRows, kThreads, kRuled>(
        tile, from.data + from.offset(item.entry, q_row, item.head) * kSize, from.row * strand.stride * kSize, 0, rows,
        a.tensors.columns, a.tensors.aligned);
  }
  __device__ __forceinline__ void load_keys(std::uint32_t tile, const Rows& from, int first, bool of_v) {
    const char* const base = from.data + from.offset(item.entry, strand.start, kv_head) * kSize;
    const std::int64_t step = from.row * strand.stride * kSize;
    if constexpr (kRuled)
      pairs.template load_keys<Math, kColumns, kKeys, kThreads>(tile, keys, first, base, step, of_v);
    else
      load_rows<Math, kColumns, kKeys, kThreads, false>(tile, base, step, first, strand.count, a.tensors.columns, true);
  }

  /// Q and dO, their row values, and which keys there are.
  __device__ __forceinline__ void begin() {
    load_queries(q_tile, a.tensors.q);
    load_queries(do_tile, a.gradients.dout);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = own - first_query + 8 * half;
      values[half] = make_float2(LONGSPAN_INFINITY, 0.0f);
      if (row < rows)
        values[half] = reinterpret_cast<const float2*>(
            a.gradients.delta)[a.delta_row(item.branch, item.entry, row_of_q(row), item.head)];
    }
    keys = RowSequence<kLists>::range(0, a.rules.causal ? min(strand.count, first_query + rows) : strand.count, 0);
    if constexpr (kLists) {
      if (listed) {
        const BlockLists& lists = a.schedule.lists[item.branch];
        keys = RowSequence<kLists>::blocks(lists.walk(lists.place(item.entry, item.head, item.tile), 0, strand.count),
                                           strand.count);
      }
    }
    clear(dq);
  }

  /// Scores become P: masked, and relative to lse.
  __device__ __forceinline__ void weigh(float (&p)[1][kBlocks][4], int first) {
    float factor = a.rules.scale * kLog2E;
    if constexpr (kRuled) {
      if (a.rules.alibi) {
        pairs.add_bias(p, factor, own, keys, first);
        factor = 1.0f;
      }
    }
    const bool masked =
        kLists || first + kKeys > strand.count || (a.rules.causal && first + kKeys > first_query + warp_row + 1);
#pragma unroll
    for (int n = 0; n < kBlocks; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        p[0][n][i] = fast_exp2(least(fmaf(p[0][n][i], factor, -values[i / 2].x), 0.0f));
        if (!masked) continue;
        const int key = keys.row(first + n * 8) + static_cast<int>(threadIdx.x) % 4 * 2 + i % 2;
        const int query = own + i / 2 * 8;
        if (key >= strand.count || (a.rules.causal && key > query) || !(keys.met(first + n * 8) >> keys.bit(query) & 1))
          p[0][n][i] = 0.0f;
      }
  }

  /// dS, relative to the bits of the tile's keys.
  __device__ __forceinline__ void differentiate(float (&ds)[1][kBlocks][4], float (&p)[1][kBlocks][4], int first) {
    const float dweight_scale = a.rules.output_scale * a.gradients.dscore_scale;
    if constexpr (kRuled) {
      pairs.mask_keys(p, 0.0f);
      if (a.rules.dropout) {
        pairs.template for_each_kept<1, kBlocks>(own, keys, first, [&](int, int n, int i, bool kept) {
          const float scale = kept ? dweight_scale * a.rules.keep_factor : 0.0f;
          ds[0][n][i] = p[0][n][i] * fmaf(scale, ds[0][n][i], -values[i / 2].y);
        });
        return;
      }
    }
#pragma unroll
    for (int n = 0; n < kBlocks; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) ds[0][n][i] = p[0][n][i] * fmaf(dweight_scale, ds[0][n][i], -values[i / 2].y);
  }

  __device__ __forceinline__ void take_keys(int first) {
    if constexpr (kRuled) {
      pairs.template ask<kKeys>(keys, first);
      pairs.template tell<kKeys>(first);
    }
    __syncthreads();
    load_keys(k_tile, a.tensors.k, first, false);
    load_keys(v_tile, a.tensors.v, first, true);
    copy_commit();
    copy_wait<0>();
    __syncthreads();
    float p[1][kBlocks][4], ds[1][kBlocks][4];
    multiply_rows<Math, kColumns>(p, q_tile, warp_row, k_tile, 0);
    multiply_rows<Math, kColumns>(ds, do_tile, warp_row, v_tile, 0);
    weigh(p, first);
    differentiate(ds, p, first);
    accumulate<Math, kPitch, kKeys / kStepSize<Math>>(
        dq, [&](Fragment& f, int, int step) { weights_of<Math>(f, ds[0], step); }, k_tile, 0, 0);
  }

  __device__ __forceinline__ void add_queries() {
    add_rows(dq[0], a.tensors.columns, 0, [&](int row) -> float* {
      if (warp_row + row >= rows) return nullptr;
      return a.gradients.dq_sum +
             a.tensors.packed_row(item.entry, row_of_q(warp_row + row), item.head) * a.tensors.columns;
    });
  }

  __device__ __forceinline__ void run() {
    if (rows <= 0) return;
    begin();
    for (int first = 0; first < keys.count; first += kKeys) {
      if (first % kRowsOfSum == 0 && first > 0) {  // closed_sums.cuh
        add_queries();
        clear(dq);
      }
      take_keys(first);
    }
    add_queries();
  }
};

template <class Shape>
__global__ void __launch_bounds__(Shape::kThreads, Shape::kBlocksPerSm)
    backward_queries_mma(const __grid_constant__ Launch a) {
  extern __shared__ __align__(128) char shared[];
  const Item item = a.schedule.decode(blockIdx.x);
  QueryItem<Shape>(a, item, shared).run();
}

}  // namespace longspan::cuda
