// The arithmetic this machine can do at best, measured: what a kernel's GFLOP/s are a fraction of.
#pragma once

#include <optional>

#include "longspan/tensor_view.h"

namespace longspan::cli {

/// GFLOP/s of vector multiply-adds on registers with `threads` threads, the best of several short runs: float64 for
/// f64, pairs of bfloat16 for bf16 where the CPU has them (AVX512-BF16), else float32. Takes about a third of a second.
double measured_peak_gflops(DType dtype, int threads);

/// The same for tiles of bfloat16 (AMX), where the CPU has them: far above the vectors', and above what a softmax
/// between two products lets attention use.
std::optional<double> measured_tile_peak_gflops(int threads);

}  // namespace longspan::cli
