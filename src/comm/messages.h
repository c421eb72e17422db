// One exchange of a ring: packed messages with headers that say who computes what, checked on arrival.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <vector>

#include "comm/gpu/gpu.h"
#include "device/device_pool.h"
#include "longspan/communicator.h"
#include "longspan/exchange.h"
#include "memory/host_pool.h"

namespace longspan {

inline constexpr std::uint64_t kMessageMagic = 0x4C4F4E475350414Eu;  // "LONGSPAN"
inline constexpr const char* kComputesSomethingElse =
    "computes something else: pattern, shapes, dtype, device, options, call data and shards must be the same on all "
    "ranks";

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

/// Memory that the rows of a message are packed in and used from, and whether they go by way of the host.
struct MessageMemory {
  Device device{};
  void* stream = nullptr;
  bool staged = false;

  bool on_gpu() const { return device.type == DeviceType::cuda; }
};

/// Memory for one message. What travels is a header and the payload behind it; of messages that travel from GPU to GPU
/// the header is also kept on the host, and of those that go by way of the host the payload also on the GPU.
class MessageBuffer {
 public:
  MessageBuffer(int peer, std::int64_t payload_bytes, const MessageMemory& memory);
  int peer() const { return peer_; }
  std::int64_t bytes() const { return bytes_; }
  std::size_t size() const { return static_cast<std::size_t>(bytes_); }
  std::size_t whole_size() const { return sizeof(MessageHeader) + size(); }
  const MessageMemory& memory() const { return memory_; }
  /// Where the rows are, on the device of the tensors.
  std::byte* payload() const { return memory_.staged ? rows_->data() : data() + sizeof(MessageHeader); }
  /// What travels, and whose memory that is.
  std::byte* data() const { return travels_on_gpu() ? rows_->data() : host(); }
  Device device() const { return travels_on_gpu() ? memory_.device : Device{}; }
  bool travels_on_gpu() const { return memory_.on_gpu() && !memory_.staged; }
  MessageHeader& header() const { return *reinterpret_cast<MessageHeader*>(host()); }
  /// The payload on the host, where it is there.
  std::byte* host_payload() const { return host() + sizeof(MessageHeader); }
  /// What a transport is given, for whoever must keep it.
  std::shared_ptr<const void> travelling() const {
    if (travels_on_gpu()) return rows_;
    return host_;
  }

 private:
  struct HostMemory {
    HostLease plain;
    gpu::PinnedLease pinned;
  };
  std::byte* host() const { return memory_.on_gpu() ? host_->pinned.data() : host_->plain.data(); }

  int peer_;
  std::int64_t bytes_;
  MessageMemory memory_;
  std::shared_ptr<HostMemory> host_;
  std::shared_ptr<DeviceLease> rows_;
};

/// 64-bit sums of the payloads of messages that are on the host, 0 for others. Any single change of a byte shows.
std::vector<std::uint64_t> checksums(std::span<const MessageBuffer> messages);

inline std::int64_t total_bytes(std::span<const MessageBuffer> messages) {
  std::int64_t bytes = 0;
  for (const MessageBuffer& message : messages) bytes += message.bytes();
  return bytes;
}

/// What a call computes, as a number that all ranks must agree on, and how messages are sent.
struct MessageRules {
  std::uint64_t digest = 0;
  bool checksums = true;
  std::chrono::nanoseconds deadline{};
  MessageMemory memory;
  bool in_order = false;  // messages move in the order of the stream, and others write and read their headers
};

/// What rings keep of a communicator until it ends. Rings that share it go on from one another's steps.
struct CommunicatorSteps {
  std::uint64_t next = 0;  // all ranks count alike
  bool greeted = false;    // ranks have compared what they compute
};
CommunicatorSteps& steps_of(const Communicator& communicator);

/// begin() and finish() of one exchange. What goes wrong becomes a CommError that names the step, and the
/// communicator's failure.
class MessageStep {
 public:
  using Clock = std::chrono::steady_clock;

  MessageStep(Communicator& communicator, const MessageRules& rules, std::string name);
  ~MessageStep();
  MessageStep(const MessageStep&) = delete;
  MessageStep& operator=(const MessageStep&) = delete;

  /// Index of this exchange among those of the communicator, which all ranks count alike.
  std::uint64_t step() const { return step_; }
  /// Until buffers that were sent earlier in the order of a stream may be written.
  void settle();
  /// Writes headers and starts. Both lists stay where they are until finish(); the deadline counts from here.
  /// `lent`: see ReceiveBuffer; one for each receive, or none.
  void begin(std::span<const MessageBuffer> sends, std::span<const MessageBuffer> receives,
             std::span<const void*> lent = {});
  /// Lets messages move while the rank computes.
  void progress();
  /// Waits and checks every header.
  void finish();
  /// Both at once.
  void run(std::span<const MessageBuffer> sends, std::span<const MessageBuffer> receives) {
    begin(sends, receives);
    finish();
  }
  /// When all messages were seen to have arrived and left; nothing if that was not seen before finish().
  const std::optional<Clock::time_point>& arrived() const { return arrived_; }

  /// The first call on a communicator: all ranks compare digests with all others.
  static void greet(Communicator& communicator, const MessageRules& rules, const std::string& name);

 private:
  template <class Action>
  void guarded(Action&& action);
  void give_up() noexcept;
  void seal(std::span<const MessageBuffer> sends) const;
  void open(std::span<const MessageBuffer> receives) const;

  Communicator& communicator_;
  const MessageRules& rules_;
  std::string name_;
  std::uint64_t step_ = 0;
  std::span<const MessageBuffer> sends_, receives_;
  Clock::time_point deadline_{};
  std::optional<Clock::time_point> arrived_;
  bool active_ = false;
};

}  // namespace longspan
