// How the ranks of a ring talk: messages between pairs of ranks, with a deadline. Knows nothing of attention.
#pragma once

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "longspan/export.h"
#include "longspan/tensor_view.h"

namespace longspan {

struct SendBuffer {
  int peer = 0;
  const void* data = nullptr;
  std::size_t bytes = 0;
  Device device{};         ///< whose memory it is; others than the CPU's only where Communicator::takes says so
  bool in_order = false;   ///< moves in the order of `stream`; only where Communicator::in_stream_order
  void* stream = nullptr;  ///< cudaStream_t
};
struct ReceiveBuffer {
  int peer = 0;
  void* data = nullptr;
  std::size_t bytes = 0;
  Device device{};
  bool in_order = false;
  void* stream = nullptr;
  /// Where given, and in the order of a stream, the sender's memory may be lent until release() instead of copied: its
  /// address is put here.
  const void** lent = nullptr;
};

/// One rank's end of a ring. Used by one thread at a time. Derive from it to bring a transport of your own.
class LONGSPAN_API Communicator {
 public:
  using Deadline = std::chrono::steady_clock::time_point;

  Communicator() = default;
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;
  virtual ~Communicator();

  virtual int rank() const = 0;
  virtual int size() const = 0;
  /// Starts one exchange: at most one message to and from each peer, in an order that both sides keep from exchange to
  /// exchange. Buffers stay valid and untouched until wait() returns or abort() does.
  /// GPU memory is ready when begin() is called, and what has arrived there is when wait() returns.
  virtual void begin(std::span<const SendBuffer> sends, std::span<const ReceiveBuffer> receives) = 0;
  /// Called now and then between begin() and wait() while the rank computes, so that messages move meanwhile. Returns
  /// whether every message has arrived and left; false where it cannot tell. Failures are left to wait().
  virtual bool progress() noexcept { return false; }
  /// Returns when every message of the exchange has arrived and left. Throws CommError, naming a rank, if one fails or
  /// the deadline passes.
  virtual void wait(Deadline deadline) = 0;
  /// Whether GPU memory can move in the order of the streams that buffers name. What is sent is then what the stream
  /// has made by begin(); wait() returns when the peers' hosts have sent, and what the stream gets from then on finds
  /// what has arrived. Sent buffers may be written by what the stream gets after settle(). No host waits for a device.
  virtual bool in_stream_order() const { return false; }
  /// Returns when peers' hosts have taken what was sent in the order of streams. Throws as wait() does.
  virtual void settle(Deadline) {}
  /// What was lent is used by nothing that the stream gets from now on.
  virtual void release() {}
  /// Gives the exchange up: afterwards nobody reads or writes its buffers (but see keeps_buffers), and the communicator
  /// is of no more use.
  virtual void abort() noexcept = 0;
  /// Whether buffers may still be written after abort(). Whoever made them then keeps them until the process ends.
  virtual bool keeps_buffers() const { return false; }

  /// Whether buffers may be in a device's memory. What is on a GPU and not taken goes by way of the host.
  virtual bool takes(Device device) const { return device.type == DeviceType::cpu; }

  /// Why the communicator is unusable; empty while it is not. A failed call of a ring leaves its reason here.
  const std::string& failure() const { return failure_; }
  void fail(std::string reason);

 private:
  std::string failure_;
};

/// Every rank's bytes on every rank, under a deadline: sends `own` to all others and fills parts[p] with what rank p
/// sent. All ranks know the sizes of all parts and call it in the same order; memory is on one device, `stream` is that
/// of a GPU. `what` names the step in errors. Throws CommError.
LONGSPAN_API void all_gather(Communicator& communicator, const std::string& what, const SendBuffer& own,
                             std::span<const ReceiveBuffer> parts, std::chrono::milliseconds deadline,
                             void* stream = nullptr);

/// What a local ring does wrong on purpose, so that callers can test what they do about it.
struct LocalFault {
  enum class Kind { delay, lose, duplicate, corrupt, die, stall };
  Kind kind = Kind::delay;
  int rank = 0;   ///< who misbehaves: the sender of a message, or the rank that dies (throws) or stalls (stays silent)
  int peer = -1;  ///< to whom; -1: to everybody
  int exchange = -1;                   ///< index of the exchange within that rank's, from 0; -1: all of them
  std::chrono::milliseconds time{50};  ///< delay and stall
};

/// The network that a local ring imitates. Each rank has a port out and a port in, both of this rate; a message arrives
/// `latency` after the later of both has passed it and what was queued there before.
struct LocalLink {
  double bytes_per_second = 0;          ///< 0: as fast as memory
  std::chrono::nanoseconds latency{0};  ///< of every message
};

/// Ranks of one process, one per calling thread; rank p is element p. Messages are copied once, from buffer to buffer,
/// between GPUs too; several ranks may share a GPU.
/// A nonzero `shuffle` delivers messages in an order drawn from it.
LONGSPAN_API std::vector<std::shared_ptr<Communicator>> local_ring(int ranks, std::vector<LocalFault> faults = {},
                                                                   std::uint64_t shuffle = 0, LocalLink link = {});

/// The ranks of MPI_COMM_WORLD (a duplicate of it). Initialises MPI if nobody has. Throws Unsupported where the library
/// was built without MPI. After a failure MPI is not finalised: its pending messages may never complete.
LONGSPAN_API std::shared_ptr<Communicator> mpi_ring();
/// Whether this process was started by an MPI launcher. False where the library was built without MPI.
LONGSPAN_API bool under_mpi();

/// Ranks that are processes of one node, at most 64: rows travel through shared memory, those on a GPU through memory
/// of it that processes map (CUDA IPC; several ranks may share a GPU). `name` is the ring's own, the same on all ranks,
/// which call at the same time; who does not come by the deadline is a CommError.
LONGSPAN_API std::shared_ptr<Communicator> node_ring(const std::string& name, int rank, int size,
                                                     std::chrono::milliseconds deadline = std::chrono::seconds(60));

/// What the ranks of one NCCL ring have in common. Made by one rank and given to the others by whatever they share.
using NcclId = std::array<char, 128>;
/// Throws Unsupported where NCCL is not found (libnccl.so.2, as the system finds libraries) or too old.
LONGSPAN_API NcclId nccl_id();
/// This rank's end of a ring over NCCL, which moves GPU memory only. Every rank has a process and a GPU of its own (the
/// memory of messages is not mapped on other GPUs of a process) and calls at the same time; one that does not come by
/// the deadline is a CommError. A new ring may be made after a failure.
LONGSPAN_API std::shared_ptr<Communicator> nccl_ring(const NcclId& id, int rank, int size, int device,
                                                     std::chrono::milliseconds deadline = std::chrono::seconds(60));

}  // namespace longspan
