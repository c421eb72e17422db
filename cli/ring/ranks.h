// What the ranks of `longspan ring` exchange besides attention: barriers, reports to rank 0, and a text from it.
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

/// Rank 0's text, at every rank. All ranks call it.
std::string broadcast(Communicator& communicator, const std::string& text, std::chrono::milliseconds deadline);

/// Returns when every rank has called it.
void barrier(Communicator& communicator, std::chrono::milliseconds deadline);

/// Calls body(communicator) as every local rank, each on a thread of its own; rethrows the first rank's error that is
/// not the echo of another's.
void run_local_ranks(int ranks, const std::function<void(const std::shared_ptr<Communicator>&)>& body,
                     const LocalLink& link = {});

}  // namespace longspan::cli
