// The Hopper kernels as the CUDA engine sees them.
#pragma once

#include <string>

#include "kernels/hopper/choice.h"
#include "kernels/kernel.h"

namespace longspan::hopper {

extern const Kernel kKernel;

Choice choose(const Plan& plan);
std::string to_string(const Choice& choice);

Verdict can_run_backward(const Plan& plan);
std::size_t backward_workspace_bytes(const Plan& plan);
Verdict accepts_backward(const BackwardArguments& arguments);
void backward(const BackwardArguments& arguments);

}  // namespace longspan::hopper
