// What all communicators share.
#include "longspan/communicator.h"

#include <mutex>
#include <unordered_map>

#include "comm/messages.h"

namespace longspan {
namespace {

std::mutex& steps_mutex() {
  static auto* const mutex = new std::mutex;  // never destroyed, as the map: communicators may end during exit
  return *mutex;
}
std::unordered_map<const Communicator*, CommunicatorSteps>& all_steps() {
  static auto* const steps = new std::unordered_map<const Communicator*, CommunicatorSteps>;
  return *steps;
}

}  // namespace

CommunicatorSteps& steps_of(const Communicator& communicator) {
  const std::lock_guard lock(steps_mutex());
  return all_steps()[&communicator];
}

Communicator::~Communicator() {
  const std::lock_guard lock(steps_mutex());
  all_steps().erase(this);
}

void Communicator::fail(std::string reason) {
  if (failure_.empty()) failure_ = std::move(reason);
}

}  // namespace longspan
