// What goes wrong on the way: an error that names rank and step, or the right result. Never a wrong one, never a hang.
#include <gtest/gtest.h>

#include "comm/messages.h"
#include "longspan/error.h"
#include "ring/ring_cases.h"
#include "support/loops.h"

namespace longspan::testing {
namespace {

using Kind = LocalFault::Kind;
using Clock = std::chrono::steady_clock;

Case far_case() { return Case(Pattern::longnet({16, 120}, {1, 3}), {}, {1, 120, 3, 3, 16}); }

struct Outcome {
  std::vector<std::string> errors;  // empty where a rank succeeded
  std::vector<RankResults> results;
  double seconds = 0;
};

Outcome run_with(std::vector<LocalFault> faults, int ranks = 3,
                 std::chrono::milliseconds deadline = std::chrono::milliseconds(5000), bool checksums = true) {
  const Case c = far_case();
  RingRun run;
  run.options.deadline = deadline;
  run.options.checksums = checksums;
  Outcome outcome;
  outcome.results.resize(static_cast<std::size_t>(ranks));
  const auto begin = Clock::now();
  const auto errors =
      on_ranks(local_ring(ranks, std::move(faults)), [&](int rank, std::shared_ptr<Communicator> communicator) {
        outcome.results[static_cast<std::size_t>(rank)] =
            run_rank(c, Shards::even(120, ranks), std::move(communicator), run);
      });
  outcome.seconds = std::chrono::duration<double>(Clock::now() - begin).count();
  outcome.errors = texts_of<CommError>(errors);
  return outcome;
}

void expect_right(const Outcome& outcome, std::size_t rank) {
  const Case c = far_case();
  const Shards shards = Shards::even(120, static_cast<int>(outcome.errors.size()));
  ASSERT_EQ(outcome.errors[rank], "");
  expect_same(outcome.results[rank], c.run(), shards.ranges(static_cast<int>(rank)), ring_tolerance(DType::f32), true,
              true, "");
}

// Exchanges of a rank: 0 compares ranks, 1 moves rows, 2 returns gradients.
TEST(Fault, LostMessagesRaiseBeforeTheDeadlineIsLongOver) {
  for (const int exchange : {0, 1, 2}) {
    const Outcome outcome = run_with({{Kind::lose, 1, 2, exchange}}, 3, std::chrono::milliseconds(1000));
    // Rank 1, which misses the answer, may have started earlier and so give up first, or be done by then.
    const bool named = exchange < 2 ? outcome.errors[2].find(": rank 1 sent nothing") != std::string::npos ||
                                          outcome.errors[2].find(": rank 1 gave up") != std::string::npos
                                    : outcome.errors[2].find(": rank 1 ") != std::string::npos;
    EXPECT_TRUE(named) << outcome.errors[2];
    EXPECT_NE(outcome.errors[2].find("step "), std::string::npos);
    EXPECT_LT(outcome.seconds, 10);
  }
}

TEST(Fault, LateMessagesArriveOrRaise) {
  const Outcome slow = run_with({{Kind::delay, 1, -1, -1, std::chrono::milliseconds(40)}});
  for (std::size_t rank = 0; rank < 3; ++rank) expect_right(slow, rank);
  const Outcome late =
      run_with({{Kind::delay, 1, -1, 1, std::chrono::milliseconds(8000)}}, 3, std::chrono::milliseconds(700));
  for (const std::size_t rank : {0u, 2u})
    EXPECT_NE(late.errors[rank].find("rank 1"), std::string::npos) << late.errors[rank];
  EXPECT_LT(late.seconds, 7.5);
}

/// Seconds that one exchange of every rank with every other takes over an imitated link.
double seconds_of_exchange(int ranks, std::size_t bytes, LocalLink link) {
  const auto begin = Clock::now();
  const auto errors =
      on_ranks(local_ring(ranks, {}, 0, link), [&](int rank, std::shared_ptr<Communicator> communicator) {
        std::vector<std::byte> sent(bytes), got(bytes * static_cast<std::size_t>(ranks));
        std::vector<SendBuffer> sends;
        std::vector<ReceiveBuffer> receives;
        for (int peer = 0; peer < ranks; ++peer) {
          if (peer == rank) continue;
          sends.push_back({peer, sent.data(), bytes});
          receives.push_back({peer, got.data() + static_cast<std::size_t>(peer) * bytes, bytes});
        }
        communicator->begin(sends, receives);
        communicator->wait(Clock::now() + std::chrono::seconds(60));
      });
  const double seconds = std::chrono::duration<double>(Clock::now() - begin).count();
  for (const std::string& text : texts_of<CommError>(errors)) EXPECT_EQ(text, "");
  return seconds;
}

// Lower bounds only: a loaded machine may take longer, never less.
TEST(ImitatedLink, MessagesArriveNoSoonerThanTheirBytesAndTheLatencyAllow) {
  EXPECT_GE(seconds_of_exchange(2, 1, {0, std::chrono::milliseconds(30)}), 0.030);
  EXPECT_GE(seconds_of_exchange(2, 100'000, {2e6, std::chrono::milliseconds(10)}), 0.060);
}

TEST(ImitatedLink, MessagesThroughOnePortQueue) {
  // Each rank's port takes three messages in and three out, at the same time.
  EXPECT_GE(seconds_of_exchange(4, 50'000, {2e6, {}}), 0.075);
}

TEST(ImitatedLink, GivesTheSameResults) {
  const Case c = far_case();
  const Shards shards = Shards::even(120, 3);
  std::vector<RankResults> results(3);
  const auto ring = local_ring(3, {}, 0, {1e6, std::chrono::milliseconds(3)});
  const auto errors = on_ranks(ring, [&](int rank, std::shared_ptr<Communicator> communicator) {
    results[static_cast<std::size_t>(rank)] = run_rank(c, shards, std::move(communicator), {});
  });
  for (int rank = 0; rank < 3; ++rank) {
    EXPECT_EQ(texts_of<CommError>(errors)[static_cast<std::size_t>(rank)], "");
    expect_same(results[static_cast<std::size_t>(rank)], c.run(), shards.ranges(rank), ring_tolerance(DType::f32), true,
                true, "");
  }
}

TEST(ImitatedLink, TooSlowForTheDeadlineIsAnErrorThatNamesARank) {
  const auto errors =
      on_ranks(local_ring(2, {}, 0, {1, {}}), [&](int rank, std::shared_ptr<Communicator> communicator) {
        std::byte sent{}, got[4096];
        const SendBuffer send{1 - rank, got, rank == 0 ? sizeof(got) : 1};
        const ReceiveBuffer receive{1 - rank, rank == 0 ? &sent : got, rank == 0 ? 1 : sizeof(got)};
        communicator->begin({&send, 1}, {&receive, 1});
        communicator->wait(Clock::now() + std::chrono::milliseconds(100));
      });
  EXPECT_NE(texts_of<CommError>(errors)[1].find("rank 0"), std::string::npos);
}

TEST(ImitatedLink, RefusesRatesAndLatenciesThatAreNone) {
  const double nan = std::numeric_limits<double>::quiet_NaN(), infinity = std::numeric_limits<double>::infinity();
  for (const double rate : {-1.0, 0.5, nan, infinity})
    EXPECT_THROW(local_ring(2, {}, 0, {rate, {}}), InvalidArgument) << rate;
  EXPECT_THROW(local_ring(2, {}, 0, {1e9, std::chrono::nanoseconds(-1)}), InvalidArgument);
  EXPECT_THROW(local_ring(2, {}, 0, {1e9, std::chrono::hours(2)}), InvalidArgument);
}

TEST(Fault, RanksThatWaitLeaveTheirCores) {
  std::atomic<bool> over{false};
  std::thread ring([&] {
    run_with({{Kind::delay, 1, -1, 1, std::chrono::milliseconds(3000)}});
    over = true;
  });
  std::this_thread::sleep_for(std::chrono::milliseconds(500));  // by then two wait for the third, and it for them
  bool found = false;
  while (!found && !over) found = most_at_once(12) == 4;
  EXPECT_TRUE(found && !over);
  ring.join();
}

TEST(Fault, DoubledMessagesAreTakenOnce) {
  const Outcome outcome = run_with({{Kind::duplicate, 0, -1, -1}, {Kind::duplicate, 2, 1, 1}});
  for (std::size_t rank = 0; rank < 3; ++rank) expect_right(outcome, rank);
}

TEST(Fault, ChangedMessagesAreNoticed) {
  for (const int exchange : {1, 2}) {
    const Outcome outcome = run_with({{Kind::corrupt, 1, 0, exchange}});
    EXPECT_NE(outcome.errors[0].find("rank 1 sent a message that arrived changed"), std::string::npos)
        << outcome.errors[0];
  }
  // The test above can fail: without checksums the same change reaches the result.
  const Outcome unnoticed = run_with({{Kind::corrupt, 1, 0, 1}}, 3, std::chrono::milliseconds(5000), false);
  ASSERT_EQ(unnoticed.errors[0], "");
  const Case c = far_case();
  EXPECT_NE(bits_differ(unnoticed.results[0].results.out, rows_at(c.run().out, Shards::even(120, 3).ranges(0))), "");
}

TEST(Fault, ADeadRankIsNamedByEveryoneItExchangesWith) {
  for (const int exchange : {0, 1, 2}) {
    const Outcome outcome = run_with({{Kind::die, 1, -1, exchange}});
    EXPECT_NE(outcome.errors[1].find("died"), std::string::npos);
    // Whoever hears of it first gives up, which the other may hear of before it misses the dead one.
    bool named = false;
    for (const std::size_t rank : {0u, 2u}) {
      named = named || outcome.errors[rank].find(": rank 1 ") != std::string::npos;
      EXPECT_NE(outcome.errors[rank].find("step "), std::string::npos) << outcome.errors[rank];
    }
    EXPECT_TRUE(named) << outcome.errors[0] << "\n" << outcome.errors[2];
    EXPECT_LT(outcome.seconds, 10);
  }
}

TEST(Fault, ALateRankNamesTheDeadOneAndNotThoseWhoLeftBecauseOfIt) {
  const auto ring = local_ring(4);
  char byte = 0;
  const auto error_of = [&](int rank, std::vector<int> sources) {
    std::vector<ReceiveBuffer> receives;
    for (const int source : sources) receives.push_back({source, &byte, 1, {}});
    std::string message = "none";
    const auto& own = ring[static_cast<std::size_t>(rank)];
    own->begin({}, receives);
    try {
      own->wait(Clock::now() + std::chrono::seconds(20));
    } catch (const CommError& error) {
      message = error.what();
    }
    own->abort();
    return message;
  };
  ring[3]->abort();
  EXPECT_EQ(error_of(1, {3}), "rank 3 gave up");
  EXPECT_EQ(error_of(2, {1, 3}), "rank 3 gave up") << "rank 1 left because of it";
  EXPECT_EQ(error_of(0, {1}), "rank 3 failed, so rank 1 gave up");
}

TEST(Fault, ASilentRankIsNamedByTheDeadline) {
  const Outcome outcome =
      run_with({{Kind::stall, 1, -1, 1, std::chrono::milliseconds(2500)}}, 3, std::chrono::milliseconds(700));
  bool named = false;
  for (const std::size_t rank : {0u, 2u}) {
    EXPECT_NE(outcome.errors[rank], "");
    named = named || outcome.errors[rank].find("rank 1 sent nothing before the deadline") != std::string::npos;
  }
  EXPECT_TRUE(named);
  EXPECT_NE(outcome.errors[1], "");  // wakes up among ranks that have left
}

TEST(Fault, AFailedCommunicatorSaysSoAndANewOneGoesOn) {
  const Case c = far_case();
  const Shards shards = Shards::even(120, 2);
  RingRun run;
  run.options.deadline = std::chrono::milliseconds(200);
  const auto errors = on_ranks(local_ring(2, {{Kind::lose, 0, 1, 1}}),
                               [&](int rank, const std::shared_ptr<Communicator>& communicator) {
                                 const Tensor before = c.q;
                                 try {
                                   run_rank(c, shards, communicator, run);
                                   EXPECT_EQ(rank, 0) << "a lost message went unnoticed";
                                 } catch (const CommError&) {}
                                 EXPECT_TRUE(before == c.q);
                                 EXPECT_TRUE(rank == 0 || !communicator->failure().empty());
                                 if (!communicator->failure().empty()) {
                                   EXPECT_THROW(run_rank(c, shards, communicator, run), CommError);
                                 }
                               });
  for (const auto& error : errors) EXPECT_FALSE(error);
  const auto got = run_local(c, shards);
  for (int rank = 0; rank < 2; ++rank)
    expect_same(got[static_cast<std::size_t>(rank)], c.run(), shards.ranges(rank), ring_tolerance(DType::f32), true,
                true, "");
}

/// Rank 1 computes something a little different.
void expect_disagreement(const std::function<void(Case&, Shards&, RingRun&)>& change, bool later) {
  RingRun common;
  common.options.deadline = std::chrono::milliseconds(400);
  const auto errors = on_ranks(local_ring(3), [&](int rank, const std::shared_ptr<Communicator>& communicator) {
    Case c = far_case();
    Shards shards = Shards::even(120, 3);
    RingRun run = common;
    if (later) run_rank(c, shards, communicator, {});  // past the first call only headers tell
    if (rank == 1) change(c, shards, run);
    run_rank(c, shards, communicator, run);
  });
  for (const auto& error : errors) {
    ASSERT_TRUE(error);
    EXPECT_THROW(std::rethrow_exception(error), CommError);
  }
}

TEST(Fault, RanksThatDisagreeAllRaise) {
  for (const bool later : {false, true}) {
    expect_disagreement([](Case& c, Shards&, RingRun&) { c.pattern = Pattern::longnet({16, 120}, {1, 2}); }, later);
    expect_disagreement([](Case& c, Shards&, RingRun&) { c.options.causal = true; }, later);
    expect_disagreement([](Case& c, Shards&, RingRun&) { c = Case(c.pattern, c.options, c.shape, DType::bf16); },
                        later);
    expect_disagreement([](Case& c, Shards&, RingRun&) { c.options.scale = 0.5; }, later);
    expect_disagreement([](Case& c, Shards&, RingRun&) { c.lengths = {100}; }, later);
    expect_disagreement([](Case&, Shards& shards, RingRun&) { shards = uneven(120, 3); }, later);
    expect_disagreement([](Case&, Shards&, RingRun& run) { run.options.checksums = false; }, later);
  }
}

TEST(Checksum, EveryBitCountsInEveryMessage) {
  constexpr std::size_t kLong = 600 * 1024;  // several parts, and threads
  const MessageBuffer messages[] = {{0, 203, {}}, {1, kLong, {}}, {2, 0, {}}};
  for (const MessageBuffer& message : messages) {
    for (std::size_t i = 0; i < message.size(); ++i) message.host_payload()[i] = static_cast<std::byte>(i * 7);
  }
  const std::vector<std::uint64_t> sums = checksums(messages);
  EXPECT_EQ(checksums({messages, 1})[0], sums[0]) << "a sum does not depend on the messages beside it";
  const auto expect_seen = [&](std::size_t which) {
    const std::vector<std::uint64_t> now = checksums(messages);
    for (std::size_t m = 0; m < 3; ++m) EXPECT_EQ(now[m] != sums[m], m == which);
  };
  for (std::size_t bit = 0; bit < 203 * 8; ++bit) {
    std::byte& byte = messages[0].host_payload()[bit / 8];
    byte ^= static_cast<std::byte>(1u << (bit % 8));
    EXPECT_NE(checksums({messages, 1})[0], sums[0]);
    byte ^= static_cast<std::byte>(1u << (bit % 8));
  }
  for (const std::size_t at : {std::size_t{0}, std::size_t{128 * 1024}, kLong - 1}) {
    messages[1].host_payload()[at] ^= std::byte{0x10};
    expect_seen(1);
    messages[1].host_payload()[at] ^= std::byte{0x10};
  }
  std::swap(messages[0].host_payload()[3], messages[0].host_payload()[99]);
  expect_seen(0);
}

}  // namespace
}  // namespace longspan::testing
