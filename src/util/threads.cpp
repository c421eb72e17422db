// The thread pool: workers that sleep until a loop has items to give away.
//
// A loop is a Job on its caller's stack. The caller works on it itself; idle workers join it while it has items and
// free places. Several host threads may run loops at once: they share the same workers, which join, and stay between
// two items, only as long as no more threads work than the loop asked for, callers included. So ranks of a local ring
// do not get in each other's way.
#if defined(__linux__)
#include <sched.h>
#endif

#include <algorithm>
#include <bitset>
#include <chrono>
#include <condition_variable>
#include <exception>
#include <mutex>
#include <system_error>
#include <thread>

#include "longspan/error.h"
#include "longspan/threads.h"
#include "util/cpu_info.h"
#include "util/fork_safe.h"
#include "util/parallel.h"

namespace longspan {
namespace {

using Clock = std::chrono::steady_clock;

/// How long an idle thread looks for work before it sleeps: a wake-up costs about as much.
constexpr int kSpins = 2000;
constexpr int kMostThreads = 4096;
/// Between two calls of a progress hook, in which a ring also takes the messages that have come.
constexpr auto kReportEvery = std::chrono::milliseconds(5);

inline void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

#if defined(__linux__)
int this_cpu() { return sched_getcpu(); }

/// While it lasts, the thread does not wake up on a CPU. A virtual machine takes its own CPUs, when they sleep, for
/// ones that the host needs, and so wakes a worker where its caller is; for milliseconds both then share that CPU.
class AwayFrom {
 public:
  explicit AwayFrom(int cpu) {
    if (cpu < 0 || cpu >= CPU_SETSIZE || sched_getaffinity(0, sizeof before_, &before_) != 0 ||
        !CPU_ISSET(cpu, &before_))
      return;
    cpu_set_t others = before_;
    CPU_CLR(cpu, &others);
    moved_ = CPU_COUNT(&others) > 0 && sched_setaffinity(0, sizeof others, &others) == 0;
  }
  ~AwayFrom() {
    if (moved_) sched_setaffinity(0, sizeof before_, &before_);
  }
  AwayFrom(const AwayFrom&) = delete;
  AwayFrom& operator=(const AwayFrom&) = delete;

 private:
  cpu_set_t before_;
  bool moved_ = false;
};
#else
int this_cpu() { return -1; }
struct AwayFrom {
  explicit AwayFrom(int) {}
};
#endif

thread_local bool inside_loop = false;
thread_local bool seated = false;

struct Job {
  detail::ItemFunction function;
  void* context;
  std::int64_t items;
  const LoopControl& control;
  const int threads;                       // in all loops together, before workers leave this one
  int places;                              // workers that may still join; guarded by the pool's mutex
  std::bitset<kMostThreads + 1> taken{1};  // numbers of those inside, and the caller's; likewise
  std::atomic<std::int64_t> next{0};
  std::atomic<int> active{0};  // workers inside
  std::atomic<bool> stop{false};
  std::exception_ptr error;  // guarded by the pool's mutex
  Job* following = nullptr;

  Job(detail::ItemFunction f, void* c, std::int64_t n, const LoopControl& loop, int most_threads, int free_places)
      : function(f), context(c), items(n), control(loop), threads(most_threads), places(free_places) {}

  bool cancelled() const { return control.cancel && control.cancel->load(std::memory_order_relaxed); }
};

class Pool {
 public:
  void run(Job& job) {
    caller_cpu_.store(this_cpu(), std::memory_order_relaxed);
    int room = 0, idle = 0;  // for sleeping workers: none where other loops have all threads
    {
      const std::lock_guard lock(mutex_);
      int wanted = job.places;
      for (const Job* other = jobs_; other; other = other->following)
        wanted += other->places + other->active.load(std::memory_order_relaxed);
      grow(std::min(wanted, job.threads - 1));
      job.following = jobs_;
      jobs_ = &job;
      if (!seated) working_.fetch_add(1, std::memory_order_relaxed);
      published_.fetch_add(1, std::memory_order_release);
      room = std::min(job.places, job.threads - working_.load(std::memory_order_relaxed));
      idle = asleep_;
    }
    if (room >= idle) {
      wake_.notify_all();
    } else {
      for (; room > 0; --room) wake_.notify_one();  // others would only look, in the way of those that work
    }
    work(job, 0, true);
    {
      const std::lock_guard lock(mutex_);
      for (Job** link = &jobs_; *link; link = &(*link)->following) {
        if (*link == &job) {
          *link = job.following;
          break;
        }
      }
    }
    // Stragglers are often about to end. A seat is kept that long: whoever takes it stays for an item, however long.
    if (!seated) leave();
    for (int spin = 0; spin < kSpins && job.active.load(std::memory_order_acquire) > 0; ++spin) relax();
    if (job.active.load(std::memory_order_acquire) == 0) return;
    if (seated) leave();
    {
      std::unique_lock lock(mutex_);
      done_.wait(lock, [&] { return job.active.load(std::memory_order_acquire) == 0; });
    }
    if (seated) enter();
  }

