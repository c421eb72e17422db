// The CPU engine for AVX-512 with BF16: dot products of bfloat16 pairs.
#include "hwy/detect_targets.h"
#undef HWY_TARGET
#define HWY_TARGET HWY_AVX3
#include "hwy/highway.h"
#undef HWY_TARGET_STR
#define HWY_TARGET_STR HWY_TARGET_STR_AVX3 ",avx512bf16"
#define LONGSPAN_CONVERTS_BF16  // by one instruction
#include "kernels/cpu/isa.h"
#include "kernels/cpu/pairs-inl.h"

namespace longspan::cpu {

constinit const Engine kAvx512Bf16Engine =
    N_AVX3::engine_of<N_AVX3::VectorForward<N_AVX3::PairLayout<1>>, N_AVX3::VectorBackward<N_AVX3::PairLayout<1>>>(
        "cpu-avx512-bf16", missing_avx512_bf16);

}  // namespace longspan::cpu
