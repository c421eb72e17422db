// Holds plan and workspace between the two parts.
#include "attention/split_forward.h"

#include "attention/kernel_choice.h"
#include "longspan/threads.h"

namespace longspan {

SplitForward::SplitForward(const Attention& attention, const ConstTensorView& q, const ConstTensorView& k,
                           const ConstTensorView& v, const TensorView& out, const TensorView& lse, const Call& call)
    : plan_(attention.plan(Attention::problem(q, k, call))),
      q_(q),
      k_(k),
      v_(v),
      out_(out),
      lse_(lse),
      threads_(num_threads()),
      kernel_(KernelChoice::of(*plan_)->taking(Pass::forward, arguments(call))),
      workspace_(q.device, call.stream, needed_bytes()) {}

std::size_t SplitForward::needed_bytes() const {
  return possible() && q_.rows() > 0 ? kernel_.workspace_bytes(*plan_, Pass::forward, threads_) : 0;
}

ForwardArguments SplitForward::arguments(const Call& call) const {
  return {*plan_, call, call.query_ranges, q_, k_, v_, out_, lse_, threads_};
}

void SplitForward::run(const ForwardPart& part, const Call& call) const {
  if (q_.batch() == 0 || q_.rows() == 0) return;
  ForwardArguments a = arguments(call);
  a.workspace = workspace_.data();
  a.part = &part;
  kernel_.forward(a);
  if (call.report) call.report->kernel = kernel_.name;
}

}  // namespace longspan
