// Tiles of rows in shared memory: loading strided rows, reading fragments, products of tiles, and the order of items.
//   A row takes kPitch bytes, a multiple of 128; its 16-byte chunk c lies at place c ^ (row mod 8), so that eight rows
//   of one chunk, which is what a fragment load touches, are in different banks. A step is 32 bytes of each row: 16
//   numbers of 16 bits or 8 of float32, what one instruction multiplies.
#pragma once

#include "kernels/cuda/arithmetic.cuh"
#include "kernels/cuda/fill.cuh"
#include "kernels/cuda/launch.h"

namespace longspan::cuda {

template <class Math>
inline constexpr bool kWide = sizeof(Element<Math>) == 4;
template <class Math>
inline constexpr int kStepSize = 32 / static_cast<int>(sizeof(Element<Math>));
template <class Math>
constexpr int pitch_of(int columns) {
  return (columns * static_cast<int>(sizeof(Element<Math>)) + 127) / 128 * 128;
}

template <int kPitch>
__device__ __forceinline__ std::uint32_t chunk_offset(int row, int chunk) {
  return static_cast<std::uint32_t>(row * kPitch + ((chunk ^ (row & 7)) << 4));
}
/// Where a pair of columns lies that one thread has of an accumulator block: columns 8 * block + 2 * (lane mod 4) ..
template <class Math, int kPitch>
__device__ __forceinline__ std::uint32_t pair_offset(int row, int block) {
  const int lane = threadIdx.x % kWarpThreads;
  if constexpr (kWide<Math>) return chunk_offset<kPitch>(row, block * 2 + (lane % 4) / 2) + (lane & 1) * 8;
  else return chunk_offset<kPitch>(row, block) + (lane % 4) * 4;
}
template <class Math>
__device__ __forceinline__ void store_pair(std::uint32_t target, float first, float second) {
  if constexpr (kWide<Math>) store_shared(target, make_float2(first, second));
  else store_shared(target, pack<Element<Math>>(first, second));
}

/// 16 bytes of a row, wherever the row lies: asynchronous if aligned, by elements otherwise. Columns past the last are
/// 0.
template <class T, bool kUnaligned>
__device__ __forceinline__ void load_chunk(std::uint32_t target, const char* row, int chunk, bool valid, int columns,
                                           bool aligned) {
  valid = valid && chunk * static_cast<int>(16 / sizeof(T)) < columns;
  if constexpr (kUnaligned) {
    if (!aligned) {
      std::uint32_t words[4] = {0, 0, 0, 0};
      if (valid) {
        if constexpr (sizeof(T) == 4) {
          const std::uint32_t* const source = reinterpret_cast<const std::uint32_t*>(row) + chunk * 4;
#pragma unroll
          for (int i = 0; i < 4; ++i) words[i] = source[i];
        } else {
          const std::uint16_t* const source = reinterpret_cast<const std::uint16_t*>(row) + chunk * 8;
#pragma unroll
          for (int i = 0; i < 4; ++i) words[i] = source[2 * i] | static_cast<std::uint32_t>(source[2 * i + 1]) << 16;
        }
      }
      store_shared(target, words);
      return;
    }
  }
  copy_async(target, valid ? row + chunk * 16 : row, valid);
}

/// Calls body(row, chunk) for each chunk of a tile that this thread loads. kUnrolls: false for long bodies, which would
/// fill the instruction cache.
template <class Math, int kColumns, int kRows, int kThreads, bool kUnrolls = true, class Body>
__device__ __forceinline__ void for_each_chunk(Body&& body) {
  constexpr int kPlaces = pitch_of<Math>(kColumns) / 16, kStep = kThreads / kPlaces;
  constexpr int kTimes = (kRows + kStep - 1) / kStep, kAtOnce = kUnrolls ? kTimes : 1;
  static_assert(kThreads % kPlaces == 0);
  const int chunk = threadIdx.x % kPlaces, begin = threadIdx.x / kPlaces;
  if (chunk >= kColumns / (16 / static_cast<int>(sizeof(Element<Math>)))) return;
#pragma unroll kAtOnce
  for (int i = 0; i < kTimes; ++i) {
    const int row = begin + i * kStep;
    if (kRows % kStep == 0 || row < kRows) body(row, chunk);
  }
}

/// Rows first .. first + kRows - 1 of an arithmetic progression: address base + index * step bytes; zeros from `count`
/// on.
template <class Math, int kColumns, int kRows, int kThreads, bool kUnaligned>
__device__ __forceinline__ void load_rows(std::uint32_t target, const char* base, std::int64_t step, int first,
                                          int count, int columns, bool aligned) {
  for_each_chunk<Math, kColumns, kRows, kThreads>([&](int row, int chunk) {
    const bool valid = first + row < count;
    const char* const source = valid ? base + (first + row) * step : base;
    load_chunk<Element<Math>, kUnaligned>(target + chunk_offset<pitch_of<Math>(kColumns)>(row, chunk), source, chunk,
                                          valid, columns, aligned);
  });
}

/// The rows of a strand that a tile is multiplied with, in order: [begin, begin + count), or those of a list of blocks.
/// kLists false: always a range, and nothing of this is left when compiled.
template <bool kLists>
struct RowSequence {
  int begin, count;  // of a list: 0 and the rows that its blocks have, existing or not
  int unmasked;      // from the start, rows that need no mask
  int none;          // a row that does not exist
  bool listed;
  BlockWalk walk;

