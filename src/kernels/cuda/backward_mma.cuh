// Backward on matrix units: one block per tile of keys of one strand, looping over the queries that attend to it.
//   a warp   16 * kRowTiles keys; S^T = K Q^T and dP^T = V dO^T for some queries at a time, so that P^T and dS^T are,
//            packed, the A operands of dV and dK. Where dK and dV of a warp's keys do not fit its registers, kSplit
//            warps share the keys: each computes a part of the queries of P^T and dS^T, which then go through shared
//            memory, and sums up a part of the columns
//   shared   K, V [keys][columns]; Q, dO [queries][columns] twice (the next tile loads under this one); dS^T, through
//            which the warps share dS for dQ = dS K
//   dq       added to float32 accumulators by reductions, whose order is the only thing not fixed here
#pragma once

#include "kernels/cuda/closed_sums.cuh"
#include "kernels/cuda/pairs.cuh"

namespace longspan::cuda {

/// kCompact: half the keys and queries at a time, for GPUs with less than 100 KiB of shared memory in a block. kCloses:
/// as in the forward.
template <class MathValue, int kColumnsValue, class PairsValue, bool kListsValue, bool kCompact, bool kClosesValue>
struct BackwardShape {
  using Math = MathValue;
  using Pairs = PairsValue;
  static constexpr int kColumns = kColumnsValue;
  static constexpr bool kLists = kListsValue, kCloses = kClosesValue;
  static constexpr bool kLight = kColumns <= 64 || kWide<Math>;  // one warp has its keys' gradients in registers
  static constexpr int kRowTiles = kWide<Math> || kColumns > 128 ? 1 : 2;
  static constexpr int kKeyWarps = kCompact ? 2 : 4, kSplit = kLight ? 1 : 2;
  static constexpr int kQueries = kWide<Math> || kColumns > 128 || kCompact ? 32 : 64;   // of a tile
  static constexpr int kPassQueries = kColumns > 128 || kCompact ? 16 : 32;              // of a warp at a time
  static constexpr int kQueryColumnWarps = kColumns % 64 != 0 ? kSplit : kColumns / 32;  // the dQ tile over warps
  static constexpr int kBlocksPerSm = kLight ? 2 : 1;
};

/// Everything that follows from a shape.
template <class Shape>
struct BackwardTile : Shape {
  using Math = typename Shape::Math;
  static constexpr int kWarps = Shape::kKeyWarps * Shape::kSplit, kThreads = kWarps * kWarpThreads;
  static constexpr int kWarpKeys = 16 * Shape::kRowTiles, kKeys = kWarpKeys * Shape::kKeyWarps;
  static constexpr int kPasses = Shape::kQueries / (Shape::kPassQueries * Shape::kSplit);
  static constexpr int kPitch = pitch_of<Math>(Shape::kColumns), kWeightPitch = pitch_of<Math>(Shape::kQueries);
  static constexpr int kWarpColumns = Shape::kColumns / Shape::kSplit;  // of dK and dV
  static constexpr int kKeyBytes = kKeys * kPitch, kQueryBytes = Shape::kQueries * kPitch;
  static constexpr int kWeightBytes = kKeys * kWeightPitch;
  static constexpr int kQueryRowWarps = kWarps / Shape::kQueryColumnWarps;
  static constexpr int kQueryRowTiles = Shape::kQueries / kQueryRowWarps / 16;
  static constexpr int kQueryWarpColumns = Shape::kColumns / Shape::kQueryColumnWarps;
  static constexpr int kSharedBytes = 2 * kKeyBytes + 4 * kQueryBytes + (Shape::kSplit > 1 ? 2 : 1) * kWeightBytes +
                                      2 * Shape::kQueries * static_cast<int>(sizeof(float2));
  static_assert(kPasses * Shape::kPassQueries * Shape::kSplit == Shape::kQueries);
  static_assert(kQueryRowTiles * 16 * kQueryRowWarps == Shape::kQueries && kQueryWarpColumns % 16 == 0);
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

/// One tile of keys.
template <class Shape>
struct BackwardItem {
  using Tile = BackwardTile<Shape>;
  using Math = typename Shape::Math;
  using Pairs = typename Shape::Pairs;
  using T = Element<Math>;
  static constexpr int kSize = sizeof(T), kColumns = Shape::kColumns, kKeys = Tile::kKeys, kQueries = Shape::kQueries;
  static constexpr int kThreads = Tile::kThreads, kRowTiles = Shape::kRowTiles, kPitch = Tile::kPitch;
  static constexpr bool kRuled = Pairs::kRuled, kLists = Shape::kLists, kSplits = Shape::kSplit > 1;
  static constexpr int kBlocks = Shape::kPassQueries / 8, kColumnBlocks = Tile::kWarpColumns / 8;
  static constexpr int kTilesOfSum = kRowsOfSum / kQueries, kTotals = kRowTiles * Tile::kWarpColumns / 2;

