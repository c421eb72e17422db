// Tensors that the command itself owns, and how much memory the machine has for them.
#pragma once

#include <memory>
#include <string_view>
#include <vector>

#include "problem_options.h"

namespace longspan::cli {

/// Memory on a device, aligned for every kernel, with the view that the operator takes.
class Tensor {
 public:
  Tensor() = default;
  /// [batch, rows, heads, columns] in a layout; contents are undefined.
  Tensor(std::string_view name, DType dtype, Layout layout, std::int64_t batch, std::int64_t rows, std::int64_t heads,
         std::int64_t columns, Device device = {});
  /// [batch, heads, rows] as lse is stored.
  static Tensor lse(std::string_view name, std::int64_t batch, std::int64_t rows, std::int64_t heads,
                    DType dtype = DType::f32, Device device = {});
  /// A copy on some device of a tensor without gaps.
  static Tensor copy_of(std::string_view name, const ConstTensorView& view, Device device);

  /// A copy on some device.
  Tensor on(Device device) const { return copy_of("a copy", view_, device); }
  /// Takes the contents of a tensor of the same shape, wherever it is.
  void copy_from(const Tensor& other) const;

  const TensorView& view() const { return view_; }
  void* data() const { return view_.data; }
  std::int64_t elements() const { return view_.sizes[0] * view_.sizes[1] * view_.sizes[2] * view_.sizes[3]; }
  std::size_t bytes() const { return bytes_; }

 private:
  struct Free {
    Device device;
    void operator()(void* memory) const;
  };
  void allocate(std::string_view name, const std::vector<std::int64_t>& sizes, DType dtype, Device device);

  std::unique_ptr<void, Free> memory_;
  std::size_t bytes_ = 0;
  TensorView view_;
};

/// Throws OutOfMemory if `bytes` are more than the device has: an error here instead of a kill by the OOM killer later.
void require_memory(double bytes, Device device);

/// Everything one training step touches, with random q, k, v and dout.
struct Workload {
  Tensor q, k, v, out, lse, dout, dq, dk, dv;
  /// Allocates and fills; `shape` says the sizes and the device. The numbers are the same on every device.
  Workload(const Problem& shape, Layout layout, std::uint64_t seed);
  /// A copy on some device.
  Workload on(Device device) const;

 private:
  Workload() = default;
};

}  // namespace longspan::cli
