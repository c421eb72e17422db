// A fixed table, since a signal handler may neither allocate nor lock.
#include "files/temporaries.h"

#include <unistd.h>

#include <array>
#include <atomic>
#include <climits>
#include <cstring>

namespace longspan::cli {
namespace {

enum class State : int { empty, writing, full };
struct Slot {
  std::atomic<State> state{State::empty};
  char path[PATH_MAX] = {};
};
std::array<Slot, 4> slots;
static_assert(std::atomic<State>::is_always_lock_free, "a signal handler may only touch lock-free atomics");

}  // namespace

void remember_temporary(const std::string& path) noexcept {
  if (path.size() >= PATH_MAX) return;
  for (Slot& slot : slots) {
    State empty = State::empty;
    if (!slot.state.compare_exchange_strong(empty, State::writing)) continue;
    std::memcpy(slot.path, path.c_str(), path.size() + 1);
    slot.state = State::full;
    return;
  }
}

void forget_temporary(const std::string& path) noexcept {
  for (Slot& slot : slots) {
    if (slot.state == State::full && path == slot.path) slot.state = State::empty;
  }
}

void remove_temporaries() noexcept {
  for (const Slot& slot : slots) {
    if (slot.state == State::full) unlink(slot.path);
  }
}

}  // namespace longspan::cli
