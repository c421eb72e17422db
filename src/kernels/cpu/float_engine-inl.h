// The engine with float products, for the instruction set HWY_TARGET names.
#pragma once

#include "kernels/cpu/backward-inl.h"
#include "kernels/cpu/forward-inl.h"

HWY_BEFORE_NAMESPACE();
namespace longspan::cpu {
namespace HWY_NAMESPACE {
namespace {

constexpr Engine float_engine(std::string_view name, const char* (*missing)()) {
  return {.name = name,
          .missing = missing,
          .bf16_products = false,
          .forward_row_budget = 128 * 1024,
          .backward_key_budget = 64 * 1024,
          .backward_key_tile = FloatBackward::kKeyTile,
          .forward_bytes = forward_bytes<FloatForward>,
          .backward_bytes = backward_bytes<FloatBackward>,
          .forward = forward<FloatForward>,
          .backward = backward<FloatBackward>,
          .store_row = store_row};
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace longspan::cpu
HWY_AFTER_NAMESPACE();