  __device__ __forceinline__ static RowSequence range(int begin, int count, int unmasked) {
    RowSequence all;
    all.begin = begin, all.count = count, all.unmasked = unmasked, all.listed = false;
    all.walk.shift = all.walk.first_block = 0;
    return all;
  }
  __device__ __forceinline__ static RowSequence blocks(const BlockWalk& walk, int none) {
    RowSequence all;
    all.begin = 0, all.count = walk.rows(), all.unmasked = walk.unmasked, all.none = none, all.listed = true;
    all.walk = walk;
    return all;
  }
  /// Element x as a row of the strand. Eight neighbours from a multiple of eight on are neighbours there too.
  __device__ __forceinline__ int row(int x) const {
    if constexpr (kLists) {
      if (listed) return x < count ? walk.row(x) : none;
    }
    return begin + x;
  }
  /// Which blocks of the tile meet element x, one bit each, as far as a list says.
  __device__ __forceinline__ std::uint32_t met(int x) const {
    if constexpr (kLists) {
      if (listed) return x >= count ? 0u : walk.bits ? walk.bits[walk.place_of(x >> walk.shift)] : ~0u;
    }
    return ~0u;
  }
  /// The bit of a row of the tile.
  __device__ __forceinline__ int bit(int own_row) const {
    return kLists ? ((own_row >> walk.shift) - walk.first_block) & 31 : 0;
  }
};

/// The A operand: rows row .. row + 15, one step of columns.
template <int kPitch>
__device__ __forceinline__ void load_a(Fragment& f, std::uint32_t tile, int row, int step) {
  const int lane = threadIdx.x % kWarpThreads;
  load_fragment(f, tile + chunk_offset<kPitch>(row + (lane & 15), step * 2 + (lane >> 4)));
}
/// The B operand from rows that are its columns (the tile holds B transposed): f[0..1] for rows row .., f[2..3] for row
/// + 8 ..
template <int kPitch>
__device__ __forceinline__ void load_b_transposed(Fragment& f, std::uint32_t tile, int row, int step) {
  const int lane = threadIdx.x % kWarpThreads;
  load_fragment(f, tile + chunk_offset<kPitch>(row + (lane & 7) + ((lane >> 4) << 3), step * 2 + ((lane >> 3) & 1)));
}

/// Below, a step is one of rows. 16-bit fragments are transposed by the load; float32 ones are read word by word, with
/// the rows of a step in the order 0, 2, 4, 6, 1, 3, 5, 7, in which a thread's two accumulator columns are its two
/// rows.
template <int kPitch>
__device__ __forceinline__ std::uint32_t load_word(std::uint32_t tile, int row, int column) {
  return load_shared_word(tile + chunk_offset<kPitch>(row, column >> 2) + (column & 3) * 4);
}
/// The B operand from rows that are its rows: f[0..1] for columns 16 * block .., f[2..3] for the next 8.
template <class Math, int kPitch>
__device__ __forceinline__ void load_b(Fragment& f, std::uint32_t tile, int row, int block) {
  const int lane = threadIdx.x % kWarpThreads;
  if constexpr (kWide<Math>) {
#pragma unroll
    for (int i = 0; i < 4; ++i)
      f[i] = load_word<kPitch>(tile, row + (lane % 4) * 2 + i % 2, block * 16 + i / 2 * 8 + lane / 4);
  } else {
    load_fragment_transposed(f, tile + chunk_offset<kPitch>(row + (lane & 15), block * 2 + (lane >> 4)));
  }
}
/// The A operand from a tile that holds it transposed: A rows first .., A columns row ..
template <class Math, int kPitch>
__device__ __forceinline__ void load_a_transposed(Fragment& f, std::uint32_t tile, int row, int first) {
  const int lane = threadIdx.x % kWarpThreads;
  if constexpr (kWide<Math>) {
#pragma unroll
    for (int i = 0; i < 4; ++i)
      f[i] = load_word<kPitch>(tile, row + (lane % 4) * 2 + i / 2, first + i % 2 * 8 + lane / 4);
  } else {
    load_fragment_transposed(
        f, tile + chunk_offset<kPitch>(row + (lane & 7) + ((lane >> 4) << 3), first / 8 + ((lane >> 3) & 1)));
  }
}
/// The A operand from accumulators: columns of one step.
template <class Math, int kBlocks>
__device__ __forceinline__ void weights_of(Fragment& f, const float (&blocks)[kBlocks][4], int step) {
  if constexpr (kWide<Math>) {
    f[0] = __float_as_uint(blocks[step][0]), f[1] = __float_as_uint(blocks[step][2]);
    f[2] = __float_as_uint(blocks[step][1]), f[3] = __float_as_uint(blocks[step][3]);
  } else {
#pragma unroll
    for (int i = 0; i < 4; ++i)
      f[i] = pack<Element<Math>>(blocks[2 * step + i / 2][i % 2 * 2], blocks[2 * step + i / 2][i % 2 * 2 + 1]);
  }
}

template <int kRowTiles, int kBlocks>
__device__ __forceinline__ void clear(float (&sums)[kRowTiles][kBlocks][4]) {
#pragma unroll
  for (int m = 0; m < kRowTiles; ++m)
#pragma unroll
    for (int n = 0; n < kBlocks; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) sums[m][n][i] = 0.0f;
}

/// sums = rows a_row .. of one tile times rows b_row .. of another, over kColumns. Matrix units truncate what they add:
/// exact float32 of wide heads is added up step by step, or scores would be too small by up to their last six bits.
template <class Math, int kColumns, int kRowTiles, int kBlocks>
__device__ __forceinline__ void multiply_rows(float (&sums)[kRowTiles][kBlocks][4], std::uint32_t a_tile, int a_row,
                                              std::uint32_t b_tile, int b_row) {
  constexpr int kPitch = pitch_of<Math>(kColumns);
  constexpr bool kExact = std::is_same_v<Math, SplitFloat> && kColumns > 128;
  clear(sums);
#pragma unroll
  for (int step = 0; step < kColumns / kStepSize<Math>; ++step) {
    Fragment a[kRowTiles];
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) load_a<kPitch>(a[m], a_tile, a_row + 16 * m, step);
#pragma unroll
    for (int n = 0; n < kBlocks / 2; ++n) {
      Fragment b;
      load_b_transposed<kPitch>(b, b_tile, b_row + n * 16, step);
#pragma unroll
      for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          float(&sum)[4] = sums[m][2 * n + i];
          if constexpr (kExact) {
            float part[4] = {0.0f, 0.0f, 0.0f, 0.0f};
            multiply_add<Math>(part, a[m], b[2 * i], b[2 * i + 1]);
#pragma unroll
            for (int each = 0; each < 4; ++each) sum[each] += part[each];
          } else {
            multiply_add<Math>(sum, a[m], b[2 * i], b[2 * i + 1]);
          }
        }
      }
    }
  }
}

