// A forward in two parts, for a ring: first what needs no remote row, then the rest.
#pragma once

#include <memory>

#include "device/scratch.h"
#include "kernels/kernel.h"
#include "longspan/attention.h"

namespace longspan {

/// Checked by the caller; all rows of keys are in pieces.
class SplitForward {
 public:
  SplitForward(const Attention& attention, const ConstTensorView& q, const ConstTensorView& k, const ConstTensorView& v,
               const TensorView& out, const TensorView& lse, const Call& call);
  /// Whether the kernel that takes the call can.
  bool possible() const { return kernel_.runs_parts; }
  void run(const ForwardPart& part, const Call& call) const;

 private:
  ForwardArguments arguments(const Call& call) const;
  std::size_t needed_bytes() const;

  std::shared_ptr<const Plan> plan_;
  ConstTensorView q_, k_, v_;
  TensorView out_, lse_;
  int threads_;
  const Kernel& kernel_;
  Scratch workspace_;
};

}  // namespace longspan
