// What the kernels of the Hopper backward are told, and where rows of strands lie in the workspace.
//   Row values and sums of dq are kept strand by strand, each from a multiple of 64 rows on, so that a tile of queries
//   is one run of memory. Sums lie in tiles of 64 rows by 48 or 64 columns, in the order in which a warp group holds
//   them: [warp][8 columns][lane] of four floats, {row, column}, {row, column + 1}, {row + 8, ...}, {row + 8, ...}.
//   Where branches share rows, all of them add to one row of sums: [entry][head][row of q][columns], by maps of which
//   one box is a tile of a strand, as for q. Columns come in blocks of 16, of which the second and the third four have
//   changed places: so a warp's stores to a tile of such rows, swizzled over 64 bytes, are in different banks. Heads
//   over 128, whose sums do not go through shared memory, have them in their order.
#pragma once

#include "kernels/hopper/backward_listed.h"
#include "kernels/hopper/launch.h"

namespace longspan::hopper {

inline constexpr int kSumTileRows = 64;
inline constexpr int kUnitsAtOnce = 32;      // tiles of sums whose turns one thread block counts
inline constexpr int kSumBlockColumns = 16;  // of shared rows of sums
inline constexpr int kWidestStaged = 128;    // head dim up to which dq goes through shared memory
inline constexpr int kKeyTileRows = 128;
inline constexpr int kPartsThreads = 256;  // of a block of the kernels around the main one
inline constexpr int kWarpsOfKeys = 8;     // that hold a tile of keys
inline constexpr int kMostHalved = 66;     // items: half of the multiprocessors of the GPU that this is made for
// |lse| in base 2 up to which P = exp2(s * factor - lse) needs no minimum. lse is not below any score, and forward and
// backward compute a score's bits alike, so only the roundings of lse, of its conversion to base 2 and of the
// multiply-add put the exponent above 0: by 3 * 2^-24 * 2^8 < 2^-14, so that P <= 1 + 2^-14.
inline constexpr float kPlainLse = 256.0f;

/// Rows of one branch in one range: heads one after the other, in each the range's segments.
struct StrandPlaces {
  std::int64_t first, per_head;
  std::int64_t opening, each;  // rows that the first segment and those after it take
  int first_segment;

  LONGSPAN_DEVICE std::int64_t row(const cuda::DeviceBranch& branch, int entry, int head, int segment) const {
    const std::int64_t inside = segment == first_segment ? 0 : opening + (segment - first_segment - 1) * each;
    return first + (static_cast<std::int64_t>(entry) * branch.head_count + head - branch.head_begin) * per_head +
           inside;
  }
};

/// Strands of a branch in a range: `count` rows of q from position `start` on, in a sequence of `tokens`.
LONGSPAN_DEVICE StrandPlaces places_of(const cuda::DeviceBranch& branch, const cuda::DeviceRange& range, int tokens) {
  const auto padded = [&](std::int64_t positions) {
    const std::int64_t rows = (positions + branch.dilation - 1) / branch.dilation;
    return (rows + kSumTileRows - 1) / kSumTileRows * kSumTileRows;
  };
  const std::int64_t segment = branch.segment < tokens ? branch.segment : tokens;
  const std::int64_t end = static_cast<std::int64_t>(range.start) + range.count, last = (end - 1) / branch.segment;
  StrandPlaces places{};
  places.first_segment = range.start / branch.segment;
  const std::int64_t first_end = (static_cast<std::int64_t>(places.first_segment) + 1) * branch.segment;
  places.opening = padded((first_end < end ? first_end : end) - range.start);
  places.each = padded(segment);
  places.per_head = places.opening;
  if (last > places.first_segment)
    places.per_head += (last - places.first_segment - 1) * places.each + padded(end - last * branch.segment);
  return places;
}

/// Scores of smaller or negative scales are scaled before the mask, which is at -infinity, not after it.
inline constexpr float kLeastScale = 1e-30f;
/// Which instantiation of the main kernel runs a call: for calls without options nothing of them is compiled.
///   some     key_mask, ALiBi and scales below kLeastScale, each behind a branch that a whole warp group takes
///   dropout  the same, and dropout
enum class BackwardExtras { none, some, dropout };

/// Which tiles of keys a launch of the main kernel takes, where key_mask is the only option of a call: those of which
/// key_mask leaves the first keys, and no others, run in the kernel without options, as if the strand ended there.
enum class KeysTaken { all, leading, scattered };

/// What preparation and conversion are told: work by tiles of 64 query rows, then items of rows that no branch covers.
struct PartsLaunch {
  cuda::Launch base;
  PackedPlaces packed;
  StrandPlaces places[cuda::kMaxWork];     // of branch b in range r: [r * branches + b]
  float* lse;                              // of each row, in base 2 and negative; -inf where a row has no keys
  float* delta;                            // dscore_scale * (dlse - delta)
  float* sums;                             // of dq
  std::uint8_t* far_lse;                   // of each tile of 64 rows: some |lse| exceeds kPlainLse
  unsigned* ticket;                        // the main kernel's next item
  unsigned* turns;                         // deterministic: tiles of keys that were added to each tile of sums
  unsigned* key_turns;                     // of cut lists: items that have added to each 64 keys, by group
  unsigned* joined;                        // items with half of the queries that are done with their keys
  ListedTile* listed[cuda::kMaxBranches];  // of branches with a block mask
  unsigned list_blocks;                    // of threads that make these, before the items
  unsigned items, fill_items;              // of strands, and of uncovered rows after them
  bool finish_keys;                        // sums of dk and dv are complete: the conversion writes them too
  bool zero_keys;                          // uncovered rows of dk and dv are those of dq, and nobody else writes them
  bool lists;                              // some branch has a block mask
  bool splits;                             // some lists are cut: only the keys of these are added up in sums
  int sum_columns;                         // where branches share rows: of a row of sums
  BackwardExtras extras;
  KeysTaken taken;

