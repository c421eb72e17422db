// Counters of launches whose blocks take items as they become free, or wait for one another's.
// Memory of the library that rests at zero is hidden state; it saves a memset before each launch (what that is worth is
// in bench/notes/restraint.md).
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

namespace longspan::cuda {

inline constexpr int kCounterStreams = 128;  // of a device; numbers of streams are never used again

/// Memory of the current device that was zero when the library came there: kCounterWords for each of these streams.
cudaError_t find_counters(unsigned** memory);

struct CounterRequest {
  cudaStream_t stream;
  std::int64_t words;
  unsigned* own;  // memory of the call
  std::size_t own_bytes;
};

/// `first` and what follows are zero when the launch begins. Where `leaving` is not null the launch has to leave all of
/// them so: its blocks count themselves out there, and the last one clears what they used, at most kCounterWords
/// (launch.h) from there on.
struct Counters {
  unsigned* leaving = nullptr;
  unsigned* first = nullptr;
};

/// The call's own memory, cleared by a piece of work before the launch.
Counters cleared_counters(const CounterRequest& request);

/// The library's own on the current device, which are zero between launches, so that nothing has to come first. In
/// graphs, whose replays come at any time, for more words than there are, and on streams after the first
/// kCounterStreams they are cleared_counters.
Counters resting_counters(const CounterRequest& request);
/// The same without memory of the call: null where cleared_counters would have to take their place.
Counters resting_counters(cudaStream_t stream);

}  // namespace longspan::cuda
