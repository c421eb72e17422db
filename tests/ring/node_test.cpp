// Processes of one node as ranks: the same results, and errors that name who is gone.
#include <gtest/gtest.h>

#include <csignal>

#include "longspan/error.h"
#include "ring/processes.h"
#include "ring/ring_cases.h"

namespace longspan::testing {
namespace {

using Clock = std::chrono::steady_clock;

/// One exchange of `bytes` with every other rank; the text of its error.
std::string exchange_with_all(Communicator& communicator, std::size_t bytes, int step,
                              std::chrono::milliseconds deadline = std::chrono::seconds(60)) {
  const int ranks = communicator.size(), rank = communicator.rank();
  const auto value = [&](int source, int target) { return static_cast<char>(step * 31 + source * 7 + target); };
  std::vector<std::string> sent(static_cast<std::size_t>(ranks)), got(sent.size());
  std::vector<SendBuffer> sends;
  std::vector<ReceiveBuffer> receives;
  for (int peer = 0; peer < ranks; ++peer) {
    if (peer == rank) continue;
    const auto at = static_cast<std::size_t>(peer);
    sent[at].assign(bytes, value(rank, peer));
    got[at].assign(bytes, 0);
    sends.push_back({peer, sent[at].data(), bytes});
    receives.push_back({peer, got[at].data(), bytes});
  }
  try {
    communicator.begin(sends, receives);
    communicator.wait(Clock::now() + deadline);
  } catch (const CommError& error) {
    communicator.abort();
    return error.what();
  }
  for (int peer = 0; peer < ranks; ++peer) {
    if (peer == rank) continue;
    EXPECT_EQ(got[static_cast<std::size_t>(peer)], std::string(bytes, value(peer, rank))) << step;
  }
  return "";
}

TEST(NodeRing, HasTheBitsOfOneDevice) {
  for (const int ranks : {1, 2, 4}) {
    const std::string name = ring_name();
    expect_all_well(ranks, [&](int rank) {
      const Case c(Pattern::longnet({16, 120}, {1, 3}), {}, {1, 120, 3, 3, 16});
      const Shards shards = Shards::even(120, ranks);
      const RankResults results = run_rank(c, shards, node_ring(name, rank, ranks), {});
      expect_same(results, c.run(), shards.ranges(rank), ring_tolerance(DType::f32), true, true, "");
    });
  }
}

TEST(NodeRing, MovesMessagesOfAnySizeInAnyOrderOfThem) {
  const std::string name = ring_name();
  expect_all_well(3, [&](int rank) {
    const auto communicator = node_ring(name, rank, 3);
    int step = 0;
    for (const std::size_t bytes : {1u, 0u, 100000u, 3u, 5000000u, 257u}) {
      for (int i = 0; i < 20; ++i) EXPECT_EQ(exchange_with_all(*communicator, bytes, step++), "");
    }
  });
}

TEST(NodeRing, NamesAKilledRank) {
  const std::string name = ring_name();
  const std::vector<bool> well = in_processes(3, [&](int rank) {
    const auto communicator = node_ring(name, rank, 3);
    EXPECT_EQ(exchange_with_all(*communicator, 10, 0), "");
    if (rank == 1) raise(SIGKILL);
    const std::string text = exchange_with_all(*communicator, 10, 1);
    EXPECT_TRUE(text == "rank 1 ended" || text.find("rank 1 failed, so rank ") == 0) << text;
  });
  EXPECT_EQ(well, (std::vector<bool>{true, false, true}));
}

TEST(NodeRing, NamesASilentRankAtTheDeadline) {
  const std::string name = ring_name();
  expect_all_well(2, [&](int rank) {
    const auto communicator = node_ring(name, rank, 2);
    if (rank == 1) {  // takes and says nothing, until the other has given up
      const ReceiveBuffer receive{0, nullptr, 0};
      for (const bool arrives : {true, false}) {
        communicator->begin({}, {&receive, 1});
        if (arrives) communicator->wait(Clock::now() + std::chrono::seconds(60));
        else EXPECT_THROW(communicator->wait(Clock::now() + std::chrono::seconds(60)), CommError);
      }
      return;
    }
    const std::string text = exchange_with_all(*communicator, 0, 0, std::chrono::milliseconds(200));
    EXPECT_EQ(text, "rank 1 sent nothing before the deadline");
  });
}

TEST(NodeRing, IsMadeWhereOneOfTheSameNameDied) {
  const std::string name = ring_name();
  in_processes(1, [&](int) {
    std::thread([&] { node_ring(name, 0, 2); }).detach();
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
    raise(SIGKILL);
  });
  expect_all_well(2, [&](int rank) {
    if (rank == 0) std::this_thread::sleep_for(std::chrono::milliseconds(50));  // the other meets what is left first
    const auto communicator = node_ring(name, rank, 2);
    EXPECT_EQ(exchange_with_all(*communicator, 10, 0), "");
  });
}

TEST(NodeRing, RefusesWhoIsTooManyOrDoesNotCome) {
  const std::string name = ring_name();
  const auto soon = std::chrono::milliseconds(200);
  EXPECT_THROW(node_ring(name, 0, 2, soon), CommError);
  EXPECT_THROW(node_ring(name, 1, 2, soon), CommError);
  EXPECT_THROW(node_ring(name, 2, 2), InvalidArgument);
  EXPECT_THROW(node_ring(name, -1, 2), InvalidArgument);
  EXPECT_THROW(node_ring(name, 0, 65), InvalidArgument);
  for (const char* wrong : {"", "a/b", "..\n", " "}) EXPECT_THROW(node_ring(wrong, 0, 1), InvalidArgument) << wrong;
}

}  // namespace
}  // namespace longspan::testing
