// A processor the CPU engine has no instruction set for: the plain kernel runs instead.
#include "kernels/cpu/cpu_kernels.h"

namespace longspan {

std::span<const Kernel* const> cpu_kernels() { return {}; }

}  // namespace longspan
