// Threads as ranks. Messages wait on a shared board: the receiver copies from the sender's buffer, so that a rank
// that stays silent is missed by those it sends to as well as by those it receives from.
#include <algorithm>
#include <cmath>
#include <condition_variable>
#include <cstring>
#include <exception>
#include <list>
#include <mutex>
#include <random>
#include <thread>
#include <utility>

#include "comm/gpu/gpu.h"
#include "longspan/communicator.h"
#include "longspan/threads.h"
#include "util/parallel.h"
#include "util/reject.h"

namespace longspan {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int kMostRanks = 4096;

struct Message {
  int source = 0, target = 0;
  std::uint64_t number = 0;  // of the messages from source to target
  const std::byte* data = nullptr;
  std::size_t bytes = 0;
  Device device{};
  Clock::time_point visible;
  std::uint64_t order = 0;  // delivery follows this
  bool corrupt = false;
  enum class State { waiting, copying, done } state = State::waiting;
  std::vector<std::byte> own;  // a duplicate outlives its sender's buffer
  // Of what moves in the order of a stream: it is ready, and it has been copied (null where both share the stream).
  bool in_order = false;
  void* stream = nullptr;
  std::shared_ptr<gpu::StreamMark> ready, taken;
};

void copy(void* target, Device target_device, const void* source, Device source_device, std::size_t bytes) {
  if (bytes == 0) return;
  for (const Device& device : {target_device, source_device}) {
    if (device.type == DeviceType::cuda) return gpu::copy_now(target, source, bytes, device.index);
  }
  // A rank that is done helps those that are not, so a long copy is not one thread's alone.
  constexpr std::size_t kAtOnce = 256 * 1024;
  parallel_for(threads_for_bytes(static_cast<std::int64_t>(bytes)),
               static_cast<std::int64_t>((bytes + kAtOnce - 1) / kAtOnce), {}, [&](int, std::int64_t part) {
                 const std::size_t begin = static_cast<std::size_t>(part) * kAtOnce;
                 std::memcpy(static_cast<std::byte*>(target) + begin, static_cast<const std::byte*>(source) + begin,
                             std::min(kAtOnce, bytes - begin));
               });
}

struct Board {
  Board(int count, std::vector<LocalFault> list, std::uint64_t seed, LocalLink like)
      : ranks(count),
        faults(std::move(list)),
        link(like),
        random(seed),
        shuffled(seed != 0),
        out_free(static_cast<std::size_t>(count)),
        in_free(out_free) {
    gave_up.reserve(static_cast<std::size_t>(count));
  }

  /// When a message that is posted now arrives; both ports are then taken until it has passed.
  Clock::time_point arrival(int source, int target, std::size_t bytes, Clock::time_point now) {
    if (link.bytes_per_second == 0) return now + link.latency;
    constexpr double kLongest = 1e6;  // seconds: beyond any deadline, and far from what the clock can count
    const std::chrono::duration<double> passing(std::min(static_cast<double>(bytes) / link.bytes_per_second, kLongest));
    const auto take = [&](Clock::time_point& free) {
      return free = std::max(free, now) + std::chrono::ceil<Clock::duration>(passing);
    };
    return std::max(take(out_free[static_cast<std::size_t>(source)]), take(in_free[static_cast<std::size_t>(target)])) +
           link.latency;
  }

  const int ranks;
  const std::vector<LocalFault> faults;
  const LocalLink link;
  std::mutex mutex;
  std::condition_variable changed;
  std::list<Message> messages;
  std::mt19937_64 random;
  const bool shuffled;
  std::uint64_t posted = 0;
  std::vector<Clock::time_point> out_free, in_free;  // ports of the imitated link, by rank
  struct GaveUp {
    int rank, because_of;
  };
  std::vector<GaveUp> gave_up;  // ranks that aborted, the first one first
};

class LocalCommunicator final : public Communicator {
 public:
  LocalCommunicator(std::shared_ptr<Board> board, int rank)
      : board_(std::move(board)),
        rank_(rank),
        failed_(rank),
        sent_(static_cast<std::size_t>(board_->ranks)),
        received_(sent_.size()) {}
  // A rank that leaves (its thread ended, perhaps by an error of its own) is not waited for.
  ~LocalCommunicator() override { abort(); }

