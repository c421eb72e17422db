// Items whose keys are named by a list of a block mask: which tiles of keys they are, and what is to be masked in each.
//   A tile of queries is 128 rows of the strand's grid, 64 for each of two groups; a tile of keys is a block or half of
//   one. Blocks of 64 give each group a list of its own; both go through the union of the two.
#pragma once

#include "kernels/hopper/shape.cuh"

namespace longspan::hopper {

/// What consumers are told of a tile of keys: its first key, and in the bits that a multiple of 64 leaves free, whether
/// group 0 (1: the next bit) masks anything, whether it sees the block at all, and whether the strand ends inside.
struct ListNote {
  static constexpr int kMasks = 1, kSees = 4, kEnds = 16;
  int bits;
  __device__ __forceinline__ int first_key() const { return bits & ~63; }
  __device__ __forceinline__ bool masks(int group) const { return bits & kMasks << group; }
  __device__ __forceinline__ bool sees(int group) const { return bits & kSees << group; }
  __device__ __forceinline__ bool ends() const { return bits & kEnds; }
};

/// The list of an item, and how many tiles it has: at least one, since rows without keys are written too.
template <class S>
__device__ __forceinline__ int find_list(const cuda::BlockLists& lists, const cuda::Item& item, int keys,
                                         ListTask& task) {
  task.listed = true;
  task.list = lists.walk(lists.place(item.entry, item.head, item.tile), 0, keys);
  return max(1, task.list.rows() / S::kKeys);
}

/// Index on the grid of a tile's first row, `before` rows after the range's first in its strand; it may be negative,
/// which the copy engine takes for rows that do not exist.
__device__ __forceinline__ int first_index(int q_row, int before, int stride) {
  return (q_row - before * stride) / stride + before;
}

/// Goes through the tiles of an item; the next block of the list is read before it is needed.
template <class S>
struct ListCursor {
  const ListTask& task;
  int entry = 0, part = 0, block = 0, next = 0;  // part: of a block, in tiles
  unsigned seen = 0, next_seen = 0;

  __device__ __forceinline__ explicit ListCursor(const ListTask& of) : task(of) {
    look(0);
    step();
  }
  __device__ __forceinline__ void look(int at) {
    if (!task.listed || at >= task.list.count) return;
    next = task.list.block(at);
    next_seen = 0;
#pragma unroll
    for (int group = 0; group < S::kGroups; ++group)
      next_seen |= task.list.meets(at, task.first_query + group * kGroupRows) ? 1u << group : 0;
  }
  __device__ __forceinline__ void step() {
    block = next;
    seen = next_seen;
    look(entry + 1);
  }
  __device__ __forceinline__ int first_key() const {
    return task.listed ? (block << task.list.shift) + part * S::kKeys : part * S::kKeys;
  }
  __device__ __forceinline__ int note(bool causal) const {
    const int first = first_key(), end = first + S::kKeys;
    const bool ends = end > task.keys;
    int bits = first | (ends ? ListNote::kEnds : 0);
#pragma unroll
    for (int group = 0; group < S::kGroups; ++group) {
      const bool sees = !task.listed || seen >> group & 1;
      const bool diagonal = causal && end > task.first_query + group * kGroupRows + 1;
      bits |= (sees ? ListNote::kSees : 0) << group | (!sees || diagonal || ends ? ListNote::kMasks : 0) << group;
    }
    return bits;
  }
  __device__ __forceinline__ void advance() {
    ++part;
    if (task.listed && part * S::kKeys == 1 << task.list.shift) {
      part = 0;
      ++entry;
      step();
    }
  }
};

}  // namespace longspan::hopper
