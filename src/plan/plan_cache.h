// The process-wide cache of compiled plans.
#pragma once

#include <list>
#include <memory>
#include <unordered_map>

#include "longspan/plan.h"
#include "util/fork_safe.h"

namespace longspan {

/// What an Attention object fixes; shared by its plans' keys, so that a lookup copies a pointer.
struct PlanSpecification {
  Pattern pattern;
  Options options;
  std::uint64_t hash = 0;
};

class PlanCache {
 public:
  using Compile = std::shared_ptr<const Plan> (*)(const PlanSpecification&, const Problem&);

  /// The cached plan, or a new one made by `compile` (outside the lock).
  std::shared_ptr<const Plan> get(const std::shared_ptr<const PlanSpecification>& specification, const Problem& problem,
                                  Compile compile);
  PlanCacheStatistics statistics() const;
  void clear();
  void set_limit_bytes(std::size_t limit);

  static PlanCache& instance();

 private:
  struct Entry {
    std::uint64_t hash;
    std::shared_ptr<const PlanSpecification> specification;
    Problem problem;
    std::shared_ptr<const Plan> plan;
    std::size_t bytes;
  };
  using Entries = std::list<Entry>;

  std::shared_ptr<const Plan> find(std::uint64_t hash, const PlanSpecification& specification, const Problem& problem);
  /// Takes out entries until the rest has `limit` bytes. For a caller that destroys them without the lock.
  Entries evict_to(std::size_t limit);

  mutable ForkSafeMutex mutex_;
  Entries entries_;  // most recently used first
  std::unordered_multimap<std::uint64_t, Entries::iterator> index_;
  PlanCacheStatistics statistics_{.limit_bytes = std::size_t{256} << 20};
};

}  // namespace longspan