  const Launch& a;
  const Item& item;
  const StrandRows strand;
  const StrandQueries queries;
  const int kv_head, part, warp_key;
  const std::uint32_t k_tile, v_tile, q_tiles, do_tiles, ds_tile, p_tile, rows_offset;
  const float4* const row_values;
  const std::int64_t q_step, do_step;
  const char *const q_base, *const do_base;
  const float2* const values_base;
  Pairs pairs;
  RowSequence<kLists> sequence;
  bool listed = false, masks_keys = false;
  int first_key, skipped = 0, tiles = 0, own_key = 0;
  unsigned open = 0;  // one bit for each key of this thread
  float dk[kRowTiles][kColumnBlocks][4], dv[kRowTiles][kColumnBlocks][4];

  __device__ __forceinline__ BackwardItem(const Launch& launch, const Item& of, char* shared)
      : a(launch),
        item(of),
        strand(a.schedule.branches[item.branch].strand(item.head, item.segment, a.tensors.length(item.entry))),
        queries(a.schedule.ranges[item.range].of(strand)),
        kv_head(item.head / (a.tensors.heads / a.tensors.kv_heads)),
        part(warp() / Shape::kKeyWarps),
        warp_key(warp() % Shape::kKeyWarps * Tile::kWarpKeys),
        k_tile(shared_address(shared)),
        v_tile(k_tile + Tile::kKeyBytes),
        q_tiles(v_tile + Tile::kKeyBytes),
        do_tiles(q_tiles + 2 * Tile::kQueryBytes),
        ds_tile(do_tiles + 2 * Tile::kQueryBytes),
        p_tile(ds_tile + (kSplits ? Tile::kWeightBytes : 0)),
        rows_offset(p_tile + Tile::kWeightBytes),
        row_values(reinterpret_cast<const float4*>(shared + (rows_offset - k_tile))),
        q_step(a.tensors.q.row * strand.stride * kSize),
        do_step(a.gradients.dout.row * strand.stride * kSize),
        q_base(a.tensors.q.data + a.tensors.q.offset(item.entry, queries.q_row, item.head) * kSize),
        do_base(a.gradients.dout.data + a.gradients.dout.offset(item.entry, queries.q_row, item.head) * kSize),
        values_base(reinterpret_cast<const float2*>(a.gradients.delta) +
                    a.delta_row(item.branch, item.entry, queries.q_row, item.head)),
        pairs(a, item, strand, kv_head),
        first_key(item.tile * kKeys) {}

  __device__ __forceinline__ static int warp() { return threadIdx.x / kWarpThreads; }
  __device__ __forceinline__ static int lane() { return threadIdx.x % kWarpThreads; }
  /// Element x of the sequence among the range's rows of the strand; -1 where there is none.
  __device__ __forceinline__ int query_at(int x) const {
    if constexpr (!kLists) return x < queries.count ? x : -1;
    const unsigned query = sequence.row(x) - queries.begin;
    return x < sequence.count && query < static_cast<unsigned>(queries.count) ? static_cast<int>(query) : -1;
  }
  __device__ __forceinline__ std::int64_t row_of_q(int query) const {
    return queries.q_row + static_cast<std::int64_t>(query) * strand.stride;
  }