  /// Thread blocks of the kernel that orders the items of lists, for one head of a branch's mask.
  LONGSPAN_DEVICE unsigned ordered_blocks(int branch) const {
    const std::int64_t rows = base.schedule.branches[branch].longest_strand(base.tensors.tokens);
    return static_cast<unsigned>((rows + kUnitsAtOnce * kSumTileRows - 1) / (kUnitsAtOnce * kSumTileRows));
  }
  /// Sums of a row of q, where branches share them.
  LONGSPAN_DEVICE float* merged_row(int entry, int head, std::int64_t q_row) const {
    return sums + base.tensors.packed_row(entry, q_row, head) * sum_columns;
  }
  LONGSPAN_DEVICE std::int64_t row(const cuda::Item& item) const {
    return places[item.range * base.schedule.branch_count + item.branch].row(base.schedule.branches[item.branch],
                                                                             item.entry, item.head, item.segment);
  }
};

/// The main kernel: work by tiles of 128 keys.
struct alignas(128) BackwardLaunch {
  CUtensorMap q[kMaxMaps], dout[kMaxMaps], k[kMaxMaps + 1], v[kMaxMaps + 1], dk[kMaxMaps], dv[kMaxMaps];
  PartsLaunch parts;
  int first_map[cuda::kMaxBranches];
  int longer_queries[cuda::kMaxBranches], longer_keys[cuda::kMaxBranches];  // rows of q and of k, modulo the dilation
  int query_group;                                                          // heads that share a head of k and v
  int blocks;
  unsigned first_ticket;  // launches before this one left the counter there
  unsigned halved;  // the last so many items are two each, with half of the queries: they fill the last round of blocks
  float* halves;    // what these leave for one another
  float* totals;    // of closed sums of dk and dv, for each consumer; null where no strand is that long
  int told_tiles;   // deterministic: tiles of queries that one block tells the next of at a time
  unsigned together;  // deterministic: strands of all works, where each of them is one chunk; 0: work after work
  CUtensorMap sums[kMaxMaps];  // of dq, where branches share rows

