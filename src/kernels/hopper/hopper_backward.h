// Arithmetic of the Hopper backward that needs no GPU.
#pragma once

#include "kernels/kernel.h"

namespace longspan::hopper {

/// Rows of sums of dq, and of row values, that a launch of this plan takes at most, whatever its query ranges.
std::int64_t sum_rows(const Plan& plan);

}  // namespace longspan::hopper
