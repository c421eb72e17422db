// The Hopper forward as the CUDA engine sees it.
#pragma once

#include <string>

#include "kernels/hopper/choice.h"
#include "kernels/kernel.h"

namespace longspan::hopper {

extern const Kernel kForward;

Choice choose(const Plan& plan);
std::string to_string(const Choice& choice);

}  // namespace longspan::hopper
