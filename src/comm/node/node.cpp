// Processes of one node as ranks. A segment of shared memory has a mailbox for each pair of ranks; rows lie in the
// sender's outbox, which is shared memory or, for rows on a GPU, memory there that others map. Whoever lives holds a
// lock on a byte of the segment's file, which the system takes away from the dead.
#include <fcntl.h>
#include <fmt/format.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cctype>
#include <cerrno>
#include <cstring>
#include <map>
#include <optional>
#include <thread>
#include <utility>

#include "comm/gpu/gpu.h"
#include "comm/node/ipc.h"
#include "longspan/communicator.h"
#include "util/reject.h"

namespace longspan {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int kMostRanks = 64;
constexpr std::size_t kAlignment = 256;

struct Mailbox {
  std::atomic<std::uint64_t> posted, taken;  // messages so far
  std::uint64_t bytes, offset, generation;   // of the last one; which of the sender's outboxes
  std::int32_t on_gpu;
};

struct Cell {
  std::atomic<std::int32_t> gave_up;      // the rank that this one gave up because of, and 1; 0: it has not
  std::atomic<std::uint64_t> generation;  // of the outbox in shared memory, whose file others remove if it dies
  ipc::Handle handle;                     // of the outbox on the GPU
};

struct Segment {
  std::atomic<std::uint32_t> ready;
  std::atomic<std::int32_t> joined;
  std::int32_t size;
  Cell cells[kMostRanks];
  Mailbox mailboxes[kMostRanks][kMostRanks];  // [source][target]
};

/// A file of shared memory, mapped.
class Shared {
 public:
  /// `bytes` 0: as it is. Does not throw if it is not there: see mapped().
  Shared(const std::string& name, int flags, std::size_t bytes) : file_(shm_open(name.c_str(), flags, 0600)) {
    if (file_ < 0) return;
    struct stat status {};
    // Allocated at once: where there is no room, that is an error here and not a signal at the first write.
    if (bytes > 0 && (flags & O_CREAT)) {
      errno = posix_fallocate(file_, 0, static_cast<off_t>(bytes));
      if (errno != 0) return;
    }
    if (fstat(file_, &status) != 0 || status.st_size == 0) return;
    size_ = static_cast<std::size_t>(status.st_size);
    void* const memory = mmap(nullptr, size_, PROT_READ | PROT_WRITE, MAP_SHARED, file_, 0);
    if (memory != MAP_FAILED) data_ = static_cast<std::byte*>(memory);
  }
  Shared(const Shared&) = delete;
  Shared& operator=(const Shared&) = delete;
  ~Shared() {
    if (data_) munmap(data_, size_);
    if (file_ >= 0) close(file_);
  }
  bool mapped() const { return data_ != nullptr; }
  std::byte* data() const { return data_; }
  std::size_t size() const { return size_; }

  /// The lock of this open file on a byte; false if another has it.
  bool lock(int byte) const {
    struct flock lock = region(byte);
    return fcntl(file_, F_OFD_SETLK, &lock) == 0;
  }
  bool locked_by_another(int byte) const {
    struct flock lock = region(byte);
    return fcntl(file_, F_OFD_GETLK, &lock) == 0 && lock.l_type != F_UNLCK;
  }

 private:
  static struct flock region(int byte) {
    struct flock lock {};
    lock.l_type = F_WRLCK;
    lock.l_whence = SEEK_SET;
    lock.l_start = byte;
    lock.l_len = 1;
    return lock;
  }
  int file_;
  std::byte* data_ = nullptr;
  std::size_t size_ = 0;
};

void pause(int idle) {
  if (idle > 500) std::this_thread::sleep_for(std::chrono::microseconds(std::min(idle, 2000) / 20));
  else std::this_thread::yield();
}

class NodeCommunicator final : public Communicator {
 public:
  NodeCommunicator(const std::string& name, int rank, int size, std::chrono::milliseconds deadline)
      : name_(fmt::format("/longspan-{}-{}", getuid(), name)), rank_(rank), size_(size), failed_(rank) {
    const auto end = Clock::now() + deadline;
    if (rank == 0) create();
    else join(end);
    segment().joined.fetch_add(1);
    for (int idle = 0; segment().joined.load() < size; ++idle) {
      if (Clock::now() >= end) {
        if (rank == 0) shm_unlink(name_.c_str());
        raise<CommError>("joining ring '{}' as rank {} of {}: only {} came before the deadline", name, rank, size,
                         segment().joined.load());
      }
      pause(idle);
    }
    if (rank == 0) shm_unlink(name_.c_str());
  }

