// Block masks on their way to a GPU: lists for one kernel's tiles, made and uploaded when first asked for, kept with
// the mask (so with the plan that holds it). Calls after that copy nothing.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels/cuda/block_lists.h"
#include "longspan/block_mask.h"

namespace longspan::cuda {

/// Which lists a launch reads.
struct ListShape {
  int tile_rows = 0;  // a power of two, up to 16 blocks
  bool by_keys = false;
  bool splits = false;  // whether long lists may be several items
  bool causal = false;
};

/// Entries from which on a list is cut in two, where `lists` have `entries` together: twice the average, and never
/// where a list is soon done.
std::int64_t longest_list(std::int64_t entries, std::int64_t lists, int block_size);

/// Lists of all heads of a mask on the host, as they are uploaded.
struct HostLists {
  std::vector<BlockPlace> places;  // [mask head][places_of_head]
  std::vector<std::int32_t> blocks;
  std::vector<std::uint16_t> bits;
  std::int64_t places_of_head = 0, slots_of_head = 0;
};
HostLists make_lists(const BlockMask& mask, const ListShape& shape);
/// Lists whose arrays are elsewhere.
BlockLists view_of(const HostLists& lists, const BlockMask& mask, const ListShape& shape, const BlockPlace* places,
                   const std::int32_t* blocks, const std::uint16_t* bits);

/// Parts that the lists of a mask head are cut into at most, forward; 0 if none is worth it.
std::int64_t slots_of(const BlockMask& mask, const ListShape& shape);
/// Whether some key block is seen by so many block rows that its list is worth splitting.
bool has_long_columns(const BlockMask& mask);
/// Rows that the list of a tile of rows has at most, or that of a tile of keys.
std::int64_t most_listed_rows(const BlockMask& mask);

/// The lists of a mask on the current GPU. `captured`: a graph will read them, so they stay until the process ends.
BlockLists lists_of(const BlockMask& mask, const ListShape& shape, int device, bool captured);

/// How many lists this process has copied to GPUs.
std::uint64_t lists_uploaded();

}  // namespace longspan::cuda
