// A rank's tensors on the GPU, for the cases that every ring runs.
#pragma once

#include <list>
#include <map>

#include "gpu/device_case.h"
#include "ring/ring_cases.h"

namespace longspan::testing {

/// Inputs are copied to the GPU when asked for, results come back at the end.
class GpuPlace {
 public:
  ConstTensorView input(const Tensor& tensor) { return tensors_.emplace_back(tensor.view()).view(); }
  TensorView output(Tensor& tensor) {
    const auto& [target, copy] = results_.emplace_back(&tensor, DeviceTensor(std::as_const(tensor).view()));
    copy.poison();
    return copy.output();
  }
  Call call(Call call) {
    for (ConstTensorView* view : {&call.lengths, &call.key_mask, &call.alibi_slopes}) {
      if (view->given()) *view = tensors_.emplace_back(*view).view();
    }
    return call;
  }
  void finish() {
    expect_success(cudaDeviceSynchronize());
    for (const auto& [target, copy] : results_) {
      if (std::as_const(*target).view().rows() > 0) copy.download(*target);  // a rank may have none
    }
  }

 private:
  std::list<DeviceTensor> tensors_;
  std::list<std::pair<Tensor*, DeviceTensor>> results_;
};

/// What one GPU computes with a kernel; with keys in a piece, some kernels take other tiles.
inline Results run_on_gpu(const Case& c, const std::string& kernel, bool in_a_piece = false) {
  Options options = c.options;
  options.kernel = kernel;
  const Attention attention(c.pattern, options);
  DeviceCase device(c);
  Call call = device.call();
  const KeyPiece everything{0, 1, device.k.view(), device.v.view()};
  if (in_a_piece) call.pieces = {&everything, 1};
  device.forward(attention, call);
  device.backward(attention, call);
  return device.download();
}

/// Kernels that take a case's keys, and their gradients, in pieces; fastest first.
inline std::vector<std::string> kernels_for_pieces(const Case& c) {
  std::vector<std::string> names;
  Problem problem = Attention::problem(c.q.view(), c.k.view(), c.call());
  problem.device = kGpu;
  problem.has_pieces = problem.has_piece_gradients = true;
  const Plan plan(c.pattern, c.options, problem);
  for (const Kernel* kernel : cuda::kernels()) {
    if (kernel->can_run(plan, Pass::forward).ok && kernel->can_run(plan, Pass::backward).ok)
      names.emplace_back(kernel->name);
  }
  return names;
}

/// Kernels that a ring over this case runs with the bits of one GPU: those, and what takes packed strands.
inline std::vector<std::string> kernels_for_rings(const Case& c) {
  std::vector<std::string> names = kernels_for_pieces(c);
  Problem problem = Attention::problem(c.q.view(), c.k.view(), c.call());
  problem.device = kGpu;
  problem.is_share = true;
  const Plan plan(c.pattern, c.options, problem);
  for (const Kernel* kernel : cuda::kernels()) {
    if (kernel->takes_packed && kernel->can_run(plan, Pass::forward).ok && kernel->can_run(plan, Pass::backward).ok)
      names.emplace_back(kernel->name);
  }
  return names;
}

}  // namespace longspan::testing
