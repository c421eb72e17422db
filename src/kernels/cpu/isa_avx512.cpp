// The CPU engine for AVX-512 (F, VL, DQ, BW): float products, 16 lanes.
#include "hwy/detect_targets.h"
#undef HWY_TARGET
#define HWY_TARGET HWY_AVX3
#include "kernels/cpu/engine-inl.h"
#include "kernels/cpu/isa.h"

namespace longspan::cpu {
constinit const Engine kAvx512Engine = N_AVX3::engine_of("cpu-avx512", missing_avx512);
}  // namespace longspan::cpu
