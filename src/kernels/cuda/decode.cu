// Starts the kernel for few query rows: three ways to multiply, three widths of heads, with features or without.
#include "kernels/cuda/decode.cuh"

#include "kernels/cuda/start.cuh"

namespace longspan::cuda {
namespace {

template <class Math>
cudaError_t start_with(const Decode& a, cudaStream_t stream) {
  const bool features = a.rules.key_mask || a.rules.alibi || a.tensors.piece_count > 0 || !a.tensors.aligned;
  const auto run = [&]<int kColumns>() {
    const auto run_shape = [&]<bool kFeatures>() {
      using Shape = DecodeShape<Math, kColumns, kFeatures>;
      return start<&decode<Shape>>(a.grid.blocks, Shape::kThreads, Shape::kSharedBytes, stream, a);
    };
    return features ? run_shape.template operator()<true>() : run_shape.template operator()<false>();
  };
  if (a.tensors.columns <= 64) return run.template operator()<64>();
  return a.tensors.columns <= 128 ? run.template operator()<128>() : run.template operator()<256>();
}

}  // namespace

cudaError_t start_decode(const Decode& a, DType dtype, cudaStream_t stream) {
  if (dtype == DType::f32) return start_with<SplitFloat>(a, stream);
  return dtype == DType::bf16 ? start_with<__nv_bfloat16>(a, stream) : start_with<__half>(a, stream);
}

}  // namespace longspan::cuda
