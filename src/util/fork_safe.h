// A mutex that a fork cannot leave locked in the child by a thread that no longer exists.
#pragma once

#include <mutex>

namespace longspan {

/// For objects that live as long as the process: it is never unregistered. Satisfies Lockable.
class ForkSafeMutex {
 public:
  ForkSafeMutex();
  ForkSafeMutex(const ForkSafeMutex&) = delete;
  ForkSafeMutex& operator=(const ForkSafeMutex&) = delete;
  void lock() { mutex_.lock(); }
  bool try_lock() { return mutex_.try_lock(); }
  void unlock() { mutex_.unlock(); }

 private:
  std::mutex mutex_;
};

/// Calls `function` in the child after every fork.
void on_fork_in_child(void (*function)());

}  // namespace longspan
