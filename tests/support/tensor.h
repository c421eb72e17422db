// Tensors that tests own: random contents, any layout, poisoned outputs.
#pragma once

#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "longspan/longspan.h"
#include "util/half.h"

namespace longspan::testing {

enum class Layout { bnhd, bhnd, padded };  // padded: rows with a gap after each head, as slices of a larger tensor have

/// Writes a value in a dtype's own representation.
inline void put(void* data, DType dtype, std::size_t index, double value) {
  switch (dtype) {
    case DType::f64:
      static_cast<double*>(data)[index] = value;
      break;
    case DType::f32:
      static_cast<float*>(data)[index] = static_cast<float>(value);
      break;
    case DType::bf16:
      static_cast<BFloat16*>(data)[index] = from_float<BFloat16>(static_cast<float>(value));
      break;
    default:
      static_cast<Float16*>(data)[index] = from_float<Float16>(static_cast<float>(value));
  }
}

inline double get(const void* data, DType dtype, std::size_t index) {
  switch (dtype) {
    case DType::f64:
      return static_cast<const double*>(data)[index];
    case DType::f32:
      return static_cast<const float*>(data)[index];
    case DType::bf16:
      return to_float(static_cast<const BFloat16*>(data)[index]);
    default:
      return to_float(static_cast<const Float16*>(data)[index]);
  }
}

class Tensor {
 public:
  Tensor() = default;
  Tensor(DType dtype, std::int64_t batch, std::int64_t rows, std::int64_t heads, std::int64_t columns,
         Layout layout = Layout::bnhd) {
    const std::int64_t gap = layout == Layout::padded ? 3 : 0;
    storage_.resize(static_cast<std::size_t>((batch * rows * heads * (columns + gap) + 8) * size_of(dtype)));
    view_ = layout == Layout::bhnd ? TensorView::bhnd(storage_.data(), dtype, batch, rows, heads, columns)
                                   : TensorView::bnhd(storage_.data(), dtype, batch, rows, heads, columns);
    if (gap > 0) view_.strides = {rows * heads * (columns + gap), heads * (columns + gap), columns + gap, 1};
    poison();
  }
  /// [B, H, N] of float32 (float64 for float64 problems).
  static Tensor lse(DType dtype, std::int64_t batch, std::int64_t rows, std::int64_t heads) {
    Tensor tensor(dtype == DType::f64 ? DType::f64 : DType::f32, batch, rows, heads, 1);
    tensor.view_ = TensorView::lse(tensor.storage_.data(), batch, rows, heads, {}, tensor.view_.dtype);
    return tensor;
  }

  /// NaN everywhere, the gaps included: an element that is never written, or read before, shows.
  void poison() {
    const std::size_t elements = storage_.size() / static_cast<std::size_t>(size_of(view_.dtype));
    for (std::size_t i = 0; i < elements; ++i)
      put(storage_.data(), view_.dtype, i, std::numeric_limits<double>::quiet_NaN());
  }

  Tensor& fill_random(std::uint64_t seed, double deviation = 1.0) {
    std::mt19937_64 engine(seed);
    std::normal_distribution<double> normal(0, deviation);
    for_each([&](std::int64_t b, std::int64_t row, std::int64_t head, std::int64_t column) {
      set(b, row, head, column, normal(engine));
    });
    return *this;
  }

  template <class Body>
  void for_each(Body&& body) const {
    for (std::int64_t b = 0; b < view_.batch(); ++b)
      for (std::int64_t row = 0; row < view_.rows(); ++row)
        for (std::int64_t head = 0; head < view_.heads(); ++head)
          for (std::int64_t column = 0; column < view_.columns(); ++column) body(b, row, head, column);
  }

  void set(std::int64_t b, std::int64_t row, std::int64_t head, std::int64_t column, double value) {
    put(storage_.data(), view_.dtype, static_cast<std::size_t>(view_.offset(b, row, head) + column), value);
  }
  double at(std::int64_t b, std::int64_t row, std::int64_t head, std::int64_t column = 0) const {
    return get(storage_.data(), view_.dtype, static_cast<std::size_t>(view_.offset(b, row, head) + column));
  }

  /// The view is made anew, since a moved or copied tensor has storage elsewhere.
  TensorView view() {
    TensorView view = view_;
    view.data = storage_.data();
    return view;
  }
  ConstTensorView view() const {
    ConstTensorView view = view_;
    view.data = storage_.data();
    return view;
  }
  bool operator==(const Tensor& other) const { return storage_ == other.storage_; }

 private:
  std::vector<std::uint8_t> storage_;
  TensorView view_;
};

}  // namespace longspan::testing
