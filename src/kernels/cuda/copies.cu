// Element by element copies of strided tensors: as float32, or as they are.
#include <algorithm>

#include "kernels/cuda/arithmetic.cuh"
#include "kernels/cuda/kernels.h"
#include "kernels/cuda/start.cuh"

namespace longspan::cuda {
namespace {

constexpr int kThreads = 256;

struct Index4 {
  std::int64_t size[4], from[4], to[4];
  int head_group;  // heads of the target for one of the source
};

Index4 index_of(const ConstTensorView& from, const ConstTensorView& to) {
  Index4 index;
  for (int d = 0; d < 4; ++d) {
    index.size[d] = to.sizes[static_cast<std::size_t>(d)];
    index.from[d] = from.strides[static_cast<std::size_t>(d)];
    index.to[d] = to.strides[static_cast<std::size_t>(d)];
  }
  index.head_group = static_cast<int>(to.heads() / std::max<std::int64_t>(1, from.heads()));
  return index;
}

std::int64_t elements(const ConstTensorView& view) {
  return view.batch() * view.rows() * view.heads() * view.columns();
}

/// One thread per element.
template <class From, class To>
__global__ void __launch_bounds__(kThreads) copy(const From* from, To* to, Index4 index, std::int64_t count) {
  const std::int64_t flat = static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (flat >= count) return;
  const std::int64_t column = flat % index.size[3], head = flat / index.size[3] % index.size[2],
                     row = flat / index.size[3] / index.size[2] % index.size[1],
                     entry = flat / index.size[3] / index.size[2] / index.size[1];
  const From value = from[entry * index.from[0] + row * index.from[1] + head / index.head_group * index.from[2] +
                          column * index.from[3]];
  To& target = to[entry * index.to[0] + row * index.to[1] + head * index.to[2] + column * index.to[3]];
  if constexpr (std::is_same_v<From, To>) target = value;
  else if constexpr (std::is_same_v<From, double>) target = static_cast<float>(value);
  else target = as_float(value);
}

template <class From, class To>
cudaError_t start_copy(const ConstTensorView& from, const TensorView& to, cudaStream_t stream) {
  const std::int64_t count = elements(to);
  if (count == 0) return cudaSuccess;
  return start<&copy<From, To>>((count + kThreads - 1) / kThreads, kThreads, 0, stream,
                                static_cast<const From*>(from.data), static_cast<To*>(to.data), index_of(from, to),
                                count);
}

}  // namespace

cudaError_t copy_as_float(const ConstTensorView& from, const TensorView& to, cudaStream_t stream) {
  if (from.dtype == DType::f64) return start_copy<double, float>(from, to, stream);
  return with_storage(from.dtype, [&]<class T>() { return start_copy<T, float>(from, to, stream); });
}

cudaError_t copy_elements(const ConstTensorView& from, const TensorView& to, cudaStream_t stream) {
  const std::int64_t size = size_of(from.dtype);
  return size == 8   ? start_copy<std::uint64_t, std::uint64_t>(from, to, stream)
         : size == 4 ? start_copy<std::uint32_t, std::uint32_t>(from, to, stream)
         : size == 2 ? start_copy<std::uint16_t, std::uint16_t>(from, to, stream)
                     : start_copy<std::uint8_t, std::uint8_t>(from, to, stream);
}

}  // namespace longspan::cuda
