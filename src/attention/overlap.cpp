// Do two strided tensors share memory? Exact for tensors cut from one buffer (the slices of a fused qkv), where
// comparing address ranges alone would refuse what is fine.
#include <algorithm>
#include <array>
#include <cstdlib>
#include <span>

#include "attention/check.h"

namespace longspan {
namespace {

struct Dimension {
  std::int64_t stride = 0;  // bytes, positive
  std::int64_t span = 0;    // indices differ by at most this much
};

/// Whether offset = sum(stride_d * index_d) + x has a solution with |index_d| <= span_d and |x| < width. Dimensions are
/// in descending order of stride; each can only take the values that leave a remainder the smaller ones can reach.
bool reaches(std::span<const Dimension> dimensions, std::int64_t offset, std::int64_t width) {
  if (dimensions.empty()) return std::abs(offset) < width;
  const std::span<const Dimension> smaller = dimensions.subspan(1);
  std::int64_t reach = width - 1;
  for (const Dimension& inner : smaller) reach += inner.stride * inner.span;
  const Dimension& dimension = dimensions.front();
  const auto floor_divide = [](std::int64_t a, std::int64_t b) { return a / b - (a % b != 0 && (a < 0) != (b < 0)); };
  const std::int64_t low = std::max(-dimension.span, -floor_divide(reach - offset, dimension.stride));
  const std::int64_t high = std::min(dimension.span, floor_divide(offset + reach, dimension.stride));
  // More than a few candidates means interleaved strides; then "may overlap" is the safe answer.
  if (high - low > 8) return true;
  for (std::int64_t index = low; index <= high; ++index) {
    if (reaches(smaller, offset - index * dimension.stride, width)) return true;
  }
  return false;
}

struct Extent {
  std::uintptr_t begin, end;
};

Extent extent(const ConstTensorView& view) {
  const std::int64_t element = size_of(view.dtype);
  std::int64_t low = 0, high = element;
  for (int d = 0; d < 4; ++d) {
    const std::int64_t reach = (view.sizes[d] - 1) * view.strides[d] * element;
    (reach < 0 ? low : high) += reach;
  }
  const auto base = reinterpret_cast<std::uintptr_t>(view.data);
  return {base + static_cast<std::uintptr_t>(low), base + static_cast<std::uintptr_t>(high)};
}

bool empty(const ConstTensorView& view) {
  return !view.data || std::any_of(view.sizes.begin(), view.sizes.end(), [](std::int64_t size) { return size <= 0; });
}

/// Dimensions that move, in descending order of stride. No heap: this runs in every call.
struct Dimensions {
  std::array<Dimension, 4> all;
  std::size_t count = 0;
  operator std::span<const Dimension>() const { return {all.data(), count}; }
};

Dimensions dimensions_of(const ConstTensorView& view) {
  Dimensions dimensions;
  const std::int64_t element = size_of(view.dtype);
  for (int d = 0; d < 4; ++d) {
    if (view.sizes[d] <= 1 || view.strides[d] == 0) continue;
    const Dimension dimension{std::abs(view.strides[d]) * element, view.sizes[d] - 1};
    std::size_t place = dimensions.count++;
    for (; place > 0 && dimensions.all[place - 1].stride < dimension.stride; --place)
      dimensions.all[place] = dimensions.all[place - 1];
    dimensions.all[place] = dimension;
  }
  return dimensions;
}

}  // namespace

bool may_overlap(const ConstTensorView& a, const ConstTensorView& b) {
  if (empty(a) || empty(b) || a.device != b.device) return false;
  const Extent ea = extent(a), eb = extent(b);
  if (ea.end <= eb.begin || eb.end <= ea.begin) return false;
  // Same strides and sizes: the difference of addresses decides. Anything else that interleaves is refused.
  if (a.dtype != b.dtype || a.strides != b.strides || a.sizes != b.sizes) return true;
  const std::int64_t difference =
      static_cast<std::int64_t>(reinterpret_cast<std::uintptr_t>(b.data) - reinterpret_cast<std::uintptr_t>(a.data));
  return reaches(dimensions_of(a), difference, size_of(a.dtype));
}

bool may_overlap_itself(const ConstTensorView& view) {
  if (empty(view)) return false;
  for (int d = 0; d < 4; ++d) {
    if (view.sizes[d] > 1 && view.strides[d] == 0) return true;
  }
  // Nested strides (each at least as long as everything below it) are the common, provably distinct case.
  const Dimensions dimensions = dimensions_of(view);
  std::int64_t below = size_of(view.dtype);
  for (std::size_t i = dimensions.count; i-- > 0;) {
    if (dimensions.all[i].stride < below) return true;
    below += dimensions.all[i].stride * dimensions.all[i].span;
  }
  return false;
}

}  // namespace longspan
