// Whole tensors, row by row: zeroed, or converted to another dtype.
#pragma once

#include <algorithm>
#include <cstring>

#include "kernels/cuda/cuda.h"
#include "longspan/tensor_view.h"
#include "util/dispatch.h"
#include "util/parallel.h"

namespace longspan {

/// The dtype that partial results and gradients are summed in.
inline DType sum_dtype(DType dtype) { return dtype == DType::f64 ? DType::f64 : DType::f32; }

inline constexpr std::int64_t kRowsAtOnce = 64;  // of a thread: enough that sharing out rows costs nothing

/// Calls body(entry, row, head) for all rows of a tensor on the host, in parallel where that pays.
template <class Body>
void for_each_row(const ConstTensorView& view, Body&& body) {
  const std::int64_t rows = view.rows(), blocks = (rows + kRowsAtOnce - 1) / kRowsAtOnce;
  const std::int64_t bytes = view.batch() * rows * view.heads() * view.columns() * size_of(view.dtype);
  parallel_for(threads_for_bytes(bytes), view.batch() * blocks, {}, [&](int, std::int64_t item) {
    const std::int64_t begin = item % blocks * kRowsAtOnce;
    for (std::int64_t row = begin; row < std::min(begin + kRowsAtOnce, rows); ++row) {
      for (std::int64_t head = 0; head < view.heads(); ++head) body(item / blocks, row, head);
    }
  });
}

/// Zeroes every element of a strided tensor.
inline void clear(const TensorView& view, void* stream = nullptr) {
  if (view.device.type == DeviceType::cuda) return cuda::fill_zero(view, stream);
  const auto bytes = static_cast<std::size_t>(view.columns() * size_of(view.dtype));
  for_each_row(view, [&](std::int64_t entry, std::int64_t row, std::int64_t head) {
    std::memset(view.bytes_at(entry, row, head), 0, bytes);
  });
}

/// target = source on the host, each in its own dtype; heads of the source serve several of the target's where it has
/// more.
inline void convert_on_host(const TensorView& target, const ConstTensorView& source) {
  const std::int64_t group = target.heads() / std::max<std::int64_t>(1, source.heads());
  dispatch_storage(target.dtype, [&]<class To>() {
    dispatch_storage(source.dtype, [&]<class From>() {
      for_each_row(target, [&](std::int64_t entry, std::int64_t row, std::int64_t head) {
        To* const to = target.at<To>(entry, row, head);
        const From* const from = source.at<From>(entry, row, head / group);
        for (std::int64_t column = 0; column < target.columns(); ++column) {
          if constexpr (std::is_same_v<To, From>) to[column] = from[column];
          else to[column] = from_float<To>(to_float(from[column]));
        }
      });
    });
  });
}

}  // namespace longspan