  /// Finds the tile's queries; false where it has none, or no keys.
  __device__ __forceinline__ bool find_queries() {
    // Under a causal mask queries before the first key see none of these keys.
    skipped = a.rules.causal ? max(0, first_key - queries.begin) / kQueries : 0;
    sequence = RowSequence<kLists>::range(queries.begin, queries.count, 0);
    if constexpr (kLists) {
      const BlockLists& lists = a.schedule.lists[item.branch];
      listed = lists.places;
      if (listed) {
        const BlockPlace& place = lists.place(item.entry, item.head, item.tile);
        if (place.tile < 0) return false;
        first_key = place.tile * kKeys;
        skipped = 0;
        sequence = RowSequence<kLists>::blocks(lists.walk(place, queries.begin, queries.begin + queries.count), -1);
        if (sequence.count == 0 && a.gradients.sum_keys) return false;
      }
    }
    tiles = (sequence.count + kQueries - 1) / kQueries;
    return first_key < strand.count && (tiles > skipped || listed);
  }

  /// K and V, and which keys count.
  __device__ __forceinline__ void load_keys() {
    for_each_chunk<Math, kColumns, kKeys, kThreads, !kRuled>([&](int row, int chunk) {
      const int key = first_key + row, position = strand.start + key * strand.stride;
      const char *k_row = a.tensors.q.data, *v_row = k_row;
      bool valid = key < strand.count;
      if constexpr (kRuled) valid = pairs.counts(key);
      if (valid && kRuled) a.tensors.key_row(item.entry, kv_head, position, kSize, k_row, v_row);
      if (valid && !kRuled) {
        k_row = a.tensors.k.data + a.tensors.k.offset(item.entry, position, kv_head) * kSize;
        v_row = a.tensors.v.data + a.tensors.v.offset(item.entry, position, kv_head) * kSize;
      }
      const std::uint32_t target = chunk_offset<kPitch>(row, chunk);
      load_chunk<T, kRuled>(k_tile + target, k_row, chunk, valid, a.tensors.columns, a.tensors.aligned);
      load_chunk<T, kRuled>(v_tile + target, v_row, chunk, valid, a.tensors.columns, a.tensors.aligned);
    });
    own_key = first_key + warp_key + lane() / 4;  // and those 8, 16, 24 after it
#pragma unroll
    for (int i = 0; i < 2 * kRowTiles; ++i) {
      const int key = own_key + 8 * i;
      bool is_open = key < strand.count;
      if constexpr (kRuled) is_open = pairs.counts(key);
      open |= static_cast<unsigned>(is_open) << i;
    }
    masks_keys = kRuled ? !__all_sync(~0u, open == (1u << 2 * kRowTiles) - 1) : first_key + kKeys > strand.count;
  }

  __device__ __forceinline__ void load_queries(int tile) {
    const int stage = tile & 1;
    const std::uint32_t q_tile = q_tiles + stage * Tile::kQueryBytes, do_tile = do_tiles + stage * Tile::kQueryBytes;
    if constexpr (kLists) {
      for_each_chunk<Math, kColumns, kQueries, kThreads>([&](int row, int chunk) {
        const int query = query_at(tile * kQueries + row);
        const std::uint32_t target = chunk_offset<kPitch>(row, chunk);
        load_chunk<T, kRuled>(q_tile + target, query >= 0 ? q_base + query * q_step : q_base, chunk, query >= 0,
                              a.tensors.columns, a.tensors.aligned);
        load_chunk<T, kRuled>(do_tile + target, query >= 0 ? do_base + query * do_step : do_base, chunk, query >= 0,
                              a.tensors.columns, a.tensors.aligned);
      });
    } else {
      load_rows<Math, kColumns, kQueries, kThreads, kRuled>(q_tile, q_base, q_step, tile * kQueries, queries.count,
                                                            a.tensors.columns, a.tensors.aligned);
      load_rows<Math, kColumns, kQueries, kThreads, kRuled>(do_tile, do_base, do_step, tile * kQueries, queries.count,
                                                            a.tensors.columns, a.tensors.aligned);
    }
    if (threadIdx.x < kQueries) {
      const int query = query_at(tile * kQueries + threadIdx.x);
      const bool valid = query >= 0;
      const std::uint32_t target = rows_offset + (stage * kQueries + threadIdx.x) * 8;
      // No row: where a bias may be negative only lse = inf keeps its weights from overflowing.
      if (kRuled && !valid) store_shared(target, make_float2(LONGSPAN_INFINITY, 0.0f));
      else
        copy_async_pair(target, valid ? values_base + static_cast<std::int64_t>(query) * strand.stride : values_base,
                        valid);
    }
    copy_commit();
  }

