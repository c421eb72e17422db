// A tensor that somebody else owns: pointer, element type, device, sizes and strides.
//
// Every tensor of the operator is indexed (batch, row, head, column). A dimension a tensor does not have is 1 long:
//   q, k, v, out and gradients  [B, rows, heads, D]
//   lse, dlse                   [B, rows, heads, 1]   (stored [B, H, Nq] by lse(): the row is the contiguous one)
//   key_mask                    [B, N, 1, 1]
//   lengths                     [B, 1, 1, 1]
//   alibi_slopes                [1, 1, H, 1]
// So [B, N, H, D] and [B, H, N, D] are one thing with two sets of strides, and no copy is made to change layout.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <type_traits>

#include "longspan/export.h"

namespace longspan {

enum class DType : std::uint8_t { f32, bf16, f16, f64, i32, i64, boolean };

/// Bytes of one element.
constexpr std::int64_t size_of(DType dtype) {
  switch (dtype) {
    case DType::f64:
    case DType::i64:
      return 8;
    case DType::f32:
    case DType::i32:
      return 4;
    case DType::bf16:
    case DType::f16:
      return 2;
    case DType::boolean:
      return 1;
  }
  return 0;
}

/// "f32", "bf16", ...
LONGSPAN_API std::string_view name_of(DType dtype);
/// The inverse of name_of; throws InvalidArgument for anything else.
LONGSPAN_API DType parse_dtype(std::string_view name);

enum class DeviceType : std::uint8_t { cpu, cuda };

struct Device {
  DeviceType type = DeviceType::cpu;
  int index = 0;
  bool operator==(const Device&) const = default;
};

/// "cpu" or "cuda:1".
LONGSPAN_API std::string to_string(Device device);
/// "cpu", "cuda" or "cuda:1"; throws InvalidArgument for anything else.
LONGSPAN_API Device parse_device(std::string_view name);

/// Void is `void` for outputs and `const void` for inputs; an output converts to an input, never back.
template <class Void>
struct BasicTensorView {
  Void* data = nullptr;
  DType dtype = DType::f32;
  Device device{};
  std::array<std::int64_t, 4> sizes{0, 0, 0, 0};    ///< batch, rows, heads, columns
  std::array<std::int64_t, 4> strides{0, 0, 0, 0};  ///< in elements; 0 is allowed on inputs

  std::int64_t batch() const { return sizes[0]; }
  std::int64_t rows() const { return sizes[1]; }
  std::int64_t heads() const { return sizes[2]; }
  std::int64_t columns() const { return sizes[3]; }
  /// False for a default-constructed view, which means "not given".
  bool given() const { return data != nullptr || sizes != std::array<std::int64_t, 4>{0, 0, 0, 0}; }

  /// Element offset of (batch, row, head, 0).
  std::int64_t offset(std::int64_t b, std::int64_t row, std::int64_t head) const {
    return b * strides[0] + row * strides[1] + head * strides[2];
  }
  /// Pointer to (batch, row, head, 0). T must match dtype.
  template <class T>
  auto at(std::int64_t b, std::int64_t row, std::int64_t head) const {
    using Element = std::conditional_t<std::is_const_v<Void>, const T, T>;
    return static_cast<Element*>(data) + offset(b, row, head);
  }

  /// The same address for whoever copies bytes.
  auto bytes_at(std::int64_t b, std::int64_t row, std::int64_t head) const {
    using Byte = std::conditional_t<std::is_const_v<Void>, const std::byte, std::byte>;
    return static_cast<Byte*>(data) + offset(b, row, head) * size_of(dtype);
  }

  operator BasicTensorView<const void>() const requires(!std::is_const_v<Void>) {
    return {data, dtype, device, sizes, strides};
  }

  /// Contiguous [batch, rows, heads, columns]: what PyTorch users call [b, n, h, d].
  static BasicTensorView bnhd(Void* data, DType dtype, std::int64_t batch, std::int64_t rows, std::int64_t heads,
                              std::int64_t columns, Device device = {}) {
    return {data, dtype, device, {batch, rows, heads, columns}, {rows * heads * columns, heads * columns, columns, 1}};
  }
  /// The same index space over contiguous [batch, heads, rows, columns] storage.
  static BasicTensorView bhnd(Void* data, DType dtype, std::int64_t batch, std::int64_t rows, std::int64_t heads,
                              std::int64_t columns, Device device = {}) {
    return {data, dtype, device, {batch, rows, heads, columns}, {heads * rows * columns, columns, rows * columns, 1}};
  }
  /// Contiguous [batch, heads, rows], as lse and dlse are stored.
  static BasicTensorView lse(Void* data, std::int64_t batch, std::int64_t rows, std::int64_t heads, Device device = {},
                             DType dtype = DType::f32) {
    return {data, dtype, device, {batch, rows, heads, 1}, {heads * rows, 1, rows, 1}};
  }
  /// Contiguous [batch, rows], as key_mask is stored.
  static BasicTensorView mask(Void* data, std::int64_t batch, std::int64_t rows, Device device = {}) {
    return {data, DType::boolean, device, {batch, rows, 1, 1}, {rows, 1, 0, 1}};
  }
  /// One value per batch entry, as lengths are stored.
  static BasicTensorView per_batch(Void* data, DType dtype, std::int64_t batch, Device device = {}) {
    return {data, dtype, device, {batch, 1, 1, 1}, {1, 0, 0, 1}};
  }
  /// One value per head, as alibi_slopes are stored.
  static BasicTensorView per_head(Void* data, std::int64_t heads, Device device = {}, DType dtype = DType::f32) {
    return {data, dtype, device, {1, 1, heads, 1}, {0, 0, 1, 1}};
  }
};

using TensorView = BasicTensorView<void>;
using ConstTensorView = BasicTensorView<const void>;

}  // namespace longspan
