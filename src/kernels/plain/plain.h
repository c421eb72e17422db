// The fallback: attention in plain C++ for every CPU, dtype and option. Streams over strands, float32 sums.
#pragma once

#include "kernels/kernel.h"

namespace longspan {

extern const Kernel kPlainKernel;

namespace plain {
void forward(const ForwardArguments& arguments);
void backward(const BackwardArguments& arguments);
std::size_t backward_workspace(const Plan& plan);
}  // namespace plain

}  // namespace longspan
