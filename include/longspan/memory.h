// What the library's own memory pools hold.
#pragma once

#include <cstddef>
#include <cstdint>

#include "longspan/export.h"

namespace longspan {

struct MemoryStatistics {
  std::uint64_t allocations = 0;    ///< times memory was asked of the system
  std::size_t reserved_bytes = 0;   ///< held by the pool, in use or not
  std::size_t used_bytes = 0;       ///< lent to calls right now
  std::size_t peak_used_bytes = 0;  ///< since the last reset_peak()
  std::size_t limit_bytes = 0;      ///< 0: none
};

/// Workspace of CPU calls: kept between calls, so that the steady state allocates nothing.
namespace host_memory {
LONGSPAN_API MemoryStatistics statistics();
LONGSPAN_API void reset_peak();
/// Returns unused memory to the system.
LONGSPAN_API void trim();
/// Calls that would push reserved_bytes beyond the limit throw OutOfMemory; 0 removes the limit.
LONGSPAN_API void set_limit_bytes(std::size_t limit);
}  // namespace host_memory

/// Workspace of GPU calls, one stream-ordered pool per device, likewise kept.
namespace device_memory {
LONGSPAN_API MemoryStatistics statistics(int device = 0);
LONGSPAN_API void reset_peak(int device = 0);
LONGSPAN_API void trim(int device = 0);
/// Calls that would push used_bytes beyond the limit throw OutOfMemory; 0 removes the limit.
LONGSPAN_API void set_limit_bytes(int device, std::size_t limit);
}  // namespace device_memory

}  // namespace longspan
