// Kernels over rows: one warp per (row, head) of a message and batch entry, whose lanes take 16 bytes each where rows
// are aligned, else two. Which run of the message a pair belongs to is found by bisection.
#include "comm/gpu/gpu_rows.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>

#include "device/run_kernel.cuh"

namespace longspan::gpu {
namespace {

using cuda::run_kernel;

constexpr int kThreads = 256, kWarp = 32, kWarps = kThreads / kWarp;

__device__ __forceinline__ char* row_at(const StridedRows& where, std::int64_t entry, std::int64_t row,
                                        std::int64_t head) {
  return where.data + entry * where.batch + row * where.row + head * where.head;
}

struct PairRows {
  std::int64_t message_k, message_v;  // rows of the message
  std::int64_t row;
  int head;
};

__device__ __forceinline__ PairRows find(const MessageRuns& all, std::int64_t pair, std::int64_t entry) {
  int low = 0, high = all.count - 1;
  while (low < high) {
    const int middle = (low + high + 1) / 2;
    if (all.runs[middle].first_pair <= pair) low = middle;
    else high = middle - 1;
  }
  const ShardRun& run = all.runs[low];
  const std::int64_t local = pair - run.first_pair, row = local / run.heads;
  const int head = static_cast<int>(local - row * run.heads);
  const std::int64_t key = entry * all.pairs + run.offset + row * run.heads + head;
  return {key, all.batch * all.pairs + key, run.shard_row + row * run.step, run.kv_head + head};
}

template <class Unit>
__global__ void __launch_bounds__(kThreads)
    pack_rows(char* payload, MessageRuns all, StridedRows k, StridedRows v, int units) {
  const std::int64_t flat = static_cast<std::int64_t>(blockIdx.x) * kWarps + threadIdx.x / kWarp;
  if (flat >= all.pairs * all.batch) return;
  const std::int64_t entry = flat / all.pairs;
  const PairRows at = find(all, flat - entry * all.pairs, entry);
  const auto* const from_k = reinterpret_cast<const Unit*>(row_at(k, entry, at.row, at.head));
  const auto* const from_v = reinterpret_cast<const Unit*>(row_at(v, entry, at.row, at.head));
  auto* const to_k = reinterpret_cast<Unit*>(payload) + at.message_k * units;
  auto* const to_v = reinterpret_cast<Unit*>(payload) + at.message_v * units;
  for (int i = threadIdx.x % kWarp; i < units; i += kWarp) {
    to_k[i] = from_k[i];
    to_v[i] = from_v[i];
  }
}

__global__ void __launch_bounds__(kThreads)
    add_rows(const float* payload, MessageRuns all, StridedRows dk, StridedRows dv, int columns) {
  const std::int64_t flat = static_cast<std::int64_t>(blockIdx.x) * kWarps + threadIdx.x / kWarp;
  if (flat >= all.pairs * all.batch) return;
  const std::int64_t entry = flat / all.pairs;
  const PairRows at = find(all, flat - entry * all.pairs, entry);
  auto* const to_k = reinterpret_cast<float*>(row_at(dk, entry, at.row, at.head));
  auto* const to_v = reinterpret_cast<float*>(row_at(dv, entry, at.row, at.head));
  for (int i = threadIdx.x % kWarp; i < columns; i += kWarp) {
    to_k[i] += payload[at.message_k * columns + i];
    to_v[i] += payload[at.message_v * columns + i];
  }
}

__device__ __forceinline__ void store(float* target, float value) { *target = value; }
__device__ __forceinline__ void store(__half* target, float value) { *target = __float2half(value); }
__device__ __forceinline__ void store(__nv_bfloat16* target, float value) { *target = __float2bfloat16(value); }

__device__ __forceinline__ float load(const float* source) { return *source; }
__device__ __forceinline__ float load(const __half* source) { return __half2float(*source); }
__device__ __forceinline__ float load(const __nv_bfloat16* source) { return __bfloat162float(*source); }

/// An element of a tensor by its number.
struct Element {
  std::int64_t entry, row, head;
  int column;
  __device__ __forceinline__ Element(std::int64_t flat, std::int64_t rows, std::int64_t heads, int columns)
      : entry(flat / columns / heads / rows),
        row(flat / columns / heads % rows),
        head(flat / columns % heads),
        column(static_cast<int>(flat % columns)) {}
  template <class T>
  __device__ __forceinline__ T* in(const StridedRows& where) const {
    return reinterpret_cast<T*>(row_at(where, entry, row, head)) + column;
  }
};

template <class To, class From>
__global__ void __launch_bounds__(kThreads) convert_rows(StridedRows to, StridedRows from, std::int64_t rows,
                                                         std::int64_t heads, std::int64_t elements, int columns) {
  const std::int64_t flat = static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (flat >= elements) return;
  const Element at(flat, rows, heads, columns);
  store(at.in<To>(to), load(at.in<From>(from)));
}

__global__ void __launch_bounds__(kThreads) sum_rows(StridedRows to, StridedRows from, std::int64_t rows,
                                                     std::int64_t heads, std::int64_t elements, int columns) {
  const std::int64_t flat = static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (flat >= elements) return;
  const Element at(flat, rows, heads, columns);
  *at.in<float>(to) += *at.in<float>(from);
}

/// A warp for each row. Two empty parts stay empty.
__global__ void __launch_bounds__(kThreads)
    mix_rows(StridedRows out, StridedRows lse, StridedRows more_out, StridedRows more_lse, std::int64_t rows,
             std::int64_t heads, std::int64_t count, int columns) {
  const std::int64_t flat = static_cast<std::int64_t>(blockIdx.x) * kWarps + threadIdx.x / kWarp;
  if (flat >= count) return;
  const Element at(flat, rows, heads, 1);
  const float more = *at.in<float>(more_lse);
  if (more == -INFINITY) return;
  float* const total = at.in<float>(lse);
  const float before = *total, largest = fmaxf(before, more);
  const float sum = largest + logf(expf(before - largest) + expf(more - largest));
  const float keep = expf(before - sum), add = expf(more - sum);
  for (int i = threadIdx.x % kWarp; i < columns; i += kWarp) {
    float* const value = at.in<float>(out) + i;
    *value = keep * *value + (more_out.data ? add * at.in<float>(more_out)[i] : 0.0f);
  }
  __syncwarp();  // every lane has read the old total
  if (threadIdx.x % kWarp == 0) *total = sum;
}

/// Each word is mixed with its place by a function that loses nothing, so that one changed word always shows.
__global__ void __launch_bounds__(kThreads)
    checksum(unsigned long long* sum, const unsigned char* data, std::size_t bytes, bool take_away) {
  const std::size_t words = (bytes + 7) / 8;
  unsigned long long own = 0;
  for (std::size_t i = static_cast<std::size_t>(blockIdx.x) * kThreads + threadIdx.x; i < words;
       i += static_cast<std::size_t>(gridDim.x) * kThreads) {
    unsigned long long word = 0;
    if (i * 8 + 8 <= bytes) word = reinterpret_cast<const unsigned long long*>(data)[i];
    else
      for (std::size_t b = i * 8; b < bytes; ++b) word = word << 8 | data[b];
    word = (word ^ i * 0x9E3779B97F4A7C15u) * 0xBF58476D1CE4E5B9u;
    own += (word ^ word >> 31) * 0x94D049BB133111EBu;
  }
  for (int distance = kWarp / 2; distance > 0; distance /= 2) own += __shfl_xor_sync(~0u, own, distance);
  if (threadIdx.x % kWarp == 0) atomicAdd(sum, take_away ? 0ull - own : own);
}

unsigned blocks(std::int64_t items, std::int64_t per_block) {
  return static_cast<unsigned>((items + per_block - 1) / per_block);
}

}  // namespace

cudaError_t start_pack(char* payload, const MessageRuns& runs, const StridedRows& k, const StridedRows& v, int bytes,
                       bool aligned, cudaStream_t stream) {
  const unsigned count = blocks(runs.pairs * runs.batch, kWarps);
  if (aligned) return run_kernel(pack_rows<uint4>, count, kThreads, 0, stream, payload, runs, k, v, bytes / 16);
  return run_kernel(pack_rows<std::uint16_t>, count, kThreads, 0, stream, payload, runs, k, v, bytes / 2);
}

cudaError_t start_add(const float* payload, const MessageRuns& runs, const StridedRows& dk, const StridedRows& dv,
                      int columns, cudaStream_t stream) {
  return run_kernel(add_rows, blocks(runs.pairs * runs.batch, kWarps), kThreads, 0, stream, payload, runs, dk, dv,
                    columns);
}

cudaError_t start_convert(DType to_dtype, const StridedRows& to, DType from_dtype, const StridedRows& from,
                          const RowCounts& counts, cudaStream_t stream) {
  const std::int64_t elements = counts.rows_of_all() * counts.columns;
  const auto run = [&](auto* kernel) {
    return run_kernel(kernel, blocks(elements, kThreads), kThreads, 0, stream, to, from, counts.rows, counts.heads,
                      elements, counts.columns);
  };
  if (from_dtype == DType::bf16) return run(convert_rows<float, __nv_bfloat16>);
  if (from_dtype == DType::f16) return run(convert_rows<float, __half>);
  if (to_dtype == DType::bf16) return run(convert_rows<__nv_bfloat16, float>);
  if (to_dtype == DType::f16) return run(convert_rows<__half, float>);
  return run(convert_rows<float, float>);
}

cudaError_t start_sum(const StridedRows& to, const StridedRows& from, const RowCounts& counts, cudaStream_t stream) {
  const std::int64_t elements = counts.rows_of_all() * counts.columns;
  return run_kernel(sum_rows, blocks(elements, kThreads), kThreads, 0, stream, to, from, counts.rows, counts.heads,
                    elements, counts.columns);
}

cudaError_t start_mix(const StridedRows& out, const StridedRows& lse, const StridedRows& more_out,
                      const StridedRows& more_lse, const RowCounts& counts, cudaStream_t stream) {
  const std::int64_t count = counts.rows_of_all();
  return run_kernel(mix_rows, blocks(count, kWarps), kThreads, 0, stream, out, lse, more_out, more_lse, counts.rows,
                    counts.heads, count, counts.columns);
}

cudaError_t start_checksum(std::uint64_t* sum, const std::byte* data, std::size_t bytes, bool take_away,
                           cudaStream_t stream) {
  const unsigned count = static_cast<unsigned>(std::min<std::size_t>((bytes / 8 + kThreads) / kThreads, 264));
  return run_kernel(checksum, count, kThreads, 0, stream, reinterpret_cast<unsigned long long*>(sum),
                    reinterpret_cast<const unsigned char*>(data), bytes, take_away);
}

}  // namespace longspan::gpu