  /// P^T of some queries from scores; `values`: two queries each, as accumulators have them: {lse, delta, lse, delta}.
  __device__ __forceinline__ void weigh(float (&p)[kRowTiles][kBlocks][4], const float4* values, int first) {
    float factor = a.rules.scale * kLog2E;
    if constexpr (kRuled) {
      if (a.rules.alibi) {
        pairs.add_bias(p, factor, own_key, sequence, first);
        factor = 1.0f;
      }
    }
#pragma unroll
    for (int n = 0; n < kBlocks; ++n) {
      const float4 value = values[4 * n];
#pragma unroll
      for (int m = 0; m < kRowTiles; ++m)
#pragma unroll
        for (int i = 0; i < 4; ++i)
          p[m][n][i] = fast_exp2(least(fmaf(p[m][n][i], factor, i % 2 ? -value.z : -value.x), 0.0f));
    }
    const bool masked = listed ? first + Shape::kPassQueries > sequence.unmasked
                               : a.rules.causal && sequence.row(first) < first_key + warp_key + Tile::kWarpKeys - 1;
    if (!masks_keys && !masked) return;
#pragma unroll
    for (int n = 0; n < kBlocks; ++n) {
      const int first_query = sequence.row(first + n * 8) + (lane() % 4) * 2;
      const std::uint32_t met = sequence.met(first + n * 8);
#pragma unroll
      for (int m = 0; m < kRowTiles; ++m)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int key = own_key + 16 * m + i / 2 * 8;
          if (!(open >> (2 * m + i / 2) & 1) || (a.rules.causal && key > first_query + i % 2) ||
              !(met >> sequence.bit(key) & 1))
            p[m][n][i] = 0.0f;
        }
    }
  }

  /// dS^T from dP^T and P^T, which loses what dropout drops.
  __device__ __forceinline__ void differentiate(float (&ds)[kRowTiles][kBlocks][4], float (&p)[kRowTiles][kBlocks][4],
                                                const float4* values, int first) {
    const float dweight_scale = a.rules.output_scale * a.gradients.dscore_scale;
    if constexpr (kRuled) {
      if (a.rules.dropout) {
        const float kept_scale = dweight_scale * a.rules.keep_factor;
        pairs.template for_each_kept_transposed<kRowTiles, kBlocks>(
            own_key, sequence, first, [&](int m, int n, int i, bool kept) {
              const float delta = i % 2 ? values[4 * n].w : values[4 * n].y;
              ds[m][n][i] = p[m][n][i] * fmaf(kept ? kept_scale : 0.0f, ds[m][n][i], -delta);
              if (!kept) p[m][n][i] = 0.0f;
            });
        return;
      }
    }
#pragma unroll
    for (int n = 0; n < kBlocks; ++n) {
      const float4 value = values[4 * n];
#pragma unroll
      for (int m = 0; m < kRowTiles; ++m)
#pragma unroll
        for (int i = 0; i < 4; ++i)
          ds[m][n][i] = p[m][n][i] * fmaf(dweight_scale, ds[m][n][i], i % 2 ? -value.w : -value.y);
    }
  }

  __device__ __forceinline__ void put_weights(std::uint32_t target, const float (&weights)[kRowTiles][kBlocks][4],
                                              int pass_query) {
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m)
#pragma unroll
      for (int n = 0; n < kBlocks; ++n)
#pragma unroll
        for (int half = 0; half < 2; ++half)
          store_pair<Math>(target + pair_offset<Math, Tile::kWeightPitch>(warp_key + lane() / 4 + 16 * m + 8 * half,
                                                                          pass_query / 8 + n),
                           weights[m][n][2 * half], weights[m][n][2 * half + 1]);
  }

