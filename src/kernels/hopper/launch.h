// What the Hopper kernel is told: what every CUDA kernel is told, and the tensor maps by which TMA finds the
// rows of a strand.
//   A branch of dilation r sees rows as a grid: row x is at (index x / r, phase x mod r). The rows of a strand are then
//   neighbours in index at one phase, whatever its segment, and one box of the map is a tile of the strand, read in
//   place. Phases hold ceil(rows / r) or floor(rows / r) rows; each kind has a map, so nothing past the end is touched.
#pragma once

#include <cuda.h>

#include "kernels/cuda/launch.h"

namespace longspan::hopper {

inline constexpr int kMaxMaps = 20;
inline constexpr int kPackedMap = kMaxMaps;  // of k and v: of a rank's packed strands (kernel.h)
inline constexpr int kGroupThreads = 128;
inline constexpr int kGroupRows = 64;         // query rows of a warp group, and of a box of q and out
inline constexpr int kBlockColumns = 64;      // columns of a box: 128 bytes, which is what the swizzle spans
inline constexpr int kWidestWithZeros = 128;  // head dim up to which shared memory has room for a box of zeros

inline constexpr int kNearEntries = 32;  // of a list that are brought to shared memory with the item

/// Where the strands of a rank of a ring are (kernel.h, PackedStrands).
struct PackedPlaces {
  const int* ranges[cuda::kMaxRanges];  // null where rows of k and v are all positions
  std::int64_t sums;                    // rows of dk_sum and dv_sum before those of packed strands
  int key_rows, rows;                   // of one head of an entry in place; of an entry, all packed strands

  /// The packed row that a strand begins with; -1: it is in place.
  LONGSPAN_DEVICE int row(const cuda::Item& item, int heads) const {
    const int* crossing = ranges[item.range];
    if (!crossing) return -1;
    crossing += item.branch * 2 * (1 + heads);
    if (crossing[0] != item.segment) crossing += 1 + heads;
    return crossing[0] == item.segment ? crossing[1 + item.head] : -1;
  }
  /// The row of k and v that has a position of a range in place.
  LONGSPAN_DEVICE int key_row(const cuda::Item& item, const cuda::DeviceRange& range, int position) const {
    return ranges[item.range] ? position - range.start + static_cast<int>(range.first_row) : position;
  }
};

/// Floats that a consumer thread keeps of sums that were closed: two maxima, two row sums, two rows of values.
constexpr int total_floats(int columns) { return 4 + columns / 2; }

struct alignas(128) HopperLaunch {
  CUtensorMap q[kMaxMaps], k[kMaxMaps + 1], v[kMaxMaps + 1], out[kMaxMaps];
  cuda::Launch base;
  int first_map[cuda::kMaxBranches];
  int longer_queries[cuda::kMaxBranches], longer_keys[cuda::kMaxBranches];  // rows of q and of k, modulo the dilation
  unsigned* ticket;     // next item; null: items are dealt out in turn
  unsigned items;       // of the work table, without those that fill
  unsigned fill_items;  // by rows, where boxes of zeros do not fit the pattern
  float* totals;        // of closed sums, for each consumer (consumer.cuh); null where no strand is that long
  float* parts;         // of lists that are cut: what each consumer found (cut_lists.cuh)
  std::int64_t first_slot[cuda::kMaxBranches];  // of a branch there, 2 groups of consumers each
  int slots[cuda::kMaxBranches];                // of a strand
  int packed;        // items that a block takes at a time: more than one where strands are short
  int ahead;         // items that a block looks up before their turn
  int part_rows;     // lists in parts: rows of a box of keys
  int query_group;   // heads that share a head of k and v
  int first_branch;  // what dropout counts the first one as; else 0
  bool whole;        // rows of q are all positions in order
  PackedPlaces places;
  bool fill_boxes;  // uncovered rows are whole phases

  /// Counts items of a branch that are done, where branches wait for one another.
  LONGSPAN_DEVICE unsigned* finished(int branch, int range, int entry, int head) const {
    return base.scratch.finished +
           ((range * base.schedule.branch_count + branch) * base.tensors.batch + entry) * base.tensors.heads + head;
  }
  /// The map of a branch for rows of one phase; phases from `longer` on are one row shorter than those before it.
  LONGSPAN_DEVICE int map(int branch, int phase, int longer) const {
    return first_map[branch] + (longer > 0 && phase >= longer);
  }
};

/// An item as the warp groups of a block hand it on, in shared memory.
struct Task {
  int tiles;         // of keys; -1: there are no more items
  int above, below;  // tiles that are loaded before and after them, for items taken together with this one
  int keys, first_query, rows;
  int q_map, q_index, q_phase, k_map, k_index, k_phase;
  int head, kv_head, entry, q_row, stride;
  int branch, range, length, position, padding;
};

/// An item whose keys are what a list of a block mask names: tiles, in the order of the list.
struct ListTask : Task {
  bool listed;  // else the branch has no mask: all keys in order
  cuda::BlockWalk list;
  int first_row;              // rows of the tile before it are not of this query range
  bool cut;                   // the list is one of several of the tile
  std::int64_t slot;          // where its rows wait to be joined then
  int entries[kNearEntries];  // the first of the list, as lists.cuh reads them
};

/// An item of a call with extras (extras.cuh).
template <class Item>
struct ExtrasTask : Item {
  int first_tile;  // of keys: key_mask excludes all before it
  bool masked;     // it excludes others, too
  float slope;     // of ALiBi, in base 2, for a step of the strand
};

}  // namespace longspan::hopper
