// Allocation of the command's own tensors.
#include "tensor.h"

#include <fmt/format.h>

#include <algorithm>
#include <new>

#include "console.h"
#include "gpu/gpu.h"
#include "longspan/error.h"
#include "machine.h"
#include "random.h"

namespace longspan::cli {
namespace {

constexpr std::align_val_t kAlignment{128};

}  // namespace

void Tensor::Free::operator()(void* memory) const {
  if (device.type == DeviceType::cuda) gpu_free(device, memory);
  else ::operator delete(memory, kAlignment);
}

void Tensor::allocate(std::string_view name, const std::vector<std::int64_t>& sizes, DType dtype, Device device) {
  bytes_ = checked_bytes(name, sizes, size_of(dtype));
  if (device.type == DeviceType::cuda) {
    memory_ = {gpu_allocate(device, bytes_, name), Free{device}};
    return;
  }
  try {
    memory_ = {::operator new(std::max<std::size_t>(bytes_, 1), kAlignment), Free{device}};
  } catch (const std::bad_alloc&) {
    throw OutOfMemory(fmt::format("{} needs {}, which this machine does not have: use fewer tokens", name,
                                  short_bytes(static_cast<double>(bytes_))));
  }
}

Tensor::Tensor(std::string_view name, DType dtype, Layout layout, std::int64_t batch, std::int64_t rows,
               std::int64_t heads, std::int64_t columns, Device device) {
  allocate(name, {batch, rows, heads, columns}, dtype, device);
  view_ = view_of<void>(memory_.get(), dtype, layout, batch, rows, heads, columns);
  view_.device = device;
}

Tensor Tensor::lse(std::string_view name, std::int64_t batch, std::int64_t rows, std::int64_t heads, DType dtype,
                   Device device) {
  Tensor tensor;
  tensor.allocate(name, {batch, heads, rows}, dtype, device);
  tensor.view_ = TensorView::lse(tensor.memory_.get(), batch, rows, heads, device, dtype);
  return tensor;
}

Tensor Tensor::copy_of(std::string_view name, const ConstTensorView& view, Device device) {
  Tensor tensor;
  tensor.allocate(name, {view.sizes.begin(), view.sizes.end()}, view.dtype, device);
  tensor.view_ = {tensor.memory_.get(), view.dtype, device, view.sizes, view.strides};
  copy_bytes(tensor.data(), device, view.data, view.device, tensor.bytes_);
  return tensor;
}

void Tensor::copy_from(const Tensor& other) const {
  copy_bytes(data(), view_.device, other.data(), other.view_.device, bytes_);
}

void require_memory(double bytes, Device device) {
  const bool gpu = device.type == DeviceType::cuda;
  const double present = gpu ? gpu_free_bytes(device) : 0.9 * memory_bytes();
  if (bytes > present) {
    throw OutOfMemory(fmt::format("tensors of {} are needed and {} has {}: use fewer tokens", short_bytes(bytes),
                                  gpu ? to_string(device) : "this machine", short_bytes(present)));
  }
}

Workload::Workload(const Problem& shape, Layout layout, std::uint64_t seed) {
  checked_bytes("q", {shape.batch, shape.tokens, shape.heads, shape.head_dim}, size_of(shape.dtype));
  const double rows = static_cast<double>(shape.batch) * static_cast<double>(shape.tokens);
  const double numbers =
      4 * rows * static_cast<double>(shape.head_dim) * static_cast<double>(shape.heads + shape.kv_heads);
  require_memory(numbers * static_cast<double>(size_of(shape.dtype)), shape.device);
  const auto tensor = [&](std::string_view name, std::int64_t heads, Device device) {
    return Tensor(name, shape.dtype, layout, shape.batch, shape.tokens, heads, shape.head_dim, device);
  };
  std::uint32_t stream = 0;
  const auto input = [&](std::string_view name, std::int64_t heads) {
    Tensor made = tensor(name, heads, {});
    fill_normal(made.data(), shape.dtype, made.elements(), seed, stream++);
    return shape.device.type == DeviceType::cpu ? std::move(made) : made.on(shape.device);
  };
  q = input("q", shape.heads);
  k = input("k", shape.kv_heads);
  v = input("v", shape.kv_heads);
  dout = input("dout", shape.heads);
  out = tensor("out", shape.heads, shape.device);
  dq = tensor("dq", shape.heads, shape.device);
  dk = tensor("dk", shape.kv_heads, shape.device);
  dv = tensor("dv", shape.kv_heads, shape.device);
  lse = Tensor::lse("lse", shape.batch, shape.tokens, shape.heads, shape.dtype == DType::f64 ? DType::f64 : DType::f32,
                    shape.device);
}

Workload Workload::on(Device device) const {
  Workload copy;
  copy.q = q.on(device);
  copy.k = k.on(device);
  copy.v = v.on(device);
  copy.out = out.on(device);
  copy.lse = lse.on(device);
  copy.dout = dout.on(device);
  copy.dq = dq.on(device);
  copy.dk = dk.on(device);
  copy.dv = dv.on(device);
  return copy;
}

}  // namespace longspan::cli
