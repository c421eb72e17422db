// Thin wrappers: asynchronous copies, matrix fragments and products that every GPU since Ampere has.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

namespace longspan::cuda {

/// Which of a multiprocessor's places for warps this one has, as long as it is not moved.
__device__ __forceinline__ unsigned hardware_warp() {
  unsigned place;
  asm volatile("mov.u32 %0, %%warpid;" : "=r"(place));
  return place;
}

__device__ __forceinline__ std::uint32_t shared_address(const void* pointer) {
  return static_cast<std::uint32_t>(__cvta_generic_to_shared(pointer));
}

/// 16 bytes to shared memory; zeros if not `valid` (the source is then not read).
__device__ __forceinline__ void copy_async(std::uint32_t target, const void* source, bool valid) {
  const int bytes = valid ? 16 : 0;
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;\n" ::"r"(target), "l"(source), "r"(bytes) : "memory");
}
/// The same for 8 bytes.
__device__ __forceinline__ void copy_async_pair(std::uint32_t target, const void* source, bool valid) {
  const int bytes = valid ? 8 : 0;
  asm volatile("cp.async.ca.shared.global [%0], [%1], 8, %2;\n" ::"r"(target), "l"(source), "r"(bytes) : "memory");
}
__device__ __forceinline__ void copy_commit() { asm volatile("cp.async.commit_group;\n" ::: "memory"); }
template <int kPending>
__device__ __forceinline__ void copy_wait() {
  asm volatile("cp.async.wait_group %0;\n" ::"n"(kPending) : "memory");
}

using Fragment = std::uint32_t[4];

__device__ __forceinline__ void load_fragment(Fragment& f, std::uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];\n"
               : "=r"(f[0]), "=r"(f[1]), "=r"(f[2]), "=r"(f[3])
               : "r"(address)
               : "memory");
}
__device__ __forceinline__ void load_fragment_transposed(Fragment& f, std::uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];\n"
               : "=r"(f[0]), "=r"(f[1]), "=r"(f[2]), "=r"(f[3])
               : "r"(address)
               : "memory");
}

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

__device__ __forceinline__ void multiply_add_tf32(float (&c)[4], const Fragment& a, std::uint32_t b0,
                                                  std::uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};\n"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
/// To the nearest number of 11 bits; the instruction ignores the bits below them. Before Hopper by hand, where NaN is
/// left as it is: half a unit more would turn one of all ones into 0.
__device__ __forceinline__ std::uint32_t to_tf32(std::uint32_t bits) {
  const float value = __uint_as_float(bits);
#if __CUDA_ARCH__ >= 900
  std::uint32_t rounded;
  asm("cvt.rn.tf32.f32 %0, %1;\n" : "=r"(rounded) : "f"(value));
  return rounded;
#else
  return value == value ? bits + 0x1000u : bits;
#endif
}
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
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};\n"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
template <>
__device__ __forceinline__ void multiply_add<__half>(float (&c)[4], const Fragment& a, std::uint32_t b0,
                                                     std::uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};\n"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
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

__device__ __forceinline__ void store_shared(std::uint32_t target, std::uint32_t word) {
  asm volatile("st.shared.b32 [%0], %1;\n" ::"r"(target), "r"(word) : "memory");
}
__device__ __forceinline__ void store_shared(std::uint32_t target, float2 pair) {
  asm volatile("st.shared.v2.f32 [%0], {%1,%2};\n" ::"r"(target), "f"(pair.x), "f"(pair.y) : "memory");
}
__device__ __forceinline__ std::uint32_t load_shared_word(std::uint32_t source) {
  std::uint32_t word;
  asm volatile("ld.shared.b32 %0, [%1];\n" : "=r"(word) : "r"(source) : "memory");
  return word;
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

/// 2^x to two units in the last place; exp2(-inf) = 0.
__device__ __forceinline__ float fast_exp2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;\n" : "=f"(y) : "f"(x));
  return y;
}

__device__ __forceinline__ unsigned load_acquire(const unsigned* pointer) {
  unsigned value;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];\n" : "=r"(value) : "l"(pointer) : "memory");
  return value;
}

/// Adds four floats to memory aligned to 16 bytes: one reduction where the GPU has it, four otherwise.
__device__ __forceinline__ void add_four(float* target, float4 value) {
#if __CUDA_ARCH__ >= 900
  asm volatile("red.global.add.v4.f32 [%0], {%1,%2,%3,%4};\n" ::"l"(target), "f"(value.x), "f"(value.y), "f"(value.z),
               "f"(value.w)
               : "memory");
#else
  atomicAdd(target, value.x);
  atomicAdd(target + 1, value.y);
  atomicAdd(target + 2, value.z);
  atomicAdd(target + 3, value.w);
#endif
}

inline constexpr float kLog2E = 1.4426950408889634f;
inline constexpr float kLn2 = 0.6931471805599453f;
#define LONGSPAN_INFINITY __int_as_float(0x7f800000)

}  // namespace longspan::cuda
