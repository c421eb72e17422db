// The CPU engine for AMX-BF16: tiles of bfloat16 pairs, AVX-512 for everything between the products.
#include "hwy/detect_targets.h"
#undef HWY_TARGET
#define HWY_TARGET HWY_AVX3
#include "hwy/highway.h"
#undef HWY_TARGET_STR
#define HWY_TARGET_STR HWY_TARGET_STR_AVX3 ",avx512bf16,amx-tile,amx-bf16"
#define LONGSPAN_CONVERTS_BF16  // by one instruction
#include <sys/syscall.h>
#include <unistd.h>

#include "kernels/cpu/amx-inl.h"
#include "kernels/cpu/amx.h"
#include "kernels/cpu/isa.h"

namespace longspan::cpu {

bool amx_permitted() {
#if defined(__linux__)
  constexpr long kRequestPermission = 0x1023, kTileData = 18;  // arch_prctl(ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA)
  static const bool permitted = syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
  return permitted;
#else
  return false;
#endif
}

constinit const Engine kAmxEngine = N_AVX3::engine_of<N_AVX3::AmxForward, N_AVX3::AmxBackward>("cpu-amx", missing_amx);

}  // namespace longspan::cpu
