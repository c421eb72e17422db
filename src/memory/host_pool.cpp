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

class HostPool {
 public:
  std::byte* take(std::size_t bytes) {
    const std::lock_guard lock(mutex_);
    Block* best = nullptr;
    for (Block& block : blocks_) {
      if (!block.used && block.size >= bytes && (!best || block.size < best->size)) best = &block;
    }
    if (!best) best = allocate(bytes);
    best->used = true;
    used_ += best->size;
    statistics_.peak_used_bytes = std::max(statistics_.peak_used_bytes, used_);
    return best->data;
  }

  void give_back(std::byte* data) {
    const std::lock_guard lock(mutex_);
    for (Block& block : blocks_) {
      if (block.data == data) {
        block.used = false;
        used_ -= block.size;
        return;
      }
    }
  }

  MemoryStatistics statistics() {
    const std::lock_guard lock(mutex_);
    MemoryStatistics result = statistics_;
    result.used_bytes = used_;
    return result;
  }

  void reset_peak() {
    const std::lock_guard lock(mutex_);
    statistics_.peak_used_bytes = used_;
  }

  void trim() {
    const std::lock_guard lock(mutex_);
    release_unused();
  }

  void set_limit(std::size_t limit) {
    const std::lock_guard lock(mutex_);
    statistics_.limit_bytes = limit;
  }

 private:
  struct Block {
    std::byte* data = nullptr;
    std::size_t size = 0;
    bool used = false;
  };

  Block* allocate(std::size_t bytes) {
    release_unused();
    if (bytes > SIZE_MAX - kGranularity) refuse(bytes, "more than an address space");
    const std::size_t size = (bytes + kGranularity - 1) / kGranularity * kGranularity;
    const std::size_t limit = statistics_.limit_bytes;
    if (limit > 0 && (size > limit || statistics_.reserved_bytes > limit - size)) {
      refuse(bytes, fmt::format("{} bytes are in use and the limit is {}", statistics_.reserved_bytes, limit));
    }
    auto* data = static_cast<std::byte*>(std::aligned_alloc(kAlignment, size));
    if (!data) refuse(bytes, "the system has no more memory");
    ++statistics_.allocations;
    statistics_.reserved_bytes += size;
    blocks_.push_back({data, size, false});
    return &blocks_.back();
  }

  [[noreturn]] static void refuse(std::size_t bytes, const std::string& why) {
    raise<OutOfMemory>("workspace of {} bytes: {}; use fewer threads, a smaller problem, or a higher limit", bytes,
                       why);
  }

  void release_unused() {
    std::erase_if(blocks_, [&](const Block& block) {
      if (block.used) return false;
      statistics_.reserved_bytes -= block.size;
      std::free(block.data);
      return true;
    });
  }

  ForkSafeMutex mutex_;
  std::vector<Block> blocks_;
  std::size_t used_ = 0;
  MemoryStatistics statistics_;
};

HostPool& pool() {
  static HostPool* const instance = new HostPool;  // never destroyed: leases may end during exit
  return *instance;
}

}  // namespace

HostLease::HostLease(std::size_t bytes) : data_(bytes > 0 ? pool().take(bytes) : nullptr) {}
HostLease::~HostLease() {
  if (data_) pool().give_back(data_);
}

namespace host_memory {
MemoryStatistics statistics() { return pool().statistics(); }
void reset_peak() { pool().reset_peak(); }
void trim() { pool().trim(); }
void set_limit_bytes(std::size_t limit) { pool().set_limit(limit); }
}  // namespace host_memory

}  // namespace longspan
