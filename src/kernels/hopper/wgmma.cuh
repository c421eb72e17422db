// Operands of matrix products of a warp group in shared memory, and the products (kernels/ptx/wgmma.cuh).
#pragma once

#include <cstdint>

#include "kernels/ptx/wgmma.cuh"

namespace longspan::hopper {

/// An operand in shared memory in rows of 128 bytes, swizzled over 1024. `distance`: bytes from one block of 64 columns
/// to the next, where columns are the operand's rows.
__device__ __forceinline__ std::uint64_t operand(std::uint32_t address, std::uint32_t distance) {
  constexpr std::uint64_t kEightRows = 1024 >> 4, kSwizzle128 = std::uint64_t{1} << 62;
  return (address & 0x3FFFF) >> 4 | static_cast<std::uint64_t>(distance >> 4) << 16 | kEightRows << 32 | kSwizzle128;
}

}  // namespace longspan::hopper
