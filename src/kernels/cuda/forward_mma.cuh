// Forward on matrix units: one block per tile of query rows of one strand.
//   shared   Q [rows][columns], K and V [keys][columns], 16-bit, swizzled; V loads under Q K^T, the next K under P V
//   float32  tiles become scaled float16 numbers where they lie (scaled.cuh)
//   a warp   16 * kRowTiles query rows; scores and probabilities stay in registers: what Q K^T leaves there is, packed,
//            the A operand of P V
//   halves   the last tiles of small problems may come as two items of half the rows, so that no multiprocessor has
//            much more to do than others
//   merging  where several branches cover a row, its softmax state (maximum, sum, unscaled output) is put down in
//            float32 and taken up by the next branch that covers it, in branch order: one sum, as defined
#pragma once

#include "kernels/cuda/closed_sums.cuh"
#include "kernels/cuda/forward_tile.cuh"
#include "kernels/cuda/pairs.cuh"
#include "kernels/cuda/scaled.cuh"

namespace longspan::cuda {

/// One tile of 16 * kRowTiles rows a warp. What becomes of a row does not depend on how many there are.
template <class Shape, int kRowTiles>
struct ForwardItem {
  using Tile = ForwardTile<Shape, kRowTiles>;
  using Math = typename Shape::Math;
  using Pairs = typename Shape::Pairs;
  using T = Element<Math>;
  static constexpr int kSize = sizeof(T), kColumns = Shape::kColumns, kRows = Tile::kRows, kKeys = Shape::kKeys;
  static constexpr int kThreads = Tile::kThreads, kPitch = Tile::kPitch, kStages = Shape::kStages;
  static constexpr bool kRuled = Pairs::kRuled, kLists = Shape::kLists, kScaled = Shape::kScaled;
  static constexpr bool kMerges = kRowTiles == Shape::kRowTiles;  // half tiles never do

  const Launch& a;
  const Item& item;
  char* const shared;
  const DeviceBranch& branch;
  const int length;
  const StrandRows strand;
  const StrandQueries queries;
  const bool listed;  // its tiles are the strand's, else the range's
  const int first_query, rows;
  const std::int64_t q_row;
  const int kv_head, warp_row, thread_row;
  const std::uint32_t q_tile, k_tiles, v_tiles;
  const char *const k_base, *const v_base;
  const std::int64_t k_step, v_step;
  Pairs pairs;
  RowSequence<kLists> keys;
  Tile tile;

  // float32 (scaled.cuh): powers of two that take products back, of Q and K; V's, and the most of some rows
  using ScaledQ = ScaledRows<Math, kColumns, kRows, kThreads>;
  using ScaledKeys = ScaledRows<Math, kColumns, kKeys, kThreads>;
  struct Powers {
    float q[kRows], k[kKeys];
    std::uint32_t v[kKeys], most[ScaledKeys::kStep];
  };
  __device__ __forceinline__ static Powers& powers() {
    __shared__ Powers all;
    return all;
  }
  __device__ __forceinline__ static void tell_q(int row, std::uint32_t power) { powers().q[row] = power_of_two(power); }
  static constexpr bool kFetches = kScaled && !kRuled && !kLists;  // K and V come through registers
  struct Nothing {};
  std::conditional_t<kFetches, ScaledKeys, Nothing> fetched;

  __device__ __forceinline__ ForwardItem(const Launch& launch, const Item& of, char* memory)
      : a(launch),
        item(of),
        shared(memory),
        branch(a.schedule.branches[item.branch]),
        length(a.tensors.length(item.entry)),
        strand(branch.strand(item.head, item.segment, length)),
        queries(a.schedule.ranges[item.range].of(strand)),
        listed(kLists && a.schedule.lists[item.branch].places),
        first_query(listed ? max(queries.begin, item.tile * kRows) : queries.begin + item.tile * kRows),
        rows(kLists ? min(queries.begin + queries.count, listed ? (item.tile + 1) * kRows : first_query + kRows) -
                          first_query
                    : min(kRows, queries.count - item.tile * kRows)),
        q_row(queries.q_row +
              (kLists ? first_query - queries.begin : static_cast<std::int64_t>(item.tile) * kRows) * strand.stride),
        kv_head(item.head / (a.tensors.heads / a.tensors.kv_heads)),
        warp_row(static_cast<int>(threadIdx.x) / kWarpThreads * 16 * kRowTiles),
        thread_row(warp_row + lane() / 4),
        q_tile(shared_address(shared)),
        k_tiles(q_tile + kRows * kPitch),
        v_tiles(k_tiles + kStages * Tile::kKeyBytes),
        k_base(a.tensors.k.data + a.tensors.k.offset(item.entry, strand.start, kv_head) * kSize),
        v_base(a.tensors.v.data + a.tensors.v.offset(item.entry, strand.start, kv_head) * kSize),
        k_step(a.tensors.k.row * strand.stride * kSize),
        v_step(a.tensors.v.row * strand.stride * kSize),
        pairs(a, item, strand, kv_head) {}

