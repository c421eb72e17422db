// What a Ring holds, and what its two ways of exchanging (a halo at once, or in rounds) share.
#pragma once

#include <memory>
#include <mutex>

#include "comm/messages.h"
#include "comm/shard_rows.h"
#include "longspan/ring.h"

namespace longspan {

/// Times what happens in a call and adds it up.
class RingClock {
 public:
  explicit RingClock(RingReport& report) : report_(report) { report_ = {}; }
  ~RingClock() { report_.total_seconds = now(); }
  double now() const { return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin_).count(); }

  template <class Body>
  void waiting(const char* name, Body&& body) {
    report_.waited_seconds += timed(name, body);
  }
  template <class Body>
  void working(const char* name, bool overlapped, Body&& body) {
    const double seconds = timed(name, body);
    if (overlapped) report_.overlapped_seconds += seconds;
  }

 private:
  template <class Body>
  double timed(const char* name, Body&& body) {
    const double begin = now();
    body();
    report_.events.push_back({name, begin, now()});
    return report_.events.back().end - begin;
  }
  RingReport& report_;
  std::chrono::steady_clock::time_point begin_ = std::chrono::steady_clock::now();
};

/// One exchange's messages: memory, who gets what, and what the report says of it.
struct Messages {
  std::vector<MessageBuffer> sends, receives;

  void count(RingReport& report) const {
    for (const MessageBuffer& send : sends) {
      report.bytes_sent += static_cast<std::int64_t>(send.bytes());
      report.header_bytes_sent += static_cast<std::int64_t>(sizeof(MessageHeader));
    }
    for (const MessageBuffer& receive : receives) report.bytes_received += static_cast<std::int64_t>(receive.bytes());
    report.messages_sent += static_cast<std::int64_t>(sends.size());
    report.messages_received += static_cast<std::int64_t>(receives.size());
  }
};

struct RingHalo::Data {
  Problem problem;
  std::vector<MessageBuffer> messages;  // one for each peer that something was received from, in plan order
};

/// Everything a rank knows about a problem over its shards.
struct RingPlan {
  Problem problem;
  std::shared_ptr<const Plan> plan;
  std::shared_ptr<const ExchangePlan> exchange;
  std::vector<std::shared_ptr<const ExchangePlan>> all;  // of every rank, where rounds may be needed
  bool in_rounds = false;
};

struct ForwardTensors {
  ConstTensorView q, k, v;
  TensorView out, lse;
};
struct BackwardTensors {
  ConstTensorView q, k, v, out, lse, dout;
  TensorView dq, dk, dv;
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
  /// `fetch`: a backward that exchanges rows again.
  MessageRules rules(const RingPlan& plan, const Call& call, Pass pass, bool fetch) const;
  void check_call(const ConstTensorView& q, const ConstTensorView& k, const ConstTensorView& v, const Call& call) const;
  std::span<const RowRange> ranges() const { return shards.ranges(rank); }

  void halo_forward(const RingPlan& plan, const MessageRules& rules, const ForwardTensors& t, const Call& call,
                    RingHalo* keep);
  void halo_backward(const RingPlan& plan, const MessageRules& rules, const BackwardTensors& t, const Call& call,
                     const RingHalo* kept);
  void rounds_forward(const RingPlan& plan, const MessageRules& rules, const ForwardTensors& t, const Call& call);
  void rounds_backward(const RingPlan& plan, const MessageRules& rules, const BackwardTensors& t, const Call& call);
};

/// The dtype that partial results and gradients are summed in.
inline DType sum_dtype(DType dtype) { return dtype == DType::f64 ? DType::f64 : DType::f32; }

}  // namespace longspan