/// sums += weights * tile: rows row .. of the tile, kSteps of them, columns first_column ..; weights(fragment, m, step)
/// gives the A operand. Matrix units cut sums off instead of rounding: where that would show, float32 adds up by step.
template <class Math, int kPitch, int kSteps, int kRowTiles, int kBlocks, class Weights>
__device__ __forceinline__ void accumulate(float (&sums)[kRowTiles][kBlocks][4], Weights&& weights, std::uint32_t tile,
                                           int row, int first_column) {
  constexpr bool kExact = std::is_same_v<Math, SplitFloat>;
  constexpr int kGroup = kExact && kBlocks > 4 ? 4 : kBlocks;
  static_assert(kBlocks % kGroup == 0 && kBlocks % 2 == 0);
#pragma unroll
  for (int group = 0; group < kBlocks; group += kGroup) {
    float part[kExact ? kRowTiles : 1][kExact ? kGroup : 1][4];
    if constexpr (kExact) clear(part);
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      Fragment a[kRowTiles];
#pragma unroll
      for (int m = 0; m < kRowTiles; ++m) weights(a[m], m, step);
#pragma unroll
      for (int n = 0; n < kGroup; n += 2) {
        Fragment b;
        load_b<Math, kPitch>(b, tile, row + step * kStepSize<Math>, (first_column + (group + n) * 8) / 16);
#pragma unroll
        for (int m = 0; m < kRowTiles; ++m)
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            if constexpr (kExact) multiply_add<Math>(part[m][n + i], a[m], b[2 * i], b[2 * i + 1]);
            else multiply_add<Math>(sums[m][group + n + i], a[m], b[2 * i], b[2 * i + 1]);
          }
      }
    }
    if constexpr (kExact) {
#pragma unroll
      for (int m = 0; m < kRowTiles; ++m)
#pragma unroll
        for (int n = 0; n < kGroup; ++n)
#pragma unroll
          for (int i = 0; i < 4; ++i) sums[m][group + n][i] += part[m][n][i];
    }
  }
}

