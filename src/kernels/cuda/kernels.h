// The functions that start kernels, one translation unit each, so that a build compiles them side by side.
#pragma once

#include <cuda_runtime_api.h>

#include "kernels/cuda/launch.h"
#include "longspan/tensor_view.h"

namespace longspan::cuda {

/// Rows of one forward item and keys of one backward item, which the work table is made for, and the shared memory that
/// a block takes at most. `wide`: float32 storage. The shapes of the kernels are held to these where they are started.
constexpr int tile_rows(bool wide, int columns) { return wide || columns > 128 ? 64 : 128; }
inline constexpr int kCompactKeys = 64, kCompactBytes = 81 * 1024;
inline constexpr int kQueryPassRows = 64;  // of dq in a pass of its own
constexpr int forward_shared_bytes(bool wide, int columns) {
  const int bytes = columns * (wide ? 4 : 2);
  return (bytes <= 128 ? 48 : bytes <= 256 ? 64 : bytes <= 512 ? 96 : 128) * 1024;
}
constexpr int backward_shared_bytes(bool wide, int columns) {
  if (wide) return (columns <= 64 ? 73 : 137) * 1024;
  return (columns <= 64 ? 81 : columns <= 128 ? 161 : 145) * 1024;
}

/// Whether a forward runs with three blocks on a multiprocessor: full attention of head dims 56 and 64. Causal items
/// differ in length: of more blocks at once some multiprocessors get several long ones.
inline constexpr int kCrowdedBlocks = 3;
inline bool crowded(bool wide, const Launch& launch, bool features) {
  return !wide && !features && !launch.schedule.listed && !launch.rules.causal && launch.tensors.columns > 48 &&
         launch.tensors.columns <= 64;
}

/// `features`: anything the lean instantiation leaves out (see ForwardShape).
using StartPass = cudaError_t (*)(const Launch& launch, bool features, cudaStream_t stream);
cudaError_t forward_bf16(const Launch& launch, bool features, cudaStream_t stream);
cudaError_t forward_f16(const Launch& launch, bool features, cudaStream_t stream);
cudaError_t forward_tf32(const Launch& launch, bool features, cudaStream_t stream);
cudaError_t forward_f32(const Launch& launch, bool features, cudaStream_t stream);
cudaError_t backward_bf16(const Launch& launch, bool features, cudaStream_t stream);
cudaError_t backward_f16(const Launch& launch, bool features, cudaStream_t stream);
cudaError_t backward_tf32(const Launch& launch, bool features, cudaStream_t stream);
cudaError_t backward_f32(const Launch& launch, bool features, cudaStream_t stream);
/// dq alone, each row written once.
cudaError_t backward_queries_bf16(const Launch& launch, bool features, cudaStream_t stream);
cudaError_t backward_queries_f16(const Launch& launch, bool features, cudaStream_t stream);
cudaError_t backward_queries_tf32(const Launch& launch, bool features, cudaStream_t stream);
cudaError_t backward_queries_f32(const Launch& launch, bool features, cudaStream_t stream);

/// delta of every query row, zeros in accumulators and in dk and dv that nothing may write.
cudaError_t prepare_backward(const Launch& launch, DType dtype, cudaStream_t stream);
/// Accumulators to dq, and to dk and dv where several items add to them.
cudaError_t finish_backward(const Launch& launch, DType dtype, cudaStream_t stream);
/// Zeros in the accumulators of dk and dv.
cudaError_t clear_key_sums(const Launch& launch, cudaStream_t stream);

/// Any storage type on CUDA cores in float32, one warp per row.
cudaError_t forward_simt(const Launch& launch, DType dtype, cudaStream_t stream);
/// dq and the deltas, then dk and dv.
cudaError_t backward_queries_simt(const Launch& launch, DType dtype, cudaStream_t stream);
cudaError_t backward_keys_simt(const Launch& launch, DType dtype, cudaStream_t stream);

/// A strided tensor into another, as float32 (heads repeated where the target has more) or as it is.
cudaError_t copy_as_float(const ConstTensorView& from, const TensorView& to, cudaStream_t stream);
cudaError_t copy_elements(const ConstTensorView& from, const TensorView& to, cudaStream_t stream);

/// Zeroes a strided tensor.
cudaError_t fill_zero(const Rows& rows, int element_bytes, std::int64_t batch, std::int64_t row_count,
                      std::int64_t heads, int columns, cudaStream_t stream);

}  // namespace longspan::cuda
