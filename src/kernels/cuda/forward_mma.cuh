// Forward on matrix units: one block per tile of query rows of one strand.
//   shared   Q [rows][columns], K and V [keys][columns], 16-bit, swizzled; V loads under Q K^T, the next K under P V
//   a warp   16 * kRowTiles query rows; scores and probabilities stay in registers: what Q K^T leaves there is, packed,
//            the A operand of P V
//   halves   the last tiles of small problems may come as two items of half the rows, so that no multiprocessor has
//            much more to do than others
//   merging  where several branches cover a row, its softmax state (maximum, sum, unscaled output) is put down in
//            float32 and taken up by the next branch that covers it, in branch order: one sum, as defined
#pragma once

#include "kernels/cuda/closed_sums.cuh"
#include "kernels/cuda/pairs.cuh"

namespace longspan::cuda {

/// Pairs: what options make of pairs of rows (pairs.cuh). kLists: block masks. Head dims between those instantiated run
/// with columns of zeros.
/// kCrowded: three blocks on a multiprocessor, not two; for items of one length, of which small problems have a few.
/// kCloses: strands may be so long that sums are closed; a loop without has registers to spare for other things.
template <class MathValue, int kColumnsValue, class PairsValue, bool kListsValue, bool kCrowdedValue, bool kClosesValue>
struct ForwardShape {
  using Math = MathValue;
  using Pairs = PairsValue;
  static constexpr int kColumns = kColumnsValue;
  static constexpr bool kLists = kListsValue, kCloses = kClosesValue;
  static constexpr int kWarps = 4;
  static constexpr int kRowTiles = kWide<Math> || kColumns > 128 ? 1 : 2;
  static constexpr bool kSmall = !kWide<Math> && !Pairs::kRuled && (kColumns <= 48 || kCrowdedValue);
  static constexpr int kKeys = kWide<Math> && kColumns > 128                                            ? 32
                               : !kWide<Math> && kColumns == 64 && !Pairs::kRuled && !kLists && !kSmall ? 128
                                                                                                        : 64;
  static constexpr int kStages = kSmall ? 2 : 1;  // of K and of V; with two there is one barrier in a tile
  static constexpr int kBlocksPerSm = kSmall ? 3 : kWide<Math> && kColumns > 64 ? 1 : 2;
  static constexpr bool kHalves = kCrowdedValue;  // items may be half tiles: see Schedule::decode_halves
};

template <class Shape, int kRowTilesValue = Shape::kRowTiles>
struct ForwardTile {
  using Math = typename Shape::Math;
  static constexpr int kColumns = Shape::kColumns, kKeys = Shape::kKeys, kRowTiles = kRowTilesValue;
  static constexpr int kThreads = Shape::kWarps * kWarpThreads, kRows = 16 * kRowTiles * Shape::kWarps;
  static constexpr int kPitch = pitch_of<Math>(kColumns), kKeyBytes = kKeys * kPitch;
  static constexpr int kSharedBytes = kRows * kPitch + 2 * Shape::kStages * kKeyBytes;
  static constexpr float kLargeBase = 1 << 20;
  float scores[kRowTiles][kKeys / 8][4];
  float out[kRowTiles][kColumns / 8][4];
  float largest[kRowTiles][2];
  float sum[kRowTiles][2];

  __device__ __forceinline__ static float base_of(float value) { return value == -LONGSPAN_INFINITY ? 0.0f : value; }

  /// Raises a row's maximum; what is summed so far is scaled to it.
  __device__ __forceinline__ void raise(int m, int half, float to) {
    const float correction = fast_exp2(largest[m][half] - base_of(to));
    largest[m][half] = to;
    sum[m][half] *= correction;
#pragma unroll
    for (int n = 0; n < kColumns / 8; ++n) {
      out[m][n][2 * half] *= correction;
      out[m][n][2 * half + 1] *= correction;
    }
  }

