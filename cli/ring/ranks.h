// What the ranks of `longspan ring` say to each other beside attention: meeting, and reports to rank 0.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "longspan/communicator.h"

namespace longspan::cli {

/// Every rank's text, at rank 0; empty elsewhere. All ranks call it.
std::vector<std::string> gather(Communicator& communicator, const std::string& text,
                                std::chrono::milliseconds deadline);

/// Returns when every rank has called it.
void meet(Communicator& communicator, std::chrono::milliseconds deadline);

/// Calls body(communicator) as every local rank, each on a thread of its own; rethrows the first rank's error that is
/// not the echo of another's.
void run_local_ranks(int ranks, const std::function<void(const std::shared_ptr<Communicator>&)>& body);

}  // namespace longspan::cli
