// Items whose keys are named by a list of a block mask: which tiles of keys they are, and what is to be masked in each.
//   A tile of queries is 128 rows of the strand's grid, 64 for each of two groups; a tile of keys is a block or half of
//   one. Blocks of 64 give each group a list of its own; both go through the union of the two.
#pragma once

#include "kernels/hopper/shape.cuh"

namespace longspan::hopper {

/// The producer's note on a tile of keys: its first key, and in the bits that a multiple of 64 leaves free, whether
/// group 0 (1: the next bit) masks anything, whether it sees the block at all, and whether the strand ends inside.
struct ListNote {
  static constexpr int kMasks = 1, kSees = 4, kEnds = 16;
  int bits;
  __device__ __forceinline__ int first_key() const { return bits & ~63; }
  __device__ __forceinline__ bool masks(int group) const { return bits & kMasks << group; }
  __device__ __forceinline__ bool sees(int group) const { return bits & kSees << group; }
  __device__ __forceinline__ bool ends() const { return bits & kEnds; }
};

/// An entry of an item's list: the first key of its block, and in the bits below, which groups see it.
template <class S>
__device__ __forceinline__ int read_entry(const ListTask& task, int at) {
  int entry = task.list.block(at) << task.list.shift;
#pragma unroll
  for (int group = 0; group < S::kGroups; ++group)
    entry |= task.list.meets(at, task.first_query + group * kGroupRows) ? 1 << group : 0;
  return entry;
}

/// The list of an item, and how many tiles it has: at least one, since rows without keys are written too.
template <class S>
__device__ __forceinline__ int find_list(const cuda::BlockLists& lists, const cuda::Item& item, int keys,
                                         ListTask& task) {
  task.listed = true;
  task.list = lists.walk(lists.place(item.entry, item.head, item.tile), 0, keys);
  return max(1, task.list.rows() / S::kKeys);
}
/// Copies the first entries of a list to shared memory, by a warp, so that loads of tiles need not wait for memory.
template <class S>
__device__ __forceinline__ void bring_entries(ListTask& task, int lane) {
  static_assert(kNearEntries == kWarpThreads);
  if (task.tiles > 0 && task.listed && lane < task.list.count) task.entries[lane] = read_entry<S>(task, lane);
}

/// Index on the grid of a tile's first row, `before` rows after the range's first in its strand; it may be negative,
/// which TMA takes for rows that do not exist.
__device__ __forceinline__ int first_index(int q_row, int before, int stride) {
  return (q_row - before * stride) / stride + before;
}

/// Walks over the tiles of an item. Entries that are not in shared memory are prefetched.
template <class S>
struct ListCursor {
  const ListTask& task;
  int at = 0, part = 0, entry = 0, next = 0;  // part: of a block, in tiles

  __device__ __forceinline__ explicit ListCursor(const ListTask& of) : task(of), entry(look(0)), next(look(1)) {}
  __device__ __forceinline__ int look(int index) const {
    if (!task.listed || index >= task.list.count) return 0;
    return index < kNearEntries ? task.entries[index] : read_entry<S>(task, index);
  }
  __device__ __forceinline__ int first_key() const { return (entry & ~63) + part * S::kKeys; }
  __device__ __forceinline__ int note(bool causal) const {
    const int first = first_key(), end = first + S::kKeys;
    const bool ends = end > task.keys;
    int bits = first | (ends ? ListNote::kEnds : 0);
#pragma unroll
    for (int group = 0; group < S::kGroups; ++group) {
      const bool sees = !task.listed || entry >> group & 1;
      const bool diagonal = causal && end > task.first_query + group * kGroupRows + 1;
      bits |= (sees ? ListNote::kSees : 0) << group | (!sees || diagonal || ends ? ListNote::kMasks : 0) << group;
    }
    return bits;
  }
  __device__ __forceinline__ void advance() {
    ++part;
    if (task.listed && part * S::kKeys == 1 << task.list.shift) {
      part = 0;
      ++at;
      entry = next;
      next = look(at + 1);
    }
  }
};

}  // namespace longspan::hopper
