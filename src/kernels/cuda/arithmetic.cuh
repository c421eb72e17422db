// Numbers and products as the kernels use them: types of multiplication, rounding, packing.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#include "kernels/ptx/ampere.cuh"

namespace longspan::cuda {

/// How numbers are multiplied: 16-bit types as they are; float32 rounded to TF32, or as sums of two TF32 numbers each,
/// whose three larger products together are as exact as float32 products.
struct Tf32 {};
struct SplitFloat {};
template <class Math>
struct ElementOf {
  using Type = Math;
};
template <>
struct ElementOf<Tf32> {
  using Type = float;
};
template <>
struct ElementOf<SplitFloat> {
  using Type = float;
};
template <class Math>
using Element = typename ElementOf<Math>::Type;

/// Of NaN it may be any number: low_part is NaN then.
__device__ __forceinline__ std::uint32_t high_part(std::uint32_t bits) { return (bits + 0x1000u) & 0xffffe000u; }
__device__ __forceinline__ std::uint32_t low_part(std::uint32_t bits) {
  return to_tf32(__float_as_uint(__uint_as_float(bits) - __uint_as_float(high_part(bits))));
}

/// c += a b, sums in float32: a is 16 rows of 32 bytes, b as many numbers by 8.
template <class Math>
__device__ __forceinline__ void multiply_add(float (&c)[4], const Fragment& a, std::uint32_t b0, std::uint32_t b1);
template <>
__device__ __forceinline__ void multiply_add<__nv_bfloat16>(float (&c)[4], const Fragment& a, std::uint32_t b0,
                                                            std::uint32_t b1) {
  multiply_add_bf16(c, a, b0, b1);
}
template <>
__device__ __forceinline__ void multiply_add<__half>(float (&c)[4], const Fragment& a, std::uint32_t b0,
                                                     std::uint32_t b1) {
  multiply_add_f16(c, a, b0, b1);
}
template <>
__device__ __forceinline__ void multiply_add<Tf32>(float (&c)[4], const Fragment& a, std::uint32_t b0,
                                                   std::uint32_t b1) {
  const Fragment rounded = {to_tf32(a[0]), to_tf32(a[1]), to_tf32(a[2]), to_tf32(a[3])};
  multiply_add_tf32(c, rounded, to_tf32(b0), to_tf32(b1));
}
template <>
__device__ __forceinline__ void multiply_add<SplitFloat>(float (&c)[4], const Fragment& a, std::uint32_t b0,
                                                         std::uint32_t b1) {
  const Fragment high = {high_part(a[0]), high_part(a[1]), high_part(a[2]), high_part(a[3])};
  const Fragment low = {low_part(a[0]), low_part(a[1]), low_part(a[2]), low_part(a[3])};
  multiply_add_tf32(c, low, high_part(b0), high_part(b1));
  multiply_add_tf32(c, high, low_part(b0), low_part(b1));
  multiply_add_tf32(c, high, high_part(b0), high_part(b1));
}

/// Two floats rounded to nearest, the first in the low half.
template <class T>
__device__ __forceinline__ std::uint32_t pack(float low, float high);
template <>
__device__ __forceinline__ std::uint32_t pack<__nv_bfloat16>(float low, float high) {
  const __nv_bfloat162 both = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<const std::uint32_t*>(&both);
}
template <>
__device__ __forceinline__ std::uint32_t pack<__half>(float low, float high) {
  const __half2 both = __floats2half2_rn(low, high);
  return *reinterpret_cast<const std::uint32_t*>(&both);
}

__device__ __forceinline__ float as_float(float value) { return value; }
__device__ __forceinline__ float as_float(__nv_bfloat16 value) { return __bfloat162float(value); }
__device__ __forceinline__ float as_float(__half value) { return __half2float(value); }
template <class T>
__device__ __forceinline__ T from_float(float value);
template <>
__device__ __forceinline__ float from_float<float>(float value) {
  return value;
}
template <>
__device__ __forceinline__ __nv_bfloat16 from_float<__nv_bfloat16>(float value) {
  return __float2bfloat16_rn(value);
}
template <>
__device__ __forceinline__ __half from_float<__half>(float value) {
  return __float2half_rn(value);
}

inline constexpr float kLog2E = 1.4426950408889634f;
inline constexpr float kLn2 = 0.6931471805599453f;
#define LONGSPAN_INFINITY __int_as_float(0x7f800000)

}  // namespace longspan::cuda