  /// Some queries of a tile: their weights for the other warps, and, unless warps share keys, what they add to dk, dv.
  __device__ __forceinline__ void take_pass(int tile, int pass) {
    const int stage = tile & 1, pass_query = (pass * Shape::kSplit + part) * Shape::kPassQueries;
    const int first = tile * kQueries + pass_query;  // of the sequence
    const std::uint32_t q_tile = q_tiles + stage * Tile::kQueryBytes, do_tile = do_tiles + stage * Tile::kQueryBytes;
    const float4* const values = row_values + (stage * kQueries + pass_query) / 2 + lane() % 4;
    float p[kRowTiles][kBlocks][4], ds[kRowTiles][kBlocks][4];
    multiply_rows<Math, kColumns>(p, k_tile, warp_key, q_tile, pass_query);
    weigh(p, values, first);
    multiply_rows<Math, kColumns>(ds, v_tile, warp_key, do_tile, pass_query);
    differentiate(ds, p, values, first);
    put_weights(ds_tile, ds, pass_query);
    if constexpr (kSplits) {
      put_weights(p_tile, p, pass_query);
    } else {
      constexpr int kSteps = Shape::kPassQueries / kStepSize<Math>;
      accumulate<Math, kPitch, kSteps>(
          dv, [&](Fragment& f, int m, int step) { weights_of<Math>(f, p[m], step); }, do_tile, pass_query, 0);
      accumulate<Math, kPitch, kSteps>(
          dk, [&](Fragment& f, int m, int step) { weights_of<Math>(f, ds[m], step); }, q_tile, pass_query, 0);
    }
  }

  /// Where warps share keys: a part of the columns of dk and dv, from weights in shared memory.
  __device__ __forceinline__ void add_shared_weights(int stage) {
    constexpr int kSteps = kQueries / kStepSize<Math>;
    const int first_column = part * Tile::kWarpColumns;
    accumulate<Math, kPitch, kSteps>(
        dv, [&](Fragment& f, int m, int step) { load_a<Tile::kWeightPitch>(f, p_tile, warp_key + 16 * m, step); },
        do_tiles + stage * Tile::kQueryBytes, 0, first_column);
    accumulate<Math, kPitch, kSteps>(
        dk, [&](Fragment& f, int m, int step) { load_a<Tile::kWeightPitch>(f, ds_tile, warp_key + 16 * m, step); },
        q_tiles + stage * Tile::kQueryBytes, 0, first_column);
  }

  /// dq of a tile of queries.
  __device__ __forceinline__ void add_queries(int tile) {
    const int query_row = warp() % Tile::kQueryRowWarps * Tile::kQueryRowTiles * 16,
              query_column = warp() / Tile::kQueryRowWarps * Tile::kQueryWarpColumns;
    float dq[Tile::kQueryRowTiles][Tile::kQueryWarpColumns / 8][4];
    clear(dq);
    accumulate<Math, kPitch, kKeys / kStepSize<Math>>(
        dq,
        [&](Fragment& f, int m, int step) {
          load_a_transposed<Math, Tile::kWeightPitch>(f, ds_tile, step * kStepSize<Math>, query_row + 16 * m);
        },
        k_tile, 0, query_column);
#pragma unroll
    for (int m = 0; m < Tile::kQueryRowTiles; ++m) {
      add_rows(dq[m], a.tensors.columns, query_column, [&](int row) -> float* {
        const int query = query_at(tile * kQueries + query_row + 16 * m + row);
        if (query < 0) return nullptr;
        return a.gradients.dq_sum + a.tensors.packed_row(item.entry, row_of_q(query), item.head) * a.tensors.columns;
      });
    }
  }

  __device__ __forceinline__ void take_queries(int tile) {
    copy_wait<0>();
    __syncthreads();
    if (tile + 1 < tiles) load_queries(tile + 1);
#pragma unroll 1
    for (int pass = 0; pass < Tile::kPasses; ++pass) take_pass(tile, pass);
    __syncthreads();
    if constexpr (kSplits) add_shared_weights(tile & 1);
    if (!a.gradients.separate_dq) add_queries(tile);
  }

  template <class Body>
  __device__ __forceinline__ void for_each_total(float* totals, Body&& body) {
#pragma unroll
    for (int i = 0; i < kTotals; ++i) {
      constexpr int kEach = Tile::kWarpColumns / 2;
      body(totals[i * kThreads], dk[i / kEach][i % kEach / 4][i % 4]);
      body(totals[(kTotals + i) * kThreads], dv[i / kEach][i % kEach / 4][i % 4]);
    }
  }

