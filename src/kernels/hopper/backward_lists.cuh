// Tiles of keys whose queries are named by a list of a block mask (backward_listed.h).
#pragma once

#include "kernels/hopper/backward_shape.cuh"

namespace longspan::hopper {

/// Goes through the tiles of queries of an item, the last one first: key tiles of a strand are taken in ascending
/// order, and under a local mask the next one then comes to each tile of queries right after this one. A tile is read
/// while the one before it is loaded.
template <class S>
struct QueryCursor {
  const typename S::Item& task;
  int left;  // tiles, from the list's start
  ListedTile next;

  __device__ __forceinline__ explicit QueryCursor(const typename S::Item& of) : task(of), left(of.tiles) { read(); }
  __device__ __forceinline__ void read() {
    if (task.empty) next = {};
    else if (task.list) next = task.list[left - 1];
    else next = {{~0u, ~0u}, (left - 1) * S::kQueries, 0, {own_turn(), own_turn()}};
  }
  /// Without a mask every tile of keys before this one comes to all queries that this one comes to.
  __device__ __forceinline__ unsigned own_turn() const { return static_cast<unsigned>(task.key_tile); }
  __device__ __forceinline__ void advance() {
    if (--left > task.first_tile) read();
  }
  __device__ __forceinline__ BackwardNote note(bool causal) const {
    constexpr std::uint32_t kAll = S::kQueries == kGroupRows ? kFirstHalf : ~0u;
    BackwardNote note{next.first, 0, {next.sees[0], next.sees[1]}, {next.turn[0], next.turn[1]}};
#pragma unroll
    for (int group = 0; group < 2; ++group) {
      const int keys = (group * S::kGroupStep) + kGroupRows;  // of the tile, up to the group's last
      const bool sees = (next.sees[S::kShared ? 0 : group] & kAll) == kAll;
      const bool diagonal = causal && next.first < task.diagonal + keys - 1;
      note.masks |= (!sees || diagonal || task.plain_keys < keys ? 1u : 0u) << group;
    }
    return note;
  }
};

}  // namespace longspan::hopper
