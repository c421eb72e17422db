// Stands in for the device pool in builds without CUDA: it never held anything and lends nothing.
#include "device/device_pool.h"
#include "longspan/error.h"
#include "longspan/memory.h"

namespace longspan {

DeviceLease::DeviceLease(int, void*, std::size_t bytes) {
  if (bytes > 0) throw Unsupported("GPU workspace: this build has no CUDA; configure with -DLONGSPAN_CUDA=ON");
}
DeviceLease::~DeviceLease() = default;

namespace device_memory {
MemoryStatistics statistics(int) { return {}; }
void reset_peak(int) {}
void trim(int) {}
void set_limit_bytes(int, std::size_t) {}
}  // namespace device_memory

}  // namespace longspan
