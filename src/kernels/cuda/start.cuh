// Starting a kernel: storage type and head dim become template arguments, and shared memory beyond a default of 48 KB
// (static included) has to be asked for, once per device.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <atomic>
#include <cstdint>

#include "device/run_kernel.cuh"
#include "kernels/cuda/launch.h"
#include "longspan/tensor_view.h"

namespace longspan::cuda {

template <class Body>
cudaError_t with_storage(DType dtype, Body&& body) {
  if (dtype == DType::f32) return body.template operator()<float>();
  if (dtype == DType::bf16) return body.template operator()<__nv_bfloat16>();
  return body.template operator()<__half>();
}

/// Calls run<head dim, features> with the narrowest instantiation that holds `columns`: up to 64 and 128 lean (kFine:
/// 48, 96 and kWidest too), up to 64, 128 and kWidest with features.
template <bool kFine, int kWidest, class Run>
cudaError_t with_head_dim(int columns, bool features, const Run& run) {
  if (!features) {
    if constexpr (kFine) {
      if (columns <= 48) return run.template operator()<48, false>();
      if (columns > 64 && columns <= 96) return run.template operator()<96, false>();
      if (columns > 128) return run.template operator()<kWidest, false>();
    }
    if (columns <= 64) return run.template operator()<64, false>();
    if (columns <= 128) return run.template operator()<128, false>();
  }
  if (columns <= 64) return run.template operator()<64, true>();
  if constexpr (kWidest > 128) {
    if (columns > 128) return run.template operator()<kWidest, true>();
  }
  return run.template operator()<128, true>();
}

/// Block masks without features, and features without block masks, which 16-bit types have for head dims up to 128.
template <class Run>
cudaError_t with_one_of(const Launch& launch, bool features, const Run& run) {
  if (launch.tensors.columns <= 64)
    return features ? run.template operator()<64, true, false>() : run.template operator()<64, false, true>();
  return features ? run.template operator()<128, true, false>() : run.template operator()<128, false, true>();
}

template <auto kKernel, class... Arguments>
cudaError_t start(std::int64_t blocks, int threads, int shared_bytes, cudaStream_t stream,
                  const Arguments&... arguments) {
  static std::atomic<std::uint64_t> prepared{0};  // one bit per device
  if (shared_bytes > 0) {
    int device = 0;
    if (const cudaError_t error = cudaGetDevice(&device); error != cudaSuccess) return error;
    const std::uint64_t bit = std::uint64_t{1} << (device % 64);
    if (!(prepared.load(std::memory_order_acquire) & bit)) {
      const cudaError_t error =
          cudaFuncSetAttribute(kKernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes);
      if (error != cudaSuccess) return error;
      prepared.fetch_or(bit, std::memory_order_release);
    }
  }
  return run_kernel(kKernel, dim3(static_cast<unsigned>(blocks)), threads, shared_bytes, stream, arguments...);
}

}  // namespace longspan::cuda
