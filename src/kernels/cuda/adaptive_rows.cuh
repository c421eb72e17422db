// Choosing columns of block rows on a GPU. A thread block scores a few block rows with all columns on the matrix units,
// in two TF32 parts each, and keeps the scores in shared memory, where a warp finds the best of a row: what can be
// among them is mostly a few, which are compared with one another.
#pragma once

#include <cstdint>

#include "kernels/cuda/arithmetic.cuh"

namespace longspan::cuda {

inline constexpr int kThreads = 256, kLanes = 32, kWarps = kThreads / kLanes;
inline constexpr int kTileRows = 16, kTileColumns = 8, kTileDepth = 16;  // of matrix products; two of them in depth
inline constexpr int kColumnTiles = 4;                                   // that a warp has at once

__device__ __forceinline__ int warp_of_block() { return static_cast<int>(threadIdx.x) / kLanes; }

/// Scores as integers of the same order, from 1 on: NaN is 1, below everything; equal scores are equal. 0 is no score.
inline constexpr std::uint32_t kNan = 1;
__device__ __forceinline__ std::uint32_t rank_of(float score) {
  const std::uint32_t word = __float_as_uint(score + 0.0f);  // -0 is 0
  const std::uint32_t order = word ^ (static_cast<std::uint32_t>(static_cast<int>(word) >> 31) | 0x80000000u);
  return isnan(score) ? kNan : order;
}

/// Query means of `rows` block rows in shared memory, as lanes take them: [high or low part][tile][step][slot], where a
/// slot has two numbers in depth of two rows that are eight apart.
struct QuerySlots {
  int steps, slots, parts;  // parts: from high to low ones
  __host__ __device__ QuerySlots(int rows, int columns)
      : steps((columns + kTileDepth - 1) / kTileDepth * 2),
        slots(rows < 8 ? rows * 4 : kLanes),
        parts((rows + kTileRows - 1) / kTileRows * steps * slots) {}
  __host__ __device__ int bytes() const { return 2 * parts * static_cast<int>(sizeof(uint4)); }
};

/// One thread block's block rows, and what they choose from.
struct RowsToChoose {
  int first_row, rows, present;  // rows: that exist
  bool causal;
  __device__ int candidates(int row) const {
    const int block_row = first_row + row;
    return row >= rows || block_row >= present ? 0 : causal ? block_row + 1 : present;
  }
  /// Candidates of the last row.
  __device__ int most() const { return first_row >= present ? 0 : causal ? min(present, first_row + rows) : present; }
};

/// Ranks of all columns in kTiles * 16 block rows. Columns that are no candidates of a row, and the diagonal, which
/// stays in any case, have none. A lane's four numbers of 16 in depth are the same ones of queries and keys, in
/// whatever order the matrix units take them.
template <int kTiles>
__device__ __forceinline__ void rank_columns(const RowsToChoose& of, const uint4* queries, const QuerySlots& layout,
                                             const float* means, const float* keys, int columns, int allocated,
                                             int stride, std::uint32_t* ranks) {
  constexpr int kOwnWarps = kTiles * kWarps, kColumns = kColumnTiles * kTileColumns;
  const int lane = static_cast<int>(threadIdx.x) % kLanes, warp = static_cast<int>(threadIdx.x) / kLanes;
  const int group = lane / 4, own = lane % 4 * 4, most = of.most();
  const uint4* const slot = queries + min(group, layout.slots / 4 - 1) * 4 + lane % 4;
  for (int first = warp * kColumns; first < most; first += kOwnWarps * kColumns) {
    float sums[kTiles][kColumnTiles][4] = {};
    int offset[kColumnTiles];
#pragma unroll
    for (int j = 0; j < kColumnTiles; ++j) offset[j] = min(first + j * kTileColumns + group, most - 1) * columns;
    float4 next[kColumnTiles];
    const auto ask = [&](int d) {
      const int at = min(d + own, columns - 4);  // beyond them queries are 0
#pragma unroll
      for (int j = 0; j < kColumnTiles; ++j) next[j] = __ldg(reinterpret_cast<const float4*>(keys + (offset[j] + at)));
    };
    ask(0);
#pragma unroll 1
    for (int d = 0; d < columns; d += kTileDepth) {
      float4 key[kColumnTiles];
#pragma unroll
      for (int j = 0; j < kColumnTiles; ++j) key[j] = next[j];
      if (d + kTileDepth < columns) ask(d + kTileDepth);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        std::uint32_t high_key[kColumnTiles][2], low_key[kColumnTiles][2];
#pragma unroll
        for (int j = 0; j < kColumnTiles; ++j) {
          const float pair[2] = {half ? key[j].z : key[j].x, half ? key[j].w : key[j].y};
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            high_key[j][i] = high_part(__float_as_uint(pair[i]));
            low_key[j][i] = low_part(__float_as_uint(pair[i]));
          }
        }
#pragma unroll
        for (int tile = 0; tile < kTiles; ++tile) {
          const int at = (tile * layout.steps + d / 8 + half) * layout.slots;
          const uint4 highs = slot[at], lows = slot[at + layout.parts];
          const Fragment high = {highs.x, highs.y, highs.z, highs.w}, low = {lows.x, lows.y, lows.z, lows.w};
          // One kind of product after the other: those of a sum wait for one another.
#pragma unroll
          for (int j = 0; j < kColumnTiles; ++j) multiply_add_tf32(sums[tile][j], low, high_key[j][0], high_key[j][1]);
#pragma unroll
          for (int j = 0; j < kColumnTiles; ++j) multiply_add_tf32(sums[tile][j], high, low_key[j][0], low_key[j][1]);
#pragma unroll
          for (int j = 0; j < kColumnTiles; ++j) multiply_add_tf32(sums[tile][j], high, high_key[j][0], high_key[j][1]);
        }
      }
    }
    bool again = false;
#pragma unroll
    for (int i = 0; i < kTiles * 2; ++i) {
      const int row = i * 8 + group, candidates = of.candidates(row);
      if (row >= allocated) continue;
#pragma unroll
      for (int j = 0; j < kColumnTiles; ++j) {
        const int column = first + j * kTileColumns + own / 2;
        const auto rank = [&](int at, float sum) {
          return at < candidates && at != of.first_row + row ? rank_of(sum) : 0;
        };
        const uint2 both =
            make_uint2(rank(column, sums[i / 2][j][i % 2 * 2]), rank(column + 1, sums[i / 2][j][i % 2 * 2 + 1]));
        *reinterpret_cast<uint2*>(ranks + row * stride + column) = both;
        again = again || both.x == kNan || both.y == kNan;
      }
    }
    // Infinity has no low part, so the matrix units make NaN of it, too.
    for (int i = 0; again && i < kTiles * 2 * kColumnTiles * 2; ++i) {
      const int row = i / (kColumnTiles * 2) * 8 + group,
                column = first + i / 2 % kColumnTiles * kTileColumns + own / 2 + i % 2;
      if (row >= allocated || ranks[row * stride + column] != kNan) continue;
      float sum = 0;
      for (int d = 0; d < columns && !isnan(sum); ++d)
        sum = fmaf(means[row * columns + d], keys[column * columns + d], sum);
      ranks[row * stride + column] = rank_of(sum);
    }
  }
}