/// The item of this block. Items that wait for others are handed out in order, so that what they wait for has started.
__device__ __forceinline__ unsigned take_item(const Launch& a) {
  if (!a.scratch.ticket) return blockIdx.x;
  __shared__ unsigned item;
  if (threadIdx.x == 0) item = atomicAdd(a.scratch.ticket, 1u);
  __syncthreads();
  return item;
}

/// The same where some tiles are halved: of a multiprocessor's blocks as many take whole tiles as there are for each,
/// and others halves, as long as there are any. Blocks in their own order would give some multiprocessors one more:
/// hardware does not hand them out evenly. A block's place there is a hint: what is computed does not depend on it.
/// Nobody looks at the counters after a block has taken its item, so the last one clears them.
template <int kWarps>
__device__ __forceinline__ unsigned take_sized_item(const Launch& a) {
  if (!a.schedule.halved_tiles || !a.scratch.leaving) return take_item(a);
  __shared__ unsigned item;
  if (threadIdx.x == 0) {
    const unsigned count[2] = {a.schedule.whole_tiles,
                               static_cast<unsigned>(a.schedule.items) - a.schedule.whole_tiles};
    unsigned kind = hardware_warp() / kWarps < a.schedule.whole_each ? 0 : 1,
             taken = atomicAdd(a.scratch.ticket + kind, 1u);
    if (taken >= count[kind]) taken = atomicAdd(a.scratch.ticket + (kind ^= 1), 1u);
    item = kind == 0 ? taken : count[0] + taken;
    __threadfence();
    if (atomicAdd(a.scratch.leaving, 1u) + 1 == gridDim.x)
      a.scratch.ticket[0] = a.scratch.ticket[1] = *a.scratch.leaving = 0;
  }
  __syncthreads();
  return item;
}

/// Waits until the earlier branches of this item's rows are done.
__device__ __forceinline__ void wait_for_earlier(const Launch& a, const Item& item) {
  if (!a.scratch.finished || item.finished_before == 0) return;
  if (threadIdx.x == 0) {
    const unsigned* const counter =
        a.scratch.finished + (item.range * a.tensors.batch + item.entry) * a.tensors.heads + item.head;
    while (load_acquire(counter) < static_cast<unsigned>(item.finished_before)) __nanosleep(64);
  }
  __syncthreads();
}

__device__ __forceinline__ void announce(const Launch& a, const Item& item) {
  if (!a.scratch.finished) return;
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0)
    atomicAdd(a.scratch.finished + (item.range * a.tensors.batch + item.entry) * a.tensors.heads + item.head, 1u);
}

}  // namespace longspan::cuda
