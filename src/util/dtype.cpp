// Names of element types and devices.
#include <fmt/format.h>

#include <charconv>

#include "longspan/error.h"
#include "longspan/tensor_view.h"

namespace longspan {
namespace {

struct DTypeName {
  DType dtype;
  std::string_view name;
};
constexpr DTypeName kNames[] = {{DType::f32, "f32"},        {DType::bf16, "bf16"}, {DType::f16, "f16"},
                                {DType::f64, "f64"},        {DType::i32, "i32"},   {DType::i64, "i64"},
                                {DType::boolean, "boolean"}};

}  // namespace

std::string_view name_of(DType dtype) {
  for (const DTypeName& entry : kNames) {
    if (entry.dtype == dtype) return entry.name;
  }
  return "unknown";
}

DType parse_dtype(std::string_view name) {
  for (const DTypeName& entry : kNames) {
    if (entry.name == name) return entry.dtype;
  }
  throw InvalidArgument("dtype", fmt::format("dtype '{}' is unknown: use f32, bf16, f16 or f64", name));
}

std::string to_string(Device device) {
  return device.type == DeviceType::cpu ? "cpu" : fmt::format("cuda:{}", device.index);
}

Device parse_device(std::string_view name) {
  if (name == "cpu") return {};
  if (name == "cuda") return {DeviceType::cuda, 0};
  if (name.starts_with("cuda:")) {
    int index = -1;
    const auto [end, error] = std::from_chars(name.data() + 5, name.data() + name.size(), index);
    if (error == std::errc{} && end == name.data() + name.size() && index >= 0) return {DeviceType::cuda, index};
  }
  throw InvalidArgument("device", fmt::format("device '{}' is unknown: use cpu, cuda or cuda:0", name));
}

}  // namespace longspan
