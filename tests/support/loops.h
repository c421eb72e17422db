// How many threads a loop of the pool finds.
#pragma once

#include <atomic>
#include <chrono>
#include <thread>

#include "util/parallel.h"

namespace longspan::testing {

/// The most threads that work at once on `items` items of a loop of four.
inline int most_at_once(std::int64_t items) {
  std::atomic<int> working{0}, most{0};
  parallel_for(4, items, {}, [&](int, std::int64_t) {
    const int now = working.fetch_add(1) + 1;
    for (int seen = most.load(); seen < now && !most.compare_exchange_weak(seen, now);) {}
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
    working.fetch_sub(1);
  });
  return most;
}

/// Whether a loop of four finds all four threads, given some time for workers to come.
inline bool finds_all() {
  int attempt = 0;
  while (most_at_once(12) < 4 && attempt < 50) ++attempt;
  return attempt < 50;
}

}  // namespace longspan::testing
