// What this x86 machine has, and the kernels that use it, fastest first.
#include <array>

#include "kernels/cpu/amx.h"
#include "kernels/cpu/cpu_kernels.h"
#include "kernels/cpu/isa.h"
#include "kernels/cpu/kernel_of.h"
#include "util/x86.h"

namespace longspan::cpu {

const char* missing_sse4() { return has_sse4() ? nullptr : "SSE4.2"; }
const char* missing_avx2() { return has_avx2() ? nullptr : "AVX2, FMA and F16C"; }
const char* missing_avx512() {
  if (has_avx512()) return nullptr;
  return has_avx2() ? "AVX-512 F, VL, DQ and BW" : missing_avx2();
}
const char* missing_avx512_bf16() {
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  const bool there = __get_cpuid_count(7, 1, &eax, &ebx, &ecx, &edx) && (eax >> 5 & 1u);
  return there ? missing_avx512() : "AVX512-BF16";
}
const char* missing_amx() {
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  const bool there = __get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) && (edx >> 22 & 1u) && (edx >> 24 & 1u);
  if (!there || missing_avx512_bf16()) return "AMX-BF16";
  return amx_permitted() ? nullptr : "the system's permission to use AMX tiles";
}

}  // namespace longspan::cpu

namespace longspan {

std::span<const Kernel* const> cpu_kernels() {
  static constexpr Kernel kAmx = cpu::kernel_of<cpu::kAmxEngine>("cpu-amx");
  static constexpr Kernel kBf16 = cpu::kernel_of<cpu::kAvx512Bf16Engine>("cpu-avx512-bf16");
  static constexpr Kernel kAvx512 = cpu::kernel_of<cpu::kAvx512Engine>("cpu-avx512");
  static constexpr Kernel kAvx2 = cpu::kernel_of<cpu::kAvx2Engine>("cpu-avx2");
  static constexpr Kernel kSse4 = cpu::kernel_of<cpu::kSse4Engine>("cpu-sse4");
  static constexpr std::array<const Kernel*, 5> kKernels = {&kAmx, &kBf16, &kAvx512, &kAvx2, &kSse4};
  return kKernels;
}

}  // namespace longspan
