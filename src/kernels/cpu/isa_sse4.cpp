// The CPU engine for SSE4.2: float products, 4 lanes.
#include "hwy/detect_targets.h"
#undef HWY_TARGET
#define HWY_TARGET HWY_SSE4
#include "kernels/cpu/engine-inl.h"
#include "kernels/cpu/isa.h"

namespace longspan::cpu {
constinit const Engine kSse4Engine = N_SSE4::engine_of("cpu-sse4", missing_sse4);
}  // namespace longspan::cpu
