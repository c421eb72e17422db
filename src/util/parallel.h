// Runs independent items on the library's thread pool.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <type_traits>

#include "longspan/threads.h"

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

/// Threads for copying, clearing or summing up so many bytes: waking others for a few costs more than it saves.
inline int threads_for_bytes(std::int64_t bytes) { return bytes < 512 * 1024 ? 1 : num_threads(); }

/// While it lives, its thread counts as one of the pool's between loops, too, so that workers leave it a core: for
/// callers among several that do more than run loops (ranks of a local ring). Not while it waits for others.
class Seat {
 public:
  Seat();
  ~Seat();
  Seat(const Seat&) = delete;
  Seat& operator=(const Seat&) = delete;

 private:
  bool own_;  // else the thread has one already
};

/// While it lives, its thread's seat, if it has one, is free for others.
class SeatLeft {
 public:
  SeatLeft();
  ~SeatLeft();
  SeatLeft(const SeatLeft&) = delete;
  SeatLeft& operator=(const SeatLeft&) = delete;

 private:
  bool had_;
};

}  // namespace longspan
