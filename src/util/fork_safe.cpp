// One pthread_atfork registration for all of the library's long-lived locks.
#include "util/fork_safe.h"

#include <pthread.h>

#include <vector>

namespace longspan {
namespace {

struct Registry {
  std::mutex mutex;
  std::vector<ForkSafeMutex*> mutexes;
  std::vector<void (*)()> child_functions;
};

Registry& registry() {
  // Never destroyed: threads may still run while the process exits.
  static Registry* const instance = [] {
    auto* created = new Registry;
    pthread_atfork(
        [] {
          registry().mutex.lock();
          for (ForkSafeMutex* mutex : registry().mutexes) mutex->lock();
        },
        [] {
          for (ForkSafeMutex* mutex : registry().mutexes) mutex->unlock();
          registry().mutex.unlock();
        },
        [] {
          for (ForkSafeMutex* mutex : registry().mutexes) mutex->unlock();
          for (auto* function : registry().child_functions) function();
          registry().mutex.unlock();
        });
    return created;
  }();
  return *instance;
}

}  // namespace

ForkSafeMutex::ForkSafeMutex() {
  Registry& all = registry();
  const std::lock_guard lock(all.mutex);
  all.mutexes.push_back(this);
}

void on_fork_in_child(void (*function)()) {
  Registry& all = registry();
  const std::lock_guard lock(all.mutex);
  all.child_functions.push_back(function);
}

}  // namespace longspan
