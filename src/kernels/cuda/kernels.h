// The functions that start kernels, one translation unit each, so that a build compiles them side by side.
#pragma once

#include <cuda_runtime_api.h>

#include "kernels/cuda/launch.h"
#include "longspan/tensor_view.h"

namespace longspan::cuda {

/// Rows of one forward item, and keys of one backward item, which the work table is made for.
int forward_tile_rows(int columns);
int backward_tile_keys(int columns);

/// `features`: anything the lean instantiation leaves out (see ForwardShape).
cudaError_t forward_bf16(const Launch& launch, bool features, cudaStream_t stream);
cudaError_t forward_f16(const Launch& launch, bool features, cudaStream_t stream);
cudaError_t backward_bf16(const Launch& launch, bool features, cudaStream_t stream);
cudaError_t backward_f16(const Launch& launch, bool features, cudaStream_t stream);

/// delta of every query row, zeros in accumulators and in dk and dv that nothing may write.
cudaError_t prepare_backward(const Launch& launch, DType dtype, cudaStream_t stream);
/// Accumulators to dq, and to dk and dv where several items add to them.
cudaError_t finish_backward(const Launch& launch, DType dtype, cudaStream_t stream);

/// Any storage type on CUDA cores in float32, one warp per row.
cudaError_t forward_simt(const Launch& launch, DType dtype, cudaStream_t stream);
cudaError_t backward_simt(const Launch& launch, DType dtype, cudaStream_t stream);

/// Zeroes a strided tensor.
cudaError_t fill_zero(const Rows& rows, int element_bytes, std::int64_t batch, std::int64_t row_count,
                      std::int64_t heads, int columns, cudaStream_t stream);

}  // namespace longspan::cuda
