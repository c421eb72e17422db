// Signal handlers that only set flags.
#include "interrupt.h"

#include <csignal>

#include "longspan/error.h"

namespace longspan::cli {
namespace {

std::atomic<bool> interrupted_flag{false};
std::atomic<int> received_signal{SIGINT};
static_assert(std::atomic<bool>::is_always_lock_free && std::atomic<int>::is_always_lock_free,
              "a signal handler may only touch lock-free atomics");

extern "C" void remember_signal(int number) {
  received_signal.store(number);
  interrupted_flag.store(true);
}

}  // namespace

void handle_signals() {
  struct sigaction remember = {};
  remember.sa_handler = remember_signal;
  remember.sa_flags = SA_RESETHAND;
  sigaction(SIGINT, &remember, nullptr);
  sigaction(SIGTERM, &remember, nullptr);
  struct sigaction ignore = {};
  ignore.sa_handler = SIG_IGN;
  sigaction(SIGPIPE, &ignore, nullptr);
  sigaction(SIGXFSZ, &ignore, nullptr);
}

const std::atomic<bool>& interrupted() { return interrupted_flag; }

void stop_if_interrupted() {
  if (interrupted_flag.load()) throw Cancelled("interrupted");
}

int interrupt_exit_code() { return 128 + received_signal.load(); }

}  // namespace longspan::cli
