// The oracle: float64 attention that follows the definition line by line. Short, obvious, slow.
#pragma once

#include "kernels/kernel.h"

namespace longspan {

extern const Kernel kReferenceKernel;

/// Inputs and outputs may each have any floating-point dtype here (the operator itself wants one for all), so that a
/// float32 or bfloat16 run can be compared with float64 results of the same inputs.
void reference_forward(const ForwardArguments& arguments);
void reference_backward(const BackwardArguments& arguments);

/// Only the rows `positions` of dk and dv, as rows 0, 1, ... of those views; dq is not touched. The rows of q, out, lse
/// and dout named by the query ranges must be all that attend to these positions.
void reference_backward_keys(const BackwardArguments& arguments, std::span<const std::int64_t> positions);

}  // namespace longspan
