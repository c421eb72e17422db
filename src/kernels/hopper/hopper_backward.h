// Arithmetic of the Hopper backward that needs no GPU.
#pragma once

#include "kernels/kernel.h"

namespace longspan::hopper {

/// Rows of row values, and of sums of dq where branches share none, that a launch of this plan takes at most, whatever
/// its query ranges.
std::int64_t sum_rows(const Plan& plan);
/// Numbers in the sums of dq.
std::int64_t sum_count(const Plan& plan);

}  // namespace longspan::hopper
