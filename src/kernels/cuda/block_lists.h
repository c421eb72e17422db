// Block masks as kernels on a GPU read them: for each tile of rows of a strand a list of the blocks it meets. Forward,
// a tile is `tile_rows` queries and the list names key blocks; backward (by keys) a tile is `tile_rows` keys and the
// list names block rows of queries. Tiles lie on a grid anchored at the strand's start, whatever the query range;
// blocks count rows of the strand, so one set of lists serves all segments.
//   tile_rows >= block size   the tile's blocks, up to 16, share a list: an entry is a block
//                             that any of them meets, and its bits say which
//                             of them do
//   tile_rows < block size    tiles inside one block have places of their own that name the same entries
//   full, then partial        entries [0, full) of a list need no mask inside: all blocks of the tile
//                             meet them, and they are off the diagonal if causal.
//                             From `full` on bits and causality count. Both parts
//                             ascend; causal lists hold nothing beyond the diagonal. What a strand's end cuts short is
//                             not marked, since strands differ: it can only be the block that holds row strand.count.
//   forward                   place p is tile p. Or long lists are several places, whose results are joined later.
//   by keys                   long lists may come as several places of one tile, so that no item takes all queries; the
//                             items then add to sums of dk and dv (Launch::sum_keys). A place with tile -1 is no item.
// How a kernel reads it: item.tile indexes places (`place`), place.tile is the tile on the grid, and `walk` gives the
// entries that a strand or query range leaves as one sequence of rows, row x of which is row walk.row(x) of the strand.
#pragma once

#include <cstdint>

#if defined(__CUDACC__)
#define LONGSPAN_DEVICE __host__ __device__ __forceinline__
#else
#define LONGSPAN_DEVICE inline
#endif

namespace longspan::cuda {

/// The list of one item: blocks begin .. begin + count - 1 of BlockLists::blocks.
struct BlockPlace {
  std::int64_t begin;
  int full, count;
  int tile;
  int slot = 0;  // forward, of a list that is cut: one more than where this part's results wait, of its mask head
};

/// What a strand's end and a query range leave of a list.
struct BlockWalk {
  const std::int32_t* blocks;
  const std::uint16_t* bits;  // null where a tile has one block
  int full, count, skip;      // entry e is blocks[e], from `full` on blocks[e + skip]
  int unmasked;               // rows of the sequence, from its start, that take no mask at all
  int shift, first_block;

  LONGSPAN_DEVICE int rows() const { return count << shift; }
  LONGSPAN_DEVICE int place_of(int entry) const { return entry < full ? entry : entry + skip; }
  LONGSPAN_DEVICE int block(int entry) const { return blocks[place_of(entry)]; }
  /// Row x of the sequence as a row of the strand; x < rows().
  LONGSPAN_DEVICE int row(int x) const { return (block(x >> shift) << shift) + (x & ((1 << shift) - 1)); }
  /// Whether the block of the tile that holds `own_row` of the strand meets an entry.
  LONGSPAN_DEVICE bool meets(int entry, int own_row) const {
    return !bits || bits[place_of(entry)] >> ((own_row >> shift) - first_block) & 1;
  }
};

/// The lists of one branch.
struct BlockLists {
  const BlockPlace* places;  // [mask head][places]; null: the branch has no mask
  const std::int32_t* blocks;
  const std::uint16_t* bits;      // beside blocks: bit i for block i of the tile; null where tiles have one block
  int entry_places, head_places;  // from a batch entry or head to the next; 0 where they share lists
  int place_count;                // of one mask head
  std::uint8_t shift;             // a block has 1 << shift rows
  std::uint8_t tile_shift;        // a tile has 1 << tile_shift rows

  LONGSPAN_DEVICE const BlockPlace& place(int entry, int head, int index) const {
    return places[static_cast<std::int64_t>(entry) * entry_places + static_cast<std::int64_t>(head) * head_places +
                  index];
  }
  /// The entries of a place that hold rows [begin, end) of the strand: forward 0 .. strand.count, backward the queries.
  LONGSPAN_DEVICE BlockWalk walk(const BlockPlace& at, int begin, int end) const {
    BlockWalk walk;
    const std::int32_t* const list = blocks + at.begin;
    const int first = begin >> shift, last = ((end - 1) >> shift) + 1;
    const auto from = [&](int low, int high, int block) {  // the first entry in [low, high) from `block` on
      if (low == high || list[low] >= block) return low;
      if (list[--high] < block) return high + 1;
      while (high - low > 1) {
        const int middle = (low + high) / 2;
        if (list[middle] < block) low = middle;
        else high = middle;
      }
      return high;
    };
    const int full_begin = from(0, at.full, first), full_end = from(full_begin, at.full, last);
    const int partial_begin = from(at.full, at.count, first), partial_end = from(partial_begin, at.count, last);
    walk.full = full_end - full_begin;
    walk.count = walk.full + partial_end - partial_begin;
    walk.skip = partial_begin - full_end;
    walk.blocks = list + full_begin;
    walk.bits = bits ? bits + at.begin + full_begin : nullptr;
    walk.shift = shift;
    walk.first_block = (at.tile << tile_shift) >> shift;
    const bool cut = walk.full > 0 && ((walk.blocks[walk.full - 1] + 1) << shift) > end;
    walk.unmasked = (walk.full - (cut ? 1 : 0)) << shift;
    return walk;
  }
};

}  // namespace longspan::cuda
