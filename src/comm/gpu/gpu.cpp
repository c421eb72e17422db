// Pinned memory, streams and copies of rings on GPUs, and what the kernels over rows are told. Both kinds of lease are
// taken from lists that grow to what a process uses at a time.
#include "comm/gpu/gpu.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <map>
#include <mutex>
#include <vector>

#include "comm/gpu/gpu_rows.h"
#include "device/device_pool.h"
#include "device/error.h"
#include "plan/exchange_runs.h"

namespace longspan::gpu {
namespace {

/// Things not in use, by key. Never destroyed: leases may end during exit.
template <class Key, class Thing>
class Spare {
 public:
  bool take(const Key& key, Thing& thing) {
    const std::lock_guard lock(mutex_);
    const auto at = spare_.find(key);
    if (at == spare_.end()) return false;
    thing = at->second;
    spare_.erase(at);
    return true;
  }
  void give_back(const Key& key, Thing thing) {
    const std::lock_guard lock(mutex_);
    spare_.emplace(key, thing);
  }

 private:
  std::mutex mutex_;
  std::multimap<Key, Thing> spare_;
};
auto& spare_memory = *new Spare<std::size_t, std::byte*>;
auto& spare_streams = *new Spare<int, cudaStream_t>;
auto& spare_events = *new Spare<int, cudaEvent_t>;

/// A power of two, so that messages of changing sizes find memory of earlier ones.
std::size_t rounded(std::size_t bytes) {
  std::size_t size = 4096;
  while (size < bytes) size *= 2;
  return size;
}

template <class View>
StridedRows rows_of(const View& view) {
  const std::int64_t size = size_of(view.dtype);
  return {static_cast<char*>(const_cast<void*>(static_cast<const void*>(view.data))), view.strides[0] * size,
          view.strides[1] * size, view.strides[2] * size};
}

bool aligned(const StridedRows& where) {
  return (reinterpret_cast<std::uintptr_t>(where.data) | static_cast<std::uint64_t>(where.batch) |
          static_cast<std::uint64_t>(where.row) | static_cast<std::uint64_t>(where.head)) %
             16 ==
         0;
}

/// Runs as the shard has them: positions become rows, cut where the shard's ranges end.
std::vector<ShardRun> shard_runs(std::span<const ExchangeRun> runs, std::span<const RowRange> ranges) {
  std::vector<ShardRun> parts;
  std::int64_t pair = 0;
  for (const ExchangeRun& run : runs) {
    std::int64_t row = 0, done = 0;
    for (const RowRange& range : ranges) {
      const std::int64_t first = run.first + done * run.step, end = range.start + range.count;
      if (done < run.count && first < end) {
        const std::int64_t count = std::min(run.count - done, (end - 1 - first) / run.step + 1);
        parts.push_back({pair, run.offset + done * run.kv_heads, row + first - range.start, run.step,
                         static_cast<int>(run.kv_head), static_cast<int>(run.kv_heads)});
        pair += count * run.kv_heads;
        done += count;
      }
      row += range.count;
    }
  }
  return parts;
}

/// Uploads the runs and calls start(runs on the device).
template <class Start>
void with_runs(std::span<const ExchangeRun> runs, std::span<const RowRange> ranges, const ConstTensorView& like,
               void* stream, const char* doing, Start&& start) {
  const std::vector<ShardRun> parts = shard_runs(runs, ranges);
  if (parts.empty()) return;
  const cuda::DeviceGuard guard(like.device.index);
  const DeviceLease memory(like.device.index, stream, parts.size() * sizeof(ShardRun));
  cuda::check(cudaMemcpyAsync(memory.data(), parts.data(), parts.size() * sizeof(ShardRun), cudaMemcpyHostToDevice,
                              static_cast<cudaStream_t>(stream)),
              doing);
  cuda::check(start(MessageRuns{reinterpret_cast<const ShardRun*>(memory.data()), static_cast<int>(parts.size()),
                                pairs_of(runs), like.batch()}),
              doing);
}

/// Calls start(rows to work on, stream) where a tensor has elements.
template <class Start>
void over_rows(const TensorView& target, void* stream, const char* doing, Start&& start) {
  const RowCounts counts{target.batch(), target.rows(), target.heads(), static_cast<int>(target.columns())};
  if (counts.rows_of_all() * counts.columns == 0) return;
  const cuda::DeviceGuard guard(target.device.index);
  cuda::check(start(counts, static_cast<cudaStream_t>(stream)), doing);
}

}  // namespace

PinnedLease::PinnedLease(std::size_t bytes) {
  if (bytes == 0) return;
  bytes_ = rounded(bytes);
  if (spare_memory.take(bytes_, data_)) return;
  void* memory = nullptr;
  cuda::check(cudaHostAlloc(&memory, bytes_, cudaHostAllocPortable), "host memory for messages of a ring");
  data_ = static_cast<std::byte*>(memory);
}

PinnedLease::~PinnedLease() {
  if (data_) spare_memory.give_back(bytes_, data_);
}

SideStream::SideStream(int device) : device_(device) {
  cudaStream_t stream = nullptr;
  if (!spare_streams.take(device, stream)) {
    const cuda::DeviceGuard guard(device);
    // Not blocking: the legacy default stream, which callers may use, would hold it up.
    cuda::check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "making a stream for messages of a ring");
  }
  stream_ = stream;
}

