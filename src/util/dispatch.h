// Run-time values become compile-time types in one place; an unknown value throws.
#pragma once

#include <fmt/format.h>

#include <utility>

#include "longspan/error.h"
#include "util/half.h"

namespace longspan {

/// Calls body.operator()<Storage>() for a floating-point dtype of q, k and v.
template <class Body>
decltype(auto) dispatch_storage(DType dtype, Body&& body) {
  switch (dtype) {
    case DType::f32:
      return body.template operator()<float>();
    case DType::bf16:
      return body.template operator()<BFloat16>();
    case DType::f16:
      return body.template operator()<Float16>();
    case DType::f64:
      return body.template operator()<double>();
    default:
      throw Unsupported(fmt::format("dtype {}: attention runs on f32, bf16, f16 and f64", name_of(dtype)));
  }
}

}  // namespace longspan
