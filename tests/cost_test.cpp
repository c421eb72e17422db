// The cost model: work adds up to the plan's totals, bytes are those of the exchange, and predictions behave.
#include <gtest/gtest.h>

#include <cmath>

#include "longspan/cost.h"
#include "longspan/error.h"

namespace longspan {
namespace {

Plan plan_of(const Pattern& pattern, std::int64_t tokens, bool causal = false, std::int64_t heads = 5,
             std::int64_t kv_heads = 5) {
  Options options;
  options.causal = causal;
  Problem problem;
  problem.dtype = DType::bf16;
  problem.batch = 2;
  problem.tokens = problem.query_rows = tokens;
  problem.heads = heads;
  problem.kv_heads = kv_heads;
  problem.head_dim = 64;
  return Plan(pattern, options, problem);
}

std::vector<Pattern> patterns() {
  return {Pattern::dense(), Pattern::dilated({64, 100, 2000}, {1, 3, 8}), Pattern::longnet({48, 200, 5000}, {1, 4, 6}),
          Pattern::longnet({48, 200, 5000}, {1, 4, 6}, PhaseRule::torchscale),
          Pattern::block_sparse(BlockPattern::local_window(64))};
}

constexpr std::int64_t kMebi = 1 << 20;
const Pattern kFar = Pattern::longnet({2048, kMebi}, {1, 64});

RingModel model_of(double bytes_per_second = 50e9, double latency = 5e-6) {
  return {device_rates("h200", DType::bf16, 64), {bytes_per_second, latency}, 1};
}

TEST(WorkOfQueries, AddsUpToTheTotalsOfThePlan) {
  for (const Pattern& pattern : patterns()) {
    for (const bool causal : {false, true}) {
      const Plan plan = plan_of(pattern, 1003, causal);
      const WorkCounter counter(plan);
      const PlanTotals totals = plan.totals();
      SCOPED_TRACE(plan.to_string());
      EXPECT_NEAR(counter.of_all(Pass::forward).flops, totals.forward_flops, 1e-9 * totals.forward_flops);
      EXPECT_NEAR(counter.of_all(Pass::backward).flops, totals.backward_flops, 1e-9 * totals.backward_flops);
      EXPECT_EQ(counter.of_all(Pass::forward).row_bytes, totals.strand_rows * 64 * 2 * 4);
      for (const Shards& shards : {Shards::even(1003, 7), Shards::zigzag(1003, 4)}) {
        Work sum;
        for (int rank = 0; rank < shards.ranks(); ++rank) {
          for (std::size_t branch = 0; branch < plan.branches().size(); ++branch)
            sum += counter.of(branch, shards.ranges(rank), Pass::forward);
        }
        EXPECT_NEAR(sum.flops, totals.forward_flops, 1e-9 * totals.forward_flops);
        EXPECT_EQ(sum.row_bytes, totals.strand_rows * 64 * 2 * 4);
      }
    }
  }
}

TEST(RingPrediction, MovesTheBytesOfTheExchange) {
  const Plan plan = plan_of(Pattern::longnet({48, 200, 5000}, {1, 4, 6}), 1003, true);
  const Shards shards = Shards::even(1003, 6);
  const RingPrediction prediction = predict_ring(plan, shards, model_of());
  ASSERT_EQ(prediction.listed.size(), 6u);
  for (const RankPrediction& rank : prediction.listed) {
    const ExchangePlan exchange(plan, shards, rank.rank);
    EXPECT_EQ(rank.bytes_received, exchange.bytes_received());
    EXPECT_EQ(rank.bytes_sent, exchange.bytes_sent());
    EXPECT_EQ(rank.gradient_bytes_sent, exchange.receive_pairs() * exchange.gradient_bytes_per_pair());
    EXPECT_EQ(rank.gradient_bytes_received, exchange.send_pairs() * exchange.gradient_bytes_per_pair());
  }
}

TEST(RingPrediction, TakesWhatComputeAndWhatIsNotHiddenTake) {
  const Plan plan = plan_of(kFar, kMebi);
  double before = 0;
  for (const double rate : {1e12, 50e9, 1e9, 1e8, 1e6}) {
    const RingPrediction prediction = predict_ring(plan, Shards::even(kMebi, 8), model_of(rate));
    for (const RankPrediction& rank : prediction.listed) {
      for (const PassPrediction& pass : {rank.forward, rank.backward}) {
        EXPECT_LE(pass.hiding, pass.compute);
        EXPECT_DOUBLE_EQ(pass.waiting, std::max(0.0, pass.transfer - pass.hiding));
        EXPECT_DOUBLE_EQ(pass.total, pass.compute + pass.messages + pass.waiting);
      }
      EXPECT_GE(rank.forward.transfer, static_cast<double>(rank.bytes_received) / rate);
    }
    const double step = prediction.forward_seconds + prediction.backward_seconds;
    EXPECT_GE(step, before) << "a slower link is not faster";
    before = step;
    EXPECT_LE(prediction.efficiency, 1.0);
  }
}

TEST(RingPrediction, NamesWhatLimits) {
  const Plan plan = plan_of(kFar, kMebi);
  const RingPrediction fast = predict_ring(plan, Shards::even(kMebi, 8), model_of(1e12, 0));
  EXPECT_EQ(fast.limit, RingPrediction::Limit::compute);
  EXPECT_EQ(fast.limiting_branch, 0u) << "2,048 keys of each row, against 16,384 of each 64th";
  const RingPrediction slow = predict_ring(plan, Shards::even(kMebi, 8), model_of(1e6));
  EXPECT_EQ(slow.limit, RingPrediction::Limit::link);
  EXPECT_EQ(slow.limiting_branch, 1u);
  EXPECT_DOUBLE_EQ(slow.limiting_share, 1.0) << "segments of 2048 lie within shards and bring nothing";
  const Plan near = plan_of(Pattern::longnet({4096, kMebi}, {1, 512}), kMebi);
  EXPECT_EQ(predict_ring(near, Shards::even(kMebi, 8), model_of()).limiting_branch, 0u);
  const RingPrediction many = predict_ring(plan_of(kFar, kMebi), Shards::even(kMebi, 512), model_of(1e15, 0));
  EXPECT_EQ(many.limit, RingPrediction::Limit::messages) << "511 messages for 2,048 rows";
  // Causal, the first rank sends most and receives nothing: the branch is that of those who receive.
  const RingPrediction causal = predict_ring(plan_of(kFar, kMebi, true), Shards::even(kMebi, 8), model_of(1e6));
  EXPECT_EQ(causal.limiting_branch, 1u);
  EXPECT_DOUBLE_EQ(causal.limiting_share, 1.0);
}

TEST(RingPrediction, OfOneRankIsOneDevice) {
  const RingPrediction one = predict_ring(plan_of(kFar, kMebi), Shards::even(kMebi, 1), model_of(1));
  EXPECT_DOUBLE_EQ(one.forward_seconds, one.one_device_forward_seconds);
  EXPECT_DOUBLE_EQ(one.backward_seconds, one.one_device_backward_seconds);
  EXPECT_DOUBLE_EQ(one.efficiency, 1);
}

TEST(RingPrediction, RanksThatShareADeviceComputeInTurn) {
  const Plan plan = plan_of(kFar, kMebi);
  RingModel shared = model_of(1e15, 0);
  const double apart = predict_ring(plan, Shards::even(kMebi, 8), shared).forward_seconds;
  shared.ranks_per_device = 8;
  const RingPrediction together = predict_ring(plan, Shards::even(kMebi, 8), shared);
  EXPECT_NEAR(together.forward_seconds, 8 * apart, 1e-6 * apart);
  EXPECT_NEAR(together.efficiency, 1, 0.1);
}

TEST(RingPrediction, LooksAtSomeOfThousandsOfRanks) {
  constexpr std::int64_t kTokens = std::int64_t{1} << 40;
  std::vector<std::int64_t> segments, dilations;
  for (int i = 0; i < 20; ++i) {
    segments.push_back(std::int64_t{2048} << i);
    dilations.push_back(std::int64_t{1} << i);
  }
  segments.push_back(kTokens);
  dilations.push_back(std::int64_t{1} << 26);
  for (const bool causal : {false, true}) {
    const Plan plan = plan_of(Pattern::longnet(segments, dilations), kTokens, causal, 12, 12);
    const RingPrediction prediction = predict_ring(plan, Shards::even(kTokens, 4096), model_of());
    EXPECT_LE(prediction.listed.size(), 64u);
    EXPECT_EQ(prediction.listed.front().rank, 0);
    EXPECT_EQ(prediction.listed.back().rank, 4095);
    for (const RankPrediction& rank : prediction.listed) {
      EXPECT_TRUE(std::isfinite(rank.total())) << rank.rank;
      EXPECT_GT(rank.total(), 0) << rank.rank;
      EXPECT_GE(rank.bytes_received, 0) << rank.rank;
    }
    EXPECT_GT(prediction.efficiency, 0);
    EXPECT_LE(prediction.efficiency, 1.0);
  }
}

TEST(RingPrediction, RefusesRatesThatAreNone) {
  const Plan plan = plan_of(kFar, kMebi);
  const Shards shards = Shards::even(kMebi, 4);
  const double nan = std::nan("");
  for (const double bad : {0.0, -1.0, nan}) {
    EXPECT_THROW(predict_ring(plan, shards, model_of(bad)), InvalidArgument);
    RingModel model = model_of();
    model.device.backward.flops_per_second = bad;
    EXPECT_THROW(predict_ring(plan, shards, model), InvalidArgument);
  }
  EXPECT_THROW(predict_ring(plan, shards, model_of(1e9, -1)), InvalidArgument);
  RingModel model = model_of();
  model.ranks_per_device = 5;
  EXPECT_THROW(predict_ring(plan, shards, model), InvalidArgument);
}

TEST(ExchangeOfHugeTensors, IsRefusedRatherThanCountedWrong) {
  Problem problem;
  problem.dtype = DType::f64;
  problem.tokens = problem.query_rows = std::int64_t{1} << 40;
  problem.heads = problem.kv_heads = 1 << 13;
  const Plan plan(Pattern::longnet({2048}, {1}), {}, problem);  // its tensors fit, k and v together do not
  EXPECT_THROW(ExchangePlan(plan, Shards::even(problem.tokens, 2), 0), InvalidArgument);
}

TEST(DeviceRatesTable, NamesItsSourcesAndWhatItLacks) {
  for (const std::string& name : rated_devices()) {
    for (const DType dtype : {DType::f32, DType::bf16, DType::f16, DType::f64}) {
      const DeviceRates rates = device_rates(name, dtype, 64);
      EXPECT_EQ(rates.source.find("bench/results/") == 0, rates.measured) << rates.source;
      EXPECT_GT(rates.forward.flops_per_second, 0);
      EXPECT_GE(device_rates(name, dtype, 128).forward.flops_per_second, rates.forward.flops_per_second);
      EXPECT_LT(device_rates(name, dtype, 24).forward.flops_per_second, rates.forward.flops_per_second);
    }
  }
  try {
    device_rates("h9000", DType::bf16, 64);
    FAIL();
  } catch (const InvalidArgument& error) {
    EXPECT_NE(std::string(error.what()).find("h200"), std::string::npos);
  }
}

}  // namespace
}  // namespace longspan
