// A sequence split over local ranks: the bits of one device, gradients to rounding, bytes to the last one.
#include <gtest/gtest.h>

#include "longspan/error.h"
#include "longspan/memory.h"
#include "ring/ring_cases.h"

namespace longspan::testing {
namespace {

std::string ring_name(const ::testing::TestParamInfo<std::tuple<int, DType>>& one) {
  return fmt::format("{}_{}", std::get<0>(one.param), name_of(std::get<1>(one.param)));
}

class LocalRing : public ::testing::TestWithParam<std::tuple<int, DType>> {};

TEST_P(LocalRing, EqualsOneDevice) {
  const auto [ranks, dtype] = GetParam();
  for (const RingCase& one : ring_cases(dtype)) {
    const Case& c = one.problem;
    const Results want = c.run();
    const Shards shards = uneven(c.shape.tokens, ranks);
    RingRun run;
    run.keep_halo = ranks % 2 == 0;
    const std::vector<RankResults> got = run_local(c, shards, run, static_cast<std::uint64_t>(ranks));
    for (int rank = 0; rank < ranks; ++rank) {
      expect_same(got[static_cast<std::size_t>(rank)], want, shards.ranges(rank), ring_tolerance(dtype), true, true,
                  fmt::format("{} rank {} of {}", one.name, rank, ranks));
      if (ranks > 1) expect_planned_bytes(got[static_cast<std::size_t>(rank)], c, shards, rank, run);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Ranks, LocalRing,
                         ::testing::Combine(::testing::Values(1, 2, 3, 4, 8),
                                            ::testing::Values(DType::f32, DType::bf16, DType::f16)),
                         ring_name);
INSTANTIATE_TEST_SUITE_P(Reference, LocalRing,
                         ::testing::Combine(::testing::Values(1, 2, 3, 4, 8), ::testing::Values(DType::f64)),
                         ring_name);

TEST(LocalRing, EveryKernelKeepsItsBits) {
  for (const std::string& kernel : kernels_here()) {
    const Case c(Pattern::longnet({40, 160, 400}, {1, 3, 6}), {}, {1, kRingTokens, 4, 2, 40});
    const Results want = c.run(kernel);
    const Shards shards = uneven(c.shape.tokens, 3);
    RingRun run;
    run.kernel = kernel;
    const auto got = run_local(c, shards, run);
    for (int rank = 0; rank < 3; ++rank) {
      expect_same(got[static_cast<std::size_t>(rank)], want, shards.ranges(rank), ring_tolerance(DType::f32), true,
                  true, kernel);
    }
  }
}

TEST(LocalRing, ArrivalOrderChangesNothing) {
  const Case c(Pattern::longnet({40, 400}, {1, 3}), {}, {1, kRingTokens, 4, 4, 16});
  const Shards shards = uneven(c.shape.tokens, 4);
  const auto first = run_local(c, shards);
  for (std::uint64_t shuffle = 1; shuffle <= 12; ++shuffle) {
    // Delays push whole ranks behind others, the shuffle single messages.
    std::vector<LocalFault> late = {{LocalFault::Kind::delay, static_cast<int>(shuffle % 4), -1,
                                     static_cast<int>(shuffle % 3), std::chrono::milliseconds(5)}};
    const auto again = run_local(c, shards, {}, shuffle, late);
    for (std::size_t rank = 0; rank < first.size(); ++rank) {
      for (const auto member : {&Results::out, &Results::lse, &Results::dq, &Results::dk, &Results::dv}) {
        EXPECT_EQ(bits_differ(again[rank].results.*member, first[rank].results.*member), "") << "shuffle " << shuffle;
      }
    }
  }
}

TEST(LocalRing, ZigzagOwnersGetTheirRows) {
  for (const DType dtype : {DType::f32, DType::bf16}) {
    for (const Pattern& pattern : {Pattern::dense(), Pattern::longnet({40, 160, 400}, {1, 3, 6})}) {
      Options options;
      options.causal = true;
      const Case c(pattern, options, {2, kRingTokens, 4, 2, 16}, dtype);
      const Results want = c.run();
      for (const int ranks : {2, 3, 4}) {
        const Shards shards = Shards::zigzag(c.shape.tokens, ranks);
        const auto got = run_local(c, shards);
        for (int rank = 0; rank < ranks; ++rank) {
          expect_same(got[static_cast<std::size_t>(rank)], want, shards.ranges(rank), ring_tolerance(dtype), true, true,
                      fmt::format("zigzag {}", ranks));
          expect_planned_bytes(got[static_cast<std::size_t>(rank)], c, shards, rank, {});
        }
      }
    }
  }
}

class LocalRounds : public ::testing::TestWithParam<DType> {};

TEST_P(LocalRounds, AgreeToRoundingAndStayWithinTheLimit) {
  const bool slow = GetParam() == DType::f64;  // the reference: fewer rounds
  for (const RingCase& one : ring_cases(GetParam())) {
    if (one.problem.options.detached_mix) continue;
    const Results want = one.problem.run();
    for (const int ranks : slow ? std::vector{3} : std::vector{2, 4, 8})
      expect_rounds(one, want, ranks, slow ? 60000 : 12000);
  }
}

INSTANTIATE_TEST_SUITE_P(Dtypes, LocalRounds, ::testing::Values(DType::f64, DType::f32, DType::bf16),
                         [](const auto& one) { return std::string(name_of(one.param)); });

TEST(LocalRounds, OfOneRowEach) {
  const RingCase one = one_row_case();
  expect_rounds(one, one.problem.run(), 3, kOneRowLimit);
}

TEST(LocalRounds, RefuseWhatNeedsAllKeysAtOnce) {
  Options detached;
  detached.detached_mix = true;
  const Case c(Pattern::dense(), detached, {1, 64, 1, 1, 16});
  RingRun run;
  run.options.halo_limit_bytes = 64;
  EXPECT_THROW(run_local(c, Shards::even(64, 2), run), Error);
}

TEST(LocalRing, ErrorIsFlatInRingSize) {
  // bfloat16 inputs against float64 arithmetic on the same numbers.
  const Case c(Pattern::longnet({64, 1024}, {1, 4}), {}, {1, 1024, 4, 4, 32}, DType::bf16);
  const reference::Expectation want = c.expected();
  const auto error_of = [&](const Results& results) {
    std::vector<double> errors;
    const auto add_error = [&](const Tensor& tensor, const reference::ExpectedTensor& expected) {
      double sum = 0;
      std::size_t element = 0;
      tensor.for_each([&](std::int64_t b, std::int64_t row, std::int64_t head, std::int64_t column) {
        sum += std::pow(tensor.at(b, row, head, column) - expected.value[element++], 2);
      });
      errors.push_back(std::sqrt(sum / static_cast<double>(element)));
    };
    add_error(results.out, want.out);
    add_error(results.dq, want.dq);
    add_error(results.dk, want.dk);
    add_error(results.dv, want.dv);
    return errors;
  };
  const std::vector<double> one = error_of(c.run());
  for (const int ranks : {2, 4, 8}) {
    for (const std::size_t limit : {std::size_t{0}, std::size_t{20000}}) {
      RingRun run;
      run.options.halo_limit_bytes = limit;
      const Shards shards = Shards::even(1024, ranks);
      const auto got = run_local(c, shards, run);
      Results whole = c.run();
      for (int rank = 0; rank < ranks; ++rank) {
        for (const auto member : {&Results::out, &Results::dq, &Results::dk, &Results::dv}) {
          Tensor& target = whole.*member;
          const Tensor& part = got[static_cast<std::size_t>(rank)].results.*member;
          part.for_each([&](std::int64_t b, std::int64_t row, std::int64_t head, std::int64_t column) {
            target.set(b, shards.ranges(rank)[0].start + row, head, column, part.at(b, row, head, column));
          });
        }
      }
      const std::vector<double> ring = error_of(whole);
      for (std::size_t i = 0; i < one.size(); ++i)
        EXPECT_LE(ring[i], 2 * one[i]) << "output " << i << ", " << ranks << " ranks, limit " << limit;
    }
  }
}

/// A communicator that must not be used.
class Forbidden final : public Communicator {
 public:
  int rank() const override { return 0; }
  int size() const override { return 1; }
  void begin(std::span<const SendBuffer>, std::span<const ReceiveBuffer>) override {
    throw CommError("begin on a ring of one");
  }
  void wait(Deadline) override { throw CommError("wait on a ring of one"); }
  void abort() noexcept override {}
};

TEST(LocalRing, ARingOfOneIsTheOperatorItself) {
  const Case c(Pattern::longnet({40, 160}, {1, 3}), {}, {1, 200, 4, 2, 16});
  const Results want = c.run();
  const Shards shards = Shards::even(200, 1);
  for (const bool none : {false, true}) {
    const RankResults got = run_rank(c, shards, none ? nullptr : std::make_shared<Forbidden>(), {});
    EXPECT_TRUE(got.results.out == want.out && got.results.lse == want.lse && got.results.dq == want.dq &&
                got.results.dk == want.dk && got.results.dv == want.dv);
  }
  const Attention attention(c.pattern, c.options);
  const Ring ring(attention, nullptr, shards);
  EXPECT_EQ(ring.plan(c.q.view(), c.k.view()), attention.plan(Attention::problem(c.q.view(), c.k.view())));
}

TEST(LocalRing, OneCommunicatorServesManyCalls) {
  const Case c(Pattern::longnet({40, 400}, {1, 3}), {}, {1, 120, 2, 2, 16});
  const Case other(Pattern::dense(), {}, {1, 75, 2, 1, 16});
  const Results want = c.run(), want_other = other.run();
  const auto errors = on_ranks(local_ring(3), [&](int rank, const std::shared_ptr<Communicator>& communicator) {
    for (int i = 0; i < 3; ++i) {
      const Shards shards = Shards::even(120, 3), shards_other = uneven(75, 3);
      expect_same(run_rank(c, shards, communicator, {}), want, shards.ranges(rank), ring_tolerance(DType::f32), true,
                  true, "first");
      expect_same(run_rank(other, shards_other, communicator, {}), want_other, shards_other.ranges(rank),
                  ring_tolerance(DType::f32), true, true, "second");
    }
  });
  for (const auto& error : errors) {
    if (error) std::rethrow_exception(error);
  }
}

TEST(LocalRing, BadInputIsRefusedByName) {
  const Case c(Pattern::dense(), {}, {1, 20, 1, 1, 16});
  const auto ring = local_ring(2);
  EXPECT_THROW(Ring(Attention(c.pattern), nullptr, Shards::even(20, 2)), InvalidArgument);
  EXPECT_THROW(Ring(Attention(c.pattern), ring[0], Shards::even(20, 3)), InvalidArgument);
  Ring rank(Attention(c.pattern), ring[0], Shards::even(20, 2));
  Tensor out(DType::f32, 1, 20, 1, 16);
  EXPECT_THROW(rank.forward(c.q.view(), c.k.view(), c.v.view(), out.view()),
               InvalidArgument);  // 20 rows, the shard has 10
  const RowRange half{0, 10};
  const Tensor q = rows_at(c.q, {&half, 1});
  Tensor small(DType::f32, 1, 10, 1, 16);
  Call call;
  call.query_ranges = {&half, 1};
  EXPECT_THROW(rank.forward(q.view(), q.view(), q.view(), small.view(), {}, call), InvalidArgument);
  EXPECT_THROW(rank.forward(q.view(), q.view(), c.v.view(), small.view()), InvalidArgument);  // 20 rows of v
  Ring alone(Attention(c.pattern), local_ring(1)[0], Shards::even(30, 1));
  EXPECT_THROW(alone.forward(c.q.view(), c.k.view(), c.v.view(), out.view()), InvalidArgument);  // 20 rows of 30
}

/// A transport of somebody's own that counts its ranks from 1.
class Miscounted final : public Communicator {
 public:
  explicit Miscounted(int rank) : rank_(rank) {}
  int rank() const override { return rank_; }
  int size() const override { return 2; }
  void begin(std::span<const SendBuffer>, std::span<const ReceiveBuffer>) override {}
  void wait(Deadline) override {}
  void abort() noexcept override {}

 private:
  int rank_;
};

TEST(LocalRing, RanksAndPeersOutsideTheRingAreRefused) {
  for (const int rank : {-1, 2}) {
    try {
      Ring(Attention(Pattern::dense()), std::make_shared<Miscounted>(rank), Shards::even(20, 2));
      ADD_FAILURE() << "rank " << rank << " of 2 was accepted";
    } catch (const InvalidArgument& error) {
      EXPECT_EQ(error.argument(), "communicator");
    }
    Miscounted outside(rank);
    std::byte part{};
    const ReceiveBuffer parts[] = {{0, &part, 1}, {1, &part, 1}};
    try {
      all_gather(outside, "bytes", {0, &part, 1}, parts, std::chrono::seconds(1));
      ADD_FAILURE() << "rank " << rank << " of 2 gathered";
    } catch (const InvalidArgument& error) {
      EXPECT_EQ(error.argument(), "communicator");
    }
  }
  EXPECT_THROW(local_ring(0), InvalidArgument);
  EXPECT_THROW(local_ring(1000000000), InvalidArgument);
  const auto ring = local_ring(2);
  std::byte data{};
  const SendBuffer sends[] = {{2, &data, 1}};
  const ReceiveBuffer receives[] = {{-1, &data, 1}};
  EXPECT_THROW(ring[0]->begin(sends, {}), InvalidArgument);
  EXPECT_THROW(ring[0]->begin({}, receives), InvalidArgument);
}

TEST(LocalRing, BlocksDrawnForEachLengthAreRefused) {
  Case c(Pattern::block_sparse(BlockPattern::random(0.5, 1, 16)), {}, {2, 64, 1, 1, 16});
  c.lengths = {64, 40};
  Ring rank(Attention(c.pattern), local_ring(2)[0], Shards::even(64, 2));
  const RowRange half{0, 32};
  const Tensor q = rows_at(c.q, {&half, 1});
  Tensor out(DType::f32, 2, 32, 1, 16);
  EXPECT_THROW(rank.forward(q.view(), q.view(), q.view(), out.view(), {}, c.call()), Unsupported);
}

}  // namespace
}  // namespace longspan::testing
