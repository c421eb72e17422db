// NCCL ranks: one group of sends and receives per exchange, on a stream of its own. The communicator never blocks:
// every wait is a loop that asks, with a deadline, after which everything is aborted.
#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cstring>
#include <thread>

#include "comm/gpu/gpu.h"
#include "comm/nccl/nccl_api.h"
#include "device/error.h"
#include "util/reject.h"

namespace longspan {
namespace nccl {
namespace {

constexpr int kOldest = 21400;               // communicators that do not block
constexpr std::chrono::seconds kToAbort{2};  // for kernels of an aborted communicator to end

struct Library {
  Api api;
  std::string why_not;
};

Library load() {
  Library library;
  void* const handle = dlopen("libnccl.so.2", RTLD_NOW | RTLD_LOCAL);
  if (!handle) {
    const char* const reason = dlerror();
    library.why_not = fmt::format(
        "NCCL rings need libnccl.so.2, which was not found ({}): install NCCL, or put its "
        "folder on LD_LIBRARY_PATH",
        reason ? reason : "no reason given");
    return library;
  }
  const auto find = [&](const char* name, auto& function) {
    function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(dlsym(handle, name));
    if (!function && library.why_not.empty())
      library.why_not = fmt::format("libnccl.so.2 has no {}: use NCCL 2.14 or newer", name);
  };
  Api& api = library.api;
  find("ncclGetVersion", api.get_version);
  find("ncclGetUniqueId", api.get_unique_id);
  find("ncclCommInitRankConfig", api.init_rank);
  find("ncclCommGetAsyncError", api.async_error);
  find("ncclCommFinalize", api.finalize);
  find("ncclCommDestroy", api.destroy);
  find("ncclCommAbort", api.abort);
  find("ncclGroupStart", api.group_start);
  find("ncclGroupEnd", api.group_end);
  find("ncclSend", api.send);
  find("ncclRecv", api.receive);
  find("ncclGetErrorString", api.error_string);
  int version = 0;
  if (library.why_not.empty() && (api.get_version(&version) != kSuccess || version < kOldest))
    library.why_not = fmt::format("libnccl.so.2 is version {}: NCCL 2.14 (21400) or newer is needed", version);
  return library;
}

class NcclCommunicator final : public Communicator {
 public:
  NcclCommunicator(const Api& api, const NcclId& id, int rank, int size, int device, std::chrono::milliseconds deadline)
      : api_(api), rank_(rank), size_(size), device_(device), stream_(device) {
    const cuda::DeviceGuard guard(device);
    cuda::check(cudaEventCreateWithFlags(&done_, cudaEventDisableTiming), "making an event for a ring");
    UniqueId unique;
    std::memcpy(unique.internal, id.data(), id.size());
    Config config;
    try {
      settle(api_.init_rank(&handle_, size, unique, rank, &config), "joining the ring",
             std::chrono::steady_clock::now() + deadline);
    } catch (...) {
      abort();
      cudaEventDestroy(done_);
      throw;
    }
  }

  ~NcclCommunicator() override {
    if (handle_) {
      // Peers may still be taking what was sent, so the end is waited for, but not for ever.
      try {
        settle(api_.finalize(handle_), "leaving the ring", std::chrono::steady_clock::now() + std::chrono::seconds(5));
        api_.destroy(handle_);
        handle_ = nullptr;
      } catch (const std::exception&) {
        abort();
      }
    }
    cudaEventDestroy(done_);
  }

  int rank() const override { return rank_; }
  int size() const override { return size_; }
  bool takes(Device device) const override { return device.type == DeviceType::cuda && device.index == device_; }

  void begin(std::span<const SendBuffer> sends, std::span<const ReceiveBuffer> receives) override {
    if (!handle_) throw CommError("the NCCL communicator was aborted: make a new one");
    peers_.clear();
    if (sends.empty() && receives.empty()) return;
    const cuda::DeviceGuard guard(device_);
    require(api_.group_start(), "starting a group");
    int status = kSuccess;
    const auto add = [&](int peer, auto&& start) {
      peers_.push_back(peer);
      const int one = start();
      if (status == kSuccess && one != kInProgress) status = one;
    };
    for (const ReceiveBuffer& receive : receives)
      add(receive.peer,
          [&] { return api_.receive(receive.data, receive.bytes, kBytes, receive.peer, handle_, stream_.get()); });
    for (const SendBuffer& send : sends)
      add(send.peer, [&] { return api_.send(send.data, send.bytes, kBytes, send.peer, handle_, stream_.get()); });
    std::sort(peers_.begin(), peers_.end());
    peers_.erase(std::unique(peers_.begin(), peers_.end()), peers_.end());
    const int ended = api_.group_end();
    require(status, "exchanging rows");
    if (ended != kInProgress) require(ended, "exchanging rows");
    phase_ = Phase::starting;
  }

