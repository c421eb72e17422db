// Allocation of the command's own tensors.
#include "tensor.h"

#include <fmt/format.h>

#include <algorithm>
#include <new>

#include "console.h"
#include "longspan/error.h"
#include "machine.h"
#include "random.h"

namespace longspan::cli {
namespace {

constexpr std::align_val_t kAlignment{128};

}  // namespace

void Tensor::Free::operator()(void* memory) const { ::operator delete(memory, kAlignment); }

void Tensor::allocate(std::string_view name, const std::vector<std::int64_t>& sizes, DType dtype) {
  bytes_ = checked_bytes(name, sizes, size_of(dtype));
  try {
    memory_.reset(::operator new(std::max<std::size_t>(bytes_, 1), kAlignment));
  } catch (const std::bad_alloc&) {
    throw OutOfMemory(fmt::format("{} needs {}, which this machine does not have: use fewer tokens", name,
                                  short_bytes(static_cast<double>(bytes_))));
  }
}

Tensor::Tensor(std::string_view name, DType dtype, Layout layout, std::int64_t batch, std::int64_t rows,
               std::int64_t heads, std::int64_t columns) {
  allocate(name, {batch, rows, heads, columns}, dtype);
  view_ = view_of<void>(memory_.get(), dtype, layout, batch, rows, heads, columns);
}

Tensor Tensor::lse(std::string_view name, std::int64_t batch, std::int64_t rows, std::int64_t heads, DType dtype) {
  Tensor tensor;
  tensor.allocate(name, {batch, heads, rows}, dtype);
  tensor.view_ = TensorView::lse(tensor.memory_.get(), batch, rows, heads, {}, dtype);
  return tensor;
}

void require_memory(double bytes) {
  const double present = memory_bytes();
  if (bytes > 0.9 * present) {
    throw OutOfMemory(fmt::format("tensors of {} are needed and this machine has {}: use fewer tokens",
                                  short_bytes(bytes), short_bytes(present)));
  }
}

void require_host(Device device) {
  if (device.type == DeviceType::cpu) return;
  throw Unsupported(fmt::format("--device {}: this command computes on the CPU in this version; leave --device out",
                                to_string(device)));
}

Workload::Workload(const Problem& shape, Layout layout, std::uint64_t seed) {
  checked_bytes("q", {shape.batch, shape.tokens, shape.heads, shape.head_dim}, size_of(shape.dtype));
  const double rows = static_cast<double>(shape.batch) * static_cast<double>(shape.tokens);
  const double numbers =
      4 * rows * static_cast<double>(shape.head_dim) * static_cast<double>(shape.heads + shape.kv_heads);
  require_memory(numbers * static_cast<double>(size_of(shape.dtype)));
  const auto tensor = [&](std::string_view name, std::int64_t heads) {
    return Tensor(name, shape.dtype, layout, shape.batch, shape.tokens, heads, shape.head_dim);
  };
  q = tensor("q", shape.heads);
  k = tensor("k", shape.kv_heads);
  v = tensor("v", shape.kv_heads);
  out = tensor("out", shape.heads);
  dout = tensor("dout", shape.heads);
  dq = tensor("dq", shape.heads);
  dk = tensor("dk", shape.kv_heads);
  dv = tensor("dv", shape.kv_heads);
  lse = Tensor::lse("lse", shape.batch, shape.tokens, shape.heads, shape.dtype == DType::f64 ? DType::f64 : DType::f32);
  std::uint32_t stream = 0;
  for (const Tensor* input : {&q, &k, &v, &dout}) {
    fill_normal(input->data(), shape.dtype, input->elements(), seed, stream++);
  }
}

}  // namespace longspan::cli
