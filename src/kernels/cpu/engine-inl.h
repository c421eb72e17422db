// An Engine for the instruction set HWY_TARGET names, of float products unless told otherwise.
#pragma once

#include "kernels/cpu/backward-inl.h"
#include "kernels/cpu/forward-inl.h"

HWY_BEFORE_NAMESPACE();
namespace longspan::cpu {
namespace HWY_NAMESPACE {
namespace {

template <class Forward = FloatForward, class Backward = FloatBackward>
constexpr Engine engine_of(std::string_view name, const char* (*missing)()) {
  constexpr bool kPairs = Forward::Products::kPerUnit == 2;
  return {.name = name,
          .missing = missing,
          .bf16_products = kPairs,
          .forward_row_budget = 128 * 1024,
          .backward_key_budget = (kPairs ? 128 : 64) * 1024,
          .backward_key_tile = Backward::kKeyTile,
          .forward_bytes = forward_bytes<Forward>,
          .backward_bytes = backward_bytes<Backward>,
          .forward = forward<Forward>,
          .backward = backward<Backward>,
          .store_row = store_row};
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace longspan::cpu
HWY_AFTER_NAMESPACE();