  int rank() const override { return rank_; }
  int size() const override { return board_->ranks; }
  bool takes(Device) const override { return true; }
  /// The host imitates a link.
  bool in_stream_order() const override {
    return board_->link.bytes_per_second == 0 && board_->link.latency == std::chrono::nanoseconds(0);
  }

  void begin(std::span<const SendBuffer> sends, std::span<const ReceiveBuffer> receives) override {
    const int exchange = exchanges_++;
    if (const LocalFault* fault = find(LocalFault::Kind::die, -1, exchange))
      raise<CommError>("rank {} died in exchange {} (injected)", fault->rank, exchange);
    if (const LocalFault* fault = find(LocalFault::Kind::stall, -1, exchange)) std::this_thread::sleep_for(fault->time);
    for (const SendBuffer& send : sends) check_peer(send.peer);
    for (const ReceiveBuffer& receive : receives) check_peer(receive.peer);
    waiting_.assign(receives.begin(), receives.end());
    std::shared_ptr<gpu::StreamMark> ready;
    if (!sends.empty() && sends[0].in_order)
      ready = std::make_shared<gpu::StreamMark>(sends[0].device.index, sends[0].stream);
    const std::lock_guard lock(board_->mutex);
    for (const SendBuffer& send : sends) post(send, exchange, ready);
    board_->changed.notify_all();
  }

  void wait(Deadline deadline) override {
    run_until(deadline, [&] {
      return waiting_.empty() && std::all_of(pending_.begin(), pending_.end(), [](auto& one) { return one->in_order; });
    });
  }
  void release() override {
    const std::lock_guard lock(board_->mutex);
    release_lent();
  }
  void settle(Deadline deadline) override {
    run_until(deadline, [&] { return pending_.empty(); });
  }

  bool progress() noexcept override {
    try {
      std::unique_lock lock(board_->mutex);
      Clock::time_point next = Clock::now();
      deliver(lock, next, next);
      return waiting_.empty() && pending_.empty();
    } catch (const std::exception&) {
      return false;  // wait() finds it again
    }
  }

  void abort() noexcept override {
    std::unique_lock lock(board_->mutex);
    if (!std::exchange(aborted_, true)) board_->gave_up.push_back({rank_, failed_});
    release_lent();
    for (const auto& message : pending_) {
      board_->changed.wait(lock, [&] { return message->state != Message::State::copying; });
      follow(*message);
      board_->messages.erase(message);
    }
    pending_.clear();
    waiting_.clear();
    board_->changed.notify_all();
  }

 private:
  using MessageHandle = std::list<Message>::iterator;

  template <class Done>
  void run_until(Deadline deadline, Done&& done) {
    std::unique_lock lock(board_->mutex);
    while (true) {
      const auto now = Clock::now();
      Clock::time_point next = deadline;
      deliver(lock, now, next);
      if (done()) return;
      const std::vector<int> peers = peers_left();
      // The first who gave up, since later ones may have done so because of it.
      for (const auto& [peer, because_of] : board_->gave_up) {
        if (!std::binary_search(peers.begin(), peers.end(), peer)) continue;
        failed_ = because_of == rank_ ? peer : because_of;
        if (failed_ == peer) raise<CommError>("rank {} gave up", peer);
        raise<CommError>("rank {} failed, so rank {} gave up", failed_, peer);
      }
      if (now >= deadline) {
        failed_ = peers.front();
        const bool silent =
            std::any_of(waiting_.begin(), waiting_.end(), [&](const ReceiveBuffer& r) { return r.peer == failed_; });
        raise<CommError>("rank {} {} before the deadline", failed_, silent ? "sent nothing" : "took nothing");
      }
      board_->changed.wait_until(lock, next);
    }
  }

  const LocalFault* find(LocalFault::Kind kind, int peer, int exchange) const {
    for (const LocalFault& fault : board_->faults) {
      if (fault.kind == kind && fault.rank == rank_ && (fault.peer < 0 || peer < 0 || fault.peer == peer) &&
          (fault.exchange < 0 || fault.exchange == exchange)) {
        return &fault;
      }
    }
    return nullptr;
  }

