// Which counters a launch gets; see counters.h.
#include "kernels/cuda/counters.h"

#include <map>
#include <mutex>

#include "device/error.h"
#include "kernels/cuda/launch.h"

namespace longspan::cuda {
namespace {

/// Launches on one stream never run at once, so they share counters; those of different streams may.
class Places {
 public:
  unsigned* find(int device, unsigned long long stream) {
    std::lock_guard lock(mutex_);
    Device& on = devices_[device];
    if (const auto found = on.streams.find(stream); found != on.streams.end()) return found->second;
    if (on.streams.size() == kCounterStreams) return nullptr;
    if (!on.memory) check(find_counters(&on.memory), "finding counters");
    unsigned* const place = on.memory + on.streams.size() * kCounterWords;
    on.streams.emplace(stream, place);
    return place;
  }

 private:
  struct Device {
    unsigned* memory = nullptr;
    std::map<unsigned long long, unsigned*> streams;
  };
  std::mutex mutex_;
  std::map<int, Device> devices_;
};

/// Null where there are none.
unsigned* place_of(cudaStream_t stream) {
  static Places& places = *new Places;                // never destroyed: threads may launch while the process ends
  if (stream == cudaStreamPerThread) return nullptr;  // one handle for a stream of each thread
  cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
  check(cudaStreamIsCapturing(stream, &capture), "asking whether a graph is captured");
  if (capture != cudaStreamCaptureStatusNone) return nullptr;
  int device = 0;
  unsigned long long number = 0;
  check(cudaGetDevice(&device), "asking for the current GPU");
  check(cudaStreamGetId(stream, &number), "asking for a stream's number");
  return places.find(device, number);
}

}  // namespace

Counters cleared_counters(const CounterRequest& request) {
  check(cudaMemsetAsync(request.own, 0, request.own_bytes, request.stream), "clearing counters");
  return {nullptr, request.own};
}

Counters resting_counters(cudaStream_t stream) {
  unsigned* const place = place_of(stream);
  return {place, place ? place + 1 : nullptr};
}

Counters resting_counters(const CounterRequest& request) {
  const Counters resting = request.words < kCounterWords ? resting_counters(request.stream) : Counters{};
  return resting.leaving ? resting : cleared_counters(request);
}

}  // namespace longspan::cuda
