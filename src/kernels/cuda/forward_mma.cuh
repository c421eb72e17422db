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
#include "kernels/cuda/tile.cuh"

namespace longspan::cuda {

/// kFeatures: key_mask, ALiBi, dropout, pieces, unaligned rows, scales that are not positive, deltas. kLists: block
/// masks. Head dims between those instantiated run with columns of zeros.
/// kCrowded: three blocks on a multiprocessor, not two; for items of one length, of which small problems have a few.
/// kCloses: strands may be so long that sums are closed; a loop without has registers to spare for other things.
template <class MathValue, int kColumnsValue, bool kFeaturesValue, bool kListsValue, bool kCrowdedValue,
          bool kClosesValue>
struct ForwardShape {
  using Math = MathValue;
  static constexpr int kColumns = kColumnsValue;
  static constexpr bool kFeatures = kFeaturesValue, kLists = kListsValue, kCloses = kClosesValue;
  static constexpr int kWarps = 4;
  static constexpr int kRowTiles = kWide<Math> || kColumns > 128 ? 1 : 2;
  static constexpr bool kSmall = !kWide<Math> && !kFeatures && (kColumns <= 48 || kCrowdedValue);
  static constexpr int kKeys = kWide<Math> && kColumns > 128                                        ? 32
                               : !kWide<Math> && kColumns == 64 && !kFeatures && !kLists && !kSmall ? 128
                                                                                                    : 64;
  static constexpr int kStages = kSmall ? 2 : 1;  // of K and of V; with two there is one barrier in a tile
  static constexpr int kBlocksPerSm = kSmall ? 3 : kWide<Math> && kColumns > 64 ? 1 : 2;
  static constexpr bool kHalves = kCrowdedValue;  // items may be half tiles: see Launch::decode_halves
};

template <class Shape, int kRowTilesValue = Shape::kRowTiles>
struct ForwardTile {
  using Math = typename Shape::Math;
  static constexpr int kColumns = Shape::kColumns, kKeys = Shape::kKeys, kRowTiles = kRowTilesValue;
  static constexpr int kThreads = Shape::kWarps * kWarpThreads, kRows = 16 * kRowTiles * Shape::kWarps;
  static constexpr int kPitch = pitch_of<Math>(kColumns), kKeyBytes = kKeys * kPitch;
  static constexpr int kSharedBytes = kRows * kPitch + 2 * Shape::kStages * kKeyBytes;
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
    for_each_row([&](int m, int half) {
      raise(m, half, fmaxf(largest[m][half], highest[m][half] * factor));
      highest[m][half] = base_of(largest[m][half]);
      total[m][half] = 0.0f;
    });
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

/// For detached_mix: delta of a row within one branch, dO times the branch's own output, which is sums * factor.
template <class T, int kBlocks>
__device__ __forceinline__ void put_delta(const Launch& a, const Item& item, std::int64_t row, float factor,
                                          const float (&sums)[kBlocks][4], int half) {
  const int lane = threadIdx.x % kWarpThreads;
  float delta = 0.0f;
  if (row >= 0) {
    const T* const dout =
        reinterpret_cast<const T*>(a.gradients.dout.data) + a.gradients.dout.offset(item.entry, row, item.head);
#pragma unroll
    for (int n = 0; n < kBlocks; ++n) {
      const int column = n * 8 + (lane % 4) * 2;
      if (column >= a.tensors.columns) continue;
      delta = fmaf(as_float(dout[column]), sums[n][2 * half], delta);
      delta = fmaf(as_float(dout[column + 1]), sums[n][2 * half + 1], delta);
    }
  }
  delta += __shfl_xor_sync(~0u, delta, 1);
  delta += __shfl_xor_sync(~0u, delta, 2);
  if (row >= 0 && lane % 4 == 0)
    a.gradients.delta[2 * a.delta_row(item.branch, item.entry, row, item.head) + 1] =
        delta * factor * a.gradients.dscore_scale;
}

/// One tile of 16 * kRowTiles rows a warp. What becomes of a row does not depend on how many there are.
template <class Shape, int kRowTiles>
__device__ __forceinline__ void forward_tile(const Launch& a, const Item& item) {
  using Tile = ForwardTile<Shape, kRowTiles>;
  using Math = typename Shape::Math;
  using T = Element<Math>;
  constexpr int kSize = sizeof(T), kColumns = Shape::kColumns, kRows = Tile::kRows, kKeys = Shape::kKeys;
  constexpr int kThreads = Tile::kThreads, kPitch = Tile::kPitch;
  constexpr bool kFeatures = Shape::kFeatures, kLists = Shape::kLists;
  constexpr bool kMerges = kRowTiles == Shape::kRowTiles;  // half tiles never do
  extern __shared__ __align__(128) char shared[];
  __shared__ std::uint8_t allowed[2][kFeatures ? kKeys : 1];
  __shared__ int total_place;
  const DeviceBranch& branch = a.schedule.branches[item.branch];
  const int length = a.tensors.length(item.entry);
  const StrandRows strand = branch.strand(item.head, item.segment, length);
  const StrandQueries queries = a.schedule.ranges[item.range].of(strand);
  const bool listed = kLists && a.schedule.lists[item.branch].places;  // its tiles are the strand's, else the range's
  const int first_query = listed ? max(queries.begin, item.tile * kRows) : queries.begin + item.tile * kRows;
  const int end_query = queries.begin + queries.count;
  const int rows = kLists ? min(end_query, listed ? (item.tile + 1) * kRows : first_query + kRows) - first_query
                          : min(kRows, queries.count - item.tile * kRows);
  if (rows <= 0) {
    wait_for_earlier(a, item);
    announce(a, item);
    return;
  }
  const std::int64_t skipped = kLists ? first_query - queries.begin : static_cast<std::int64_t>(item.tile) * kRows;
  const std::int64_t q_row = queries.q_row + skipped * strand.stride;
  const int kv_head = item.head / (a.tensors.heads / a.tensors.kv_heads);
  const int warp = threadIdx.x / kWarpThreads, lane = threadIdx.x % kWarpThreads;
  const int warp_row = warp * 16 * kRowTiles, thread_row = warp_row + lane / 4;

  const std::uint32_t q_tile = shared_address(shared), k_tiles = q_tile + kRows * kPitch,
                      v_tiles = k_tiles + Shape::kStages * Tile::kKeyBytes;
  const char* const q_base = a.tensors.q.data + a.tensors.q.offset(item.entry, q_row, item.head) * kSize;
  const char* const k_base = a.tensors.k.data + a.tensors.k.offset(item.entry, strand.start, kv_head) * kSize;
  const char* const v_base = a.tensors.v.data + a.tensors.v.offset(item.entry, strand.start, kv_head) * kSize;
  const std::int64_t k_step = a.tensors.k.row * strand.stride * kSize, v_step = a.tensors.v.row * strand.stride * kSize;

  // Without lists, what says where keys end and masks begin is computed where it is needed: the loop has no registers
  // to spare for it, and spills made heads of 48 and 128 up to 8% slower.
  const auto end_of_keys = [&] { return a.rules.causal ? min(strand.count, first_query + rows) : strand.count; };
  auto keys = RowSequence<kLists>::range(0, end_of_keys(),
                                         a.rules.causal ? min(strand.count, first_query + warp_row + 1) : strand.count);
  if constexpr (kLists) {
    if (listed) {
      const BlockLists& lists = a.schedule.lists[item.branch];
      keys = RowSequence<kLists>::blocks(lists.walk(lists.place(item.entry, item.head, item.tile), 0, strand.count),
                                         strand.count);
    }
  }

  // With features a key's row may be masked or lie in a piece; without, rows are an arithmetic progression.
  const auto load_keys = [&](std::uint32_t tile, bool values, int first) {
    if constexpr (kLists && !kFeatures) {
      const char* const base = values ? v_base : k_base;
      const std::int64_t step = values ? v_step : k_step;
      for_each_chunk<Math, kColumns, kKeys, kThreads>([&](int row, int chunk) {
        const int key = keys.row(first + row);
        const bool valid = key < strand.count;
        load_chunk<T, false>(tile + chunk_offset<kPitch>(row, chunk), valid ? base + key * step : base, chunk, valid,
                             a.tensors.columns, true);
      });
    } else if constexpr (!kFeatures) {
      load_rows<Math, kColumns, kKeys, kThreads, false>(tile, values ? v_base : k_base, values ? v_step : k_step, first,
                                                        strand.count, a.tensors.columns, true);
    } else {
      for_each_chunk<Math, kColumns, kKeys, kThreads, false>([&](int row, int chunk) {
        const char *k_row, *v_row;
        const bool valid = find_key(a, item, kv_head, strand, keys.row(first + row), kSize, k_row, v_row);
        if (!values && chunk == 0) allowed[first / kKeys & 1][row] = valid;
        load_chunk<T, true>(tile + chunk_offset<kPitch>(row, chunk), values ? v_row : k_row, chunk, valid,
                            a.tensors.columns, a.tensors.aligned);
      });
    }
    copy_commit();
  };

  load_rows<Math, kColumns, kRows, kThreads, kFeatures>(q_tile, q_base, a.tensors.q.row * strand.stride * kSize, 0,
                                                        rows, a.tensors.columns, a.tensors.aligned);
  load_keys(k_tiles, false, 0);
  if (Shape::kStages > 1) load_keys(v_tiles, true, 0);

  Tile tile;
  clear(tile.out);
#pragma unroll
  for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      tile.largest[m][half] = -LONGSPAN_INFINITY;
      tile.sum[m][half] = 0.0f;
    }
  }
  const auto position_of = [&](int row) { return strand.start + (first_query + row) * strand.stride; };
  const auto packed_of = [&](int row) {
    return a.tensors.packed_row(item.entry, q_row + static_cast<std::int64_t>(row) * strand.stride, item.head);
  };
  if (kMerges && a.schedule.merges) {
    wait_for_earlier(a, item);
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = thread_row + 16 * m + 8 * half;
        if (row >= rows || !a.schedule.covered(item.head, position_of(row), length, 0, item.branch)) continue;
        const std::int64_t packed = packed_of(row);
        tile.largest[m][half] = __ldcg(a.scratch.state_sums + 2 * packed);
        tile.sum[m][half] = lane % 4 == 0 ? __ldcg(a.scratch.state_sums + 2 * packed + 1) : 0.0f;
#pragma unroll
        for (int n = 0; n < kColumns / 8; ++n) {
          const int column = n * 8 + (lane % 4) * 2;
          if (column >= a.tensors.columns) continue;
          const float2 pair =
              __ldcg(reinterpret_cast<const float2*>(a.scratch.state + packed * a.tensors.columns + column));
          tile.out[m][n][2 * half] = pair.x;
          tile.out[m][n][2 * half + 1] = pair.y;
        }
      }
    }
  }

  const float scale_log2 = a.rules.scale * kLog2E;
  const PairRules rules(a, item, strand);
  // Else scores are scaled under the exponential, with and without features: the same bits.
  const bool biased = kFeatures && (a.rules.alibi || !(a.rules.scale > 0));

  const int last_key = kLists ? keys.count : end_of_keys();
  const auto take_keys = [&](int first) {
    const int stage = Shape::kStages > 1 ? first / kKeys & 1 : 0;
    const std::uint32_t k_tile = k_tiles + stage * Tile::kKeyBytes, v_tile = v_tiles + stage * Tile::kKeyBytes;
    const bool more = first + kKeys < last_key;
    copy_wait<0>();
    __syncthreads();
    if constexpr (Shape::kStages > 1) {
      if (more) {
        load_keys(k_tiles + (stage ^ 1) * Tile::kKeyBytes, false, first + kKeys);
        load_keys(v_tiles + (stage ^ 1) * Tile::kKeyBytes, true, first + kKeys);
      }
    } else {
      load_keys(v_tile, true, first);
    }
    multiply_rows<Math, kColumns>(tile.scores, q_tile, warp_row, k_tile, 0);

    if constexpr (kFeatures) {
#pragma unroll
      for (int m = 0; m < kRowTiles; ++m)
#pragma unroll
        for (int n = 0; n < kKeys / 8; ++n)
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            const int own = first_query + thread_row + 16 * m + (i / 2) * 8, local = n * 8 + (lane % 4) * 2 + i % 2;
            const int key = keys.row(first + n * 8) + (lane % 4) * 2 + i % 2;
            float& score = tile.scores[m][n][i];
            if (biased) score = fmaf(score, scale_log2, -rules.bias(own, key));
            if (!allowed[first / kKeys & 1][local] || (a.rules.causal && key > own) || !keys.meets(first + n * 8, own))
              score = -LONGSPAN_INFINITY;
          }
    } else if (kLists
                   ? first + kKeys > keys.unmasked
                   : first + kKeys > strand.count || (a.rules.causal && first + kKeys > first_query + warp_row + 1)) {
#pragma unroll
      for (int n = 0; n < kKeys / 8; ++n) {
        const int first_key = keys.row(first + n * 8) + (lane % 4) * 2;
#pragma unroll
        for (int m = 0; m < kRowTiles; ++m)
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            const int own = first_query + thread_row + 16 * m + (i / 2) * 8, key = first_key + i % 2;
            if (key >= strand.count || (a.rules.causal && key > own) || !keys.meets(first + n * 8, own))
              tile.scores[m][n][i] = -LONGSPAN_INFINITY;
          }
      }
    }
    tile.softmax(biased ? 1.0f : scale_log2);
    if constexpr (kFeatures) {
      if (a.rules.dropout) {
#pragma unroll
        for (int m = 0; m < kRowTiles; ++m)
#pragma unroll
          for (int half = 0; half < 2; ++half) {
#pragma unroll 1
            for (int n = 0; n < kKeys / 8; ++n) {
              const std::uint32_t word =
                  rules.word(first_query + thread_row + 16 * m + 8 * half, keys.row(first + n * 8) + (lane % 4) * 2);
              const float factors[2] = {rules.factor(word & 0xFFFF), rules.factor(word >> 16)};
#pragma unroll
              for (int each = 0; each < kKeys / 8; ++each) {  // a register array needs constant indices
                if (each != n) continue;
                tile.scores[m][each][2 * half] *= factors[0];
                tile.scores[m][each][2 * half + 1] *= factors[1];
              }
            }
          }
      }
    }
    if constexpr (Shape::kStages == 1) {
      copy_wait<0>();
      __syncthreads();
      if (more) load_keys(k_tile, false, first + kKeys);
    }
    accumulate<Math, kPitch, kKeys / kStepSize<Math>>(
        tile.out, [&](Fragment& f, int m, int step) { weights_of<Math>(f, tile.scores[m], step); }, v_tile, 0, 0);
  };
  if constexpr (Shape::kCloses) {  // one loop in another: what closes sums is outside of the one that must be fast
    for (int first = 0; first < last_key;) {
      const int end_of_sum = min(last_key, first + kRowsOfSum);
#pragma unroll 1
      for (; first < end_of_sum; first += kKeys) take_keys(first);
      if (first >= last_key) break;
      const bool opens = first == kRowsOfSum;
      tile.close_sums(find_totals(a, opens, total_place), opens);
    }
  } else {
    for (int first = 0; first < last_key; first += kKeys) take_keys(first);
  }
  if (Shape::kCloses && last_key > kRowsOfSum) {
    tile.add_totals(find_totals(a, false, total_place));
    leave_totals(a, total_place);
  }

  if (kLists && keys.count == 0) {  // Q still loads where results go
    copy_wait<0>();
    __syncthreads();
  }

  if constexpr (!kMerges) __syncwarp();  // half tiles: other lanes may have read of Q where this one writes

  // Padding, then either put the state down for a later branch or write the row. What that takes is computed here.
  const int done = computed_here(0);
  const int padding = branch.padding(strand.count, length, a.rules.causal);
