// Tiles of keys whose queries are named by a list of a block mask: which tiles of queries they are, and what is to be
// masked in each. A group has 64 keys, so one block; a tile of 128 queries may be two.
#pragma once

#include "kernels/hopper/backward_shape.cuh"

namespace longspan::hopper {

/// The list of an item and its number of tiles; 0 if no query sees these keys. Blocks hold several tiles, of which a
/// strand's end may leave out some, or two blocks that follow one another are one tile.
template <class S>
__device__ __forceinline__ int find_queries(const cuda::BlockLists& lists, const cuda::BlockPlace& place, int queries,
                                            BackwardListTask& task) {
  const cuda::BlockWalk list = lists.walk(place, 0, queries);
  task.listed = true;
  task.list = list;
  const int size = 1 << list.shift, last = (queries - 1) >> list.shift;
  int tiles = 0;
  if (size < S::kQueries) {
    for (int entry = 0; entry < list.count; ++entry, ++tiles) {
      const int block = list.block(entry);
      if (block % 2 == 0 && entry + 1 < list.count && list.block(entry + 1) == block + 1) ++entry;
    }
    return tiles;
  }
  const bool ends = (list.full > 0 && list.block(list.full - 1) == last) ||
                    (list.count > list.full && list.block(list.count - 1) == last);
  const int inside = (queries - (last << list.shift) + S::kQueries - 1) / S::kQueries;
  return list.count * (size / S::kQueries) - (ends ? size / S::kQueries - inside : 0);
}

/// Goes through the tiles of queries of an item; blocks of the list are read before they are needed.
template <class S>
struct QueryCursor {
  const typename S::Item& task;
  int first;  // query of the tile
  int entry = 0, block = 0, next = 0;
  unsigned seen = 0, next_seen = 0;  // of a block, by group; of the tile, by group and half

  __device__ __forceinline__ explicit QueryCursor(const typename S::Item& of)
      : task(of), first(of.first_tile * S::kQueries) {
    if (!task.listed || task.list.count == 0) return;
    look(0);
    step();
  }
  __device__ __forceinline__ void look(int at) {
    next = -1;
    if (at >= task.list.count) return;
    next = task.list.block(at);
    next_seen = 0;
#pragma unroll
    for (int group = 0; group < 2; ++group)
      next_seen |= task.list.meets(at, task.first_key + group * kGroupRows) ? 1u << group : 0;
  }
  /// Takes the next block, or the next two where they are one tile.
  __device__ __forceinline__ void step() {
    const auto halves = [&] { return (next_seen & 1) | (next_seen & 2) << 1; };
    const int shift = task.list.shift, size = 1 << shift;
    block = next;
    first = block << shift;
    seen = halves() * 3;
    if (size < S::kQueries) {
      const bool upper = first & size;
      seen = halves() << upper;
      first &= ~(S::kQueries - 1);
      look(++entry);
      if (upper || next < 0 || next << shift != first + size) return;
      seen |= halves() << 1;
    }
    look(++entry);
  }
  __device__ __forceinline__ void advance() {
    first += S::kQueries;
    if (!task.listed) return;
    if (first >> task.list.shift != block || first >= task.queries) step();
  }
  __device__ __forceinline__ BackwardNote note(bool causal) const {
    BackwardNote note{first, 0};
#pragma unroll
    for (int group = 0; group < 2; ++group) {
      const unsigned sees = task.listed ? seen >> 2 * group & 3 : 3u;
      const bool diagonal = causal && first < task.diagonal + (group + 1) * kGroupRows - 1;
      const bool ends = task.plain_keys < (group + 1) * kGroupRows;
      note.flags |= sees << (2 + 2 * group) | (sees != 3 || diagonal || ends ? 1u : 0u) << group;
    }
    return note;
  }
};

}  // namespace longspan::hopper
