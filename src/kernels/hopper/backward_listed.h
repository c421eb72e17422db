// Block masks of the Hopper backward. The preparation turns the list of each tile of keys (kernels/cuda/block_lists.h)
// into tiles of queries in ascending order, which the main kernel reads one by one: whatever the size of blocks, a tile
// says which 16 keys see which 16 queries.
#pragma once

#include "kernels/cuda/launch.h"

namespace longspan::hopper {

inline constexpr int kChunkRows = 16;                     // rows of the smallest block
inline constexpr std::uint32_t kFirstHalf = 0x0f0f0f0fu;  // of `sees`: 64 queries

/// A tile of queries that some block of a tile of keys sees.
struct alignas(8) ListedTile {
  std::uint32_t sees[2];  // a byte for every 16 keys, in it a bit for every 16 queries
  int first;              // query
  int tiles;              // of the first one of a list: how many it has
  unsigned turn[2];       // `deterministic`, of each 64 queries: items of the strand that add to them before this one

  LONGSPAN_DEVICE bool meets(int half) const { return ((sees[0] | sees[1]) & kFirstHalf << 4 * half) != 0; }
};

/// Tiles of queries of an entry of a list, and how many tiles of keys share a list.
LONGSPAN_DEVICE int tiles_of_entry(const cuda::BlockLists& lists, int tile_queries) {
  const int tiles = (1 << lists.shift) / tile_queries;
  return tiles > 1 ? tiles : 1;
}
LONGSPAN_DEVICE int sharers(const cuda::BlockLists& lists) {
  return lists.shift > lists.tile_shift ? 1 << (lists.shift - lists.tile_shift) : 1;
}
/// Where the tiles of a place begin, which has a list of its own there even if it shares one here.
LONGSPAN_DEVICE std::int64_t listed_from(const cuda::BlockLists& lists, const cuda::BlockPlace& place,
                                         int tile_queries) {
  const int shared_by = sharers(lists);
  return (place.begin * shared_by + static_cast<std::int64_t>(place.tile % shared_by) * place.count) *
         tiles_of_entry(lists, tile_queries);
}

/// Which 16 keys of a tile see which 16 queries where some of its blocks meet a block that begins `row` queries after
/// the tile of queries.
LONGSPAN_DEVICE void add_pairs(const cuda::BlockLists& lists, unsigned blocks, int row, int tile_queries,
                               ListedTile& tile) {
  const int chunks = (1 << lists.shift) / kChunkRows, most = tile_queries / kChunkRows;
  const std::uint32_t queries = ((1u << (chunks < most ? chunks : most)) - 1) << row / kChunkRows;
  for (int key = 0; key < (1 << lists.tile_shift) / kChunkRows; ++key) {
    if (blocks >> (key * kChunkRows >> lists.shift) & 1) tile.sees[key / 4] |= queries << key % 4 * 8;
  }
}

/// Makes the tiles of a place. Full and partial entries, each of which ascend, are merged, so that items that follow
/// one another in a strand come to the queries that they share in the same order.
LONGSPAN_DEVICE void list_tiles(const cuda::BlockLists& lists, const cuda::BlockPlace& place, int tile_queries,
                                ListedTile* tiles) {
  const int size = 1 << lists.shift, unit = size > tile_queries ? size : tile_queries;
  const std::int32_t* const blocks = lists.blocks + place.begin;
  ListedTile open{};
  int full = 0, partial = place.full, count = 0;
  const auto close = [&] {
    for (int first = open.first, end = first + unit; first < end; first += tile_queries) {
      open.first = first;
      tiles[count++] = open;
    }
  };
  open.first = -1;
  while (full < place.full || partial < place.count) {
    const bool takes_full = partial == place.count || (full < place.full && blocks[full] < blocks[partial]);
    const int entry = takes_full ? full++ : partial++;
    const int row = blocks[entry] << lists.shift, first = row / unit * unit;
    if (first != open.first) {
      if (open.first >= 0) close();
      open = {};
      open.first = first;
    }
    add_pairs(lists, lists.bits ? lists.bits[place.begin + entry] : 1u, row - first, tile_queries, open);
  }
  if (open.first >= 0) close();
  if (count > 0) tiles[0].tiles = count;
}

/// Tiles of a list that begin before a query.
LONGSPAN_DEVICE int tiles_before(const ListedTile* tiles, int count, int query) {
  if (count == 0 || tiles[count - 1].first < query) return count;
  int low = 0, high = count - 1;  // the first that does not lies in [low, high]
  while (low < high) {
    const int middle = (low + high) / 2;
    if (tiles[middle].first < query) low = middle + 1;
    else high = middle;
  }
  return low;
}

}  // namespace longspan::hopper
