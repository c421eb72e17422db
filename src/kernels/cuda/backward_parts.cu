// What surrounds the main backward kernel: delta of each row before it, accumulators to gradients after it.
//   A row is handled by 2^n neighbouring threads, eight columns each; heads are the fastest index, since that is
//   how rows lie in [B, N, H, D].
#include "kernels/cuda/arithmetic.cuh"
#include "kernels/cuda/kernels.h"
#include "kernels/cuda/start.cuh"

namespace longspan::cuda {
namespace {

constexpr int kThreads = 256;

template <class T>
struct Eight {
  static constexpr int kPieces = sizeof(T) / 2;  // of 16 bytes
  float value[8];
  __device__ __forceinline__ void load(const T* source, bool aligned) {
    alignas(16) T elements[8];
    if (aligned)
      for (int i = 0; i < kPieces; ++i)
        reinterpret_cast<uint4*>(elements)[i] = reinterpret_cast<const uint4*>(source)[i];
    else
      for (int i = 0; i < 8; ++i) elements[i] = source[i];
#pragma unroll
    for (int i = 0; i < 8; ++i) value[i] = as_float(elements[i]);
  }
  __device__ __forceinline__ void load_sums(const float* source, float factor) {
    const float4 low = *reinterpret_cast<const float4*>(source), high = *reinterpret_cast<const float4*>(source + 4);
    const float all[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
    for (int i = 0; i < 8; ++i) value[i] = factor * all[i];
  }
  __device__ __forceinline__ void store(T* target, bool aligned) const {
    alignas(16) T elements[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) elements[i] = from_float<T>(value[i]);
    if (aligned)
      for (int i = 0; i < kPieces; ++i)
        reinterpret_cast<uint4*>(target)[i] = reinterpret_cast<const uint4*>(elements)[i];
    else
      for (int i = 0; i < 8; ++i) target[i] = elements[i];
  }
};

/// (entry, row, head) of a group of `lanes` threads, and its chunk of 8 columns.
struct Place {
  int entry, head, chunk;
  std::int64_t row;
  bool valid;
};

__device__ __forceinline__ Place place_of(std::int64_t block, int lanes, std::int64_t rows, int heads, int batch,
                                          int columns) {
  const unsigned within = threadIdx.x / static_cast<unsigned>(lanes);
  const std::int64_t flat = block * (kThreads / lanes) + within;
  Place place;
  place.chunk = static_cast<int>(threadIdx.x - within * static_cast<unsigned>(lanes));
  const auto split = [&](auto index) {  // in 32 bits where they do: divisions would take longer than the memory
    using Index = decltype(index);
    const Index by_row = index / static_cast<Index>(heads);
    place.head = static_cast<int>(index - by_row * static_cast<Index>(heads));
    place.row = static_cast<std::int64_t>(by_row % static_cast<Index>(rows));
    place.entry = static_cast<int>(by_row / static_cast<Index>(rows));
  };
  if (flat >> 32 == 0 && rows >> 32 == 0) split(static_cast<unsigned>(flat));
  else split(flat);
  place.valid = place.entry < batch && place.chunk * 8 < columns;
  return place;
}

int lanes_for(int columns) { return columns <= 64 ? 8 : columns <= 128 ? 16 : 32; }
std::int64_t blocks_for(std::int64_t rows, int columns) {
  return (rows * lanes_for(columns) + kThreads - 1) / kThreads;
}
std::int64_t query_blocks(const Launch& a) {
  return blocks_for(a.tensors.query_rows * a.tensors.heads * a.tensors.batch, a.tensors.columns);
}
std::int64_t key_blocks(const Launch& a) {
  return blocks_for(static_cast<std::int64_t>(a.tensors.tokens) * a.tensors.kv_heads * a.tensors.batch,
                    a.tensors.columns);
}

/// Whether some branch covers a query row, so that it has a gradient. Known only to calls of one range; others say yes.
__device__ __forceinline__ bool has_gradient(const Launch& a, const Place& at) {
  if (a.schedule.range_count != 1 || a.schedule.ranges[0].count != a.tensors.query_rows) return true;
  const int length = a.tensors.length(at.entry), position = a.schedule.ranges[0].start + static_cast<int>(at.row);
  return position < length &&
         (!a.schedule.fill || a.schedule.covered(at.head, position, length, 0, a.schedule.branch_count));
}

/// Writes {lse in base 2, dscore_scale * (delta - dlse)} for each query row; lse = -inf becomes +inf, so that its
/// probabilities are 0.
template <class T>
__global__ void __launch_bounds__(kThreads)
    prepare(const __grid_constant__ Launch a, int lanes, std::int64_t first_key_block) {
  if (blockIdx.x >= first_key_block) {
    const Place at = place_of(blockIdx.x - first_key_block, lanes, a.tensors.tokens, a.tensors.kv_heads,
                              a.tensors.batch, a.tensors.columns);
    if (!at.valid) return;
    const int length = a.tensors.length(at.entry), position = static_cast<int>(at.row);
    // Only with one whole range and one query head per key head does a covered row have exactly one writer.
    const bool whole = a.schedule.range_count == 1 && a.schedule.ranges[0].count == a.tensors.tokens;
    if (whole && position < length && a.schedule.covered(at.head, position, length, 0, a.schedule.branch_count)) return;
    const Eight<T> zeros = {};
    zeros.store(
        reinterpret_cast<T*>(a.gradients.dk.data) + a.gradients.dk.offset(at.entry, at.row, at.head) + at.chunk * 8,
        a.tensors.aligned);
    zeros.store(
        reinterpret_cast<T*>(a.gradients.dv.data) + a.gradients.dv.offset(at.entry, at.row, at.head) + at.chunk * 8,
        a.tensors.aligned);
    return;
  }
  Place at = place_of(blockIdx.x, lanes, a.tensors.query_rows, a.tensors.heads, a.tensors.batch, a.tensors.columns);
  at.valid = at.valid && has_gradient(a, at);
  float delta = 0.0f;
  const std::int64_t packed = at.valid ? a.tensors.packed_row(at.entry, at.row, at.head) : 0;
  if (at.valid) {
    Eight<T> out, dout;
    out.load(
        reinterpret_cast<const T*>(a.tensors.out.data) + a.tensors.out.offset(at.entry, at.row, at.head) + at.chunk * 8,
        a.tensors.aligned);
    dout.load(reinterpret_cast<const T*>(a.gradients.dout.data) + a.gradients.dout.offset(at.entry, at.row, at.head) +
                  at.chunk * 8,
              a.tensors.aligned);
#pragma unroll
    for (int i = 0; i < 8; ++i) delta = fmaf(out.value[i], dout.value[i], delta);
    float4* const sums = reinterpret_cast<float4*>(a.gradients.dq_sum + packed * a.tensors.columns + at.chunk * 8);
    sums[0] = sums[1] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  }
  for (int distance = lanes / 2; distance > 0; distance /= 2) delta += __shfl_xor_sync(~0u, delta, distance);
  if (!at.valid || at.chunk != 0) return;
  const float lse = a.tensors.lse.at(at.entry, at.row, at.head);
  if (a.gradients.dlse.data) delta -= a.gradients.dlse.at(at.entry, at.row, at.head);
  const bool empty = lse == -LONGSPAN_INFINITY;
  for (int b = 0; b < (a.gradients.detached ? a.schedule.branch_count : 1);
       ++b) {  // detached: a launch of its own finds the deltas
    reinterpret_cast<float2*>(a.gradients.delta)[a.delta_row(b, at.entry, at.row, at.head)] =
        make_float2(empty ? LONGSPAN_INFINITY : lse * kLog2E,
                    empty || a.gradients.detached ? 0.0f : delta * a.gradients.dscore_scale);
  }
}

template <class T>
__global__ void __launch_bounds__(kThreads)
    finish(const __grid_constant__ Launch a, int lanes, std::int64_t first_key_block) {
  Eight<T> chunk = {};
  if (blockIdx.x < first_key_block) {
    const Place at =
        place_of(blockIdx.x, lanes, a.tensors.query_rows, a.tensors.heads, a.tensors.batch, a.tensors.columns);
    if (!at.valid) return;
    if (has_gradient(a, at))
      chunk.load_sums(
          a.gradients.dq_sum + a.tensors.packed_row(at.entry, at.row, at.head) * a.tensors.columns + at.chunk * 8,
          a.gradients.sum_scale);
    chunk.store(
        reinterpret_cast<T*>(a.gradients.dq.data) + a.gradients.dq.offset(at.entry, at.row, at.head) + at.chunk * 8,
        a.tensors.aligned);
    return;
  }
  const Place at = place_of(blockIdx.x - first_key_block, lanes, a.tensors.tokens, a.tensors.kv_heads, a.tensors.batch,
                            a.tensors.columns);
  if (!at.valid) return;
  const std::int64_t packed =
      ((static_cast<std::int64_t>(at.entry) * a.tensors.kv_heads + at.head) * a.tensors.tokens + at.row) *
          a.tensors.columns +
      at.chunk * 8;
  chunk.load_sums(a.gradients.dk_sum + packed, 1.0f);
  chunk.store(
      reinterpret_cast<T*>(a.gradients.dk.data) + a.gradients.dk.offset(at.entry, at.row, at.head) + at.chunk * 8,
      a.tensors.aligned);
  chunk.load_sums(a.gradients.dv_sum + packed, 1.0f);
  chunk.store(
      reinterpret_cast<T*>(a.gradients.dv.data) + a.gradients.dv.offset(at.entry, at.row, at.head) + at.chunk * 8,
      a.tensors.aligned);
}

/// One thread per element; only for calls without queries.
__global__ void __launch_bounds__(kThreads)
    zero(Rows rows, int element, std::int64_t row_count, std::int64_t heads, int columns, std::int64_t elements) {
  const std::int64_t flat = static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (flat >= elements) return;
  const std::int64_t column = flat % columns, head = flat / columns % heads, row = flat / columns / heads % row_count,
                     entry = flat / columns / heads / row_count;
  char* const target = rows.data + (rows.offset(entry, row, head) + column) * element;
  for (int i = 0; i < element; ++i) target[i] = 0;
}

}  // namespace

cudaError_t clear_key_sums(const Launch& a, cudaStream_t stream) {
  const std::size_t bytes = static_cast<std::size_t>(a.tensors.batch) * a.tensors.kv_heads * a.tensors.tokens *
                            a.tensors.columns * sizeof(float);
  const cudaError_t error = cudaMemsetAsync(a.gradients.dk_sum, 0, bytes, stream);
  return error != cudaSuccess ? error : cudaMemsetAsync(a.gradients.dv_sum, 0, bytes, stream);
}

cudaError_t prepare_backward(const Launch& a, DType dtype, cudaStream_t stream) {
  if (a.gradients.sum_keys && !a.gradients.piece_gradients) {
    if (const cudaError_t error = clear_key_sums(a, stream); error != cudaSuccess) return error;
  }
  const std::int64_t first = query_blocks(a),
                     blocks = first + (a.schedule.fill && !a.gradients.sum_keys ? key_blocks(a) : 0);
  const int lanes = lanes_for(a.tensors.columns);
  return with_storage(dtype,
                      [&]<class T>() { return start<&prepare<T>>(blocks, kThreads, 0, stream, a, lanes, first); });
}

cudaError_t finish_backward(const Launch& a, DType dtype, cudaStream_t stream) {
  const std::int64_t first = query_blocks(a),
                     blocks = first + (a.gradients.sum_keys && !a.gradients.piece_gradients ? key_blocks(a) : 0);
  const int lanes = lanes_for(a.tensors.columns);
  return with_storage(dtype,
                      [&]<class T>() { return start<&finish<T>>(blocks, kThreads, 0, stream, a, lanes, first); });
}

cudaError_t fill_zero(const Rows& rows, int element_bytes, std::int64_t batch, std::int64_t row_count,
                      std::int64_t heads, int columns, cudaStream_t stream) {
  const std::int64_t elements = batch * row_count * heads * columns;
  if (elements == 0) return cudaSuccess;
  return start<&zero>((elements + kThreads - 1) / kThreads, kThreads, 0, stream, rows, element_bytes, row_count, heads,
                      columns, elements);
}

}  // namespace longspan::cuda
