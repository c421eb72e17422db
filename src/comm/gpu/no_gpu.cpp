// Stands in for rings on GPUs in builds without CUDA: tensors on a GPU are refused before anything here is called.
#include "comm/gpu/gpu.h"
#include "comm/packed.h"
#include "longspan/error.h"

namespace longspan::gpu {
namespace {

[[noreturn]] void refuse() {
  throw Unsupported("rings over GPU tensors: this build has no CUDA; configure with -DLONGSPAN_CUDA=ON");
}

}  // namespace

PinnedLease::PinnedLease(std::size_t bytes) : bytes_(bytes) {
  if (bytes_ > 0) refuse();
}
PinnedLease::~PinnedLease() = default;
SideStream::SideStream(int device) : device_(device) {
  if (device_ >= 0) refuse();
}
SideStream::~SideStream() = default;
StreamMark::StreamMark(int device, void*) : device_(device) {
  if (device_ >= 0) refuse();
}
StreamMark::~StreamMark() = default;
void StreamMark::precede(int, void*) const { refuse(); }

void copy(void*, const void*, std::size_t, int, void*) { refuse(); }
void copy_now(void*, const void*, std::size_t, int) { refuse(); }
void wait(int, void*) { refuse(); }
bool busy(int, void*) { refuse(); }
void refuse_earlier_errors() { refuse(); }
void pack(std::byte*, std::span<const ExchangeRun>, std::span<const RowRange>, const ConstTensorView&,
          const ConstTensorView&, void*) {
  refuse();
}
void add_gradients(const std::byte*, std::span<const ExchangeRun>, std::span<const RowRange>, const TensorView&,
                   const TensorView&, void*) {
  refuse();
}
void convert(const TensorView&, const ConstTensorView&, void*) { refuse(); }
void add(const TensorView&, const ConstTensorView&, void*) { refuse(); }
void mix(const TensorView&, const TensorView&, const ConstTensorView&, const ConstTensorView&, void*) { refuse(); }
void add_checksum(std::uint64_t*, const std::byte*, std::size_t, bool, int, void*) { refuse(); }

}  // namespace longspan::gpu

namespace longspan {

std::shared_ptr<PackedExchange> PackedExchange::make(const Attention&, const RingPlan&, const Problem&,
                                                     std::shared_ptr<Communicator>) {
  return nullptr;
}

}  // namespace longspan