  ~NodeCommunicator() override {
    abort();
    if (outbox_) shm_unlink(outbox_name(rank_, generation_).c_str());
  }

  int rank() const override { return rank_; }
  int size() const override { return size_; }
  bool takes(Device device) const override { return device.type == DeviceType::cpu || ipc::available(); }

  void begin(std::span<const SendBuffer> sends, std::span<const ReceiveBuffer> receives) override {
    for (const SendBuffer& send : sends) check_peer(send.peer);
    for (const ReceiveBuffer& receive : receives) check_peer(receive.peer);
    std::size_t bytes[2] = {};  // on the CPU, on the GPU
    for (const SendBuffer& send : sends) bytes[on_gpu(send.device)] += padded(send.bytes);
    reserve(bytes, sends);
    std::size_t at[2] = {};
    for (const SendBuffer& send : sends) {
      const bool gpu = on_gpu(send.device);
      std::byte* const base = gpu ? gpu_outbox_->data() : outbox_ ? outbox_->data() : nullptr;
      if (send.bytes > 0) {
        if (gpu) gpu::copy(base + at[1], send.data, send.bytes, send.device.index, stream());
        else std::memcpy(base + at[0], send.data, send.bytes);
      }
      Mailbox& mail = mailbox(rank_, send.peer);
      mail.bytes = send.bytes;
      mail.offset = at[gpu];
      mail.generation = gpu ? gpu_generation_ : generation_;
      mail.on_gpu = gpu;
      at[gpu] += padded(send.bytes);
    }
    if (bytes[1] > 0) gpu::wait(gpu_device_, stream());
    for (const SendBuffer& send : sends) mailbox(rank_, send.peer).posted.fetch_add(1, std::memory_order_release);
    waiting_.assign(receives.begin(), receives.end());
    sent_to_.clear();
    for (const SendBuffer& send : sends) sent_to_.push_back(send.peer);
  }

  bool progress() noexcept override {
    try {
      return deliver();
    } catch (const std::exception&) {
      return false;  // wait() finds it again
    }
  }

  void wait(Deadline deadline) override {
    for (int idle = 0; !deliver(); ++idle) {
      if (idle % 64 == 0) look_for_the_lost(deadline);
      pause(idle);
    }
  }

  void abort() noexcept override {
    waiting_.clear();
    sent_to_.clear();
    if (!aborted_) segment().cells[rank_].gave_up.store(failed_ + 1);
    aborted_ = true;
  }

 private:
  static bool on_gpu(Device device) { return device.type == DeviceType::cuda; }
  static std::size_t padded(std::size_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }
  Segment& segment() const { return *reinterpret_cast<Segment*>(shared_->data()); }
  Mailbox& mailbox(int source, int target) const { return segment().mailboxes[source][target]; }
  std::string outbox_name(int rank, std::uint64_t generation) const {
    return fmt::format("{}-{}-{}", name_, rank, generation);
  }
  void check_peer(int peer) const {
    if (peer < 0 || peer >= size_ || peer == rank_)
      reject("peer", "peer {} of rank {} in a ring of {}: give another rank, 0 to {}", peer, rank_, size_, size_ - 1);
  }

