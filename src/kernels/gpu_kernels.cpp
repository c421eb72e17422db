// The list of kernels for NVIDIA GPUs; builds without CUDA have no_cuda.cpp instead.
#include "kernels/cuda/call.h"
#include "kernels/cuda/cuda.h"
#include "kernels/hopper/hopper.h"

namespace longspan::cuda {

std::span<const Kernel* const> kernels() {
  static const Kernel* const list[] = {&kDecode, &hopper::kKernel, &kMatrix, &kCompact, &kSimt};
  return list;
}

}  // namespace longspan::cuda
