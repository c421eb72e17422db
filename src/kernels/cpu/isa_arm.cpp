// What this AArch64 machine has, and the kernels that use it, fastest first.
#if defined(__linux__)
#include <sys/auxv.h>
#include <sys/prctl.h>
#endif

#include <array>

#include "kernels/cpu/cpu_kernels.h"
#include "kernels/cpu/isa.h"
#include "kernels/cpu/kernel_of.h"

namespace longspan::cpu {

const char* missing_neon() { return nullptr; }  // part of AArch64
const char* missing_sve() {
#if defined(__linux__)
  constexpr unsigned long kSveBit = 1ul << 22;  // HWCAP_SVE
  constexpr int kGetVectorLength = 51;          // PR_SVE_GET_VL
  if ((getauxval(AT_HWCAP) & kSveBit) != 0 && (prctl(kGetVectorLength) & 0xFFFF) == 32) return nullptr;
#endif
  return "SVE with vectors of 256 bits";
}

}  // namespace longspan::cpu

namespace longspan {

std::span<const Kernel* const> cpu_kernels() {
  static constexpr Kernel kSve = cpu::kernel_of<cpu::kSveEngine>("cpu-sve");
  static constexpr Kernel kNeon = cpu::kernel_of<cpu::kNeonEngine>("cpu-neon");
  static constexpr std::array<const Kernel*, 2> kKernels = {&kSve, &kNeon};
  return kKernels;
}

}  // namespace longspan