  /// A caller takes a core, or gives it to a worker.
  void enter() {
    const std::lock_guard lock(mutex_);
    working_.fetch_add(1, std::memory_order_relaxed);
  }
  void leave() {
    {
      const std::lock_guard lock(mutex_);
      working_.fetch_sub(1, std::memory_order_relaxed);
      if (!jobs_) return;
      published_.fetch_add(1, std::memory_order_release);
    }
    wake_.notify_one();
  }

  /// Runs items until none is left. Only the caller may call the progress hook.
  void work(Job& job, int worker, bool is_caller) {
    inside_loop = true;
    try {
      auto reported = Clock::now();
      while (!job.stop.load(std::memory_order_relaxed)) {
        if (job.cancelled()) {
          job.stop.store(true, std::memory_order_relaxed);
          throw Cancelled("the call was cancelled by its cancel flag");
        }
        const std::int64_t item = job.next.fetch_add(1, std::memory_order_relaxed);
        if (item >= job.items) break;
        job.function(job.context, worker, item);
        if (worker > 0 && working_.load(std::memory_order_relaxed) > job.threads) break;  // another caller came
        if (is_caller && job.control.progress && *job.control.progress) report(job, reported);
      }
    } catch (...) {
      job.stop.store(true, std::memory_order_relaxed);
      const std::lock_guard lock(mutex_);
      if (!job.error) job.error = std::current_exception();
    }
    inside_loop = false;
  }

 private:
  /// Where the system gives no more threads, those there are do the work.
  void grow(int workers) {
    try {
      for (; workers_ < workers; ++workers_) std::thread([this] { serve(); }).detach();
    } catch (const std::exception&) {}
  }

  void report(Job& job, Clock::time_point& reported) {
    const auto now = Clock::now();
    if (now - reported < kReportEvery) return;
    reported = now;
    const double done = static_cast<double>(std::min(job.next.load(std::memory_order_relaxed), job.items)) /
                        static_cast<double>(job.items);
    const LoopControl& control = job.control;
    if (!(*control.progress)(control.progress_begin + done * (control.progress_end - control.progress_begin))) {
      throw Cancelled("the call was cancelled by its progress hook");
    }
  }

  /// The job with the fewest workers among those that still have items and room, so that ranks of a local ring come on
  /// alike; a place is taken in it. Call with the mutex held.
  Job* join(int& worker) {
    Job* chosen = nullptr;
    for (Job* job = jobs_; job; job = job->following) {
      if (job->places > 0 && working_.load(std::memory_order_relaxed) < job->threads &&
          job->next.load(std::memory_order_relaxed) < job->items && !job->stop.load(std::memory_order_relaxed) &&
          (!chosen || job->active.load(std::memory_order_relaxed) < chosen->active.load(std::memory_order_relaxed)))
        chosen = job;
    }
    if (!chosen) return nullptr;
    --chosen->places;
    worker = 1;
    while (chosen->taken[static_cast<std::size_t>(worker)]) ++worker;
    chosen->taken.set(static_cast<std::size_t>(worker));
    working_.fetch_add(1, std::memory_order_relaxed);
    chosen->active.fetch_add(1, std::memory_order_relaxed);
    return chosen;
  }