SideStream::~SideStream() {
  if (stream_) spare_streams.give_back(device_, static_cast<cudaStream_t>(stream_));
}

StreamMark::StreamMark(int device, void* stream) : device_(device) {
  const cuda::DeviceGuard guard(device);
  cudaEvent_t event = nullptr;
  if (!spare_events.take(device, event))
    cuda::check(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "making an event for messages of a ring");
  event_ = event;
  cuda::check(cudaEventRecord(event, static_cast<cudaStream_t>(stream)), "marking a stream");
}

StreamMark::~StreamMark() {
  if (event_) spare_events.give_back(device_, static_cast<cudaEvent_t>(event_));
}

void StreamMark::precede(int device, void* stream) const {
  const cuda::DeviceGuard guard(device);
  cuda::check(cudaStreamWaitEvent(static_cast<cudaStream_t>(stream), static_cast<cudaEvent_t>(event_)),
              "joining streams");
}

void copy(void* target, const void* source, std::size_t bytes, int device, void* stream) {
  if (bytes == 0) return;
  const cuda::DeviceGuard guard(device);
  cuda::check(cudaMemcpyAsync(target, source, bytes, cudaMemcpyDefault, static_cast<cudaStream_t>(stream)),
              "copying a message of a ring");
}

void copy_now(void* target, const void* source, std::size_t bytes, int device) {
  const SideStream side(device);
  copy(target, source, bytes, device, side.get());
  wait(device, side.get());
}

void wait(int device, void* stream) {
  const cuda::DeviceGuard guard(device);
  cuda::check(cudaStreamSynchronize(static_cast<cudaStream_t>(stream)), "waiting for a stream");
}

void refuse_earlier_errors() { cuda::refuse_earlier_errors(); }

bool busy(int device, void* stream) {
  const cuda::DeviceGuard guard(device);
  const cudaError_t status = cudaStreamQuery(static_cast<cudaStream_t>(stream));
  if (status == cudaErrorNotReady) return true;
  cuda::check(status, "asking whether a stream is done");
  return false;
}

void pack(std::byte* payload, std::span<const ExchangeRun> runs, std::span<const RowRange> ranges,
          const ConstTensorView& k, const ConstTensorView& v, void* stream) {
  with_runs(runs, ranges, k, stream, "packing a message of a ring", [&](const MessageRuns& there) {
    const StridedRows from_k = rows_of(k), from_v = rows_of(v);
    const int bytes = static_cast<int>(k.columns() * size_of(k.dtype));
    return start_pack(reinterpret_cast<char*>(payload), there, from_k, from_v, bytes,
                      bytes % 16 == 0 && aligned(from_k) && aligned(from_v), static_cast<cudaStream_t>(stream));
  });
}

void add_gradients(const std::byte* payload, std::span<const ExchangeRun> runs, std::span<const RowRange> ranges,
                   const TensorView& dk, const TensorView& dv, void* stream) {
  with_runs(runs, ranges, dk, stream, "adding gradients of a ring", [&](const MessageRuns& there) {
    return start_add(reinterpret_cast<const float*>(payload), there, rows_of(dk), rows_of(dv),
                     static_cast<int>(dk.columns()), static_cast<cudaStream_t>(stream));
  });
}

void convert(const TensorView& target, const ConstTensorView& source, void* stream) {
  over_rows(target, stream, "converting rows of a ring", [&](const RowCounts& counts, cudaStream_t queue) {
    return start_convert(target.dtype, rows_of(target), source.dtype, rows_of(source), counts, queue);
  });
}

void add(const TensorView& target, const ConstTensorView& source, void* stream) {
  over_rows(target, stream, "adding rows of a ring", [&](const RowCounts& counts, cudaStream_t queue) {
    return start_sum(rows_of(target), rows_of(source), counts, queue);
  });
}

void mix(const TensorView& out, const TensorView& lse, const ConstTensorView& more_out, const ConstTensorView& more_lse,
         void* stream) {
  over_rows(out, stream, "mixing rows of a ring", [&](const RowCounts& counts, cudaStream_t queue) {
    return start_mix(rows_of(out), rows_of(lse), more_out.given() ? rows_of(more_out) : StridedRows{},
                     rows_of(more_lse), counts, queue);
  });
}

void add_checksum(std::uint64_t* sum, const std::byte* data, std::size_t bytes, bool take_away, int device,
                  void* stream) {
  if (bytes == 0) return;
  const cuda::DeviceGuard guard(device);
  cuda::check(start_checksum(sum, data, bytes, take_away, static_cast<cudaStream_t>(stream)),
              "summing up a message of a ring");
}

}  // namespace longspan::gpu