  __device__ __forceinline__ static int lane() { return threadIdx.x % kWarpThreads; }
  // Without lists, what says where keys end and masks begin is computed where it is needed: the loop has no registers
  // to spare for it, and spills made heads of 48 and 128 up to 8% slower.
  __device__ __forceinline__ int end_of_keys() const {
    return a.rules.causal ? min(strand.count, first_query + rows) : strand.count;
  }
  __device__ __forceinline__ int last_key() const { return kLists ? keys.count : end_of_keys(); }
  __device__ __forceinline__ std::int64_t row_of_q(int row) const {
    return q_row + static_cast<std::int64_t>(row) * strand.stride;
  }
  __device__ __forceinline__ std::int64_t packed_of(int row) const {
    return a.tensors.packed_row(item.entry, row_of_q(row), item.head);
  }
  /// Whether branches from `first` on, up to `last`, cover a row of the tile.
  __device__ __forceinline__ bool covered(int row, int first, int last) const {
    return a.schedule.covered(item.head, strand.start + (first_query + row) * strand.stride, length, first, last);
  }
  __device__ __forceinline__ bool unfinished(int row) const {
    return kMerges && a.schedule.merges && row < rows && covered(row, item.branch + 1, a.schedule.branch_count);
  }
  __device__ __forceinline__ std::uint32_t k_tile(int stage) const { return k_tiles + stage * Tile::kKeyBytes; }
  __device__ __forceinline__ std::uint32_t v_tile(int stage) const { return v_tiles + stage * Tile::kKeyBytes; }

  __device__ __forceinline__ void load_keys(std::uint32_t target, bool values, int first) {
    const char* const base = values ? v_base : k_base;
    const std::int64_t step = values ? v_step : k_step;
    if constexpr (kRuled) {
      pairs.template load_keys<Math, kColumns, kKeys, kThreads>(target, keys, first, base, step, values);
    } else if constexpr (kLists) {
      for_each_chunk<Math, kColumns, kKeys, kThreads>([&](int row, int chunk) {
        const int key = keys.row(first + row);
        const bool valid = key < strand.count;
        load_chunk<T, false>(target + chunk_offset<kPitch>(row, chunk), valid ? base + key * step : base, chunk, valid,
                             a.tensors.columns, true);
      });
    } else {
      load_rows<Math, kColumns, kKeys, kThreads, false>(target, base, step, first, strand.count, a.tensors.columns,
                                                        true);
    }
    copy_commit();
  }

  __device__ __forceinline__ void fetch_keys(bool values, int first) {
    fetched.fetch(values ? v_base : k_base, values ? v_step : k_step, first, strand.count, a.tensors.columns);
  }

  /// Which keys there are, Q and the first of them, and sums of nothing.
  __device__ __forceinline__ void begin() {
    keys = RowSequence<kLists>::range(0, end_of_keys(),
                                      a.rules.causal ? min(strand.count, first_query + warp_row + 1) : strand.count);
    if constexpr (kLists) {
      if (listed) {
        const BlockLists& lists = a.schedule.lists[item.branch];
        keys = RowSequence<kLists>::blocks(lists.walk(lists.place(item.entry, item.head, item.tile), 0, strand.count),
                                           strand.count);
      }
    }
    const char* const q = a.tensors.q.data + a.tensors.q.offset(item.entry, q_row, item.head) * kSize;
    const std::int64_t q_step = a.tensors.q.row * strand.stride * kSize;
    if constexpr (kFetches) {
      ScaledQ all;
      all.fetch(q, q_step, 0, rows, a.tensors.columns);
      fetch_keys(false, 0);
      all.store(q_tile, tell_q);
    } else {
      load_rows<Math, kColumns, kRows, kThreads, kRuled>(q_tile, q, q_step, 0, rows, a.tensors.columns,
                                                         a.tensors.aligned);
      if constexpr (kScaled) {
        copy_commit();
        copy_wait<0>();
        ScaledQ all;
        all.fetch(q_tile);
        all.store(q_tile, tell_q);
      }
      if constexpr (kRuled) {
        pairs.template ask<kKeys>(keys, 0);
        pairs.template tell<kKeys>(0);
        pairs.template ask<kKeys>(keys, kKeys);
        __syncthreads();
      }
      load_keys(k_tiles, false, 0);
      if (kStages > 1) load_keys(v_tiles, true, 0);
    }
    clear(tile.out);
    Tile::for_each_row([&](int m, int half) {
      tile.largest[m][half] = -LONGSPAN_INFINITY;
      tile.sum[m][half] = 0.0f;
    });
  }

