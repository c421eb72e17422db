// The arithmetic this machine can do at best, measured: what a kernel's GFLOP/s are a fraction of.
#pragma once

#include "longspan/tensor_view.h"

namespace longspan::cli {

/// GFLOP/s of fused multiply-adds on registers with `threads` threads, the best of several short runs. Sums are float32
/// for every storage type but f64, so that 16-bit types share the float32 peak. Takes about a third of a second.
double measured_peak_gflops(DType dtype, int threads);

}  // namespace longspan::cli
