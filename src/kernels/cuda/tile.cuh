// Tiles of 16-bit rows in shared memory: loading strided rows, reading fragments, and the order of items.
//   A row takes kColumns * 2 bytes; its 16-byte chunk c lies at place c ^ (row mod 8), so that eight rows of one chunk,
//   which is what a fragment load touches, are in different banks.
#pragma once

#include "kernels/cuda/fill.cuh"
#include "kernels/cuda/launch.h"
#include "kernels/cuda/ptx.cuh"

namespace longspan::cuda {

template <int kColumns>
__device__ __forceinline__ std::uint32_t chunk_offset(int row, int chunk) {
  return static_cast<std::uint32_t>(row * (kColumns * 2) + ((chunk ^ (row & 7)) << 4));
}

/// 16 bytes of a row, wherever the row lies: asynchronous if aligned, by elements otherwise. Columns past the last are
/// 0.
template <bool kFeatures>
__device__ __forceinline__ void load_chunk(std::uint32_t target, const char* row, int chunk, bool valid, int columns,
                                           bool aligned) {
  valid = valid && chunk * 8 < columns;
  if constexpr (kFeatures) {
    if (!aligned) {
      std::uint32_t words[4] = {0, 0, 0, 0};
      if (valid) {
        const std::uint16_t* const source = reinterpret_cast<const std::uint16_t*>(row) + chunk * 8;
#pragma unroll
        for (int i = 0; i < 4; ++i) words[i] = source[2 * i] | static_cast<std::uint32_t>(source[2 * i + 1]) << 16;
      }
      asm volatile("st.shared.v4.b32 [%0], {%1,%2,%3,%4};\n" ::"r"(target), "r"(words[0]), "r"(words[1]), "r"(words[2]),
                   "r"(words[3])
                   : "memory");
      return;
    }
  }
  copy_async(target, valid ? row + chunk * 16 : row, valid);
}

/// Rows first .. first + kRows - 1 of an arithmetic progression: address base + index * step bytes; zeros from `count`
/// on.
template <int kColumns, int kRows, int kThreads, bool kFeatures>
__device__ __forceinline__ void load_rows(std::uint32_t target, const char* base, std::int64_t step, int first,
                                          int count, int columns, bool aligned) {
  constexpr int kChunks = kColumns / 8, kStep = kThreads / kChunks;
  static_assert(kThreads % kChunks == 0 && kRows % kStep == 0);
  const int chunk = threadIdx.x % kChunks, begin = threadIdx.x / kChunks;
#pragma unroll
  for (int i = 0; i < kRows / kStep; ++i) {
    const int row = begin + i * kStep;
    const bool valid = first + row < count;
    const char* const source = valid ? base + (first + row) * step : base;
    load_chunk<kFeatures>(target + chunk_offset<kColumns>(row, chunk), source, chunk, valid, columns, aligned);
  }
}

/// The A operand: rows row .. row + 15, columns 16 * step ..
template <int kColumns>
__device__ __forceinline__ void load_a(Fragment& f, std::uint32_t tile, int row, int step) {
  const int lane = threadIdx.x % kWarpThreads;
  load_fragment(f, tile + chunk_offset<kColumns>(row + (lane & 15), step * 2 + (lane >> 4)));
}
/// The B operand from rows that are its columns (the tile holds B transposed): f[0..1] for rows row .., f[2..3] for row
/// + 8 ..
template <int kColumns>
__device__ __forceinline__ void load_b_transposed(Fragment& f, std::uint32_t tile, int row, int step) {
  const int lane = threadIdx.x % kWarpThreads;
  load_fragment(f, tile + chunk_offset<kColumns>(row + (lane & 7) + ((lane >> 4) << 3), step * 2 + ((lane >> 3) & 1)));
}
/// The B operand from rows that are its rows: k = row .. row + 15, f[0..1] for columns 16 * block .., f[2..3] for the
/// next 8.
template <int kColumns>
__device__ __forceinline__ void load_b(Fragment& f, std::uint32_t tile, int row, int block) {
  const int lane = threadIdx.x % kWarpThreads;
  load_fragment_transposed(f, tile + chunk_offset<kColumns>(row + (lane & 15), block * 2 + (lane >> 4)));
}
/// The A operand from a tile that holds it transposed: A rows 16 * block .., A columns row .. row + 15.
template <int kColumns>
__device__ __forceinline__ void load_a_transposed(Fragment& f, std::uint32_t tile, int row, int block) {
  const int lane = threadIdx.x % kWarpThreads;
  load_fragment_transposed(
      f, tile + chunk_offset<kColumns>(row + (lane & 7) + ((lane >> 4) << 3), block * 2 + ((lane >> 3) & 1)));
}

/// The item of this block. Items that wait for others are handed out in order, so that what they wait for has started.
__device__ __forceinline__ std::int64_t take_item(const Launch& a) {
  if (!a.ticket) return blockIdx.x;
  __shared__ unsigned item;
  if (threadIdx.x == 0) item = atomicAdd(a.ticket, 1u);
  __syncthreads();
  return item;
}

/// Waits until the earlier branches of this item's rows are done.
__device__ __forceinline__ void wait_for_earlier(const Launch& a, const Item& item) {
  if (!a.finished || item.finished_before == 0) return;
  if (threadIdx.x == 0) {
    const unsigned* const counter = a.finished + (item.range * a.batch + item.entry) * a.heads + item.head;
    while (load_acquire(counter) < static_cast<unsigned>(item.finished_before)) __nanosleep(64);
  }
  __syncthreads();
}

__device__ __forceinline__ void announce(const Launch& a, const Item& item) {
  if (!a.finished) return;
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) atomicAdd(a.finished + (item.range * a.batch + item.entry) * a.heads + item.head, 1u);
}

}  // namespace longspan::cuda
