// Stands in for the Hopper kernels in builds for other GPUs only.
#include "kernels/hopper/hopper.h"
#include "longspan/error.h"

namespace longspan::hopper {
namespace {

[[noreturn]] void refuse() { throw Unsupported("the Hopper kernels were left out of this build"); }

}  // namespace

const Kernel kKernel = {
    .name = "hopper-wgmma",
    .can_run = [](const Plan&,
                  Pass) { return no("was left out of this build: LONGSPAN_CUDA_ARCHITECTURES has no 90"); },
    .workspace_bytes = [](const Plan&, Pass, int) { return std::size_t{0}; },
    .forward = [](const ForwardArguments&) { refuse(); },
    .backward = [](const BackwardArguments&) { refuse(); }};

}  // namespace longspan::hopper
