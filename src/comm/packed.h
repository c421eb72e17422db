// The exchange of a rank on a GPU whose strands that cross ranks are packed (kernel.h, PackedStrands): everything that
// a call needs is made once for a plan and a communicator. comm/gpu/packed.cpp is it; no_gpu.cpp makes none.
#pragma once

#include <memory>

#include "attention/check.h"
#include "comm/messages.h"
#include "longspan/ring.h"

namespace longspan {

class RingClock;
struct RingPlan;

/// Packed rows of one forward, for its backward.
struct KeptStrands {
  virtual ~KeptStrands() = default;
  virtual std::int64_t bytes() const = 0;
};

/// A call in phases: each ends where peers have to send before the next one can begin. A phase does not wait for the
/// device.
class PackedCall {
 public:
  virtual ~PackedCall() = default;
  virtual void phase(int index) = 0;
  virtual int phases() const = 0;
};

class PackedExchange {
 public:
  /// Null where no kernel takes packed strands of this problem.
  static std::shared_ptr<PackedExchange> make(const Attention& attention, const RingPlan& plan, const Problem& share,
                                              std::shared_ptr<Communicator> communicator);
  virtual ~PackedExchange() = default;

  /// What a call is made of. It stays where it is until the PackedCall ends.
  struct Context {
    const MessageRules& rules;
    RingReport& report;
    RingClock& clock;
    std::span<const RowRange> ranges;
    const Call& call;
  };
  /// Null where the kernel does not take these tensors. `keep` is given the packed rows if it is not null.
  virtual std::unique_ptr<PackedCall> forward(const Context& context, const ForwardTensors& tensors,
                                              std::shared_ptr<KeptStrands>* keep) = 0;
  /// Without `kept` rows are exchanged again.
  virtual std::unique_ptr<PackedCall> backward(const Context& context, const BackwardTensors& tensors,
                                               std::shared_ptr<KeptStrands> kept) = 0;
  /// What arrived wrong, as found on the device by now; empty: nothing. `take`: it is not told again.
  virtual std::string late_error(bool take) = 0;
  /// Whether calls are still under way on the device.
  virtual bool busy() const = 0;
};

}  // namespace longspan
