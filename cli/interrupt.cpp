// Signal handlers that only set flags.
#include "interrupt.h"

#include <unistd.h>

#include <csignal>
#include <cstdint>
#include <ctime>
#include <exception>
#include <new>
#include <string_view>

#include "command.h"
#include "files/temporaries.h"
#include "longspan/error.h"

namespace longspan::cli {
namespace {

std::atomic<bool> interrupted_flag{false};
std::atomic<int> received_signal{SIGINT};
static_assert(std::atomic<bool>::is_always_lock_free && std::atomic<int>::is_always_lock_free &&
                  std::atomic<std::int64_t>::is_always_lock_free,
              "a signal handler may only touch lock-free atomics");

constexpr std::int64_t kPatience = 1'000'000'000;  // nanoseconds
std::atomic<std::int64_t> first_signal_time{0};

std::int64_t now() {
  timespec time = {};
  clock_gettime(CLOCK_MONOTONIC, &time);
  return time.tv_sec * 1'000'000'000 + time.tv_nsec;
}

/// A signal that comes well after the first means that the user does not want to wait; one that comes at once is an
/// echo (both the terminal and a parent may send it).
extern "C" void remember_signal(int number) {
  std::int64_t first = 0;
  if (first_signal_time.compare_exchange_strong(first, now())) {
    received_signal.store(number);
    interrupted_flag.store(true);
  } else if (now() - first > kPatience) {
    remove_temporaries();
    _exit(128 + number);
  }
}

/// Ends the process without destructors.
[[noreturn]] void leave(std::string_view message, int code) {
  remove_temporaries();
  [[maybe_unused]] const ssize_t written = write(STDERR_FILENO, message.data(), message.size());
  _exit(code);
}

/// Inputs are memory-mapped: a page that is gone when it is read is this signal.
extern "C" void input_vanished(int) {
  leave("longspan: an input file became shorter while it was read, or its disk failed\n", kFailure);
}

std::terminate_handler default_terminate = nullptr;

/// Memory that runs out inside a noexcept function (the option parser has some) ends here.
[[noreturn]] void on_terminate() {
  if (const std::exception_ptr error = std::current_exception()) {
    try {
      std::rethrow_exception(error);
    } catch (const std::bad_alloc&) {
      leave("longspan: out of memory\n", kFailure);
    } catch (...) {}
  }
  remove_temporaries();
  default_terminate();
  _exit(kFailure);
}

}  // namespace

void handle_signals() {
  struct sigaction remember = {};
  remember.sa_handler = remember_signal;
  sigaction(SIGINT, &remember, nullptr);
  sigaction(SIGTERM, &remember, nullptr);
  struct sigaction ignore = {};
  ignore.sa_handler = SIG_IGN;
  sigaction(SIGPIPE, &ignore, nullptr);
  sigaction(SIGXFSZ, &ignore, nullptr);
  struct sigaction vanished = {};
  vanished.sa_handler = input_vanished;
  sigaction(SIGBUS, &vanished, nullptr);
  default_terminate = std::set_terminate(on_terminate);
}

const std::atomic<bool>& interrupted() { return interrupted_flag; }

void stop_if_interrupted() {
  if (interrupted_flag.load()) throw Cancelled("interrupted");
}

int interrupt_exit_code() { return 128 + received_signal.load(); }

}  // namespace longspan::cli
