// The arithmetic this machine can do at best, measured: what a kernel's GFLOP/s are a fraction of.
#pragma once

#include "longspan/tensor_view.h"

namespace longspan::cli {

/// GFLOP/s of multiply-adds on registers with `threads` threads, the best of several short runs. Sums are float32 for
/// every storage type but f64: float16 shares the float32 peak, bfloat16 has dot products or tiles of its own where the
/// CPU does. Takes about a third of a second.
double measured_peak_gflops(DType dtype, int threads);

}  // namespace longspan::cli
