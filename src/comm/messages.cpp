// Headers, checksums and the order of steps.
#include "comm/messages.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <mutex>

#include "longspan/threads.h"
#include "util/hash.h"
#include "util/parallel.h"
#include "util/reject.h"

namespace longspan {
namespace {

[[noreturn]] void disagree(int rank, std::string_view what) { raise<CommError>("rank {} {}", rank, what); }

/// The sender adds the sum of a message on a GPU to its header, the receiver takes it away again: nothing is left.
void sum_up(const MessageBuffer& message, bool take_away, void* stream) {
  auto* const sum = reinterpret_cast<std::uint64_t*>(message.data() + offsetof(MessageHeader, checksum));
  gpu::add_checksum(sum, message.payload(), message.size(), take_away, message.device().index, stream);
}

constexpr std::uint64_t mixed(std::uint64_t sum, std::uint64_t more) {
  return (sum ^ more ^ (more >> 31)) * 0xBF58476D1CE4E5B9u;
}

/// Sums of 32-bit products, which every CPU has for vectors. A word is also added to its neighbour's sum as it is, so
/// that one changed word always shows; keys that change with the place show words that change theirs.
std::uint64_t sum_of(const std::byte* data, std::size_t bytes) {
  constexpr std::size_t kLanes = 8, kStripe = kLanes * 8;
  std::uint64_t sums[kLanes] = {}, key = 0;
  const auto add = [&](const std::byte* stripe) {
    key += 0x9E3779B97F4A7C15u;
    std::uint64_t words[kLanes];
    std::memcpy(words, stripe, kStripe);
    for (std::size_t lane = 0; lane < kLanes; ++lane) {
      const std::uint64_t word = words[lane] ^ (key + lane);
      sums[lane] += (word & 0xFFFFFFFFu) * (word >> 32) + words[lane ^ 1];
    }
  };
  std::size_t at = 0;
  for (; at + kStripe <= bytes; at += kStripe) add(data + at);
  if (at < bytes) {
    std::byte rest[kStripe] = {};
    std::memcpy(rest, data + at, bytes - at);
    add(rest);
  }
  std::uint64_t sum = bytes;
  for (const std::uint64_t lane : sums) sum = mixed(sum, lane);
  return sum;
}

}  // namespace

MessageBuffer::MessageBuffer(int peer, std::int64_t payload_bytes, const MessageMemory& memory)
    : peer_(peer), bytes_(payload_bytes), memory_(memory) {
  const bool on_gpu = memory.on_gpu();
  host_.reset(
      new HostMemory{HostLease(on_gpu ? 0 : whole_size()), gpu::PinnedLease(!on_gpu         ? 0
                                                                            : memory.staged ? whole_size()
                                                                                            : sizeof(MessageHeader))});
  rows_ = std::make_shared<DeviceLease>(memory.device.index, memory.stream,
                                        !on_gpu         ? 0
                                        : memory.staged ? size() + 1
                                                        : whole_size());
}

std::vector<std::uint64_t> checksums(std::span<const MessageBuffer> messages) {
  constexpr std::size_t kAtOnce = 128 * 1024;
  struct Chunk {
    const std::byte* data;
    std::size_t bytes, message;
    std::uint64_t sum;
  };
  std::vector<Chunk> chunks;
  std::vector<std::uint64_t> sums(messages.size());
  for (std::size_t m = 0; m < messages.size(); ++m) {
    if (messages[m].travels_on_gpu()) continue;
    sums[m] = messages[m].size();
    for (std::size_t begin = 0; begin < messages[m].size(); begin += kAtOnce)
      chunks.push_back({messages[m].host_payload() + begin, std::min(kAtOnce, messages[m].size() - begin), m, 0});
  }
  parallel_for(threads_for_bytes(total_bytes(messages)), static_cast<std::int64_t>(chunks.size()), {},
               [&](int, std::int64_t item) {
                 Chunk& chunk = chunks[static_cast<std::size_t>(item)];
                 chunk.sum = sum_of(chunk.data, chunk.bytes);
               });
  for (const Chunk& chunk : chunks) sums[chunk.message] = mixed(sums[chunk.message], chunk.sum);
  return sums;
}

/// Ends the exchange. Memory that the transport may still touch lives on until the process ends.
void MessageStep::give_up() noexcept {
  active_ = false;
  communicator_.abort();
  if (!communicator_.keeps_buffers()) return;
  static std::mutex mutex;
  static auto* const parked = new std::vector<std::shared_ptr<const void>>;
  const std::lock_guard lock(mutex);
  for (const auto& list : {sends_, receives_}) {
    for (const MessageBuffer& buffer : list) parked->push_back(buffer.travelling());
  }
}

template <class Action>
void MessageStep::guarded(Action&& action) {
  try {
    action();
  } catch (const Cancelled&) {
    active_ = true;  // left unfinished, as the destructor says
    throw;
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
    raise<CommError>("{}: this communicator failed before: {}; make a new one", name_, communicator.failure());
  }
  step_ = steps_of(communicator).next++;
}

MessageStep::~MessageStep() {
  if (!active_) return;
  // The call was left by an error of its own (cancelled, out of memory): nobody may touch the buffers from now on.
  give_up();
  communicator_.fail(fmt::format("{} (step {}) on rank {} was left unfinished", name_, step_, communicator_.rank()));
}

/// Headers, and what is on its way to the host or stays on the GPU; on return everything is ready to travel.
void MessageStep::seal(std::span<const MessageBuffer> sends) const {
  const MessageMemory& memory = rules_.memory;
  for (const MessageBuffer& send : sends) {
    send.header() = {kMessageMagic, rules_.digest, step_, communicator_.rank(), send.peer(), send.size(), 0, {}};
    if (send.travels_on_gpu()) {
      gpu::copy(send.data(), &send.header(), sizeof(MessageHeader), memory.device.index, memory.stream);
      if (rules_.checksums) sum_up(send, false, memory.stream);
    } else if (memory.staged) {
      gpu::copy(send.host_payload(), send.payload(), send.size(), memory.device.index, memory.stream);
    }
  }
  // Memory that messages will arrive in was asked for in the order of the stream, too.
  if (memory.on_gpu()) gpu::wait(memory.device.index, memory.stream);
  if (!rules_.checksums) return;
  const std::vector<std::uint64_t> sums = checksums(sends);
  for (std::size_t i = 0; i < sends.size(); ++i) {
    if (!sends[i].travels_on_gpu()) sends[i].header().checksum = sums[i];
  }
}

void MessageStep::settle() {
  guarded([&] { communicator_.settle(Clock::now() + rules_.deadline); });
}

void MessageStep::begin(std::span<const MessageBuffer> sends, std::span<const MessageBuffer> receives,
                        std::span<const void*> lent) {
  deadline_ = Clock::now() + rules_.deadline;
  sends_ = sends;
  receives_ = receives;
  std::vector<SendBuffer> to;
  std::vector<ReceiveBuffer> from;
  const bool in_order = rules_.in_order;
  void* const stream = rules_.memory.stream;
  to.reserve(sends.size());
  from.reserve(receives.size());
  for (const MessageBuffer& send : sends)
    to.push_back({send.peer(), send.data(), send.whole_size(), send.device(), in_order, stream});
  for (const MessageBuffer& receive : receives) {
    if (!in_order) receive.header() = {};
    from.push_back({receive.peer(), receive.data(), receive.whole_size(), receive.device(), in_order, stream,
                    lent.empty() ? nullptr : &lent[from.size()]});
  }
  guarded([&] {
    if (!in_order) seal(sends);
    communicator_.begin(to, from);
  });
  active_ = true;
  if (sends.empty() && receives.empty()) arrived_ = Clock::now();
}

void MessageStep::progress() {
  if (active_ && !arrived_ && communicator_.progress()) arrived_ = Clock::now();
}

/// Headers of messages that arrived on a GPU come to the host, payloads that arrived on the host go to the GPU. Beside
/// the caller's stream, which may be computing.
void MessageStep::open(std::span<const MessageBuffer> receives) const {
  const MessageMemory& memory = rules_.memory;
  if (!memory.on_gpu() || receives.empty()) return;
  const gpu::SideStream side(memory.device.index);
  for (const MessageBuffer& receive : receives) {
    if (receive.travels_on_gpu()) {
      if (rules_.checksums) sum_up(receive, true, side.get());
      gpu::copy(&receive.header(), receive.data(), sizeof(MessageHeader), memory.device.index, side.get());
    } else {
      gpu::copy(receive.payload(), receive.host_payload(), receive.size(), memory.device.index, side.get());
    }
  }
  gpu::wait(memory.device.index, side.get());
}

void MessageStep::finish() {
  guarded([&] {
    // A rank that computed past the deadline still gives messages a while to come in.
    const auto wait = [&] { communicator_.wait(std::max(deadline_, Clock::now() + rules_.deadline / 10)); };
    if (communicator_.progress()) {
      wait();  // for nothing but its errors
    } else {
      const SeatLeft left;
      wait();
    }
    if (rules_.in_order) return;
    open(receives_);
    const std::vector<std::uint64_t> sums =
        rules_.checksums ? checksums(receives_) : std::vector<std::uint64_t>(receives_.size());
    for (std::size_t i = 0; i < receives_.size(); ++i) {
      const MessageBuffer& receive = receives_[i];
      const MessageHeader& header = receive.header();
      const int peer = receive.peer();
      if (header.magic != kMessageMagic || header.source != peer || header.target != communicator_.rank())
        disagree(peer, "sent something that is no message");
      if (header.digest != rules_.digest) disagree(peer, kComputesSomethingElse);
      if (header.step != step_) disagree(peer, fmt::format("is at step {}", header.step));
      if (header.bytes != receive.size())
        disagree(peer, fmt::format("sent {} bytes, {} were expected", header.bytes, receive.bytes()));
      if (rules_.checksums && header.checksum != sums[i]) disagree(peer, "sent a message that arrived changed");
    }
  });
  active_ = false;
}

void MessageStep::greet(Communicator& communicator, const MessageRules& rules, const std::string& name) {
  CommunicatorSteps& steps = steps_of(communicator);
  if (steps.greeted) return;
  std::vector<MessageBuffer> sends, receives;
  for (int peer = 0; peer < communicator.size(); ++peer) {
    if (peer == communicator.rank()) continue;
    sends.emplace_back(peer, 0, rules.memory);
    receives.emplace_back(peer, 0, rules.memory);
  }
  MessageStep(communicator, rules, name + ", comparing ranks").run(sends, receives);
  steps.greeted = true;
}

void all_gather(Communicator& communicator, const std::string& what, const SendBuffer& own,
                std::span<const ReceiveBuffer> parts, std::chrono::milliseconds deadline, void* stream) {
  const auto rank = static_cast<std::size_t>(communicator.rank());
  if (parts.size() != static_cast<std::size_t>(communicator.size()))
    reject("parts", "{} parts for {} ranks: give one for each, this rank's too", parts.size(), communicator.size());
  if (rank >= parts.size())
    reject("communicator", "the communicator says it is rank {} of {}: ranks are 0 to {}", communicator.rank(),
           parts.size(), parts.size() - 1);
  if (parts[rank].bytes != own.bytes)
    reject("own", "own has {} bytes, part {} has {}: they are the same rank's", own.bytes, rank, parts[rank].bytes);
  const bool on_gpu = own.device.type == DeviceType::cuda;
  if (!on_gpu && !communicator.takes(own.device))
    throw Unsupported("memory of the host: this communicator moves GPU memory only; use a local or an MPI ring");
  MessageMemory memory;
  if (on_gpu) memory = {own.device, stream, !communicator.takes(own.device)};
  const auto copy = [&](void* target, const void* source, std::size_t bytes) {
    if (on_gpu) gpu::copy(target, source, bytes, memory.device.index, stream);
    else if (bytes > 0) std::memcpy(target, source, bytes);
  };
  Hasher hasher;
  hasher.add(std::string_view(what));
  std::vector<MessageBuffer> sends, receives;
  for (std::size_t peer = 0; peer < parts.size(); ++peer) {
    hasher.add(parts[peer].bytes);
    if (peer == rank) continue;
    sends.emplace_back(static_cast<int>(peer), static_cast<std::int64_t>(own.bytes), memory);
    receives.emplace_back(static_cast<int>(peer), static_cast<std::int64_t>(parts[peer].bytes), memory);
    copy(sends.back().payload(), own.data, own.bytes);
  }
  const MessageRules rules{hasher.value(), true, deadline, memory};
  MessageStep(communicator, rules, what).run(sends, receives);
  for (const MessageBuffer& receive : receives)
    copy(parts[static_cast<std::size_t>(receive.peer())].data, receive.payload(), receive.size());
  copy(parts[rank].data, own.data, own.bytes);
}

}  // namespace longspan