/// The largest number that `kept` of something reach, or one between it and the next, so that no more reach it. As many
/// reach `low`, and none more than `high`.
template <class Count>
__device__ __forceinline__ std::uint32_t reached_by(int kept, std::uint32_t low, std::uint32_t high,
                                                    const Count& count_from) {
  while (low < high) {
    const std::uint32_t middle = high - (high - low) / 2;
    const int count = count_from(middle);
    if (count < kept) high = middle - 1;
    else low = middle;
    if (count == kept) break;
  }
  return low;
}

/// A warp's row: the `kept` best columns beside the diagonal, ties to the lower one, as bits: to `target`, and in place
/// of the ranks. `few` has room for as many columns as a warp has lanes.
__device__ __forceinline__ void choose_row(std::uint32_t* ranks, int candidates, int kept, int diagonal, int words,
                                           int* few, std::uint32_t* target) {
  const int lane = static_cast<int>(threadIdx.x) % kLanes, used = (candidates + kLanes - 1) / kLanes;
  const unsigned before = (1u << lane) - 1;
  const auto for_each_word = [&](const auto& use) {
    constexpr int kAtOnce = 8;
    for (int base = 0; base < used; base += kAtOnce) {
      std::uint32_t own[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) own[i] = base + i < used ? ranks[(base + i) * kLanes + lane] : 0;
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) use(base + i, own[i]);
    }
  };
  const auto count_from = [&](std::uint32_t least) {
    int count = 0;
    for_each_word([&](int, std::uint32_t rank) { count += rank >= least; });
    return __reduce_add_sync(~0u, count);
  };
  const auto write = [&](int word, std::uint32_t bits) {
    if (word >= words) return;
    if (candidates > 0 && word == diagonal / 32) bits |= 1u << diagonal % 32;
    ranks[word] = target[word] = bits;
  };
  // What as many lanes have at least one of is below the best; what reaches it is mostly little more than these.
  std::uint32_t least = 1, highest = 0;
  int found = 0;
  if (kept > 0) {
    std::uint32_t top = 0;
    for_each_word([&](int, std::uint32_t rank) { top = max(top, rank); });
    highest = __reduce_max_sync(~0u, top);
    if (kept <= kLanes) {
      const auto lanes_from = [&](std::uint32_t number) { return __popc(__ballot_sync(~0u, top >= number)); };
      least = max(1u, reached_by(kept, __reduce_min_sync(~0u, top), highest, lanes_from));
    }
    for_each_word([&](int word, std::uint32_t rank) {
      const unsigned reach = __ballot_sync(~0u, rank >= least);
      if (reach == 0) return;
      const int place = found + __popc(reach & before);
      if (rank >= least && place < kLanes) few[place] = word * kLanes + lane;
      found += __popc(reach);
    });
    __syncwarp();
  }
  if (found <= kLanes) {
    const int column = lane < found ? few[lane] : 0;
    const std::uint32_t rank = lane < found ? ranks[column] : 0;
    int better = 0;
    for (int other = 0; other < found; ++other) {
      const std::uint32_t its = __shfl_sync(~0u, rank, other);
      better += its > rank || (its == rank && other < lane);
    }
    const unsigned chosen = __ballot_sync(~0u, lane < found && better < kept);
    for (int base = 0; base < words; base += kLanes) {
      std::uint32_t bits = 0;
      for (unsigned left = chosen; left != 0; left &= left - 1) {
        const int at = __shfl_sync(~0u, column, __ffs(static_cast<int>(left)) - 1);
        if (at / 32 == base + lane) bits |= 1u << at % 32;
      }
      write(base + lane, bits);
    }
    return;
  }
  least = reached_by(kept, least, highest, count_from);
  int ties = kept - count_from(least + 1);  // of that rank, lower columns first
  std::uint32_t mine = 0;
  for (int word = 0; word < words; ++word) {
    const std::uint32_t rank = word < used ? ranks[word * kLanes + lane] : 0;
    const unsigned equal = __ballot_sync(~0u, rank == least);
    const unsigned stays = __ballot_sync(~0u, rank > least || (rank == least && __popc(equal & before) < ties));
    ties -= min(ties, __popc(equal));
    if (word % kLanes == lane) mine = stays;
    // Ranks in place of which words come have been read.
    if ((word + 1) % kLanes == 0 || word + 1 == words) write(word / kLanes * kLanes + lane, mine), mine = 0;
  }
}

}  // namespace longspan::cuda
