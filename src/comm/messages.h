// One exchange of a ring: packed messages with headers that say who computes what, checked on arrival.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "longspan/communicator.h"
#include "longspan/exchange.h"
#include "memory/host_pool.h"

namespace longspan {

/// First bytes of every message. Ranks that exchange rows see here that they compute the same thing.
struct MessageHeader {
  std::uint64_t magic = 0;
  std::uint64_t digest = 0;
  std::uint64_t step = 0;
  std::int32_t source = 0;
  std::int32_t target = 0;
  std::uint64_t bytes = 0;
  std::uint64_t checksum = 0;
  std::uint64_t unused[2] = {};
};
static_assert(sizeof(MessageHeader) == 64);

/// A 64-bit sum of bytes in which any single change shows.
std::uint64_t checksum(const std::byte* data, std::size_t bytes);

/// Memory for the payload of one message, with room for its header in front.
class MessageBuffer {
 public:
  MessageBuffer(int peer, std::size_t payload_bytes)
      : peer_(peer),
        bytes_(payload_bytes),
        memory_(std::make_shared<HostLease>(sizeof(MessageHeader) + payload_bytes)) {}
  int peer() const { return peer_; }
  std::size_t bytes() const { return bytes_; }
  std::byte* payload() const { return memory_->data() + sizeof(MessageHeader); }
  std::byte* data() const { return memory_->data(); }
  std::size_t whole_bytes() const { return sizeof(MessageHeader) + bytes_; }
  MessageHeader& header() const { return *reinterpret_cast<MessageHeader*>(memory_->data()); }

 private:
  int peer_;
  std::size_t bytes_;
  friend class MessageStep;
  std::shared_ptr<HostLease> memory_;
};

/// What a call computes, as a number that all ranks must agree on, and how messages are sent.
struct MessageRules {
  std::uint64_t digest = 0;
  bool checksums = true;
  std::chrono::nanoseconds deadline{};
};

/// begin() and finish() of one exchange. What goes wrong becomes a CommError that names the step, and the
/// communicator's failure.
class MessageStep {
 public:
  MessageStep(Communicator& communicator, const MessageRules& rules, std::string name);
  ~MessageStep();
  MessageStep(const MessageStep&) = delete;
  MessageStep& operator=(const MessageStep&) = delete;

  /// Writes headers and starts. Both lists stay where they are until finish().
  void begin(std::span<const MessageBuffer> sends, std::span<const MessageBuffer> receives);
  /// Waits and checks every header.
  void finish();
  bool active() const { return active_; }

  /// The first call on a communicator: all ranks compare digests with all others.
  static void greet(Communicator& communicator, const MessageRules& rules, const std::string& name);

 private:
  template <class Action>
  void guarded(Action&& action);
  void give_up() noexcept;

  Communicator& communicator_;
  const MessageRules& rules_;
  std::string name_;
  std::uint64_t step_ = 0;
  std::span<const MessageBuffer> sends_, receives_;
  bool active_ = false;
};

}  // namespace longspan
