// Starts the CUDA-core kernels: three storage types, three kernels each.
#include "kernels/cuda/simt.cuh"

#include "kernels/cuda/kernels.h"
#include "kernels/cuda/start.cuh"

namespace longspan::cuda {
namespace {

constexpr int kThreads = kSimtWarps * kLanes;

std::int64_t blocks_for(std::int64_t rows) { return (rows + kSimtWarps - 1) / kSimtWarps; }

std::int64_t rows_of(const Launch& a) {
  std::int64_t rows = 0;
  for (int r = 0; r < a.schedule.range_count; ++r) rows += a.schedule.ranges[r].count;
  return rows;
}

}  // namespace

cudaError_t forward_simt(const Launch& a, DType dtype, cudaStream_t stream) {
  const std::int64_t rows = rows_of(a);
  return with_storage(dtype, [&]<class T>() {
    return start<&simt_forward<T>>(blocks_for(rows * a.tensors.heads * a.tensors.batch), kThreads, 0, stream, a, rows);
  });
}

cudaError_t backward_queries_simt(const Launch& a, DType dtype, cudaStream_t stream) {
  const std::int64_t rows = rows_of(a);
  return with_storage(dtype, [&]<class T>() {
    return start<&simt_backward_queries<T>>(blocks_for(rows * a.tensors.heads * a.tensors.batch), kThreads, 0, stream,
                                            a, rows);
  });
}

cudaError_t backward_keys_simt(const Launch& a, DType dtype, cudaStream_t stream) {
  return with_storage(dtype, [&]<class T>() {
    return start<&simt_backward_keys<T>>(
        blocks_for(static_cast<std::int64_t>(a.tensors.tokens) * a.tensors.kv_heads * a.tensors.batch), kThreads, 0,
        stream, a);
  });
}

}  // namespace longspan::cuda
