// Bounds of options and problems, checked where a plan is made: C++, Python and the command all come through here.
#pragma once

#include "longspan/plan.h"

namespace longspan {

/// Throws InvalidArgument where dropout or a factor cannot be used.
void check_options(const Options& options);
/// Throws InvalidArgument where a size is out of range, or all together are more than 64-bit offsets can address.
void check_problem(const Problem& problem);
/// A factor that float32 can hold, with room for the logarithms that kernels multiply it by.
bool is_usable_factor(double factor);

}  // namespace longspan