  __device__ __forceinline__ void take_all_queries() {
    __shared__ int total_place;
    const auto add_to_totals = [&] {
      for_each_total(find_totals(a, false, total_place), [](float& total, float& sum) { atomicAdd(&total, sum); });
    };
    // One loop in another: what closes sums is outside of the one that must be fast.
    for (int tile = skipped; tile < tiles;) {
      const int end_of_sum = Shape::kCloses ? min(tiles, (tile / kTilesOfSum + 1) * kTilesOfSum) : tiles;
#pragma unroll 1
      for (; tile < end_of_sum; ++tile) take_queries(tile);
      if (Shape::kCloses && tile < tiles) {
        if (tile - kTilesOfSum <= skipped)
          for_each_total(find_totals(a, true, total_place), [](float& total, float& sum) { total = sum; });
        else add_to_totals();
        clear(dk);
        clear(dv);
      }
    }
    if (Shape::kCloses && (tiles - 1) / kTilesOfSum * kTilesOfSum > skipped) {
      add_to_totals();
      for_each_total(find_totals(a, false, total_place), [](float& total, float& sum) { sum = __ldcg(&total); });
      leave_totals(a, total_place);
    }
  }

  /// dk (or dv) of this warp's keys: added to sums where other items have some of them, else written.
  __device__ __forceinline__ void store(float (&sums)[kRowTiles][kColumnBlocks][4], bool values, float scale) {
    const int first_column = part * Tile::kWarpColumns;
    const Rows& target = values ? a.gradients.dv : a.gradients.dk;
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (int n = 0; n < kColumnBlocks; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) sums[m][n][i] *= scale;
      if (a.gradients.sum_keys) {
        add_rows(sums[m], a.tensors.columns, first_column, [&](int row) -> float* {
          const int key = first_key + warp_key + 16 * m + row;
          if (key >= strand.count) return nullptr;
          const int position = strand.start + key * strand.stride;
          if (kRuled && a.gradients.piece_gradients)  // pieces are ruled
            return a.gradient_row(item.entry, kv_head, position, values);
          const std::int64_t packed_row =
              (static_cast<std::int64_t>(item.entry) * a.tensors.kv_heads + kv_head) * a.tensors.tokens + position;
          return (values ? a.gradients.dv_sum : a.gradients.dk_sum) + packed_row * a.tensors.columns;
        });
        continue;
      }
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int key = own_key + 16 * m + 8 * half;
        if (key >= strand.count) continue;
        T* const row = reinterpret_cast<T*>(target.data) +
                       target.offset(item.entry, strand.start + key * strand.stride, item.head);
#pragma unroll
        for (int n = 0; n < kColumnBlocks; ++n) {
          const int column = first_column + n * 8 + (lane() % 4) * 2;
          if (column >= a.tensors.columns) continue;
          const float first = sums[m][n][2 * half], second = sums[m][n][2 * half + 1];
          if (kRuled && !a.tensors.aligned) row[column] = from_float<T>(first), row[column + 1] = from_float<T>(second);
          else if constexpr (kWide<Math>) *reinterpret_cast<float2*>(row + column) = make_float2(first, second);
          else *reinterpret_cast<std::uint32_t*>(row + column) = pack<T>(first, second);
        }
      }
    }
  }

  __device__ __forceinline__ void run() {
    if (!find_queries()) return;
    load_keys();
    load_queries(skipped);
    clear(dk);
    clear(dv);
    // Where no key counts the gradients are zeros.
    if (kRuled && !__syncthreads_or(open != 0)) tiles = 0;
    take_all_queries();
    if ((kLists || kRuled) && tiles == 0) copy_wait<0>();
    store(dk, false, a.gradients.sum_scale);
    store(dv, true, a.rules.output_scale * (kRuled ? a.rules.keep_factor : 1.0f));
  }
};

template <class Shape>
__global__ void __launch_bounds__(BackwardTile<Shape>::kThreads, Shape::kBlocksPerSm)
    backward_mma(const __grid_constant__ Launch a) {
  extern __shared__ __align__(128) char shared[];
  const Item item = a.schedule.decode(blockIdx.x);
  BackwardItem<Shape>(a, item, shared).run();
}

}  // namespace longspan::cuda
