// What calls of every kernel on NVIDIA GPUs have in common.
#pragma once

#include "kernels/kernel.h"

namespace longspan::cuda {

/// The portable kernels: for few query rows, with tensor cores, with tensor cores in less shared memory, and without
/// tensor cores.
extern const Kernel kDecode, kMatrix, kCompact, kSimt;

/// What every kernel needs of a plan and of the machine.
Verdict fits(const Plan& plan);
/// Host memory or another GPU's handed over as a tensor of this one, and calls cancelled before they start.
void check_pointers(const ForwardArguments& arguments);
void check_pointers(const BackwardArguments& arguments);

}  // namespace longspan::cuda
