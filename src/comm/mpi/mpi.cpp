// MPI ranks: Isend and Irecv, and a loop of Test with a deadline. Standard calls only.
#include <fmt/format.h>
#include <mpi.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <exception>
#include <mutex>
#include <thread>

#include "longspan/communicator.h"
#include "util/reject.h"

namespace longspan {
namespace {

constexpr std::size_t kMostBytes = std::size_t{1} << 30;  // of one MPI message, whose count is an int
constexpr int kTag = 7441;

std::atomic<bool> failed{false};

std::string text_of(int code) {
  char text[MPI_MAX_ERROR_STRING] = {};
  int length = 0;
  if (MPI_Error_string(code, text, &length) != MPI_SUCCESS) return fmt::format("MPI error {}", code);
  return std::string(text, static_cast<std::size_t>(length));
}

void require(int code, const char* doing) {
  if (code != MPI_SUCCESS) raise<CommError>("{}: {}", doing, text_of(code));
}

/// Starts MPI if nobody has, and ends it with the process. After a failure it is not ended: its pending messages might
/// never complete, and MPI_Finalize would wait for them.
void initialise() {
  static std::mutex mutex;
  const std::lock_guard lock(mutex);
  int done = 0, ended = 0;
  require(MPI_Initialized(&done), "MPI_Initialized");
  require(MPI_Finalized(&ended), "MPI_Finalized");
  if (ended) throw CommError("MPI was finalised before: start the process anew");
  if (done) return;
  int provided = 0;
  require(MPI_Init_thread(nullptr, nullptr, MPI_THREAD_SERIALIZED, &provided), "MPI_Init_thread");
  std::atexit([] {
    int over = 0;
    if (!failed && MPI_Finalized(&over) == MPI_SUCCESS && !over) MPI_Finalize();
  });
}

class MpiCommunicator final : public Communicator {
 public:
  MpiCommunicator() {
    initialise();
    require(MPI_Comm_dup(MPI_COMM_WORLD, &communicator_), "MPI_Comm_dup");
    // Errors come back as codes, so that a dead rank does not end this one.
    require(MPI_Comm_set_errhandler(communicator_, MPI_ERRORS_RETURN), "MPI_Comm_set_errhandler");
    require(MPI_Comm_rank(communicator_, &rank_), "MPI_Comm_rank");
    require(MPI_Comm_size(communicator_, &size_), "MPI_Comm_size");
  }
  ~MpiCommunicator() override {
    int over = 0;
    if (requests_.empty() && !failed && MPI_Finalized(&over) == MPI_SUCCESS && !over) MPI_Comm_free(&communicator_);
  }

  int rank() const override { return rank_; }
  int size() const override { return size_; }
  bool keeps_buffers() const override { return true; }

  void begin(std::span<const SendBuffer> sends, std::span<const ReceiveBuffer> receives) override {
    for (const ReceiveBuffer& receive : receives) {
      post(receive.bytes, receive.peer, true, [&](std::size_t at, int bytes, MPI_Request* request) {
        return MPI_Irecv(static_cast<std::byte*>(receive.data) + at, bytes, MPI_BYTE, receive.peer, kTag, communicator_,
                         request);
      });
    }
    for (const SendBuffer& send : sends) {
      post(send.bytes, send.peer, false, [&](std::size_t at, int bytes, MPI_Request* request) {
        return MPI_Isend(static_cast<const std::byte*>(send.data) + at, bytes, MPI_BYTE, send.peer, kTag, communicator_,
                         request);
      });
    }
  }

  /// MPI moves large messages only inside its calls.
  bool progress() noexcept override {
    try {
      if (!error_) std::erase_if(requests_, [&](Pending& pending) { return test(pending); });
    } catch (const std::exception&) {
      error_ = std::current_exception();
    }
    return !error_ && requests_.empty();
  }

  void wait(Deadline deadline) override {
    if (error_) std::rethrow_exception(error_);
    for (int idle = 0; !requests_.empty();) {
      const std::size_t before = requests_.size();
      std::erase_if(requests_, [&](Pending& pending) { return test(pending); });
      if (requests_.size() < before) {
        idle = 0;
        continue;
      }
      if (std::chrono::steady_clock::now() >= deadline) {
        const auto silent =
            std::find_if(requests_.begin(), requests_.end(), [](const Pending& pending) { return pending.receiving; });
        const Pending& first = silent == requests_.end() ? requests_.front() : *silent;
        raise<CommError>("rank {} {} before the deadline", first.peer,
                         first.receiving ? "sent nothing" : "took nothing");
      }
      // Ranks may share cores: after a while of looking, let others run.
      if (++idle > 200) std::this_thread::sleep_for(std::chrono::microseconds(std::min(idle, 2000) / 10));
      else std::this_thread::yield();
    }
  }

  void abort() noexcept override {
    // What was received may still be written, so the buffers are kept by whoever made them.
    failed = true;
    requests_.clear();
  }

 private:
  struct Pending {
    MPI_Request request;
    int peer;
    int bytes;
    bool receiving;
  };

  /// Starts the MPI messages of one of the ring's; one of no bytes is still a message.
  template <class Start>
  void post(std::size_t bytes, int peer, bool receiving, Start&& start) {
    std::size_t at = 0;
    do {
      Pending pending{MPI_REQUEST_NULL, peer, static_cast<int>(std::min(bytes - at, kMostBytes)), receiving};
      check(start(at, pending.bytes, &pending.request), peer);
      requests_.push_back(pending);
      at += static_cast<std::size_t>(pending.bytes);
    } while (at < bytes);
  }

  void check(int code, int peer) const {
    if (code != MPI_SUCCESS) raise<CommError>("rank {}: {}", peer, text_of(code));
  }

  bool test(Pending& pending) const {
    int done = 0;
    MPI_Status status;
    const int code = MPI_Test(&pending.request, &done, &status);
    if (code != MPI_SUCCESS) {
      int kind = 0;
      MPI_Error_class(code, &kind);
      if (kind == MPI_ERR_TRUNCATE)
        raise<CommError>("rank {} sent more than the {} bytes expected: the ranks disagree", pending.peer,
                         pending.bytes);
      check(code, pending.peer);
    }
    if (!done) return false;
    if (pending.receiving) {
      int bytes = 0;
      MPI_Get_count(&status, MPI_BYTE, &bytes);
      if (bytes != pending.bytes)
        raise<CommError>("rank {} sent {} bytes, {} were expected: the ranks disagree", pending.peer, bytes,
                         pending.bytes);
    }
    return true;
  }

  MPI_Comm communicator_ = MPI_COMM_NULL;
  int rank_ = 0, size_ = 1;
  std::vector<Pending> requests_;
  std::exception_ptr error_;  // that progress() met
};

}  // namespace

std::shared_ptr<Communicator> mpi_ring() { return std::make_shared<MpiCommunicator>(); }

bool under_mpi() {
  for (const char* name : {"OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "PMIX_RANK", "MPI_LOCALNRANKS"}) {
    if (std::getenv(name)) return true;
  }
  return false;
}

}  // namespace longspan
