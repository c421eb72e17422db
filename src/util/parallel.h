// Runs independent items on the library's thread pool.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <type_traits>

namespace longspan {

/// What a long loop watches while it runs.
struct LoopControl {
  const std::atomic<bool>* cancel = nullptr;
  const std::function<bool(double)>* progress = nullptr;  // called from the calling thread only
  double progress_begin = 0.0;                            // this loop's share of the whole call
  double progress_end = 1.0;
};

namespace detail {
using ItemFunction = void (*)(void* context, int worker, std::int64_t item);
void run_items(int threads, std::int64_t items, const LoopControl& control, ItemFunction function, void* context);
}  // namespace detail

/// Calls body(worker, item) once for each item in [0, items), in ascending order of start, on up to `threads` threads
/// (the calling one included); worker is below `threads` and belongs to one thread during the loop. Rethrows the first
/// exception; throws Cancelled when told to stop. Nested calls, and calls after fork, work. Allocates nothing.
template <class Body>
void parallel_for(int threads, std::int64_t items, const LoopControl& control, Body&& body) {
  using Plain = std::remove_reference_t<Body>;
  detail::run_items(
      threads, items, control,
      [](void* context, int worker, std::int64_t item) { (*static_cast<Plain*>(context))(worker, item); },
      const_cast<void*>(static_cast<const void*>(&body)));
}

}  // namespace longspan
