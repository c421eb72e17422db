// Instructions that every GPU since Ampere has, each in a thin wrapper: asynchronous copies, matrix fragments and
// products. All assembly of the kernels is in this folder, so that an emulator can stand in for it (tests/emulator).
#pragma once

#include <cstdint>

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

/// The same value, but the compiler does not know so: what depends on it cannot be computed before, to be carried
/// through a loop in registers that the loop needs.
__device__ __forceinline__ int computed_here(int value) {
  asm volatile("" : "+r"(value));
  return value;
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

/// c += a b, sums in float32: a is 16 rows of 32 bytes, b as many numbers by 8.
__device__ __forceinline__ void multiply_add_bf16(float (&c)[4], const Fragment& a, std::uint32_t b0,
                                                  std::uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};\n"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
__device__ __forceinline__ void multiply_add_f16(float (&c)[4], const Fragment& a, std::uint32_t b0, std::uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};\n"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
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

__device__ __forceinline__ void store_shared(std::uint32_t target, std::uint32_t word) {
  asm volatile("st.shared.b32 [%0], %1;\n" ::"r"(target), "r"(word) : "memory");
}
__device__ __forceinline__ void store_shared(std::uint32_t target, float2 pair) {
  asm volatile("st.shared.v2.f32 [%0], {%1,%2};\n" ::"r"(target), "f"(pair.x), "f"(pair.y) : "memory");
}
__device__ __forceinline__ void store_shared(std::uint32_t target, const std::uint32_t (&words)[4]) {
  asm volatile("st.shared.v4.b32 [%0], {%1,%2,%3,%4};\n" ::"r"(target), "r"(words[0]), "r"(words[1]), "r"(words[2]),
               "r"(words[3])
               : "memory");
}
__device__ __forceinline__ std::uint32_t load_shared_word(std::uint32_t source) {
  std::uint32_t word;
  asm volatile("ld.shared.b32 %0, [%1];\n" : "=r"(word) : "r"(source) : "memory");
  return word;
}

/// 2^x to two units in the last place; exp2(-inf) = 0.
__device__ __forceinline__ float fast_exp2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;\n" : "=f"(y) : "f"(x));
  return y;
}

/// The lesser, or NaN if either is.
__device__ __forceinline__ float least(float x, float y) {
  float least;
  asm("min.NaN.f32 %0, %1, %2;\n" : "=f"(least) : "f"(x), "f"(y));
  return least;
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

}  // namespace longspan::cuda
