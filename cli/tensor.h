// Tensors that the command itself owns, and how much memory the machine has for them.
#pragma once

#include <memory>
#include <string_view>
#include <vector>

#include "problem_options.h"

namespace longspan::cli {

/// Memory aligned for every kernel, with the view that the operator takes.
class Tensor {
 public:
  Tensor() = default;
  /// [batch, rows, heads, columns] in a layout; contents are undefined.
  Tensor(std::string_view name, DType dtype, Layout layout, std::int64_t batch, std::int64_t rows, std::int64_t heads,
         std::int64_t columns);
  /// [batch, heads, rows] as lse is stored.
  static Tensor lse(std::string_view name, std::int64_t batch, std::int64_t rows, std::int64_t heads,
                    DType dtype = DType::f32);

  const TensorView& view() const { return view_; }
  void* data() const { return view_.data; }
  std::int64_t elements() const { return view_.sizes[0] * view_.sizes[1] * view_.sizes[2] * view_.sizes[3]; }
  std::size_t bytes() const { return bytes_; }

 private:
  struct Free {
    void operator()(void* memory) const;
  };
  void allocate(std::string_view name, const std::vector<std::int64_t>& sizes, DType dtype);

  std::unique_ptr<void, Free> memory_;
  std::size_t bytes_ = 0;
  TensorView view_;
};

/// Throws OutOfMemory if `bytes` are more than this machine could ever give; better now than by the kernel's killer.
void require_memory(double bytes);

/// The commands that compute hold their tensors in host memory; throws Unsupported for any other device.
void require_host(Device device);

/// Everything one training step touches, with random q, k, v and dout.
struct Workload {
  Tensor q, k, v, out, lse, dout, dq, dk, dv;
  /// Allocates and fills; `shape` says the sizes.
  Workload(const Problem& shape, Layout layout, std::uint64_t seed);
};

}  // namespace longspan::cli