  /// The state in which an earlier branch left the rows.
  __device__ __forceinline__ void take_up() {
    wait_for_earlier(a, item);
    Tile::for_each_row([&](int m, int half) {
      const int row = thread_row + 16 * m + 8 * half;
      if (row >= rows || !covered(row, 0, item.branch)) return;
      const std::int64_t packed = packed_of(row);
      tile.largest[m][half] = __ldcg(a.scratch.state_sums + 2 * packed);
      tile.sum[m][half] = lane() % 4 == 0 ? __ldcg(a.scratch.state_sums + 2 * packed + 1) : 0.0f;
#pragma unroll
      for (int n = 0; n < kColumns / 8; ++n) {
        const int column = n * 8 + lane() % 4 * 2;
        if (column >= a.tensors.columns) continue;
        const float2 pair =
            __ldcg(reinterpret_cast<const float2*>(a.scratch.state + packed * a.tensors.columns + column));
        tile.out[m][n][2 * half] = pair.x;
        tile.out[m][n][2 * half + 1] = pair.y;
      }
    });
  }

  /// Whether a warp's rows meet all keys of a tile, as far as lists, causality and the strand's end go.
  __device__ __forceinline__ bool all_meet(int first) const {
    return kLists ? first + kKeys <= keys.unmasked
                  : first + kKeys <= strand.count && !(a.rules.causal && first + kKeys > first_query + warp_row + 1);
  }
  /// Calls body(m, n, i, whether the two meet).
  template <class Body>
  __device__ __forceinline__ void for_each_pair(int first, Body&& body) const {
#pragma unroll
    for (int n = 0; n < kKeys / 8; ++n) {
      const int first_key = keys.row(first + n * 8) + lane() % 4 * 2;
      const std::uint32_t met = keys.met(first + n * 8);
#pragma unroll
      for (int m = 0; m < kRowTiles; ++m)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int own = first_query + thread_row + 16 * m + (i / 2) * 8, key = first_key + i % 2;
          body(m, n, i, key < strand.count && !(a.rules.causal && key > own) && (met >> keys.bit(own) & 1));
        }
    }
  }

  /// Products of scaled numbers become scores, but for the power of their row unless that is asked for.
  __device__ __forceinline__ void scale_scores(bool rows_too) {
#pragma unroll
    for (int n = 0; n < kKeys / 8; ++n) {
      const float2 of_keys = *reinterpret_cast<const float2*>(powers().k + n * 8 + lane() % 4 * 2);
      Tile::for_each_row([&](int m, int half) {
        const float of_row = rows_too ? powers().q[thread_row + 16 * m + 8 * half] : 1.0f;
        tile.scores[m][n][2 * half] *= of_keys.x * of_row;
        tile.scores[m][n][2 * half + 1] *= of_keys.y * of_row;
      });
    }
  }

  /// Scores become weights.
  __device__ __forceinline__ void weigh(int first) {
    float factor = a.rules.scale * kLog2E;
    bool biased = false;
    if constexpr (kRuled) biased = pairs.biased;
    if constexpr (kScaled) scale_scores(biased);
    if constexpr (kRuled) {
      if (biased) {
        pairs.add_bias(tile.scores, factor, first_query + thread_row, keys, first);
        factor = 1.0f;
      }
      pairs.mask_keys(tile.scores, -LONGSPAN_INFINITY);
    }
    if (!all_meet(first))
      for_each_pair(first, [&](int m, int n, int i, bool meet) {
        if (!meet) tile.scores[m][n][i] = -LONGSPAN_INFINITY;
      });
    if constexpr (kScaled) {
      float factors[kRowTiles][2];
      Tile::for_each_row([&](int m, int half) {
        factors[m][half] = biased ? factor : factor * powers().q[thread_row + 16 * m + 8 * half];
      });
      tile.softmax([&](int m, int half) { return factors[m][half]; });
    } else {
      tile.softmax([&](int, int) { return factor; });
    }
    if constexpr (kRuled) {
      if (a.rules.dropout)
        pairs.template for_each_kept<kRowTiles, kKeys / 8>(
            first_query + thread_row, keys, first, [&](int m, int n, int i, bool kept) {
              if (!kept) tile.scores[m][n][i] = 0.0f;  // what is kept is scaled with the row
            });
    }
  }

