// Headers, checksums and the order of steps.
#include "comm/messages.h"

#include <fmt/format.h>

#include <cstring>
#include <mutex>

#include "longspan/error.h"

namespace longspan {
namespace {

constexpr std::uint64_t kMagic = 0x4C4F4E475350414Eu;  // "LONGSPAN"

[[noreturn]] void disagree(int rank, std::string_view what) { throw CommError(fmt::format("rank {} {}", rank, what)); }

}  // namespace

std::uint64_t checksum(const std::byte* data, std::size_t bytes) {
  // Four sums side by side, so that the multiplications overlap; odd factors lose no change.
  std::uint64_t lanes[4] = {1, 2, 3, 4};
  std::size_t at = 0;
  for (; at + 32 <= bytes; at += 32) {
    for (std::size_t lane = 0; lane < 4; ++lane) {
      std::uint64_t word;
      std::memcpy(&word, data + at + lane * 8, 8);
      lanes[lane] = (lanes[lane] ^ word) * 0x9E3779B97F4A7C15u;
      lanes[lane] ^= lanes[lane] >> 29;
    }
  }
  for (; at < bytes; ++at) lanes[0] = (lanes[0] ^ static_cast<std::uint64_t>(data[at])) * 0xD6E8FEB86659FD93u;
  std::uint64_t sum = bytes;
  for (const std::uint64_t lane : lanes) sum = (sum ^ lane ^ (lane >> 31)) * 0xBF58476D1CE4E5B9u;
  return sum;
}

/// Ends the exchange. Buffers that the transport may still touch live on until the process ends.
void MessageStep::give_up() noexcept {
  active_ = false;
  communicator_.abort();
  if (!communicator_.keeps_buffers()) return;
  static std::mutex mutex;
  static auto* const parked = new std::vector<std::shared_ptr<HostLease>>;
  const std::lock_guard lock(mutex);
  for (const auto& list : {sends_, receives_}) {
    for (const MessageBuffer& buffer : list) parked->push_back(buffer.memory_);
  }
}

template <class Action>
void MessageStep::guarded(Action&& action) {
  try {
    action();
  } catch (const std::exception& error) {
    give_up();
    const std::string message =
        fmt::format("{} (step {}) on rank {}: {}", name_, step_, communicator_.rank(), error.what());
    communicator_.fail(message);
    throw CommError(message);
  }
}

MessageStep::MessageStep(Communicator& communicator, const MessageRules& rules, std::string name)
    : communicator_(communicator), rules_(rules), name_(std::move(name)) {
  if (!communicator.failure().empty()) {
    throw CommError(
        fmt::format("{}: this communicator failed before: {}; make a new one", name_, communicator.failure()));
  }
  step_ = communicator.steps_++;
}

MessageStep::~MessageStep() {
  if (!active_) return;
  // The call was left by an error of its own (cancelled, out of memory): nobody may touch the buffers from now on.
  give_up();
  communicator_.fail(fmt::format("{} (step {}) on rank {} was left unfinished", name_, step_, communicator_.rank()));
}

void MessageStep::begin(std::span<const MessageBuffer> sends, std::span<const MessageBuffer> receives) {
  std::vector<SendBuffer> to;
  std::vector<ReceiveBuffer> from;
  for (const MessageBuffer& send : sends) {
    send.header() = {kMagic,
                     rules_.digest,
                     step_,
                     communicator_.rank(),
                     send.peer(),
                     send.bytes(),
                     rules_.checksums ? checksum(send.payload(), send.bytes()) : 0,
                     {}};
    to.push_back({send.peer(), send.data(), send.whole_bytes()});
  }
  for (const MessageBuffer& receive : receives) {
    receive.header() = {};
    from.push_back({receive.peer(), receive.data(), receive.whole_bytes()});
  }
  sends_ = sends;
  receives_ = receives;
  guarded([&] { communicator_.begin(to, from); });
  active_ = true;
}

void MessageStep::finish() {
  guarded([&] {
    communicator_.wait(std::chrono::steady_clock::now() + rules_.deadline);
    for (const MessageBuffer& receive : receives_) {
      const MessageHeader& header = receive.header();
      const int peer = receive.peer();
      if (header.magic != kMagic || header.source != peer || header.target != communicator_.rank())
        disagree(peer, "sent something that is no message");
      if (header.digest != rules_.digest) {
        disagree(peer,
                 "computes something else: pattern, shapes, dtype, options, call data and shards must be the same on "
                 "all ranks");
      }
      if (header.step != step_) disagree(peer, fmt::format("is at step {}", header.step));
      if (header.bytes != receive.bytes())
        disagree(peer, fmt::format("sent {} bytes, {} were expected", header.bytes, receive.bytes()));
      if (rules_.checksums && header.checksum != checksum(receive.payload(), receive.bytes()))
        disagree(peer, "sent a message that arrived changed");
    }
  });
  active_ = false;
}

void MessageStep::greet(Communicator& communicator, const MessageRules& rules, const std::string& name) {
  if (communicator.greeted_) return;
  std::vector<MessageBuffer> sends, receives;
  for (int peer = 0; peer < communicator.size(); ++peer) {
    if (peer == communicator.rank()) continue;
    sends.emplace_back(peer, 0);
    receives.emplace_back(peer, 0);
  }
  MessageStep step(communicator, rules, name + ", comparing ranks");
  step.begin(sends, receives);
  step.finish();
  communicator.greeted_ = true;
}

}  // namespace longspan