  void check_peer(int peer) const {
    if (peer < 0 || peer >= size())
      reject("peer", "peer {} of a ring of {}: ranks are 0 to {}", peer, size(), size() - 1);
  }

  /// With the board's mutex held.
  void post(const SendBuffer& send, int exchange, const std::shared_ptr<gpu::StreamMark>& ready) {
    Message message;
    message.source = rank_;
    message.target = send.peer;
    message.number = sent_[static_cast<std::size_t>(send.peer)]++;
    message.data = static_cast<const std::byte*>(send.data);
    message.bytes = send.bytes;
    message.device = send.device;
    message.in_order = send.in_order;
    message.stream = send.stream;
    message.ready = ready;
    message.visible = board_->arrival(rank_, send.peer, send.bytes, Clock::now());
    message.order = board_->shuffled ? board_->random() : board_->posted++;
    if (find(LocalFault::Kind::lose, send.peer, exchange)) return;
    if (const LocalFault* fault = find(LocalFault::Kind::delay, send.peer, exchange)) message.visible += fault->time;
    message.corrupt = find(LocalFault::Kind::corrupt, send.peer, exchange) != nullptr;
    if (find(LocalFault::Kind::duplicate, send.peer, exchange)) {
      Message again = message;
      again.own.resize(message.bytes);
      if (again.in_order) gpu::wait(message.device.index, message.stream);
      copy(again.own.data(), {}, message.data, message.device, message.bytes);
      again.data = again.own.data();
      again.device = {};
      again.in_order = false;
      board_->messages.push_back(std::move(again));
    }
    board_->messages.push_back(std::move(message));
    pending_.push_back(std::prev(board_->messages.end()));
  }

  /// Copies what has come, forgets what was taken; `next` is when to look again.
  void deliver(std::unique_lock<std::mutex>& lock, Clock::time_point now, Clock::time_point& next) {
    while (true) {
      MessageHandle best = board_->messages.end();
      for (auto message = board_->messages.begin(); message != board_->messages.end();) {
        if (message->target != rank_ || message->state != Message::State::waiting) {
          ++message;
          continue;
        }
        const std::uint64_t expected = received_[static_cast<std::size_t>(message->source)];
        if (message->number < expected) {  // a double of something taken before, or that whose double was taken
          if (!message->own.empty()) {
            message = board_->messages.erase(message);
            continue;
          }
          message->state = Message::State::done;
          board_->changed.notify_all();
        }
        const bool wanted = message->number == expected &&
                            std::any_of(waiting_.begin(), waiting_.end(),
                                        [&](const ReceiveBuffer& r) { return r.peer == message->source; });
        if (wanted && message->visible > now) next = std::min(next, message->visible);
        else if (wanted && (best == board_->messages.end() || message->order < best->order)) best = message;
        ++message;
      }
      if (best == board_->messages.end()) break;
      take(lock, best);
    }
    std::erase_if(pending_, [&](MessageHandle message) {
      if (message->state != Message::State::done) return false;
      follow(*message);
      board_->messages.erase(message);
      return true;
    });
  }

