// The CPU engine for NEON (AArch64): float products, 4 lanes, 32 registers.
#include "hwy/detect_targets.h"
#undef HWY_TARGET
#define HWY_TARGET HWY_NEON
#include "kernels/cpu/engine-inl.h"
#include "kernels/cpu/isa.h"

namespace longspan::cpu {
constinit const Engine kNeonEngine = N_NEON::engine_of("cpu-neon", missing_neon);
}  // namespace longspan::cpu
