// The arithmetic this machine can do at best, measured: what a kernel's GFLOP/s are a fraction of.
#pragma once

#include <optional>

#include "longspan/tensor_view.h"

namespace longspan::cli {

/// GFLOP/s of fused multiply-adds on registers with `threads` threads, the best of several short runs: float64 for f64,
/// float32 for every other storage type, since that is what sums are. Takes about a third of a second.
double measured_peak_gflops(DType dtype, int threads);

/// The same for products of bfloat16 pairs (dot products, AMX tiles), where the CPU has instructions for them.
std::optional<double> measured_bf16_peak_gflops(int threads);

}  // namespace longspan::cli
