// The CPU engine for AVX2 and FMA: float products, 8 lanes.
#include "hwy/detect_targets.h"
#undef HWY_TARGET
#define HWY_TARGET HWY_AVX2
#include "kernels/cpu/engine-inl.h"
#include "kernels/cpu/isa.h"

namespace longspan::cpu {
constinit const Engine kAvx2Engine = N_AVX2::engine_of("cpu-avx2", missing_avx2);
}  // namespace longspan::cpu