  void serve() {
    while (true) {
      int worker = 0;
      Job* job = nullptr;
      const std::uint64_t seen = published_.load(std::memory_order_acquire);
      {
        const std::lock_guard lock(mutex_);
        job = join(worker);
      }
      if (!job) {
        // Where all threads work, looking would take a core from one of them.
        const auto full = [&] { return working_.load(std::memory_order_relaxed) >= num_threads(); };
        int spin = 0;
        while (spin < kSpins && !full() && published_.load(std::memory_order_acquire) == seen) {
          relax();
          ++spin;
        }
        if (spin == kSpins || full()) {
          const AwayFrom caller(caller_cpu_.load(std::memory_order_relaxed));
          std::unique_lock lock(mutex_);
          ++asleep_;
          wake_.wait(lock, [&] { return (job = join(worker)) != nullptr; });
          --asleep_;
        }
      }
      if (!job) continue;
      work(*job, worker, false);
      // The job may be gone the moment active reaches 0, unless the mutex is held: its caller waits under it.
      const std::lock_guard lock(mutex_);
      working_.fetch_sub(1, std::memory_order_relaxed);
      job->taken.reset(static_cast<std::size_t>(worker));
      ++job->places;
      if (job->active.fetch_sub(1, std::memory_order_release) == 1) done_.notify_all();
    }
  }

  std::mutex mutex_;
  std::condition_variable wake_;
  std::condition_variable done_;
  std::atomic<std::uint64_t> published_{0};
  Job* jobs_ = nullptr;
  int workers_ = 0, asleep_ = 0;     // guarded by the mutex
  std::atomic<int> working_{0};      // callers and workers in loops, and callers with seats; changed under the mutex
  std::atomic<int> caller_cpu_{-1};  // of the last loop
};

std::atomic<Pool*> current_pool{nullptr};

/// The pool of this process. Never destroyed: its workers sleep until the process ends. A forked child, which has none
/// of its parent's threads, starts a fresh one.
Pool& pool() {
  Pool* existing = current_pool.load(std::memory_order_acquire);
  if (existing) return *existing;
  static std::mutex creation;
  static const bool registered = [] {
    on_fork_in_child([] {
      current_pool.store(nullptr, std::memory_order_release);
      inside_loop = seated = false;
    });
    return true;
  }();
  static_cast<void>(registered);
  const std::lock_guard lock(creation);
  existing = current_pool.load(std::memory_order_acquire);
  if (!existing) {
    existing = new Pool;
    current_pool.store(existing, std::memory_order_release);
  }
  return *existing;
}

std::atomic<int> chosen_threads{0};

}  // namespace

Seat::Seat() : own_(!seated && !inside_loop) {
  if (!own_) return;
  seated = true;
  pool().enter();
}

Seat::~Seat() {
  if (!own_ || !seated) return;  // a forked child lost it with its parent's pool
  seated = false;
  pool().leave();
}

SeatLeft::SeatLeft() : had_(seated && !inside_loop) {
  if (!had_) return;
  seated = false;
  pool().leave();
}

SeatLeft::~SeatLeft() {
  if (!had_) return;
  seated = true;
  pool().enter();
}

int num_threads() {
  const int chosen = chosen_threads.load(std::memory_order_relaxed);
  if (chosen > 0) return chosen;
  static const int standard = default_threads();
  return standard;
}

void set_num_threads(int threads) {
  if (threads < 0 || threads > kMostThreads) {
    throw InvalidArgument("threads",
                          "threads is " + std::to_string(threads) + ": give 1 to 4096, or 0 for the default");
  }
  chosen_threads.store(threads, std::memory_order_relaxed);
}

namespace detail {

void run_items(int threads, std::int64_t items, const LoopControl& control, ItemFunction function, void* context) {
  if (items <= 0) return;
  // A loop inside a loop runs where it is: the outer one already fills the threads.
  const bool nested = inside_loop;
  const int helpers = nested ? 0 : static_cast<int>(std::min<std::int64_t>(threads, items)) - 1;
  Job job(function, context, items, control, threads, std::max(helpers, 0));
  if (helpers > 0) pool().run(job);
  else pool().work(job, 0, !nested);
  inside_loop = nested;
  if (job.error) std::rethrow_exception(job.error);
}

}  // namespace detail
}  // namespace longspan
