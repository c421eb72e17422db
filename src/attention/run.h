// What Attention::forward and backward run, in the steps that a ring takes one by one.
#pragma once

#include "attention/call_masks.h"
#include "attention/check.h"
#include "attention/kernel_choice.h"
#include "device/scratch.h"

namespace longspan {

/// Which keys the pieces of a call have. `some`: keys that no piece has are left out, as if masked. GPU kernels do so
/// by themselves; the CPU's leave out what key_mask excludes, so there pieces have all keys that it does not. `later`:
/// pieces are added between the two parts of a forward.
enum class KeysGiven { all, some, later };

/// `share_of`: query rows of the whole problem, of which a rank of a ring has some, since kernels are chosen by those.
void run_forward(const Attention& attention, const ForwardTensors& tensors, const Call& call, KeysGiven given,
                 std::int64_t share_of = 0);
void run_backward(const Attention& attention, const BackwardTensors& tensors, const Call& call, KeysGiven given);

/// A call whose tensors were checked: its plan, which has the masks of the call, and its query ranges.
class PreparedCall {
 public:
  PreparedCall(const Attention& attention, const Problem& problem, Pass pass, const ConstTensorView& k,
               const ConstTensorView& v, const Call& call, KeysGiven given);
  PreparedCall(const PreparedCall&) = delete;
  PreparedCall& operator=(const PreparedCall&) = delete;

 private:
  std::shared_ptr<const Plan> cached_;
  RowRange whole_;

 public:
  const std::shared_ptr<const KernelChoice> choice;
  const std::span<const RowRange> ranges;
  CallPlan plan;
  const int threads;
};

/// The first kernel that takes the arguments of a call. Its workspace, lent when it first runs, is the caller's or else
/// from the pool of the device.
class KernelRun {
 public:
  template <class Arguments>
  KernelRun(const KernelChoice& choice, Pass pass, const Arguments& arguments)
      : kernel(choice.taking(pass, arguments)), pass_(pass) {}
  template <class Arguments>
  void operator()(void (*Kernel::*run)(const Arguments&), Arguments arguments);

  const Kernel& kernel;

 private:
  void lend(const Call& call, Device device, std::size_t bytes);

  Pass pass_;
  bool lent_ = false;
  std::byte* memory_ = nullptr;
  std::optional<Scratch> own_;
};

/// A forward in two parts, for a ring: first what needs no remote row, then the rest. The calls differ in their pieces.
class SplitForward {
 public:
  SplitForward(const Attention& attention, const ForwardTensors& tensors, const Call& call);
  /// Whether the kernel that takes the call can stop between them.
  bool possible() const { return run_.kernel.runs_parts; }
  void run(const ForwardPart& part, const Call& call);

 private:
  ForwardArguments arguments(const Call& call, const ForwardPart* part = nullptr) const {
    return {*prepared_.plan, call,   call.query_ranges, t_.q,    t_.k, t_.v,
            t_.out,          t_.lse, prepared_.threads, nullptr, part, t_.k.rows()};
  }

  PreparedCall prepared_;
  ForwardTensors t_;
  KernelRun run_;
};

}  // namespace longspan
