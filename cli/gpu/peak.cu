// Multiply-adds on registers, and random numbers for the matrix product; see peak.h.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "gpu/peak.h"

namespace longspan::cli {
namespace {

constexpr int kThreads = 256, kSteps = 4096;

template <class Number>
__global__ void fill(Number* data, std::int64_t count) {
  for (std::int64_t i = blockIdx.x * std::int64_t{blockDim.x} + threadIdx.x; i < count;
       i += std::int64_t{gridDim.x} * blockDim.x) {
    std::uint64_t word = static_cast<std::uint64_t>(i) * 0x9E3779B97F4A7C15u;  // any mixing will do
    word ^= word >> 29;
    word *= 0xBF58476D1CE4E5B9u;
    data[i] = static_cast<Number>(static_cast<float>(word >> 40) * (2.0f / (1 << 24)) - 1.0f);
  }
}

/// D = A B + D with m16n8k16 (float32 sums), eight independent D per warp; 4096 FLOPs each.
template <bool kBFloat16>
__global__ void tensor_cores(float* sink) {
  constexpr int kChains = 8;
  float sums[kChains][4] = {};
  const unsigned a[4] = {threadIdx.x * 0x00010203u & 0x3F803F80u, 0x3C003B80u, 0xBC00BB80u, 0x3B003A80u};
  const unsigned b[2] = {0x3C80BC00u, 0xBB803B00u};
  for (int step = 0; step < kSteps; ++step) {
#pragma unroll
    for (int chain = 0; chain < kChains; ++chain) {
      float* d = sums[chain];
      if constexpr (kBFloat16) {
        asm volatile(
            "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
            : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
      } else {
        asm volatile(
            "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
            : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
      }
    }
  }
  float total = 0;
  for (int chain = 0; chain < kChains; ++chain) total += sums[chain][0] + sums[chain][3];
  if (total == 12345.0f) *sink = total;  // the sums must be seen to be used
}

__global__ void cuda_cores(float* sink) {
  constexpr int kChains = 16;
  float sums[kChains];
  for (int chain = 0; chain < kChains; ++chain) sums[chain] = static_cast<float>(threadIdx.x + chain);
  const float factor = 0.5f + 1e-3f * static_cast<float>(threadIdx.x);
  for (int step = 0; step < kSteps; ++step) {
#pragma unroll
    for (int chain = 0; chain < kChains; ++chain) sums[chain] = fmaf(sums[chain], factor, 1.0f);
  }
  float total = 0;
  for (int chain = 0; chain < kChains; ++chain) total += sums[chain];
  if (total == 12345.0f) *sink = total;
}

}  // namespace

cudaError_t fill_uniform(void* data, DType dtype, std::int64_t count) {
  constexpr int kBlocks = 1024;
  if (dtype == DType::bf16) fill<<<kBlocks, kThreads>>>(static_cast<__nv_bfloat16*>(data), count);
  else if (dtype == DType::f16) fill<<<kBlocks, kThreads>>>(static_cast<__half*>(data), count);
  else fill<<<kBlocks, kThreads>>>(static_cast<float*>(data), count);
  return cudaGetLastError();
}

cudaError_t multiply_registers(DType dtype, int blocks, float* sink, double& flops) {
  if (dtype == DType::bf16) tensor_cores<true><<<blocks, kThreads>>>(sink);
  else if (dtype == DType::f16) tensor_cores<false><<<blocks, kThreads>>>(sink);
  else cuda_cores<<<blocks, kThreads>>>(sink);
  const double each = dtype == DType::f32 ? kThreads * 16 * 2.0 : kThreads / 32 * 8 * 4096.0;
  flops = each * kSteps * blocks;
  return cudaGetLastError();
}

}  // namespace longspan::cli
