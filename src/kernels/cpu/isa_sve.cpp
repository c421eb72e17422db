// The CPU engine for SVE of 256 bits (Neoverse V1): float products, 8 lanes. Compiled with -msve-vector-bits=256, so
// that vectors have a size and can be held in arrays; machines with other lengths run NEON.
#include "hwy/detect_targets.h"
#undef HWY_TARGET
#define HWY_TARGET HWY_SVE_256
#include "kernels/cpu/engine-inl.h"
#include "kernels/cpu/isa.h"

namespace longspan::cpu {
constinit const Engine kSveEngine = N_SVE_256::engine_of("cpu-sve", missing_sve);
}  // namespace longspan::cpu