  /// scores become probabilities relative to the row's maximum. `factor` takes scores to base-2 exponents. Rows side by
  /// side in every step: each alone is one long chain of dependent instructions.
  __device__ __forceinline__ void softmax(float factor) {
    float highest[kRowTiles][2], total[kRowTiles][2];
    for_each_row([&](int m, int half) { highest[m][half] = scores[m][0][2 * half]; });
#pragma unroll
    for (int n = 0; n < kKeys / 8; ++n) {
      for_each_row([&](int m, int half) {
        highest[m][half] = fmaxf(highest[m][half], fmaxf(scores[m][n][2 * half], scores[m][n][2 * half + 1]));
      });
    }
#pragma unroll
    for (int distance = 1; distance <= 2; distance *= 2) {
      for_each_row([&](int m, int half) {
        highest[m][half] = fmaxf(highest[m][half], __shfl_xor_sync(~0u, highest[m][half], distance));
      });
    }
    float most = 0.0f;
    for_each_row([&](int m, int half) {
      raise(m, half, fmaxf(largest[m][half], __fmul_rn(highest[m][half], factor)));
      highest[m][half] = base_of(largest[m][half]);
      total[m][half] = 0.0f;
      most = fmaxf(most, fabsf(highest[m][half]));
    });
    if (most > kLargeBase) subtract_large(factor, highest);
#pragma unroll
    for (int n = 0; n < kKeys / 8; ++n) {
      for_each_row([&](int m, int half) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          float& score = scores[m][n][2 * half + i];
          score = fast_exp2(fmaf(score, factor, -highest[m][half]));
          total[m][half] += score;
        }
      });
    }
    for_each_row([&](int m, int half) { sum[m][half] += total[m][half]; });
  }

  /// Of maxima so large that their rounding would be a factor of weights: scores are rounded as the maximum was, so
  /// that none lies above it, and become what they lie below it.
  __device__ __forceinline__ void subtract_large(float factor, float (&base)[kRowTiles][2]) {
    const float back = 1.0f / factor;
    for_each_row([&](int m, int half) {
      if (!(fabsf(base[m][half]) > kLargeBase)) return;
#pragma unroll
      for (int n = 0; n < kKeys / 8; ++n)
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          float& score = scores[m][n][2 * half + i];
          score = __fadd_rn(__fmul_rn(score, factor), -base[m][half]) * back;
        }
      base[m][half] = 0.0f;
    });
  }

  /// Adds totals of closed sums (closed_sums.cuh), which were summed up relative to maxima of their time.
  __device__ __forceinline__ void add_totals(const float* totals) {
    for_each_row([&](int m, int half) {
      const float* const of_row = totals + (m * 2 + half) * (2 + kColumns / 4) * kThreads;
      const float factor = fast_exp2(of_row[0] - base_of(largest[m][half]));
      sum[m][half] = fmaf(of_row[kThreads], factor, sum[m][half]);
#pragma unroll
      for (int i = 0; i < kColumns / 4; ++i) {
        float& value = out[m][i / 2][2 * half + i % 2];
        value = fmaf(of_row[(2 + i) * kThreads], factor, value);
      }
    });
  }
  /// Puts sums down as totals and begins new ones.
  __device__ __forceinline__ void close_sums(float* totals, bool first) {
    if (!first) add_totals(totals);
    for_each_row([&](int m, int half) {
      float* const of_row = totals + (m * 2 + half) * (2 + kColumns / 4) * kThreads;
      of_row[0] = largest[m][half];
      of_row[kThreads] = sum[m][half];
      sum[m][half] = 0.0f;
#pragma unroll
      for (int i = 0; i < kColumns / 4; ++i) {
        float& value = out[m][i / 2][2 * half + i % 2];
        of_row[(2 + i) * kThreads] = value;
        value = 0.0f;
      }
    });
  }

  template <class Body>
  __device__ __forceinline__ static void for_each_row(Body&& body) {
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) body(m, half);
  }
};

/// One tile of 16 * kRowTiles rows a warp. What becomes of a row does not depend on how many there are.
template <class Shape, int kRowTiles>
struct ForwardItem {
  using Tile = ForwardTile<Shape, kRowTiles>;
  using Math = typename Shape::Math;
  using Pairs = typename Shape::Pairs;
  using T = Element<Math>;
  static constexpr int kSize = sizeof(T), kColumns = Shape::kColumns, kRows = Tile::kRows, kKeys = Shape::kKeys;
  static constexpr int kThreads = Tile::kThreads, kPitch = Tile::kPitch, kStages = Shape::kStages;
  static constexpr bool kRuled = Pairs::kRuled, kLists = Shape::kLists;
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
    load_rows<Math, kColumns, kRows, kThreads, kRuled>(
        q_tile, a.tensors.q.data + a.tensors.q.offset(item.entry, q_row, item.head) * kSize,
        a.tensors.q.row * strand.stride * kSize, 0, rows, a.tensors.columns, a.tensors.aligned);
    if constexpr (kRuled) {
      pairs.template ask<kKeys>(keys, 0);
      pairs.template tell<kKeys>(0);
      pairs.template ask<kKeys>(keys, kKeys);
      __syncthreads();
    }
    load_keys(k_tiles, false, 0);
    if (kStages > 1) load_keys(v_tiles, true, 0);
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

  /// -inf where a list, causality or the strand's end leaves a pair out.
  __device__ __forceinline__ void mask(int first) {
    if (kLists ? first + kKeys <= keys.unmasked
               : first + kKeys <= strand.count && !(a.rules.causal && first + kKeys > first_query + warp_row + 1))
      return;
#pragma unroll
    for (int n = 0; n < kKeys / 8; ++n) {
      const int first_key = keys.row(first + n * 8) + lane() % 4 * 2;
      const std::uint32_t met = keys.met(first + n * 8);
#pragma unroll
      for (int m = 0; m < kRowTiles; ++m)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int own = first_query + thread_row + 16 * m + (i / 2) * 8, key = first_key + i % 2;
          if (key >= strand.count || (a.rules.causal && key > own) || !(met >> keys.bit(own) & 1))
            tile.scores[m][n][i] = -LONGSPAN_INFINITY;
        }
    }
  }

  /// Scores become weights.
  __device__ __forceinline__ void weigh(int first) {
    float factor = a.rules.scale * kLog2E;
    if constexpr (kRuled) {
      if (pairs.biased) {
        pairs.add_bias(tile.scores, factor, first_query + thread_row, keys, first);
        factor = 1.0f;
      }
      pairs.mask_keys(tile.scores, -LONGSPAN_INFINITY);
    }
    mask(first);
    tile.softmax(factor);
    if constexpr (kRuled) {
      if (a.rules.dropout)
        pairs.template for_each_kept<kRowTiles, kKeys / 8>(
            first_query + thread_row, keys, first, [&](int m, int n, int i, bool kept) {
              if (!kept) tile.scores[m][n][i] = 0.0f;  // what is kept is scaled with the row
            });
    }
  }

  /// One tile of keys.
  __device__ __forceinline__ void take_keys(int first) {
    const int stage = kStages > 1 ? first / kKeys & 1 : 0;
    const bool more = first + kKeys < last_key();
    copy_wait<0>();
    __syncthreads();
    if constexpr (kRuled) {
      pairs.template tell<kKeys>(first + kKeys);
      pairs.template ask<kKeys>(keys, first + 2 * kKeys);
      if (pairs.none()) {
        __syncthreads();
        if (more) load_keys(k_tile(0), false, first + kKeys);
        return;
      }
    }
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