#pragma unroll
  for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float& sum = tile.sum[m][half];
      sum += __shfl_xor_sync(~0u, sum, 1);
      sum += __shfl_xor_sync(~0u, sum, 2);
      if (padding > 0) {
        tile.raise(m, half, fmaxf(tile.largest[m][half], 0.0f));
        sum += static_cast<float>(padding) * fast_exp2(-tile.largest[m][half]);
      }
      if constexpr (kLists) {  // without keys: values that only other rows of the tile see may be NaN, times 0 they are
        if (sum == 0.0f) {
#pragma unroll
          for (int n = 0; n < kColumns / 8; ++n) tile.out[m][n][2 * half] = tile.out[m][n][2 * half + 1] = 0.0f;
        }
      }
      const int row = done + thread_row + 16 * m + 8 * half;
      const bool unfinished =
          kMerges && a.schedule.merges && row < rows &&
          a.schedule.covered(item.head, position_of(row), length, item.branch + 1, a.schedule.branch_count);
      if (unfinished) {
        const std::int64_t packed = packed_of(row);
        if (lane % 4 == 0) {
          __stcg(a.scratch.state_sums + 2 * packed, tile.largest[m][half]);
          __stcg(a.scratch.state_sums + 2 * packed + 1, sum);
        }
#pragma unroll
        for (int n = 0; n < kColumns / 8; ++n) {
          const int column = n * 8 + (lane % 4) * 2;
          if (column >= a.tensors.columns) continue;
          __stcg(reinterpret_cast<float2*>(a.scratch.state + packed * a.tensors.columns + column),
                 make_float2(tile.out[m][n][2 * half], tile.out[m][n][2 * half + 1]));
        }
      } else if (!(kFeatures && a.gradients.deltas) && a.tensors.lse.data && row < rows && lane % 4 == 0) {
        a.tensors.lse.at(item.entry, q_row + static_cast<std::int64_t>(row) * strand.stride, item.head) =
            sum == 0.0f ? -LONGSPAN_INFINITY : fmaf(Tile::base_of(tile.largest[m][half]), kLn2, logf(sum));
      }
      const float factor = sum == 0.0f ? 0.0f : a.rules.output_scale / sum;
      if (kFeatures && a.gradients.deltas) {
        put_delta<T>(a, item, row < rows ? q_row + static_cast<std::int64_t>(row) * strand.stride : -1, factor,
                     tile.out[m], half);
        continue;
      }