  LONGSPAN_DEVICE int map(int branch, int phase, int longer) const {
    return first_map[branch] + (longer > 0 && phase >= longer);
  }
  /// The item that comes in a place of the order: where all strands are together, the first tiles of all works, then
  /// the second ones. Places of works that have no tile left are no items: -1.
  LONGSPAN_DEVICE std::int64_t item_at(unsigned place) const {
    if (together == 0) return place;
    const unsigned tile = place / together;
    unsigned strand = place - tile * together;
    const cuda::Work* work = parts.base.schedule.work;
    for (; strand >= work->strands; ++work) strand -= work->strands;
    if (tile >= static_cast<unsigned>(work->tiles)) return -1;
    return work->first_item + tile * work->strands + strand;
  }
};

/// An item as the warp groups of a block hand it on, in shared memory.
struct BackwardTask {
  int tiles;       // of queries, -1: there are no more items
  int first_tile;  // those before it see none of these keys
  int keys;        // rows of the tile that exist
  int queries;     // rows of the strand's queries
  int diagonal;    // causal: query i sees key j of the tile if i >= j + diagonal
  int key_tile, last_key_tile;
  int pair, half;  // of items that share keys; -1: this one has all queries
  int q_map, q_index, q_phase, k_map, k_index, k_phase;
  int head, kv_head, entry;
  int position, stride;  // of the first key
  int sum_step;          // rows from one key's sums of dk and dv to the next one's
  std::int64_t sum_row;  // of the first key
  std::int64_t row;      // of the first query in row values
  int first_sums;        // tile of 64 rows of sums that it is in
  bool clamps;           // some row's |lse| exceeds kPlainLse
  int plain_keys;        // keys that need no mask off the diagonal; 0 where `clamps`

  /// Tiles of queries of which a group has rows of dQ: where groups have 64 rows each, of the last one the second group
  /// may have none.
  LONGSPAN_DEVICE int tiles_of(int group, int tile_queries) const {
    if (tile_queries == kSumTileRows) return tiles;
    const int own = (queries + tile_queries - 1 - group * kSumTileRows) / tile_queries;
    return own < tiles ? own : tiles;
  }
  /// Where the tiles of queries that are told of together with one end, for a group that has rows of `own` tiles.
  LONGSPAN_DEVICE int told_end(int tile, int own, int step) const {
    const int end = (tile & -step) + step;
    return end < own ? end : own;
  }
  /// Tiles of keys that add before this one to queries up to `end`, where that has an order. Under a causal mask it is
  /// the one in which they come to them if all start at once on the diagonal: the last tile first. Upwards each would
  /// wait for the one before it, which has just begun.
  LONGSPAN_DEVICE int turn(int end, bool causal) const {
    if (!causal) return key_tile;
    const int last = (end - 1 + key_tile * kKeyTileRows - diagonal) / kKeyTileRows;  // that any of them sees
    return (last < last_key_tile ? last : last_key_tile) - key_tile;
  }
};

/// Which of several places of its tile of keys a place is; -1 if it is the only one.
LONGSPAN_DEVICE int part_of(const cuda::BlockLists& lists, const cuda::Item& item) {
  const cuda::BlockPlace* const here = &lists.place(item.entry, item.head, item.tile);
  if (here->tile < 0) return -1;
  int part = 0;
  while (part < item.tile && here[-part - 1].tile == here->tile) ++part;
  return part > 0 || (item.tile + 1 < lists.place_count && here[1].tile == here->tile) ? part : -1;
}

/// An item whose queries are what a list of a block mask names.
template <class Base>
struct BackwardListTask : Base {
  const ListedTile* list;  // null: the branch has no mask, all tiles in order
  bool empty;              // no query sees these keys: one tile is computed on zeros
  bool split;              // one of several items that have these keys, and the only ones that add to sums
  int part;                // which of them; -1: there are no others
  int first_key;
};

/// An item of branches that share rows, of heads over 128.
struct BackwardMergedTask : BackwardTask {
  float* sums;              // of the first query
  std::int64_t query_step;  // numbers from one query's to the next one's
};

/// What an item of a call with options has besides.
template <class Base>
struct BackwardExtrasTask : Base {
  std::uint32_t allowed[kKeyTileRows / 32];  // by key: it exists, and key_mask has it
  bool hides;                                // key_mask excludes some of them
  float bias;                                // ALiBi: of one row of the strand, in base 2
  std::uint32_t draw_group, draw_head;       // dropout: 4 * (first key / 32), branch * heads + head
  LONGSPAN_DEVICE bool allows(int key) const { return allowed[key / 32] >> key % 32 & 1; }
};

/// What a block is told of a tile of queries in lists.
struct BackwardNote {
  int first;              // query
  unsigned masks;         // bit for each group: it masks something
  std::uint32_t sees[2];  // as ListedTile has them
  unsigned turn[2];
  LONGSPAN_DEVICE bool meets(int half) const { return ((sees[0] | sees[1]) & kFirstHalf << 4 * half) != 0; }
};

}  // namespace longspan::hopper
