// The thread pool: every item once, exceptions, nesting, many host threads, forks.
#include <gtest/gtest.h>
#include <sched.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <optional>
#include <thread>
#include <vector>

#include "longspan/error.h"
#include "longspan/threads.h"
#include "support/case.h"
#include "support/loops.h"
#include "util/cpu_info.h"
#include "util/parallel.h"

namespace longspan {
namespace {

using testing::finds_all;
using testing::most_at_once;

#if defined(__linux__)
// First, while there is one worker: each learns where callers are when it goes to sleep.
TEST(ParallelFor, AWorkerThatSleptWakesOnAnotherCpu) {
  if (usable_cpus() < 2) GTEST_SKIP() << "needs two CPUs";
  int apart = 0;
  constexpr int kRounds = 20;
  for (int round = 0; round < kRounds; ++round) {
    std::atomic<int> started{0}, cpus[2] = {-1, -1};
    const auto begin = std::chrono::steady_clock::now();
    parallel_for(2, 2, {}, [&](int, std::int64_t item) {
      cpus[item] = sched_getcpu();
      ++started;
      while (started < 2 && std::chrono::steady_clock::now() - begin < std::chrono::seconds(1)) {}
    });
    if (round > 0 && cpus[0] != cpus[1]) ++apart;
    std::this_thread::sleep_for(std::chrono::milliseconds(20));  // the worker sleeps, too
  }
  EXPECT_GE(apart, kRounds / 2);  // callers may move in between
}
#endif

TEST(ParallelFor, RunsEveryItemOnce) {
  for (const int threads : {1, 2, 5, 16}) {
    for (const std::int64_t items : {0, 1, 2, 1000}) {
      std::vector<std::atomic<int>> runs(static_cast<std::size_t>(items));
      std::atomic<bool> worker_in_range{true};
      parallel_for(threads, items, {}, [&](int worker, std::int64_t item) {
        if (worker < 0 || worker >= threads) worker_in_range = false;
        ++runs[static_cast<std::size_t>(item)];
      });
      for (const auto& count : runs) EXPECT_EQ(count, 1);
      EXPECT_TRUE(worker_in_range);
    }
  }
}

TEST(ParallelFor, AWorkerIndexBelongsToOneThread) {
  std::vector<std::atomic<int>> inside(8);
  std::atomic<bool> shared{false};
  parallel_for(8, 2000, {}, [&](int worker, std::int64_t) {
    if (inside[static_cast<std::size_t>(worker)].fetch_add(1) != 0) shared = true;
    std::this_thread::yield();
    inside[static_cast<std::size_t>(worker)].fetch_sub(1);
  });
  EXPECT_FALSE(shared);
}

TEST(ParallelFor, RethrowsAndGoesOn) {
  for (int round = 0; round < 20; ++round) {
    EXPECT_THROW(parallel_for(4, 100, {},
                              [](int, std::int64_t item) {
                                if (item == 37) throw std::runtime_error("37");
                              }),
                 std::runtime_error);
    std::atomic<int> runs{0};
    parallel_for(4, 100, {}, [&](int, std::int64_t) { ++runs; });
    EXPECT_EQ(runs, 100);
  }
}

TEST(ParallelFor, NestedLoopsRun) {
  std::atomic<int> runs{0};
  parallel_for(4, 10, {}, [&](int, std::int64_t) {
    parallel_for(4, 10, {}, [&](int worker, std::int64_t) {
      EXPECT_EQ(worker, 0);
      ++runs;
    });
  });
  EXPECT_EQ(runs, 100);
}

TEST(ParallelFor, ShortLoopsOfSeveralCallersGetHelpers) {
  // Two loops of two items, each of which ends when all four run: there are threads enough for that.
  std::atomic<int> running{0};
  std::atomic<bool> together{true};
  const auto call = [&] {
    parallel_for(4, 2, {}, [&](int, std::int64_t) {
      ++running;
      const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(20);
      while (running < 4 && std::chrono::steady_clock::now() < deadline) std::this_thread::yield();
      if (running < 4) together = false;
    });
  };
  std::thread other(call);
  call();
  other.join();
  EXPECT_TRUE(together);
}

TEST(ParallelFor, ManyHostThreadsAtOnce) {
  std::atomic<std::int64_t> sum{0};
  std::vector<std::thread> hosts;
  for (int host = 0; host < 8; ++host) {
    hosts.emplace_back([&] {
      for (int round = 0; round < 50; ++round) parallel_for(3, 20, {}, [&](int, std::int64_t item) { sum += item; });
    });
  }
  for (auto& host : hosts) host.join();
  EXPECT_EQ(sum, 8 * 50 * 190);
}

TEST(ParallelFor, HostThreadsShareOneBudget) {
  // Four loops of four threads each: once all callers are there, nobody else works.
  std::atomic<int> callers{0}, working{0}, most{0};
  std::vector<std::thread> hosts;
  for (int host = 0; host < 4; ++host) {
    hosts.emplace_back([&] {
      parallel_for(4, 60, {}, [&](int worker, std::int64_t) {
        if (worker == 0) callers.fetch_add(1);
        const int now = working.fetch_add(1) + 1;
        if (callers.load() > 100) {  // all loops are in full swing
          for (int seen = most.load(); seen < now && !most.compare_exchange_weak(seen, now);) {}
        }
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
        working.fetch_sub(1);
      });
    });
  }
  for (std::thread& host : hosts) host.join();
  EXPECT_LE(most.load(), 4);
  EXPECT_GT(callers.load(), 100);
}

/// Whether a loop of four finds all four threads, also beside two seats that are left, and two beside two seats.
bool counts_right() {
  bool all = finds_all();
  std::atomic<int> left{0}, seated{0};
  std::atomic<bool> back{false}, over{false};
  const auto wait_for = [](const std::atomic<bool>& flag) {
    while (!flag) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  };
  std::vector<std::thread> hosts;
  for (int host = 0; host < 2; ++host) {
    hosts.emplace_back([&] {
      const Seat seat, again;  // a second one counts nothing
      {
        const SeatLeft free, twice;
        ++left;
        wait_for(back);
      }
      ++seated;
      wait_for(over);
    });
  }
  while (left < 2) std::this_thread::yield();
  all = all && finds_all();
  back = true;
  while (seated < 2) std::this_thread::yield();
  int most = 0;
  for (int round = 0; round < 5; ++round) most = std::max(most, most_at_once(12));
  over = true;
  for (std::thread& host : hosts) host.join();
  return all && most <= 2;
}

TEST(Seat, ItsThreadCountsBetweenLoopsAndIsGivenBack) {
  for (int round = 0; round < 3; ++round) EXPECT_TRUE(counts_right());
}

TEST(Seat, LoopsOfASeatedThreadCountItOnce) {
  { const SeatLeft none; }  // of a thread without
  EXPECT_TRUE(counts_right());
  {
    const Seat seat;
    EXPECT_TRUE(counts_right());
    for (int round = 0; round < 20; ++round) {
      EXPECT_THROW(parallel_for(4, 100, {},
                                [](int, std::int64_t item) {
                                  if (item == 37) throw std::runtime_error("37");
                                }),
                   std::runtime_error);
      parallel_for(4, 8, {}, [](int worker, std::int64_t) {  // stragglers: the seat is left, and taken again
        std::this_thread::sleep_for(std::chrono::milliseconds(worker == 0 ? 1 : 3));
        const Seat inside;  // of a thread that works already
        const SeatLeft none;
      });
      const SeatLeft left, again;
    }
    EXPECT_TRUE(counts_right());
  }
  EXPECT_TRUE(counts_right());
}

TEST(ParallelFor, CancelStopsWithin) {
  std::atomic<bool> cancel{false};
  std::atomic<std::int64_t> runs{0};
  const LoopControl control{&cancel, nullptr};
  EXPECT_THROW(parallel_for(4, 1000000, control,
                            [&](int, std::int64_t) {
                              if (++runs == 100) cancel = true;
                            }),
               Cancelled);
  EXPECT_LT(runs, 1000000);
}

TEST(Threads, NumberCanBeSet) {
  set_num_threads(3);
  EXPECT_EQ(num_threads(), 3);
  set_num_threads(0);
  EXPECT_EQ(num_threads(), default_threads());
  EXPECT_THROW(set_num_threads(-1), InvalidArgument);
  EXPECT_THROW(set_num_threads(100000), InvalidArgument);
}

TEST(Threads, EnvironmentLimitsTheDefault) {
  const int cpus = usable_cpus();
  setenv("OMP_NUM_THREADS", "1", 1);
  EXPECT_EQ(default_threads(), 1);
  setenv("OMP_NUM_THREADS", "1000000", 1);
  EXPECT_EQ(default_threads(), cpus);
  setenv("OMP_NUM_THREADS", "nonsense", 1);
  EXPECT_EQ(default_threads(), cpus);
  unsetenv("OMP_NUM_THREADS");
}

#if !defined(__SANITIZE_THREAD__)  // ThreadSanitizer does not support threads after a fork
TEST(Threads, WorkAfterFork) {
  using testing::Case;
  set_num_threads(2);
  Case c(Pattern::dilated({32, 64}, {1, 2}), {}, {1, 128, 4, 4, 32});
  const testing::Results before = c.run();  // workers exist in the parent
  std::optional<Seat> seat(std::in_place);  // a child has lost its parent's
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    alarm(20);  // a deadlock must end as a failure
    seat.reset();
    const testing::Results after = c.run();
    _exit(after.out == before.out && after.dk == before.dk && counts_right() ? 0 : 1);
  }
  seat.reset();
  int status = 0;
  waitpid(child, &status, 0);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0);
  EXPECT_EQ(c.run().out, before.out);
  set_num_threads(0);
}
#endif

