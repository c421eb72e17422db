// What all communicators share.
#include "longspan/communicator.h"

namespace longspan {

Communicator::~Communicator() = default;

void Communicator::fail(std::string reason) {
  if (failure_.empty()) failure_ = std::move(reason);
}

}  // namespace longspan