#pragma unroll
      for (int n = 0; n < kColumns / 8; ++n) {
        store_pair<Math>(q_tile + pair_offset<Math, kPitch>(row, n), tile.out[m][n][2 * half] * factor,
                         tile.out[m][n][2 * half + 1] * factor);
      }
    }
  }
  if (kFeatures && a.gradients.deltas) return;
  __syncwarp();
  constexpr int kPerChunk = 16 / kSize, kChunks = kColumns / kPerChunk;
#pragma unroll 4
  for (int i = lane; i < 16 * kRowTiles * kChunks; i += kWarpThreads) {
    const int row = done + warp_row + i / kChunks, chunk = i % kChunks;
    if (row >= rows || chunk * kPerChunk >= a.tensors.columns) continue;
    if (kMerges && a.schedule.merges &&
        a.schedule.covered(item.head, position_of(row), length, item.branch + 1, a.schedule.branch_count))
      continue;
    const uint4 value = *reinterpret_cast<const uint4*>(shared + chunk_offset<kPitch>(row, chunk));
    T* const target =
        reinterpret_cast<T*>(a.tensors.out.data) +
        a.tensors.out.offset(item.entry, q_row + static_cast<std::int64_t>(row) * strand.stride, item.head) +
        chunk * kPerChunk;
    if (!kFeatures || a.tensors.aligned) {
      *reinterpret_cast<uint4*>(target) = value;
    } else {
      const T* const elements = reinterpret_cast<const T*>(&value);
#pragma unroll
      for (int column = 0; column < kPerChunk; ++column) target[column] = elements[column];
    }
  }
  announce(a, item);
}

template <class Shape>
__global__ void __launch_bounds__(ForwardTile<Shape>::kThreads, Shape::kBlocksPerSm)
    forward_mma(const __grid_constant__ Launch a) {
  bool half = false;
  const Item item = Shape::kHalves ? a.schedule.decode_halves(take_sized_item<Shape::kWarps>(a), half)
                                   : a.schedule.decode(take_item(a));
  if (item.branch < 0) {
    fill_uncovered<Element<typename Shape::Math>>(a, item, threadIdx.x / kWarpThreads, blockDim.x / kWarpThreads);
    return;
  }
  if constexpr (Shape::kHalves) {
    if (half) return forward_tile<Shape, Shape::kRowTiles / 2>(a, item);
  }
  forward_tile<Shape, Shape::kRowTiles>(a, item);
}

}  // namespace longspan::cuda
