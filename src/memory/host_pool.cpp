// A list of blocks; a lease takes the smallest free one that fits. Blocks that turn out too small are given back before
// a larger one is asked for, so that growing problems do not pile up memory.
#include "memory/host_pool.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstdlib>
#include <mutex>
#include <vector>

#include "longspan/memory.h"
#include "util/fork_safe.h"
#include "util/reject.h"

namespace longspan {
namespace {

constexpr std::size_t kGranularity = 64 * 1024;
constexpr std::size_t kAlignment = 4096;

struct HostPool {
  struct Block {
    std::byte* data = nullptr;
    std::size_t size = 0;
    bool used = false;
  };

  /// With the mutex held, as the functions below.
  std::byte* take(std::size_t bytes) {
    Block* best = nullptr;
    for (Block& block : blocks) {
      if (!block.used && block.size >= bytes && (!best || block.size < best->size)) best = &block;
    }
    if (!best) best = allocate(bytes);
    best->used = true;
    statistics.used_bytes += best->size;
    statistics.peak_used_bytes = std::max(statistics.peak_used_bytes, statistics.used_bytes);
    return best->data;
  }

  void give_back(std::byte* data) {
    const auto block = std::find_if(blocks.begin(), blocks.end(), [&](const Block& one) { return one.data == data; });
    block->used = false;
    statistics.used_bytes -= block->size;
  }

  Block* allocate(std::size_t bytes) {
    release_unused();
    if (bytes > SIZE_MAX - kGranularity) refuse(bytes, "more than an address space");
    const std::size_t size = (bytes + kGranularity - 1) / kGranularity * kGranularity;
    const std::size_t limit = statistics.limit_bytes;
    if (limit > 0 && (size > limit || statistics.reserved_bytes > limit - size))
      refuse(bytes, fmt::format("{} bytes are in use and the limit is {}", statistics.reserved_bytes, limit));
    auto* data = static_cast<std::byte*>(std::aligned_alloc(kAlignment, size));
    if (!data) refuse(bytes, "the system has no more memory");
    ++statistics.allocations;
    statistics.reserved_bytes += size;
    blocks.push_back({data, size, false});
    return &blocks.back();
  }

  [[noreturn]] static void refuse(std::size_t bytes, const std::string& why) {
    raise<OutOfMemory>("workspace of {} bytes: {}; use fewer threads, a smaller problem, or a higher limit", bytes,
                       why);
  }

  void release_unused() {
    std::erase_if(blocks, [&](const Block& block) {
      if (block.used) return false;
      statistics.reserved_bytes -= block.size;
      std::free(block.data);
      return true;
    });
  }

  ForkSafeMutex mutex;
  std::vector<Block> blocks;
  MemoryStatistics statistics;
};

HostPool& the_pool() {
  static HostPool* const pool = new HostPool;  // never destroyed: leases may end during exit
  return *pool;
}

/// Calls body(pool) with its mutex held.
template <class Body>
auto locked(Body&& body) {
  HostPool& pool = the_pool();
  const std::lock_guard lock(pool.mutex);
  return body(pool);
}

}  // namespace

HostLease::HostLease(std::size_t bytes)
    : data_(bytes > 0 ? locked([&](HostPool& pool) { return pool.take(bytes); }) : nullptr) {}
HostLease::~HostLease() {
  if (data_) locked([&](HostPool& pool) { pool.give_back(data_); });
}

namespace host_memory {
MemoryStatistics statistics() {
  return locked([](HostPool& pool) { return pool.statistics; });
}
void reset_peak() {
  locked([](HostPool& pool) { pool.statistics.peak_used_bytes = pool.statistics.used_bytes; });
}
void trim() {
  locked([](HostPool& pool) { pool.release_unused(); });
}
void set_limit_bytes(std::size_t limit) {
  locked([&](HostPool& pool) { pool.statistics.limit_bytes = limit; });
}
}  // namespace host_memory

}  // namespace longspan
