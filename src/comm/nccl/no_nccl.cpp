// Stands in for NCCL in builds without CUDA, whose memory is all it moves.
#include "longspan/communicator.h"
#include "longspan/error.h"

namespace longspan {
namespace {

[[noreturn]] void refuse() {
  throw Unsupported("NCCL rings: this build has no CUDA; configure with -DLONGSPAN_CUDA=ON");
}

}  // namespace

NcclId nccl_id() { refuse(); }
std::shared_ptr<Communicator> nccl_ring(const NcclId&, int, int, int, std::chrono::milliseconds) { refuse(); }

}  // namespace longspan
