// Attention over a sequence that is split over ranks: the same operator, called by every rank with its own rows.
#pragma once

#include <chrono>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "longspan/attention.h"
#include "longspan/communicator.h"
#include "longspan/exchange.h"
#include "longspan/export.h"

namespace longspan {

struct RingOptions {
  /// How long one exchange may take. Whoever is missing by then is named in a CommError.
  std::chrono::milliseconds deadline{60000};
  /// Most bytes of remote rows (backward: and of gradients on their way) that a rank holds at a time; 0: all it needs.
  /// A pass beyond it runs in rounds, whose results agree to rounding instead of to the bit. The same on all ranks.
  std::size_t halo_limit_bytes = 0;
  /// Whether messages are checked for changes on their way.
  bool checksums = true;
};

/// A stretch of time within a call, for traces.
struct RingEvent {
  std::string name{};
  double begin = 0, end = 0;  ///< seconds since the call began
};

/// What one call did. Bytes are payload; headers are counted apart.
struct RingReport {
  std::string_view kernel{};  ///< name of the kernel that ran, the last one where parts of the call took several
  double began = 0;           ///< seconds since 1970 when the call began, on the clock that ranks share
  std::int64_t bytes_sent = 0;
  std::int64_t bytes_received = 0;
  std::int64_t messages_sent = 0;
  std::int64_t messages_received = 0;
  std::int64_t header_bytes_sent = 0;
  std::int64_t halo_bytes = 0;    ///< most memory that remote rows, copies of them and gradients on their way took
  std::int64_t rounds = 0;        ///< 0: the whole halo in one exchange
  double waited_seconds = 0;      ///< in which nothing was computed, because messages were on their way
  double overlapped_seconds = 0;  ///< of work until messages were seen to have come
  double total_seconds = 0;
  std::vector<RingEvent> events{};
  std::string late_error{};  ///< what the GPU has found wrong with messages since; empty: nothing so far
};

/// Remote rows that a forward received, for the backward of the same inputs. Empty until a forward fills it.
class LONGSPAN_API RingHalo {
 public:
  bool empty() const { return !data_; }
  void clear() { data_.reset(); }
  std::int64_t bytes() const;

 private:
  friend class Ring;
  struct Data;
  std::shared_ptr<Data> data_;
};

struct RingForward;
struct RingBackward;

/// One rank of a ring. q, k, v and all results are this rank's rows, in the order of its shard; key_mask and lengths
/// are those of the whole sequence. Every rank makes the same calls in the same order, each from one thread.
class LONGSPAN_API Ring {
 public:
  /// A ring of one needs no communicator. Throws InvalidArgument if the communicator has another size than the shards.
  Ring(Attention attention, std::shared_ptr<Communicator> communicator, Shards shards, RingOptions options = {});
  ~Ring();

  /// As Attention::forward, with the bits that one device would give (RingOptions::halo_limit_bytes). `keep` holds the
  /// remote rows for backward. Throws CommError; inputs are untouched then, outputs unspecified.
  void forward(const ConstTensorView& q, const ConstTensorView& k, const ConstTensorView& v, const TensorView& out,
               const TensorView& lse = {}, const Call& call = {}, RingHalo* keep = nullptr);
  /// As Attention::backward. Without a halo (or with an empty one) remote rows are fetched again.
  void backward(const ConstTensorView& q, const ConstTensorView& k, const ConstTensorView& v,
                const ConstTensorView& out, const ConstTensorView& lse, const ConstTensorView& dout,
                const TensorView& dq, const TensorView& dk, const TensorView& dv, const Call& call = {},
                const RingHalo* kept = nullptr);

  /// The calls of all ranks of a local ring on GPUs, from one thread, which waits for no device. Returns false, with
  /// nothing done, where that takes a thread for each rank: on CPUs, over other communicators, and in the first call.
  static bool forward_together(std::span<const RingForward> ranks);
  static bool backward_together(std::span<const RingBackward> ranks);

  /// On GPUs messages are checked after a call has returned. What is found wrong is a CommError of the next call, or of
  /// this, which waits for the GPU until the deadline.
  void check(std::chrono::milliseconds deadline);

  int rank() const;
  const Shards& shards() const;
  /// The plan of the whole sequence for this rank's tensors, and what it exchanges.
  std::shared_ptr<const Plan> plan(const ConstTensorView& q, const ConstTensorView& k, const Call& call = {}) const;
  std::shared_ptr<const ExchangePlan> exchange(const Plan& plan) const;
  /// What the last call did.
  const RingReport& report() const;

 private:
  struct State;
  class PackedRun;
  template <class RankCall>
  static bool run_together(std::span<const RankCall> calls);
  std::unique_ptr<State> state_;
};

/// The arguments of Ring::forward and Ring::backward on one rank.
struct RingForward {
  Ring* ring = nullptr;
  ConstTensorView q{}, k{}, v{};
  TensorView out{}, lse{};
  Call call{};
  RingHalo* keep = nullptr;
};
struct RingBackward {
  Ring* ring = nullptr;
  ConstTensorView q{}, k{}, v{}, out{}, lse{}, dout{};
  TensorView dq{}, dk{}, dv{};
  Call call{};
  const RingHalo* kept = nullptr;
};

}  // namespace longspan
