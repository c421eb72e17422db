// Starts the kernels for few query rows: three ways to multiply, three widths of heads, with features or without.
#include <algorithm>

#include "kernels/cuda/decode.cuh"
#include "kernels/cuda/early.cuh"
#include "kernels/cuda/start.cuh"

namespace longspan::cuda {
namespace {

/// As many warps as there are groups of chunks to merge.
int merge_threads(const DecodeGrid& grid) {
  int chunks = 1;
  for (int b = 0; b < grid.branch_count; ++b) chunks = std::max(chunks, grid.branches[b].chunks);
  return std::min(strands::ceil_divide(chunks, kDecodeFan) * kWarpThreads, kMergeThreads);
}

template <class Math>
cudaError_t start_with(const Decode& a, bool overlaps, cudaStream_t stream) {
  const bool features = a.rules.key_mask || a.rules.alibi || a.tensors.piece_count > 0 || !a.tensors.aligned;
  const auto run = [&]<int kColumns>() {
    const auto run_shape = [&]<bool kFeatures, bool kShared>() {
      using Shape = DecodeShape<Math, kColumns, kFeatures, kShared>;
      return start<&decode<Shape>>(a.grid.blocks, Shape::kThreads, Shape::kSharedBytes, stream, a);
    };
    const auto run_tiles = [&]<bool kFeatures>() {
      constexpr bool kSeveral = DecodeMemory(kWide<Math>, kColumns).warps > 1;
      return a.grid.shares ? run_shape.template operator()<kFeatures, kSeveral>()
                           : run_shape.template operator()<kFeatures, false>();
    };
    if (a.grid.blocks > 0) {
      const cudaError_t error =
          features ? run_tiles.template operator()<true>() : run_tiles.template operator()<false>();
      if (error != cudaSuccess) return error;
    }
    const dim3 results(static_cast<unsigned>(a.tensors.batch * a.grid.heads * a.grid.rows));
    return run_early_kernel(&merge_chunks<Element<Math>, (kColumns + 127) / 128>, overlaps, results,
                            merge_threads(a.grid), stream, a);
  };
  if (a.tensors.columns <= 64) return run.template operator()<64>();
  return a.tensors.columns <= 128 ? run.template operator()<128>() : run.template operator()<256>();
}

}  // namespace

cudaError_t start_decode(const Decode& a, DType dtype, bool overlaps, cudaStream_t stream) {
  if (dtype == DType::f32) return start_with<SplitFloat>(a, overlaps, stream);
  return dtype == DType::bf16 ? start_with<__nv_bfloat16>(a, overlaps, stream)
                              : start_with<__half>(a, overlaps, stream);
}

}  // namespace longspan::cuda
