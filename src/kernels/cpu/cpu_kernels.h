// The CPU engine as the registry sees it.
#pragma once

#include <span>

#include "kernels/kernel.h"

namespace longspan {

/// One kernel per instruction set of this build, fastest first; whether the machine has it is for can_run to say.
std::span<const Kernel* const> cpu_kernels();

}  // namespace longspan
