// Stands in for the CUDA engine in builds without it: the same functions, which say how to get one.
#include "kernels/cuda/cuda.h"
#include "longspan/error.h"

namespace longspan::cuda {
namespace {

constexpr const char* kLeftOut =
    "was left out of this build: configure with -DLONGSPAN_CUDA=ON where nvcc 12.4 or newer is";

Verdict can_run(const Plan& plan, Pass) {
  if (plan.problem().device.type != DeviceType::cuda)
    return no("runs on GPUs, tensors are on {}", to_string(plan.problem().device));
  return no("{}", kLeftOut);
}

const Kernel kAbsent = {
    "cuda", can_run, [](const Plan&, Pass, int) { return std::size_t{0}; },
    [](const ForwardArguments&) { throw Unsupported(std::string("the CUDA engine ") + kLeftOut); },
    [](const BackwardArguments&) { throw Unsupported(std::string("the CUDA engine ") + kLeftOut); }};
const Kernel* const kList[] = {&kAbsent};

}  // namespace

std::span<const Kernel* const> kernels() { return kList; }

const std::vector<DeviceFacts>& devices() {
  static const std::vector<DeviceFacts> none;
  return none;
}
const std::string& why_none() {
  static const std::string reason = std::string("the CUDA engine ") + kLeftOut;
  return reason;
}
void fill_zero(const TensorView&, void*) { throw Unsupported(why_none()); }
void to_float(const ConstTensorView&, const TensorView&, void*) { throw Unsupported(why_none()); }
void fill_one(const TensorView&, void*) { throw Unsupported(why_none()); }
ConstTensorView download(const ConstTensorView&, std::vector<std::byte>&, void*) { throw Unsupported(why_none()); }
void append_token(const StrandCache&, const TokenRows&, const TokenRows&, int, void*) { throw Unsupported(why_none()); }
BlockMask chosen_blocks(const Plan&, std::size_t, const ConstTensorView&, const ConstTensorView&, const Call&,
                        std::span<const RowRange>) {
  throw Unsupported(why_none());
}

}  // namespace longspan::cuda