  /// out += weights times scaled values. Weights take the powers of V's rows, relative to the largest that a row meets.
  __device__ __forceinline__ void add_scaled_values(int first) {
    std::uint32_t words[kRowTiles][kKeys / 8][kSplits<Math> ? 4 : 2], most[kRowTiles][2];
    const auto scale_weights = [&] {
#pragma unroll
      for (int n = 0; n < kKeys / 8; ++n) {
        const uint2 of_keys = *reinterpret_cast<const uint2*>(powers().v + n * 8 + lane() % 4 * 2);
        Tile::for_each_row([&](int m, int half) {
          std::uint32_t(&of_row)[kSplits<Math> ? 4 : 2] = words[m][n];
          split_pair<Math>(of_row[half], of_row[kSplits<Math> ? 2 + half : half],
                           tile.scores[m][n][2 * half] * scaled_quotient(of_keys.x, most[m][half]),
                           tile.scores[m][n][2 * half + 1] * scaled_quotient(of_keys.y, most[m][half]));
        });
      }
    };
    if (all_meet(first)) {
      std::uint32_t of_tile = kLeastPower;
#pragma unroll
      for (int i = 0; i < ScaledKeys::kStep; ++i) of_tile = max(of_tile, powers().most[i]);
      Tile::for_each_row([&](int m, int half) { most[m][half] = of_tile; });
      scale_weights();
    } else {
      Tile::for_each_row([&](int m, int half) { most[m][half] = kLeastPower; });
      for_each_pair(first, [&](int m, int n, int i, bool meet) {
        if (meet) most[m][i / 2] = max(most[m][i / 2], powers().v[n * 8 + lane() % 4 * 2 + i % 2]);
      });
      Tile::for_each_row([&](int m, int half) {
        most[m][half] = max(most[m][half], __shfl_xor_sync(~0u, most[m][half], 1));
        most[m][half] = max(most[m][half], __shfl_xor_sync(~0u, most[m][half], 2));
      });
      scale_weights();
    }
    float back[kRowTiles][2];
    Tile::for_each_row(
        [&](int m, int half) { back[m][half] = power_of_two(most[m][half] - 2 * kScaledPower * kPowerUnit); });
    accumulate_scaled<Math, kColumns, ScaledKeys::kSecond>(tile.out, words, back, v_tiles);
  }

  /// One tile of keys of float32. What is loaded lies in registers, and else where it belongs, as float32.
  __device__ __forceinline__ void take_scaled_keys(int first, bool more) {
    const auto put = [&](bool values) {
      std::uint32_t most = 0;
      const auto tell = [&](int row, std::uint32_t power) {
        if (values) powers().v[row] = power, powers().most[threadIdx.x / ScaledKeys::kLanes] = most = max(most, power);
        else powers().k[row] = power_of_two(power - 2 * kScaledPower * kPowerUnit);
      };
      const std::uint32_t tile_of = values ? v_tiles : k_tiles;
      if constexpr (kFetches) {
        fetched.store(tile_of, tell);
      } else {
        ScaledKeys all;
        copy_wait<0>();
        all.fetch(tile_of);
        all.store(tile_of, tell);
      }
      __syncthreads();
    };
    const auto load = [&](bool values, int from) {
      if constexpr (kFetches) fetch_keys(values, from);
      else load_keys(values ? v_tiles : k_tiles, values, from);
    };
    put(false);
    load(true, first);
    multiply_scaled_rows<Math, kColumns, ScaledQ::kSecond, ScaledKeys::kSecond>(tile.scores, q_tile, warp_row, k_tiles);
    weigh(first);
    put(true);
    if (more) load(false, first + kKeys);
    add_scaled_values(first);
  }

