// Block masks on their way to a GPU: lists for one kernel's tiles, made and uploaded when first asked for, kept with
// the mask (so with the plan that holds it). Calls after that copy nothing.
#pragma once

#include <cuda_runtime_api.h>

#include "kernels/cuda/block_lists.h"
#include "longspan/block_mask.h"

namespace longspan::cuda {

/// Which lists a launch reads.
struct ListShape {
  int tile_rows = 0;  // a power of two, up to 16 blocks
  bool by_keys = false;
  bool splits = false;  // by keys: whether long lists may be several items
  bool causal = false;
};

/// Entries from which on a list is cut in two, where a list has `mean` on average: never for lists that are soon done.
std::int64_t longest_list(std::int64_t mean, int block_size);

/// Whether some key block is seen by so many block rows that its list is worth splitting.
bool has_long_columns(const BlockMask& mask);

/// The lists of a mask on the current GPU. `captured`: a graph will read them, so they stay until the process ends.
BlockLists lists_of(const BlockMask& mask, const ListShape& shape, int device, bool captured);

}  // namespace longspan::cuda
