// Python arrays as tensor views; see arrays.h.
#include "arrays.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <optional>
#include <string>

#include "longspan/error.h"

namespace longspan::python {
namespace {

/// Sizes and strides as Python sees them, before the role gives them a meaning.
struct Shape {
  static constexpr std::size_t kMost = 4;
  std::size_t dimensions = 0;
  std::array<std::int64_t, kMost> sizes{};
  std::array<std::int64_t, kMost> strides{};
};

struct RoleShape {
  std::size_t dimensions;
  const char* wanted;
};

RoleShape expected(Role role) {
  switch (role) {
    case Role::bnhd:
      return {4, "[batch, tokens, heads, head_dim]"};
    case Role::bhnd:
      return {4, "[batch, heads, tokens, head_dim]"};
    case Role::lse:
      return {3, "[batch, heads, query rows]"};
    case Role::key_mask:
      return {2, "[batch, tokens]"};
    case Role::lengths:
      return {1, "[batch]"};
    case Role::alibi_slopes:
      return {1, "[heads]"};
  }
  throw Error("unknown role of an array");
}

[[noreturn]] void refuse_shape(const char* name, std::size_t dimensions, Role role) {
  throw InvalidArgument(name,
                        fmt::format("{} has {} dimensions: {} is {}", name, dimensions, name, expected(role).wanted));
}

void arrange(const Shape& shape, const char* name, Role role, TensorView& view) {
  if (shape.dimensions != expected(role).dimensions) refuse_shape(name, shape.dimensions, role);
  const auto& n = shape.sizes;
  const auto& s = shape.strides;
  switch (role) {
    case Role::bnhd:
      view.sizes = n;
      view.strides = s;
      return;
    case Role::bhnd:
      view.sizes = {n[0], n[2], n[1], n[3]};
      view.strides = {s[0], s[2], s[1], s[3]};
      return;
    case Role::lse:
      view.sizes = {n[0], n[2], n[1], 1};
      view.strides = {s[0], s[2], s[1], 1};
      return;
    case Role::key_mask:
      view.sizes = {n[0], n[1], 1, 1};
      view.strides = {s[0], s[1], 0, 1};
      return;
    case Role::lengths:
      view.sizes = {n[0], 1, 1, 1};
      view.strides = {s[0], 0, 0, 1};
      return;
    case Role::alibi_slopes:
      view.sizes = {1, 1, n[0], 1};
      view.strides = {0, 0, s[0], 1};
      return;
  }
}

std::optional<DType> known_dtype(nb::dlpack::dtype dtype) {
  using Code = nb::dlpack::dtype_code;
  const auto code = static_cast<Code>(dtype.code);
  if (dtype.lanes != 1) return {};
  if (code == Code::Float && dtype.bits == 32) return DType::f32;
  if (code == Code::Float && dtype.bits == 16) return DType::f16;
  if (code == Code::Float && dtype.bits == 64) return DType::f64;
  if (code == Code::Bfloat && dtype.bits == 16) return DType::bf16;
  if (code == Code::Int && dtype.bits == 32) return DType::i32;
  if (code == Code::Int && dtype.bits == 64) return DType::i64;
  if (code == Code::Bool && dtype.bits == 8) return DType::boolean;
  return {};
}

DType dtype_of(nb::dlpack::dtype dtype, const char* name) {
  if (const auto known = known_dtype(dtype)) return *known;
  throw InvalidArgument(name, fmt::format("{} has an element type (code {}, {} bits) that nothing here takes: give "
                                          "float32, bfloat16, float16 or float64 (bool for key_mask, int32 or int64 "
                                          "for lengths)",
                                          name, int(dtype.code), int(dtype.bits)));
}

std::optional<Device> known_device(int type, int index) {
  if (type == nb::device::cpu::value || type == nb::device::cuda_host::value) return Device{DeviceType::cpu, 0};
  if (type == nb::device::cuda::value) return Device{DeviceType::cuda, index};
  return {};
}

Device device_of(int type, int index, const char* name) {
  if (const auto known = known_device(type, index)) return *known;
  throw InvalidArgument(name, fmt::format("{} is on a device of DLPack type {}: cpu and cuda are known", name, type));
}

template <class Array>
TensorView import(const Array& array, const char* name, Role role) {
  TensorView view;
  Shape shape;
  shape.dimensions = array.ndim();
  if (shape.dimensions > Shape::kMost) refuse_shape(name, shape.dimensions, role);
  for (std::size_t i = 0; i < shape.dimensions; ++i) {
    shape.sizes[i] = static_cast<std::int64_t>(array.shape(i));
    shape.strides[i] = array.stride(i);
  }
  view.data = const_cast<void*>(static_cast<const void*>(array.data()));
  view.dtype = dtype_of(array.dtype(), name);
  view.device = device_of(array.device_type(), array.device_id(), name);
  arrange(shape, name, role, view);
  return view;
}

std::int64_t integer(PyObject* object) {
  const long long value = PyLong_AsLongLong(object);
  if (value == -1 && PyErr_Occurred()) throw nb::python_error();
  return value;
}

std::size_t integers(PyObject* tuple, std::array<std::int64_t, Shape::kMost>& into, const char* name, Role role) {
  const Py_ssize_t count = PyTuple_Size(tuple);
  if (count < 0) throw nb::python_error();
  if (static_cast<std::size_t>(count) > into.size()) refuse_shape(name, static_cast<std::size_t>(count), role);
  for (Py_ssize_t i = 0; i < count; ++i) into[static_cast<std::size_t>(i)] = integer(PyTuple_GetItem(tuple, i));
  return static_cast<std::size_t>(count);
}

/// (pointer, dtype, device type, device index, shape, strides): what torch gives without the cost of a capsule.
TensorView unpack(PyObject* tuple, const char* name, Role role) {
  if (PyTuple_Size(tuple) != 6) throw InvalidArgument(name, fmt::format("{}: a raw tensor is a tuple of 6", name));
  TensorView view;
  Shape shape;
  const auto pointer = PyLong_AsUnsignedLongLong(PyTuple_GetItem(tuple, 0));
  if (PyErr_Occurred()) throw nb::python_error();
  view.data = reinterpret_cast<void*>(static_cast<std::uintptr_t>(pointer));
  view.dtype = static_cast<DType>(integer(PyTuple_GetItem(tuple, 1)));
  view.device = device_of(static_cast<int>(integer(PyTuple_GetItem(tuple, 2))),
                          static_cast<int>(integer(PyTuple_GetItem(tuple, 3))), name);
  shape.dimensions = integers(PyTuple_GetItem(tuple, 4), shape.sizes, name, role);
  integers(PyTuple_GetItem(tuple, 5), shape.strides, name, role);
  arrange(shape, name, role, view);
  return view;
}

/// A tensor as its own package describes it; it lives as long as the call's arguments do.
TensorView read(const ExchangeTable& table, nb::handle array, const char* name, Role role) {
  nb::dlpack::dltensor tensor;
  if (table.read(array.ptr(), &tensor) != 0) throw nb::python_error();
  TensorView view;
  Shape shape;
  shape.dimensions = static_cast<std::size_t>(tensor.ndim);
  if (shape.dimensions > Shape::kMost) refuse_shape(name, shape.dimensions, role);
  std::copy_n(tensor.shape, shape.dimensions, shape.sizes.begin());
  std::copy_n(tensor.strides, shape.dimensions, shape.strides.begin());
  view.data = static_cast<std::byte*>(tensor.data) + tensor.byte_offset;
  view.dtype = dtype_of(tensor.dtype, name);
  view.device = device_of(tensor.device.device_type, tensor.device.device_id, name);
  arrange(shape, name, role, view);
  return view;
}

}  // namespace

bool Arrays::takes(const nb::dlpack::dltensor& tensor) {
  return known_dtype(tensor.dtype) && known_device(tensor.device.device_type, tensor.device.device_id);
}

TensorView Arrays::view(nb::handle array, const char* name, Role role, bool writable) {
  if (array.is_none()) return {};
  if (PyTuple_Check(array.ptr())) return unpack(array.ptr(), name, role);
  if (table_) return read(*table_, array, name, role);
  if (writable) {
    nb::ndarray<> imported;
    if (!nb::try_cast(array, imported, false)) {
      throw InvalidArgument(name, fmt::format("{} is {}: give a writable NumPy array or another DLPack tensor", name,
                                              nb::type_name(array.type()).c_str()));
    }
    outputs_.push_back(std::move(imported));
    return import(outputs_.back(), name, role);
  }
  nb::ndarray<nb::ro> imported;
  if (!nb::try_cast(array, imported, false)) {
    throw InvalidArgument(name, fmt::format("{} is {}: give a NumPy array or anything with DLPack", name,
                                            nb::type_name(array.type()).c_str()));
  }
  inputs_.push_back(std::move(imported));
  return import(inputs_.back(), name, role);
}

ConstTensorView Arrays::input(nb::handle array, const char* name, Role role) { return view(array, name, role, false); }

TensorView Arrays::output(nb::handle array, const char* name, Role role) { return view(array, name, role, true); }

}  // namespace longspan::python
