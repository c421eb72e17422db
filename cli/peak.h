// The arithmetic this machine can do at best, measured: what a kernel's GFLOP/s are a fraction of.
#pragma once

#include <string>
#include <string_view>

#include "longspan/tensor_view.h"

namespace longspan::cli {

struct Peak {
  double gflops = 0;
  std::string source;  ///< what was measured
};

/// What a CPU kernel multiplies with: vectors of float64 or float32, pairs of bfloat16 (AVX512-BF16), tiles of bfloat16
/// (AMX).
enum class Arithmetic { float64, float32, bf16_pairs, bf16_tiles };
Arithmetic arithmetic_of(std::string_view kernel, DType dtype);

/// The peak that a kernel's GFLOP/s are a fraction of: on the CPU of the instructions that it uses, on registers, with
/// as many threads as kernels get; on a GPU of a matrix product. The best of several short runs: a third of a second.
Peak measured_peak(Device device, DType dtype, std::string_view kernel);

}  // namespace longspan::cli
