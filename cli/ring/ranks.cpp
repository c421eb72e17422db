// Small exchanges over the ring's own communicator.
#include "ring/ranks.h"

#include <fmt/format.h>

#include <exception>
#include <future>
#include <span>
#include <thread>

#include "longspan/error.h"

namespace longspan::cli {
namespace {

using Clock = std::chrono::steady_clock;

/// One exchange. A rank that does not come makes the communicator unusable, so that nobody waits for it again at the
/// end.
void exchange(Communicator& communicator, const char* step, std::span<const SendBuffer> sends,
              std::span<const ReceiveBuffer> receives, std::chrono::milliseconds deadline) {
  try {
    communicator.begin(sends, receives);
    communicator.wait(Clock::now() + deadline);
  } catch (const CommError& error) {
    communicator.abort();
    const double seconds = static_cast<double>(deadline.count()) / 1000;
    communicator.fail(error.what());
    throw CommError(fmt::format("{}: {}; --deadline was {} s", step, error.what(), seconds));
  }
}

/// One message from every other rank to rank 0; sizes are known there.
void to_first(Communicator& communicator, const void* data, std::size_t bytes, std::vector<std::string>& texts,
              std::chrono::milliseconds deadline) {
  std::vector<SendBuffer> sends;
  std::vector<ReceiveBuffer> receives;
  if (communicator.rank() == 0) {
    for (int peer = 1; peer < communicator.size(); ++peer) {
      std::string& text = texts[static_cast<std::size_t>(peer)];
      receives.push_back({peer, text.data(), text.size()});
    }
  } else {
    sends.push_back({0, data, bytes});
  }
  exchange(communicator, "gathering reports", sends, receives, deadline);
}

}  // namespace

std::vector<std::string> gather(Communicator& communicator, const std::string& text,
                                std::chrono::milliseconds deadline) {
  std::vector<std::string> texts(communicator.rank() == 0 ? static_cast<std::size_t>(communicator.size()) : 0);
  std::vector<std::string> sizes(texts.size(), std::string(sizeof(std::uint64_t), '\0'));
  const std::uint64_t size = text.size();
  to_first(communicator, &size, sizeof(size), sizes, deadline);
  for (std::size_t rank = 1; rank < texts.size(); ++rank) {
    std::uint64_t bytes = 0;
    sizes[rank].copy(reinterpret_cast<char*>(&bytes), sizeof(bytes));
    texts[rank].resize(bytes);
  }
  to_first(communicator, text.data(), text.size(), texts, deadline);
  if (!texts.empty()) texts[0] = text;
  return texts;
}

std::string broadcast(Communicator& communicator, const std::string& text, std::chrono::milliseconds deadline) {
  const auto from_first = [&](void* data, std::size_t bytes) {
    std::vector<SendBuffer> sends;
    std::vector<ReceiveBuffer> receives;
    if (communicator.rank() > 0) receives.push_back({0, data, bytes});
    for (int peer = 1; communicator.rank() == 0 && peer < communicator.size(); ++peer)
      sends.push_back({peer, data, bytes});
    exchange(communicator, "telling the name of the output", sends, receives, deadline);
  };
  std::string told = text;
  std::uint64_t size = told.size();
  from_first(&size, sizeof(size));
  told.resize(size);
  from_first(told.data(), told.size());
  return told;
}

void barrier(Communicator& communicator, std::chrono::milliseconds deadline) {
  std::vector<char> said(static_cast<std::size_t>(communicator.size()), 1), heard(said.size());
  std::vector<SendBuffer> sends;
  std::vector<ReceiveBuffer> receives;
  for (int peer = 0; peer < communicator.size(); ++peer) {
    if (peer == communicator.rank()) continue;
    sends.push_back({peer, &said[static_cast<std::size_t>(peer)], 1});
    receives.push_back({peer, &heard[static_cast<std::size_t>(peer)], 1});
  }
  exchange(communicator, "barrier before the run", sends, receives, deadline);
}

void run_local_ranks(int ranks, const std::function<void(const std::shared_ptr<Communicator>&)>& body,
                     const LocalLink& link) {
  std::vector<std::shared_ptr<Communicator>> ring = local_ring(ranks, {}, 0, link);
  std::vector<std::exception_ptr> errors(ring.size());
  std::vector<std::thread> threads;
  std::promise<bool> all_there;  // ranks begin when every one has its thread
  const std::shared_future<bool> begin = all_there.get_future().share();
  std::string missing;
  try {
    threads.reserve(ring.size());
    for (std::size_t rank = 0; rank < ring.size(); ++rank) {
      threads.emplace_back([&, begin, rank] {
        if (!begin.get()) return;
        try {
          body(ring[rank]);
        } catch (...) {
          errors[rank] = std::current_exception();
        }
        ring[rank].reset();  // whoever waits for this rank hears that it left
      });
    }
  } catch (const std::exception& error) {
    missing = error.what();
  }
  all_there.set_value(missing.empty());
  const std::size_t started = threads.size();
  for (std::thread& thread : threads) thread.join();
  if (!missing.empty()) {
    throw CommError(
        fmt::format("the system gives no thread to rank {} of {} ({}): use fewer --ranks, or raise the limit on "
                    "threads (ulimit -u)",
                    started, ranks, missing));
  }
  std::exception_ptr echo;
  for (const std::exception_ptr& error : errors) {
    if (!error) continue;
    try {
      std::rethrow_exception(error);
    } catch (const CommError&) {
      if (!echo) echo = error;
    }
  }
  if (echo) std::rethrow_exception(echo);
}

}  // namespace longspan::cli
