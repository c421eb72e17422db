// Ctrl-C and SIGTERM as a flag that the library polls, so that temporary files are removed on the way out; and what
// ends the process without an exception.
#pragma once

#include <atomic>

namespace longspan::cli {

/// Installs the handlers (a second signal, a second later or more, kills at once) and ignores SIGPIPE and SIGXFSZ,
/// whose errno is reported instead. Also turns SIGBUS (a mapped input that became shorter) and memory that runs out
/// where no exception can pass into a message and exit code 3.
void handle_signals();
/// True once a signal came; pass its address as Call::cancel.
const std::atomic<bool>& interrupted();
/// Throws Cancelled if a signal came.
void stop_if_interrupted();
/// 128 + the signal's number.
int interrupt_exit_code();

}  // namespace longspan::cli