  bool progress() noexcept override {
    try {
      return advance();
    } catch (const std::exception&) {
      return false;  // wait() finds it again
    }
  }

  void wait(Deadline deadline) override {
    for (int idle = 0; !advance(); ++idle) {
      if (std::chrono::steady_clock::now() >= deadline)
        raise<CommError>("{} exchanged nothing before the deadline", who());
      pause(idle);
    }
  }

  void abort() noexcept override {
    phase_ = Phase::idle;
    if (!handle_) return;
    api_.abort(handle_);
    handle_ = nullptr;
    // That tells its kernels to end; until they have, they may touch the buffers.
    const auto deadline = std::chrono::steady_clock::now() + kToAbort;
    for (int idle = 0; cudaStreamQuery(static_cast<cudaStream_t>(stream_.get())) != cudaSuccess; ++idle) {
      if (std::chrono::steady_clock::now() >= deadline) {
        stuck_ = true;
        stream_.abandon();
        return;
      }
      pause(idle);
    }
  }
  bool keeps_buffers() const override { return stuck_; }

 private:
  enum class Phase { idle, starting, moving };  // nothing to do; not on the stream yet; on it

  /// Whether the exchange is over.
  bool advance() {
    if (phase_ == Phase::idle) return true;
    const cuda::DeviceGuard guard(device_);
    const int state = async_state();
    if (state != kInProgress) require(state, "exchanging rows");
    if (phase_ == Phase::starting) {
      if (state == kInProgress) return false;
      cuda::check(cudaEventRecord(done_, static_cast<cudaStream_t>(stream_.get())), "marking the end of an exchange");
      phase_ = Phase::moving;
    }
    const cudaError_t status = cudaEventQuery(done_);
    if (status == cudaErrorNotReady) return false;
    cuda::check(status, "waiting for an exchange");
    phase_ = Phase::idle;
    return true;
  }

  int async_state() const {
    int state = kSuccess;
    const int status = api_.async_error(handle_, &state);
    return status == kSuccess || status == kInProgress ? state : status;
  }

  /// Asks until a call that may take its time is over.
  void settle(int status, const char* doing, Deadline deadline) const {
    for (int idle = 0; status == kInProgress; ++idle) {
      if (std::chrono::steady_clock::now() >= deadline)
        raise<CommError>("{} as rank {} of {}: others did not come before the deadline", doing, rank_, size_);
      pause(idle);
      status = async_state();
    }
    if (status != kSuccess)
      raise<CommError>("{} as rank {} of {}: NCCL says {}", doing, rank_, size_, api_.error_string(status));
  }

  void require(int status, const char* doing) const {
    if (status != kSuccess) raise<CommError>("{} with {}: NCCL says {}", doing, who(), api_.error_string(status));
  }

  /// NCCL does not say which rank failed: those of the exchange.
  std::string who() const { return fmt::format("rank{} {}", peers_.size() == 1 ? "" : "s", fmt::join(peers_, ", ")); }

  static void pause(int idle) {
    if (idle > 200) std::this_thread::sleep_for(std::chrono::microseconds(std::min(idle, 1000) / 10));
    else std::this_thread::yield();
  }

  const Api& api_;
  const int rank_, size_, device_;
  Handle handle_ = nullptr;
  gpu::SideStream stream_;
  cudaEvent_t done_ = nullptr;
  Phase phase_ = Phase::idle;
  bool stuck_ = false;  // the stream did not end after an abort
  std::vector<int> peers_;
};

}  // namespace

const Api& api() {
  static const Library* const library = new Library(load());
  if (!library->why_not.empty()) throw Unsupported(library->why_not);
  return library->api;
}

std::shared_ptr<Communicator> make_ring(const Api& api, const NcclId& id, int rank, int size, int device,
                                        std::chrono::milliseconds deadline) {
  if (size < 1 || rank < 0 || rank >= size) reject("rank", "rank {} of {}: ranks are 0 to size - 1", rank, size);
  return std::make_shared<NcclCommunicator>(api, id, rank, size, device, deadline);
}

}  // namespace nccl

NcclId nccl_id() {
  nccl::UniqueId unique;
  if (const int status = nccl::api().get_unique_id(&unique); status != nccl::kSuccess)
    raise<CommError>("making an id for a ring: NCCL says {}", nccl::api().error_string(status));
  NcclId id;
  std::memcpy(id.data(), unique.internal, id.size());
  return id;
}

std::shared_ptr<Communicator> nccl_ring(const NcclId& id, int rank, int size, int device,
                                        std::chrono::milliseconds deadline) {
  return nccl::make_ring(nccl::api(), id, rank, size, device, deadline);
}

}  // namespace longspan