  /// The same of 16-bit types, which need nothing done to them.
  __device__ __forceinline__ void take_plain_keys(int first, bool more) {
    const int stage = kStages > 1 ? first / kKeys & 1 : 0;
    if constexpr (kStages > 1) {
      if (more) {
        load_keys(k_tile(stage ^ 1), false, first + kKeys);
        load_keys(v_tile(stage ^ 1), true, first + kKeys);
      }
    } else {
      load_keys(v_tiles, true, first);
    }
    multiply_rows<Math, kColumns>(tile.scores, q_tile, warp_row, k_tile(stage), 0);
    weigh(first);
    if constexpr (kStages == 1) {
      copy_wait<0>();
      __syncthreads();
      if (more) load_keys(k_tiles, false, first + kKeys);
    }
    accumulate<Math, kPitch, kKeys / kStepSize<Math>>(
        tile.out, [&](Fragment& f, int m, int step) { weights_of<Math>(f, tile.scores[m], step); }, v_tile(stage), 0,
        0);
  }

  /// One tile of keys.
  __device__ __forceinline__ void take_keys(int first) {
    const bool more = first + kKeys < last_key();
    if constexpr (!kFetches) {
      copy_wait<0>();
      __syncthreads();
    }
    if constexpr (kRuled) {
      pairs.template tell<kKeys>(first + kKeys);
      pairs.template ask<kKeys>(keys, first + 2 * kKeys);
      if (pairs.none()) {
        __syncthreads();
        if (more) load_keys(k_tile(0), false, first + kKeys);
        return;
      }
    }
    if constexpr (kScaled) take_scaled_keys(first, more);
    else take_plain_keys(first, more);
  }

  __device__ __forceinline__ void take_all_keys() {
    if constexpr (Shape::kCloses) {  // one loop in another: what closes sums is outside of the one that must be fast
      __shared__ int total_place;
      for (int first = 0; first < last_key();) {
        const int end_of_sum = min(last_key(), first + kRowsOfSum);
#pragma unroll 1
        for (; first < end_of_sum; first += kKeys) take_keys(first);
        if (first >= last_key()) break;
        const bool opens = first == kRowsOfSum;
        tile.close_sums(find_totals(a, opens, total_place), opens);
      }
      if (last_key() > kRowsOfSum) {
        tile.add_totals(find_totals(a, false, total_place));
        leave_totals(a, total_place);
      }
    } else {
      for (int first = 0; first < last_key(); first += kKeys) take_keys(first);
    }
  }

  /// Puts the state of a row down for the next branch that covers it.
  __device__ __forceinline__ void put_down(int m, int half, int row) {
    const std::int64_t packed = packed_of(row);
    if (lane() % 4 == 0) {
      __stcg(a.scratch.state_sums + 2 * packed, tile.largest[m][half]);
      __stcg(a.scratch.state_sums + 2 * packed + 1, tile.sum[m][half]);
    }
#pragma unroll
    for (int n = 0; n < kColumns / 8; ++n) {
      const int column = n * 8 + lane() % 4 * 2;
      if (column >= a.tensors.columns) continue;
      __stcg(reinterpret_cast<float2*>(a.scratch.state + packed * a.tensors.columns + column),
             make_float2(tile.out[m][n][2 * half], tile.out[m][n][2 * half + 1]));
    }
  }

  /// For detached_mix: delta of a row within this branch, dO times the branch's own output, which is sums * factor.
  __device__ __forceinline__ void put_delta(int m, int half, int row, float factor) {
    float delta = 0.0f;
    if (row < rows) {
      const T* const dout = reinterpret_cast<const T*>(a.gradients.dout.data) +
                            a.gradients.dout.offset(item.entry, row_of_q(row), item.head);
#pragma unroll
      for (int n = 0; n < kColumns / 8; ++n) {
        const int column = n * 8 + lane() % 4 * 2;
        if (column >= a.tensors.columns) continue;
        delta = fmaf(as_float(dout[column]), tile.out[m][n][2 * half], delta);
        delta = fmaf(as_float(dout[column + 1]), tile.out[m][n][2 * half + 1], delta);
      }
    }
    delta += __shfl_xor_sync(~0u, delta, 1);
    delta += __shfl_xor_sync(~0u, delta, 2);
    if (row < rows && lane() % 4 == 0)
      a.gradients.delta[2 * a.delta_row(item.branch, item.entry, row_of_q(row), item.head) + 1] =
          delta * factor * a.gradients.dscore_scale;
  }

