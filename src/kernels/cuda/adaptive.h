// adaptive(density) on the GPU: means of blocks, their products, the best columns of each block row as bits, and lists
// made of those bits. All on the call's stream, without a copy to the host.
#pragma once

#include <cuda_runtime_api.h>

#include "kernels/cuda/launch.h"
#include "kernels/cuda/mask_lists.h"
#include "longspan/plan.h"

namespace longspan::cuda {

/// Sizes of one adaptive branch. Masks are per batch entry and head.
struct AdaptiveShape {
  double density;
  int block_size, blocks, kept;  // kept: of the longest row
  int mask_heads, kv_heads, columns;
  static constexpr int kPadding = 8;                      // eight rows of scores side by side lie in different banks
  int words() const { return (blocks + 31) / 32; }        // of a row of bits
  int stride() const { return words() * 32 + kPadding; }  // of a row of scores
  std::int64_t entries() const { return static_cast<std::int64_t>(mask_heads) * blocks * kept; }
};
AdaptiveShape adaptive_shape(const Plan& plan, const BranchPlan& branch);

/// Where everything of one adaptive branch lies in the workspace.
struct AdaptivePlaces {
  std::size_t query_means, key_means, bits, cursors, places, blocks, block_bits, total;
  explicit AdaptivePlaces(const AdaptiveShape& shape);
};

/// Most blocks that a row can be chosen from in the shared memory of a GPU.
int most_adaptive_blocks(int shared_bytes, int columns);

/// What choosing the blocks of a branch takes. `all` holds every query range of the call.
struct AdaptiveCall {
  const Launch& all;
  AdaptiveShape shape;
  int branch;
  DType dtype;
  int shared_bytes;  // most that one thread block may use
  std::byte* workspace;
  cudaStream_t stream;
};
/// Chooses the blocks of a branch into the bits of its workspace, unless an earlier launch of the call has chosen them,
/// and makes their lists for a launch.
cudaError_t adaptive_lists(const AdaptiveCall& call, const ListShape& of, bool chosen, BlockLists& lists);

}  // namespace longspan::cuda
