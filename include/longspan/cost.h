// What work costs: rates of devices and links, and what they make of a plan, alone or over a ring. A model, no clock.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "longspan/exchange.h"
#include "longspan/export.h"
#include "longspan/plan.h"

namespace longspan {

/// How fast a device runs one pass: work takes flops / flops_per_second + row_bytes / row_bytes_per_second, and every
/// call call_seconds beside.
struct PassRates {
  double flops_per_second = 0;
  double row_bytes_per_second = 0;
  double call_seconds = 0;
  double message_bytes_per_second = 0;  ///< packing, checking and adding up what a rank sends and receives
};

struct DeviceRates {
  std::string name{};
  std::string source{};   ///< the result files or the data sheet that the rates come from
  bool measured = false;  ///< whether the kernels were timed; false: a share of a data sheet's peak is assumed
  PassRates forward{}, backward{};
  double exchange_seconds = 0;  ///< of a rank for one exchange, and for each of its messages, whatever they move
  double message_seconds = 0;
  double memory_bytes = 0;  ///< 0: not known
};

/// Rates for one dtype and head_dim. "cpu" is as many cores as num_threads() says, of the CPU that was measured.
/// Throws InvalidArgument, naming the devices there are.
LONGSPAN_API DeviceRates device_rates(std::string_view name, DType dtype, std::int64_t head_dim);
/// Names that device_rates knows.
LONGSPAN_API std::vector<std::string> rated_devices();

/// Work of a pass. Doubles: 2^40 tokens squared overflow an integer.
struct Work {
  double flops = 0;      ///< 4 * head_dim a pair forward, 10 backward
  double row_bytes = 0;  ///< rows of strands: each is read as q, k and v and written as out; backward twice that
  Work& operator+=(const Work& more) {
    flops += more.flops;
    row_bytes += more.row_bytes;
    return *this;
  }
};

/// Counts the work of any queries of a plan in closed form. Pairs under block masks are a share of the branch's.
class LONGSPAN_API WorkCounter {
 public:
  explicit WorkCounter(const Plan& plan);
  /// Of queries at these positions, ascending, in one branch.
  Work of(std::size_t branch, std::span<const RowRange> queries, Pass pass) const;
  /// Of the whole sequence in all branches.
  Work of_all(Pass pass) const;

 private:
  struct Heads {
    std::int64_t head, count;  ///< heads of one phase, of which one speaks for all
  };
  const Plan& plan_;
  std::vector<std::vector<Heads>> phases_;  // by branch
  std::vector<double> kept_;                // share of pairs that block masks keep, by branch
};

/// Without the call itself.
inline double seconds_of(const Work& work, const PassRates& rates) {
  return work.flops / rates.flops_per_second + work.row_bytes / rates.row_bytes_per_second;
}

/// A network between ranks: each has a port out and a port in of this rate, and every message takes this long beside.
struct LinkRates {
  double bytes_per_second = 0;
  double latency_seconds = 0;
};

/// One pass of one rank, in seconds. Forward it sends, computes what needs no remote row while messages travel, branch
/// by branch, waits for what is still to come, and computes the rest. Backward rows that need remote ones come first;
/// while their gradients travel back, rows that need none in any branch are computed.
struct PassPrediction {
  double compute = 0;   ///< all of it
  double hiding = 0;    ///< the part that runs while messages travel
  double messages = 0;  ///< packing, checking, adding
  double transfer = 0;  ///< until the last message has come
  double waiting = 0;   ///< the part of it that nothing hides
  double total = 0;
};

struct RankPrediction {
  int rank = 0;
  std::int64_t rows = 0;
  std::int64_t messages_sent = 0, messages_received = 0;  ///< forward; backward the other way round
  std::int64_t bytes_sent = 0, bytes_received = 0;
  std::int64_t gradient_bytes_sent = 0, gradient_bytes_received = 0;
  PassPrediction forward{}, backward{};
  double total() const { return forward.total + backward.total; }
};

struct RingPrediction {
  int ranks = 0;
  std::vector<RankPrediction> listed{};  ///< ranks that were looked at: all, or those at the ends and some between
  std::size_t slowest = 0;               ///< which of them
  double forward_seconds = 0, backward_seconds = 0;  ///< of the slowest
  double one_device_forward_seconds = 0, one_device_backward_seconds = 0;
  double efficiency = 0;  ///< time of one device / (devices * step); 0 where there is no work
  /// What takes more than a tenth of the step beside computing: waiting for the link, else handling messages.
  enum class Limit { compute, messages, link } limit = Limit::compute;
  std::size_t limiting_branch = 0;  ///< the one that brings most bytes, or takes most time
  double limiting_share = 0;        ///< of those bytes, or of that time
};

struct RingModel {
  DeviceRates device{};
  LinkRates link{};
  int ranks_per_device = 1;  ///< ranks that share a device compute one after the other
};

/// A forward that keeps its remote rows and a backward. Ranks beyond `most_listed` are looked at in samples, so that
/// thousands take no longer than some. `stop` is asked now and then, and throws to end it.
LONGSPAN_API RingPrediction predict_ring(const Plan& plan, const Shards& shards, const RingModel& model,
                                         int most_listed = 64, const std::function<void()>& stop = {});

}  // namespace longspan