#if defined(__GLIBC__)
TEST(Threads, ACallRunsAloneWhereTheSystemGivesNoThread) {
  const pid_t child = fork();
  if (child == 0) {  // a process of its own: its pool starts without threads
    pthread_attr_t attributes;
    pthread_attr_init(&attributes);
    pthread_attr_setstacksize(&attributes, std::size_t{1} << 50);  // more than there are addresses
    if (pthread_setattr_default_np(&attributes) != 0) _exit(2);
    std::atomic<int> ran{0};
    parallel_for(8, 1000, {}, [&](int worker, std::int64_t) { ran += worker == 0; });
    _exit(ran == 1000 ? 0 : 1);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status));
  EXPECT_EQ(WEXITSTATUS(status), 0);
}
#endif

TEST(Threads, OneAttentionSharedByHostThreads) {
  using testing::Case;
  const Case c(Pattern::longnet({32, 64}, {1, 2}), {}, {1, 128, 4, 4, 32});
  const testing::Results expected = c.run();
  std::vector<std::thread> hosts;
  for (int host = 0; host < 4; ++host) {
    hosts.emplace_back([&] {
      for (int round = 0; round < 5; ++round) {
        const testing::Results r = c.run();
        EXPECT_EQ(r.out, expected.out);
        EXPECT_EQ(r.dv, expected.dv);
      }
    });
  }
  for (auto& host : hosts) host.join();
}

}  // namespace
}  // namespace longspan