  void create() {
    shm_unlink(name_.c_str());  // of a ring that died while it was made
    shared_.emplace(name_, O_CREAT | O_EXCL | O_RDWR | O_CLOEXEC, sizeof(Segment));
    if (!shared_->mapped()) raise<CommError>("shared memory '{}': {}", name_, std::strerror(errno));
    shared_->lock(rank_);
    segment().size = size_;  // all else begins as zeros
    segment().ready.store(1, std::memory_order_release);
  }

  void join(Clock::time_point end) {
    for (int idle = 0;; ++idle) {
      shared_.emplace(name_, O_RDWR | O_CLOEXEC, 0);
      // One whose first rank is gone is left over from a ring that died.
      if (shared_->mapped() && shared_->size() == sizeof(Segment) && segment().ready.load(std::memory_order_acquire) &&
          shared_->locked_by_another(0))
        break;
      if (Clock::now() >= end)
        raise<CommError>("joining ring '{}' as rank {}: rank 0 did not come before the deadline", name_, rank_);
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    if (segment().size != size_)
      raise<CommError>("joining ring '{}': rank 0 says {} ranks, rank {} says {}", name_, segment().size, rank_, size_);
    if (!shared_->lock(rank_)) raise<CommError>("joining ring '{}': another process is rank {}", name_, rank_);
  }

  void* stream() {
    if (!stream_) stream_.emplace(gpu_device_);
    return stream_->get();
  }

  /// Outboxes that hold the messages of an exchange; everything sent before has been taken.
  void reserve(const std::size_t (&bytes)[2], std::span<const SendBuffer> sends) {
    if (bytes[0] > 0 && (!outbox_ || outbox_->size() < bytes[0])) {
      if (outbox_) shm_unlink(outbox_name(rank_, generation_).c_str());
      outbox_.reset();
      const std::string name = outbox_name(rank_, ++generation_);
      segment().cells[rank_].generation.store(generation_);
      shm_unlink(name.c_str());
      outbox_.emplace(name, O_CREAT | O_EXCL | O_RDWR | O_CLOEXEC, bytes[0]);
      if (!outbox_->mapped()) {
        outbox_.reset();
        raise<CommError>("{} bytes of shared memory for messages: {}", bytes[0], std::strerror(errno));
      }
    }
    if (bytes[1] == 0) return;
    for (const SendBuffer& send : sends) {
      if (on_gpu(send.device)) gpu_device_ = send.device.index;
    }
    if (gpu_outbox_ && gpu_capacity_ >= bytes[1]) return;
    gpu_outbox_.reset();
    gpu_outbox_.emplace(gpu_device_, bytes[1]);
    gpu_capacity_ = bytes[1];
    ++gpu_generation_;
    segment().cells[rank_].handle = gpu_outbox_->handle();
  }

  /// Where another rank's message lies.
  const std::byte* inbox(int source, const Mailbox& mail, int device) {
    if (mail.on_gpu) {
      auto& [generation, memory] = imported_[source];
      if (!memory || generation != mail.generation) {
        memory.reset();
        memory = std::make_unique<ipc::Imported>(device, segment().cells[source].handle);
        generation = mail.generation;
      }
      return memory->data() + mail.offset;
    }
    auto& [generation, memory] = opened_[source];
    if (!memory || generation != mail.generation) {
      memory = std::make_unique<Shared>(outbox_name(source, mail.generation), O_RDWR | O_CLOEXEC, 0);
      if (!memory->mapped()) {
        memory.reset();
        raise<CommError>("rank {} left before its message was read", source);
      }
      generation = mail.generation;
    }
    return memory->data() + mail.offset;
  }

  /// Takes what has come; whether all has come and was taken.
  bool deliver() {
    std::erase_if(waiting_, [&](const ReceiveBuffer& receive) {
      Mailbox& mail = mailbox(receive.peer, rank_);
      if (mail.posted.load(std::memory_order_acquire) == mail.taken.load(std::memory_order_relaxed)) return false;
      if (mail.bytes != receive.bytes)
        raise<CommError>("rank {} sent {} bytes, {} were expected: the ranks disagree", receive.peer, mail.bytes,
                         receive.bytes);
      if (mail.on_gpu != on_gpu(receive.device))
        raise<CommError>("rank {} sent from another kind of memory: the ranks disagree", receive.peer);
      if (receive.bytes > 0) {
        const std::byte* const from = inbox(receive.peer, mail, receive.device.index);
        if (mail.on_gpu) {
          gpu_device_ = receive.device.index;
          gpu::copy(receive.data, from, receive.bytes, gpu_device_, stream());
          gpu::wait(gpu_device_, stream());
        } else {
          std::memcpy(receive.data, from, receive.bytes);
        }
      }
      mail.taken.fetch_add(1, std::memory_order_release);
      return true;
    });
    std::erase_if(sent_to_, [&](int peer) {
      const Mailbox& mail = mailbox(rank_, peer);
      return mail.taken.load(std::memory_order_acquire) == mail.posted.load(std::memory_order_relaxed);
    });
    return waiting_.empty() && sent_to_.empty();
  }

  void look_for_the_lost(Deadline deadline) {
    const bool late = Clock::now() >= deadline;
    const auto look = [&](int peer, const char* did) {
      const std::int32_t gave_up = segment().cells[peer].gave_up.load();
      const bool gone = gave_up == 0 && !shared_->locked_by_another(peer);
      if (gave_up == 0 && !gone && !late) return;
      // What was posted before its sender left still arrives.
      if (deliver()) return;
      failed_ = gave_up > 0 && gave_up - 1 != rank_ ? gave_up - 1 : peer;
      if (gone) {
        shm_unlink(outbox_name(peer, segment().cells[peer].generation.load()).c_str());
        raise<CommError>("rank {} ended", peer);
      }
      if (gave_up > 0 && failed_ == peer) raise<CommError>("rank {} gave up", peer);
      if (gave_up > 0) raise<CommError>("rank {} failed, so rank {} gave up", failed_, peer);
      raise<CommError>("rank {} {} before the deadline", peer, did);
    };
    const std::vector<ReceiveBuffer> waiting = waiting_;
    const std::vector<int> sent_to = sent_to_;
    for (const ReceiveBuffer& receive : waiting) {
      if (!waiting_.empty()) look(receive.peer, "sent nothing");
    }
    for (const int peer : sent_to) {
      if (!sent_to_.empty()) look(peer, "took nothing");
    }
  }

  const std::string name_;
  const int rank_, size_;
  int failed_;  // the rank that this one gave up because of, else itself
  bool aborted_ = false;
  std::optional<Shared> shared_, outbox_;
  std::uint64_t generation_ = 0, gpu_generation_ = 0;
  std::map<int, std::pair<std::uint64_t, std::unique_ptr<Shared>>> opened_;
  std::map<int, std::pair<std::uint64_t, std::unique_ptr<ipc::Imported>>> imported_;
  std::optional<ipc::Exported> gpu_outbox_;
  std::size_t gpu_capacity_ = 0;
  int gpu_device_ = 0;
  std::optional<gpu::SideStream> stream_;
  std::vector<ReceiveBuffer> waiting_;
  std::vector<int> sent_to_;
};

}  // namespace

std::shared_ptr<Communicator> node_ring(const std::string& name, int rank, int size,
                                        std::chrono::milliseconds deadline) {
  if (size < 1 || size > kMostRanks) reject("size", "{} ranks: give 1 to {}", size, kMostRanks);
  if (rank < 0 || rank >= size) reject("rank", "rank {} of {}: ranks are 0 to size - 1", rank, size);
  const auto fits = [](char c) {
    return std::isalnum(static_cast<unsigned char>(c)) || c == '-' || c == '_' || c == '.';
  };
  if (name.empty() || name.size() > 100 || !std::all_of(name.begin(), name.end(), fits))
    reject("name", "name '{}': give 1 to 100 letters, digits, '-', '_' or '.'", name);
  return std::make_shared<NodeCommunicator>(name, rank, size, deadline);
}

}  // namespace longspan