  /// Padding; then state for a later branch, or lse, and the row into shared memory. `done`: 0, known only here.
  __device__ __forceinline__ void finish_rows(int done) {
    const int padding = branch.padding(strand.count, length, a.rules.causal);
    Tile::for_each_row([&](int m, int half) {
      float& sum = tile.sum[m][half];
      sum += __shfl_xor_sync(~0u, sum, 1);
      sum += __shfl_xor_sync(~0u, sum, 2);
      if (padding > 0) {
        tile.raise(m, half, fmaxf(tile.largest[m][half], 0.0f));
        sum += static_cast<float>(padding) * fast_exp2(-tile.largest[m][half]);
      }
      if constexpr (kLists) {  // values that only other rows of the tile see may be NaN, and 0 * NaN is NaN
        if (sum == 0.0f) {
#pragma unroll
          for (int n = 0; n < kColumns / 8; ++n) tile.out[m][n][2 * half] = tile.out[m][n][2 * half + 1] = 0.0f;
        }
      }
      const int row = done + thread_row + 16 * m + 8 * half;
      float factor = sum == 0.0f ? 0.0f : a.rules.output_scale / sum;
      if constexpr (kRuled) {
        factor *= a.rules.keep_factor;
        if (a.gradients.deltas) return put_delta(m, half, row, factor);
      }
      if (unfinished(row)) {
        put_down(m, half, row);
      } else if (a.tensors.lse.data && row < rows && lane() % 4 == 0) {
        a.tensors.lse.at(item.entry, row_of_q(row), item.head) =
            sum == 0.0f ? -LONGSPAN_INFINITY : fmaf(Tile::base_of(tile.largest[m][half]), kLn2, logf(sum));
      }
#pragma unroll
      for (int n = 0; n < kColumns / 8; ++n)
        store_pair<Math>(q_tile + pair_offset<Math, kPitch>(row, n), tile.out[m][n][2 * half] * factor,
                         tile.out[m][n][2 * half + 1] * factor);
    });
  }

  /// From shared memory to out.
  __device__ __forceinline__ void store_rows(int done) {
    constexpr int kPerChunk = 16 / kSize, kChunks = kColumns / kPerChunk;
    __syncwarp();
#pragma unroll 4
    for (int i = lane(); i < 16 * kRowTiles * kChunks; i += kWarpThreads) {
      const int row = done + warp_row + i / kChunks, chunk = i % kChunks;
      if (row >= rows || chunk * kPerChunk >= a.tensors.columns || unfinished(row)) continue;
      const uint4 value = *reinterpret_cast<const uint4*>(shared + chunk_offset<kPitch>(row, chunk));
      T* const target = reinterpret_cast<T*>(a.tensors.out.data) +
                        a.tensors.out.offset(item.entry, row_of_q(row), item.head) + chunk * kPerChunk;
      if (!kRuled || a.tensors.aligned) {
        *reinterpret_cast<uint4*>(target) = value;
      } else {
        const T* const elements = reinterpret_cast<const T*>(&value);
#pragma unroll
        for (int column = 0; column < kPerChunk; ++column) target[column] = elements[column];
      }
    }
  }

  __device__ __forceinline__ void run() {
    if (rows <= 0) {
      wait_for_earlier(a, item);
      return announce(a, item);
    }
    begin();
    if (kMerges && a.schedule.merges) take_up();
    take_all_keys();
    if (kLists && keys.count == 0) {  // Q still loads where results go
      copy_wait<0>();
      __syncthreads();
    }
    if constexpr (!kMerges) __syncwarp();  // half tiles: other lanes may have read of Q where this one writes
    const int done = computed_here(0);     // what follows is not computed before the loop
    finish_rows(done);
    if (kRuled && a.gradients.deltas) return;
    store_rows(done);
    announce(a, item);
  }
};

template <class Shape>
__global__ void __launch_bounds__(ForwardTile<Shape>::kThreads, Shape::kBlocksPerSm)
    forward_mma(const __grid_constant__ Launch a) {
  extern __shared__ __align__(128) char shared[];
  bool half = false;
  const Item item = Shape::kHalves ? a.schedule.decode_halves(take_sized_item<Shape::kWarps>(a), half)
                                   : a.schedule.decode(take_item(a));
  if (item.branch < 0) {
    fill_uncovered<Element<typename Shape::Math>>(a, item, threadIdx.x / kWarpThreads, blockDim.x / kWarpThreads);
    return;
  }
  if constexpr (Shape::kHalves) {
    if (half) return ForwardItem<Shape, Shape::kRowTiles / 2>(a, item, shared).run();
  }
  ForwardItem<Shape, Shape::kRowTiles>(a, item, shared).run();
}

}  // namespace longspan::cuda
