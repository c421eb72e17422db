// A build without CUDA.
#include "comm/node/ipc.h"
#include "util/reject.h"

namespace longspan::ipc {
namespace {

[[noreturn]] void refuse() { raise<Unsupported>("GPU memory between processes: configure with -DLONGSPAN_CUDA=ON"); }

}  // namespace

bool available() { return false; }
Exported::Exported(int device, std::size_t) : device_(device) { refuse(); }
Exported::~Exported() = default;
Handle Exported::handle() const { refuse(); }
Imported::Imported(int device, const Handle&) : device_(device) { refuse(); }
Imported::~Imported() = default;

}  // namespace longspan::ipc
