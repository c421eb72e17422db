// What a Ring holds, and what its two ways of exchanging (a halo at once, or in rounds) share.
#pragma once

#include <algorithm>
#include <memory>
#include <optional>

#include "attention/run.h"
#include "comm/messages.h"
#include "comm/packed.h"
#include "comm/shard_rows.h"
#include "longspan/ring.h"
#include "plan/row_ranges.h"
#include "util/parallel.h"

namespace longspan {

/// Times what happens in a call and adds it up. Its thread has a seat all the while, except where a step waits: a core
/// that it gave away between two pieces of work would be busy with a long item of another rank when it wants it back.
class RingClock {
 public:
  explicit RingClock(RingReport& report, const MessageMemory& memory = {}) : report_(report), memory_(memory) {
    if (!memory.on_gpu()) seat_.emplace();
    report_ = {};
    report_.began = std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count();
  }
  ~RingClock() { report_.total_seconds = seconds(Clock::now()); }

  /// A GPU that still computes when the messages have come was not kept waiting.
  template <class Body>
  void waiting(const char* name, Body&& body) {
    const double spent = timed(name, body);
    const bool computing = memory_.on_gpu() && gpu::busy(memory_.device.index, memory_.stream);
    (computing ? report_.overlapped_seconds : report_.waited_seconds) += spent;
  }
  template <class Body>
  void working(const char* name, Body&& body) {
    timed(name, body);
  }
  /// Work while the messages of a step are on their way: until they were seen to have come, else to the end.
  template <class Body>
  void working(const char* name, MessageStep& step, Body&& body) {
    const double begin = seconds(Clock::now());
    working(name, body);
    step.progress();
    const double end = report_.events.back().end;
    if (!memory_.on_gpu())
      report_.overlapped_seconds +=
          std::max(0.0, (step.arrived() ? std::min(end, seconds(*step.arrived())) : end) - begin);
  }

 private:
  using Clock = MessageStep::Clock;
  double seconds(Clock::time_point at) const { return std::chrono::duration<double>(at - begin_).count(); }

  template <class Body>
  double timed(const char* name, Body&& body) {
    const double begin = seconds(Clock::now());
    body();
    report_.events.push_back({name, begin, seconds(Clock::now())});
    return report_.events.back().end - begin;
  }
  std::optional<Seat> seat_;  // what ranks on GPUs wait for is no core
  RingReport& report_;
  MessageMemory memory_;
  Clock::time_point begin_ = Clock::now();
};

/// One exchange's messages: memory, who gets what, and what the report says of it.
struct Messages {
  std::vector<MessageBuffer> sends, receives;

  void count(RingReport& report) const {
    const auto sent = static_cast<std::int64_t>(sends.size());
    report.bytes_sent += total_bytes(sends);
    report.bytes_received += total_bytes(receives);
    report.messages_sent += sent;
    report.messages_received += static_cast<std::int64_t>(receives.size());
    report.header_bytes_sent += sent * static_cast<std::int64_t>(sizeof(MessageHeader));
  }
};

/// What each branch can do without remote rows, and what is left. Where branches are mixed, a row goes through them in
/// order, so a branch has to leave a row for later once one before it has.
struct WindowsByNeed {
  std::vector<RowRanges> local, remote;  // positions, by branch
};
inline WindowsByNeed split_windows(const Plan& plan, const ExchangePlan& exchange, std::span<const RowRange> ranges) {
  WindowsByNeed windows;
  RowRanges before(ranges.begin(), ranges.end());
  for (const RowRanges& of_branch : exchange.local_ranges()) {
    windows.local.push_back(common_rows(before, of_branch));
    windows.remote.push_back(rows_without(ranges, windows.local.back()));
    if (plan.merges_branches()) before = windows.local.back();
  }
  return windows;
}

/// The call on this rank's rows, with the shard as query ranges.
inline Call with_ranges(const Call& call, std::span<const RowRange> ranges) {
  static constexpr RowRange kNone{};
  Call own = call;
  own.query_ranges = ranges.empty() ? std::span(&kNone, 1) : ranges;
  return own;
}

struct RingHalo::Data {
  Problem problem;
  std::vector<MessageBuffer> messages;  // one for each peer that something was received from, in plan order
  std::shared_ptr<KeptStrands> packed;  // or these
};

inline constexpr const char* kOtherHalo =
    "the halo was kept by a forward of another problem: pass the one of these inputs, or none to fetch it again";

/// Everything a rank knows about a problem over its shards.
struct RingPlan {
  Problem problem;
  std::shared_ptr<const Plan> plan;
  std::shared_ptr<const ExchangePlan> exchange;
  std::vector<std::shared_ptr<const ExchangePlan>> all;  // of every rank, where rounds are needed
  bool in_rounds[2] = {false, false};                    // by pass
  std::uint64_t digest = 0;                              // of all that calls do not change
  std::shared_ptr<PackedExchange> packed;                // null: keys come in pieces

  bool rounds(Pass pass) const { return in_rounds[static_cast<int>(pass)]; }
};

struct Ring::State {
  Attention attention;
  std::shared_ptr<Communicator> communicator;
  Shards shards;
  RingOptions options;
  int rank = 0;
  RingReport report;
  std::vector<std::shared_ptr<const RingPlan>> plans;  // of recent problems, newest last

  std::shared_ptr<const RingPlan> plan(const Problem& whole);
  std::shared_ptr<RingPlan> make_plan(const Problem& whole) const;
  std::uint64_t digest_of(const RingPlan& plan) const;
  /// Throws CommError where the device has found since that something arrived wrong.
  void raise_late_errors();
  /// The first call on a communicator: ranks compare what they compute.
  void greet(const RingPlan& plan, const Call& call, Pass pass, bool fetch);
  void check_tensors(const ForwardTensors& t, const Call& call) const;
  void check_tensors(const BackwardTensors& t, const Call& call) const;
  /// `fetch`: a backward that exchanges rows again.
  MessageRules rules(const RingPlan& plan, const Call& call, Pass pass, bool fetch) const;
  void check_call(const ConstTensorView& q, const ConstTensorView& k, const ConstTensorView& v, const Call& call) const;
  /// Checks tensors as those of the whole sequence, of which this rank has its shard.
  void check_shard(const ForwardTensors& t, const Call& call) const;
  /// The same with k and v of the whole sequence, without memory.
  ForwardTensors of_sequence(const ForwardTensors& t) const;
  std::span<const RowRange> ranges() const { return shards.ranges(rank); }

  void halo_forward(const RingPlan& plan, const MessageRules& rules, RingClock& clock, const ForwardTensors& t,
                    const Call& call, RingHalo* keep);
  void halo_backward(const RingPlan& plan, const MessageRules& rules, RingClock& clock, const BackwardTensors& t,
                     const Call& call, const RingHalo* kept);
  void rounds_forward(const RingPlan& plan, const MessageRules& rules, RingClock& clock, const ForwardTensors& t,
                      const Call& call);
  void rounds_backward(const RingPlan& plan, const MessageRules& rules, RingClock& clock, const BackwardTensors& t,
                       const Call& call);
};

}  // namespace longspan
