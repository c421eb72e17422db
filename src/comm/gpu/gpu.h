// What a ring does with rows on a GPU: packing, adding, checking, and copies beside the caller's stream. gpu.cpp and
// gpu_rows.cu are it; no_gpu.cpp stands in for them in builds without CUDA. Nothing here includes a CUDA header.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "longspan/exchange.h"
#include "longspan/tensor_view.h"

namespace longspan::gpu {

/// Host memory that a GPU reads and writes by itself, kept between calls.
class PinnedLease {
 public:
  explicit PinnedLease(std::size_t bytes);
  ~PinnedLease();
  PinnedLease(const PinnedLease&) = delete;
  PinnedLease& operator=(const PinnedLease&) = delete;
  std::byte* data() const { return data_; }

 private:
  std::byte* data_ = nullptr;
  std::size_t bytes_ = 0;
};

/// A stream beside the caller's, on which messages move while the caller's computes. Kept between calls.
class SideStream {
 public:
  explicit SideStream(int device);
  ~SideStream();
  SideStream(const SideStream&) = delete;
  SideStream& operator=(const SideStream&) = delete;
  void* get() const { return stream_; }
  /// Nobody gets this stream again: it has work that may never end.
  void abandon() { stream_ = nullptr; }

 private:
  int device_;
  void* stream_ = nullptr;
};

/// A place in the order of a stream: what the stream had when this was made.
class StreamMark {
 public:
  StreamMark(int device, void* stream);
  ~StreamMark();
  StreamMark(const StreamMark&) = delete;
  StreamMark& operator=(const StreamMark&) = delete;
  /// What another stream gets from now on comes after it.
  void precede(int device, void* stream) const;

 private:
  int device_;
  void* event_ = nullptr;
};

/// Copies between any two memories, in the order of a stream.
void copy(void* target, const void* source, std::size_t bytes, int device, void* stream);
/// The same on a side stream; done when it returns.
void copy_now(void* target, const void* source, std::size_t bytes, int device);
/// Until everything that the stream has is done.
void wait(int device, void* stream);
/// Whether the stream still has work.
bool busy(int device, void* stream);
/// Throws CudaError if an earlier CUDA call of this thread failed and nobody looked.
void refuse_earlier_errors();

/// As their namesakes in shard_rows.h, in the order of a stream. convert: from or to float32.
void pack(std::byte* payload, std::span<const ExchangeRun> runs, std::span<const RowRange> ranges,
          const ConstTensorView& k, const ConstTensorView& v, void* stream);
void add_gradients(const std::byte* payload, std::span<const ExchangeRun> runs, std::span<const RowRange> ranges,
                   const TensorView& dk, const TensorView& dv, void* stream);
void convert(const TensorView& target, const ConstTensorView& source, void* stream);
/// target += source, float32.
void add(const TensorView& target, const ConstTensorView& source, void* stream);
/// (out, lse) becomes the mix of itself and a further part, float32; no more_out: of zeros.
void mix(const TensorView& out, const TensorView& lse, const ConstTensorView& more_out, const ConstTensorView& more_lse,
         void* stream);

/// Adds a sum of bytes in which any single change shows to *sum, which is on the device, or takes it away from there.
void add_checksum(std::uint64_t* sum, const std::byte* data, std::size_t bytes, bool take_away, int device,
                  void* stream);

}  // namespace longspan::gpu
