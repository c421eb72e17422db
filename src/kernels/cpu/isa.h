// The engines of this build, and what the machine has of the instruction sets they need.
#pragma once

#include "kernels/cpu/engine.h"

namespace longspan::cpu {

// Each returns null if the process may use the instructions, else their name.
const char* missing_sse4();
const char* missing_avx2();
const char* missing_avx512();
const char* missing_avx512_bf16();
const char* missing_amx();
const char* missing_neon();
const char* missing_sve();

extern const Engine kSse4Engine, kAvx2Engine, kAvx512Engine, kAvx512Bf16Engine, kAmxEngine;  // x86
extern const Engine kNeonEngine, kSveEngine;                                                 // ARM

}  // namespace longspan::cpu