  void take(std::unique_lock<std::mutex>& lock, MessageHandle message) {
    const auto receive = std::find_if(waiting_.begin(), waiting_.end(),
                                      [&](const ReceiveBuffer& r) { return r.peer == message->source; });
    if (message->bytes != receive->bytes)
      raise<CommError>("rank {} sent {} bytes, {} were expected: the ranks disagree", message->source, message->bytes,
                       receive->bytes);
    message->state = Message::State::copying;
    lock.unlock();
    std::exception_ptr error;
    try {
      const bool in_order = message->in_order && receive->in_order;
      if (in_order) take_in_order(*message, *receive);
      else if (message->in_order) gpu::wait(message->device.index, message->stream);
      if (receive->in_order && (message->corrupt || !in_order))  // the host copies, and injects faults
        gpu::wait(receive->device.index, receive->stream);
      if (!in_order) copy(receive->data, receive->device, message->data, message->device, message->bytes);
      if (message->corrupt && message->bytes > 0) {
        std::byte* const last = static_cast<std::byte*>(receive->data) + message->bytes - 1;
        std::byte value{};
        copy(&value, {}, last, receive->device, 1);
        value ^= std::byte{0x10};
        copy(last, receive->device, &value, {}, 1);
      }
    } catch (...) {
      error = std::current_exception();
    }
    lock.lock();
    const bool lends = receive->lent && *receive->lent == message->data;
    if (error) {
      message->state = Message::State::waiting;
      board_->changed.notify_all();
      std::rethrow_exception(error);
    }
    ++received_[static_cast<std::size_t>(message->source)];
    if (lends) lent_.push_back({message, receive->stream});
    else message->state = Message::State::done;
    waiting_.erase(receive);
    if (!message->own.empty()) board_->messages.erase(message);
    board_->changed.notify_all();
  }

  static void take_in_order(Message& message, const ReceiveBuffer& receive) {
    const bool same = message.stream == receive.stream && message.device == receive.device;
    if (!same) message.ready->precede(receive.device.index, receive.stream);
    if (receive.lent && message.device == receive.device && !message.corrupt) {
      *receive.lent = message.data;  // which stays as it is while the message is `copying`
      return;
    }
    gpu::copy(receive.data, message.data, message.bytes, receive.device.index, receive.stream);
    if (!same) message.taken = std::make_shared<gpu::StreamMark>(receive.device.index, receive.stream);
  }

  /// Lets the sender's stream wait for a copy. A GPU that has failed has nothing left to wait for.
  static void follow(const Message& message) noexcept {
    try {
      if (message.taken) message.taken->precede(message.device.index, message.stream);
    } catch (const std::exception&) {}
  }
  /// With the board's mutex held.
  void release_lent() noexcept {
    for (const auto& [message, stream] : lent_) {
      try {
        if (stream != message->stream)
          message->taken = std::make_shared<gpu::StreamMark>(message->device.index, stream);
      } catch (const std::exception&) {}
      message->state = Message::State::done;
    }
    if (!lent_.empty()) board_->changed.notify_all();
    lent_.clear();
  }

  std::vector<int> peers_left() const {
    std::vector<int> peers;
    for (const ReceiveBuffer& receive : waiting_) peers.push_back(receive.peer);
    if (peers.empty()) {
      for (const auto& message : pending_) peers.push_back(message->target);
    }
    std::sort(peers.begin(), peers.end());
    return peers;
  }

  const std::shared_ptr<Board> board_;
  const int rank_;
  int failed_;  // the rank that this one gave up because of, else itself
  bool aborted_ = false;
  int exchanges_ = 0;
  std::vector<std::uint64_t> sent_, received_;  // messages to and from each rank
  std::vector<ReceiveBuffer> waiting_;
  std::vector<MessageHandle> pending_;
  std::vector<std::pair<MessageHandle, void*>> lent_;  // and the stream that reads them
};

}  // namespace

std::vector<std::shared_ptr<Communicator>> local_ring(int ranks, std::vector<LocalFault> faults, std::uint64_t shuffle,
                                                      LocalLink link) {
  if (ranks < 1 || ranks > kMostRanks) reject("ranks", "{} ranks: give 1 to {}, a thread for each", ranks, kMostRanks);
  if (!(link.bytes_per_second == 0 || (link.bytes_per_second >= 1 && std::isfinite(link.bytes_per_second))))
    reject("link", "a link of {} bytes per second: give at least 1, or 0 for none", link.bytes_per_second);
  if (link.latency < std::chrono::nanoseconds(0) || link.latency > std::chrono::hours(1))
    reject("link", "a link with a latency of {} ns: give 0 to an hour", link.latency.count());
  const auto board = std::make_shared<Board>(ranks, std::move(faults), shuffle, link);
  std::vector<std::shared_ptr<Communicator>> communicators;
  for (int rank = 0; rank < ranks; ++rank) communicators.push_back(std::make_shared<LocalCommunicator>(board, rank));
  return communicators;
}

}  // namespace longspan
