// Least recently used plans go first, the newest stays however large it is; hits allocate nothing. Plans end without
// the lock: freeing what a mask has on a GPU waits for that GPU.
#include "plan/plan_cache.h"

#include <algorithm>

#include "util/hash.h"

namespace longspan {
namespace {

std::uint64_t hash_of(const PlanSpecification& specification, const Problem& problem) {
  Hasher hasher;
  hasher.add(specification.hash);
  for (const std::int64_t value :
       {problem.batch, problem.tokens, problem.query_rows, problem.heads, problem.kv_heads, problem.head_dim,
        std::int64_t{problem.alignment}, std::int64_t{problem.device.index}})
    hasher.add(value);
  hasher.add(static_cast<std::uint64_t>(problem.dtype) | static_cast<std::uint64_t>(problem.device.type) << 8 |
             std::uint64_t{problem.has_lengths} << 16 | std::uint64_t{problem.has_key_mask} << 17 |
             std::uint64_t{problem.has_alibi} << 18 | std::uint64_t{problem.has_pieces} << 19 |
             std::uint64_t{problem.is_share} << 20);
  return hasher.value();
}

}  // namespace

PlanCache& PlanCache::instance() {
  static PlanCache* const cache = new PlanCache;  // never destroyed: calls may run during exit
  return *cache;
}

std::shared_ptr<const Plan> PlanCache::find(std::uint64_t hash, const PlanSpecification& specification,
                                            const Problem& problem) {
  const auto same = [&](const PlanSpecification& other) {
    return &other == &specification || (other.hash == specification.hash && other.options == specification.options &&
                                        other.pattern == specification.pattern);
  };
  const auto [begin, end] = index_.equal_range(hash);
  for (auto candidate = begin; candidate != end; ++candidate) {
    Entry& entry = *candidate->second;
    if (entry.problem == problem && same(*entry.specification)) {
      entries_.splice(entries_.begin(), entries_, candidate->second);
      return entry.plan;
    }
  }
  return nullptr;
}

std::shared_ptr<const Plan> PlanCache::get(const std::shared_ptr<const PlanSpecification>& specification,
                                           const Problem& problem, Compile compile) {
  const std::uint64_t hash = hash_of(*specification, problem);
  {
    const std::lock_guard lock(mutex_);
    if (auto plan = find(hash, *specification, problem)) {
      ++statistics_.hits;
      return plan;
    }
    ++statistics_.misses;
  }
  auto plan = compile(*specification, problem);
  Entries evicted;
  const std::lock_guard lock(mutex_);
  // Another thread may have been faster; its plan is as good.
  if (auto existing = find(hash, *specification, problem)) return existing;
  if (statistics_.limit_bytes == 0) return plan;
  const std::size_t bytes = plan->bytes() + sizeof(Entry);
  evicted = evict_to(statistics_.limit_bytes - std::min(bytes, statistics_.limit_bytes));
  entries_.push_front({hash, specification, problem, plan, bytes});
  index_.emplace(hash, entries_.begin());
  statistics_.bytes += bytes;
  statistics_.entries = entries_.size();
  return plan;
}

PlanCache::Entries PlanCache::evict_to(std::size_t limit) {
  Entries evicted;
  while (statistics_.bytes > limit && !entries_.empty()) {
    const auto last = std::prev(entries_.end());
    auto [indexed, end] = index_.equal_range(last->hash);
    index_.erase(std::find_if(indexed, end, [&](const auto& candidate) { return candidate.second == last; }));
    statistics_.bytes -= last->bytes;
    ++statistics_.evictions;
    evicted.splice(evicted.begin(), entries_, last);
  }
  statistics_.entries = entries_.size();
  return evicted;
}

PlanCacheStatistics PlanCache::statistics() const {
  const std::lock_guard lock(mutex_);
  return statistics_;
}

void PlanCache::clear() {
  Entries evicted;
  const std::lock_guard lock(mutex_);
  evicted.swap(entries_);
  index_.clear();
  statistics_.bytes = statistics_.entries = 0;
}

void PlanCache::set_limit_bytes(std::size_t limit) {
  Entries evicted;
  const std::lock_guard lock(mutex_);
  statistics_.limit_bytes = limit;
  evicted = evict_to(limit);
}

namespace plan_cache {
PlanCacheStatistics statistics() { return PlanCache::instance().statistics(); }
void clear() { PlanCache::instance().clear(); }
void set_limit_bytes(std::size_t limit) { PlanCache::instance().set_limit_bytes(limit); }
}  // namespace plan_cache

}  // namespace longspan
