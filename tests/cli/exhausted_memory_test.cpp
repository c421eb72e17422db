// Memory may run out at any allocation of the command: it says so and exits with 3. Each allocation in turn is the
// first that fails, and all after it fail, too.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <limits>
#include <new>

#include "command.h"
#include "interrupt.h"

namespace {

std::atomic<long> allocations_left{std::numeric_limits<long>::max()};

void* allocate(std::size_t bytes, std::size_t alignment) {
  if (allocations_left.load() <= 0) throw std::bad_alloc();
  --allocations_left;
  void* memory = nullptr;
  if (posix_memalign(&memory, alignment, bytes) != 0) throw std::bad_alloc();
  return memory;
}

}  // namespace

void* operator new(std::size_t bytes) { return allocate(bytes, alignof(std::max_align_t)); }
void* operator new(std::size_t bytes, std::align_val_t alignment) {
  return allocate(bytes, static_cast<std::size_t>(alignment));
}
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }
void operator delete(void* memory, std::align_val_t) noexcept { std::free(memory); }
void operator delete(void* memory, std::size_t, std::align_val_t) noexcept { std::free(memory); }

namespace longspan::cli {
namespace {

/// The status of a process that runs the command and may allocate so often.
int status_after(long allocations, const std::vector<const char*>& arguments) {
  const pid_t child = fork();
  if (child == 0) {
    const int nowhere = open("/dev/null", O_WRONLY);
    dup2(nowhere, STDOUT_FILENO);
    dup2(nowhere, STDERR_FILENO);
    handle_signals();
    allocations_left = allocations;
    _exit(run_command_line(static_cast<int>(arguments.size()), arguments.data()));
  }
  int status = 0;
  waitpid(child, &status, 0);
  return status;
}

void expect_no_crash(const std::vector<const char*>& arguments, int success) {
  int failures = 0;
  for (long allocations = 0;; allocations += allocations < 50 ? 1 : 7) {  // every one would take too long
    const int status = status_after(allocations, arguments);
    ASSERT_TRUE(WIFEXITED(status)) << "signal " << WTERMSIG(status) << " after " << allocations << " allocations";
    if (WEXITSTATUS(status) == success) break;
    ASSERT_EQ(WEXITSTATUS(status), 3) << "after " << allocations << " allocations";
    ++failures;
  }
  EXPECT_GT(failures, 100);
}

TEST(ExhaustedMemory, EndsPlanWithExitCode3) {
  expect_no_crash({"longspan", "plan", "--tokens", "1024", "--segments=64,128,256", "--causal"}, 0);
}

TEST(ExhaustedMemory, EndsUsageErrorsWithExitCode3) {
  expect_no_crash({"longspan", "plan", "--tokem", "1024", "and an argument that is long"}, 2);
  expect_no_crash({"longspan", "an argument that is no command at all"}, 2);
}

TEST(ExhaustedMemory, EndsHelpWithExitCode3) { expect_no_crash({"longspan", "help", "ring"}, 0); }

}  // namespace
}  // namespace longspan::cli
