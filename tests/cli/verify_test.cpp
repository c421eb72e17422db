// The demo's verification finds a wrong row in any output, and accepts right ones.
#include <gtest/gtest.h>

#include <algorithm>
#include <limits>

#include "longspan/attention.h"
#include "longspan/reference.h"
#include "ring/ring_check.h"
#include "verify.h"

namespace longspan::cli {
namespace {

struct Finished {
  explicit Finished(DType dtype, bool causal)
      : attention(Pattern::dilated({64, 128}, {1, 4}), options(causal)),
        plan(attention.plan(problem(dtype))),
        work(plan->problem(), Layout::bhnd, 5) {
    attention.forward(work.q.view(), work.k.view(), work.v.view(), work.out.view(), work.lse.view());
    attention.backward(work.q.view(), work.k.view(), work.v.view(), work.out.view(), work.lse.view(), work.dout.view(),
                       work.dq.view(), work.dk.view(), work.dv.view());
  }
  static Options options(bool causal) {
    Options chosen;
    chosen.causal = causal;
    return chosen;
  }
  static Problem problem(DType dtype) {
    Problem shape;
    shape.dtype = dtype;
    shape.batch = 2;
    shape.tokens = shape.query_rows = 300;
    shape.heads = 4;
    shape.kv_heads = 2;
    shape.head_dim = 16;
    return shape;
  }
  Attention attention;
  std::shared_ptr<const Plan> plan;
  Workload work;
};

TEST(Verify, SamplesEveryBranchFirstAndLastSegment) {
  const Finished run(DType::f32, false);
  const std::vector<std::int64_t> positions = sample_positions(*run.plan, 1);
  for (const BranchPlan& branch : run.plan->branches()) {
    for (const std::int64_t segment : {std::int64_t{0}, branch.segments(300) - 1}) {
      const Strand strand = branch.strand(branch.head_begin, segment, 300);
      const bool found = std::any_of(positions.begin(), positions.end(), [&](std::int64_t position) {
        return position / branch.segment == segment && branch.covers(branch.head_begin, position);
      });
      EXPECT_TRUE(found || strand.count == 0);
    }
  }
}

// A padded entry of one row has a few dozen numbers that share a factor: their mean error says nothing.
TEST(Verify, MeanErrorsAreTakenOfManyNumbersThatAreSums) {
  reference::ExpectedTensor expected;
  expected.relative = 1;
  std::vector<float> actual(2048, 0);
  const auto set = [&](std::size_t count) {
    expected.value.assign(actual.size(), 0);
    std::fill_n(expected.value.begin(), count, 1.0);
    expected.magnitude = expected.rounded = expected.value;
    std::fill_n(expected.rounded.begin(), count, 1.0001);
    std::fill_n(actual.begin(), count, 1.001f);  // ten times as far
    return reference::compare(ConstTensorView::bnhd(actual.data(), DType::f32, 1, 64, 1, 32), expected);
  };
  EXPECT_TRUE(set(32).ok());
  EXPECT_FALSE(set(actual.size()).ok());
}

TEST(Verify, AcceptsRightResultsOfEveryType) {
  for (const DType dtype : {DType::f32, DType::bf16, DType::f16}) {
    for (const bool causal : {false, true}) {
      const Finished run(dtype, causal);
      const auto checks = verify(*run.plan, {}, run.work);
      ASSERT_EQ(checks.size(), 5u);
      for (const RowCheck& check : checks) EXPECT_TRUE(check.ok) << check.name << ": " << check.worst;
    }
  }
}

TEST(Verify, FindsAWrongRowInEveryOutput) {
  const Finished run(DType::f32, true);
  const std::int64_t position = sample_positions(*run.plan, 0)[3];
  const std::pair<const char*, const Tensor*> outputs[] = {
      {"out", &run.work.out}, {"lse", &run.work.lse}, {"dq", &run.work.dq}, {"dk", &run.work.dk}, {"dv", &run.work.dv}};
  for (const auto& [name, tensor] : outputs) {
    float& value = *tensor->view().at<float>(1, position, 0);
    const float right = value;
    value = right + 0.01f;
    bool found = false;
    for (const RowCheck& check : verify(*run.plan, {}, run.work)) found |= check.name == name && !check.ok;
    EXPECT_TRUE(found) << name;
    value = right;
  }
}

/// Results of a rank that has all rows, one element of which is changed by a factor.
std::vector<RingCheck> ring_checks(const Finished& run, const Tensor Workload::*changed, double factor,
                                   std::int64_t rounds) {
  const Workload copy = run.work.on({});
  if (changed) {
    auto* const value = static_cast<float*>((copy.*changed).data()) + 37;
    *value = static_cast<float>(*value * factor);
  }
  const auto views = [](const Workload& work) {
    return WholeResults{work.q.view(),   work.k.view(),  work.v.view(),  work.dout.view(), work.out.view(),
                        work.lse.view(), work.dq.view(), work.dk.view(), work.dv.view()};
  };
  const RowRange all{0, run.plan->problem().tokens};
  return check_ring(run.attention, {}, views(run.work), views(copy), {&all, 1}, rounds);
}

TEST(RingCheck, EqualBitsNeedNoTolerance) {
  const Finished run(DType::bf16, true);
  for (const RingCheck& check : ring_checks(run, nullptr, 1, 0)) {
    EXPECT_TRUE(check.same_bits && check.ok()) << check.name;
    EXPECT_EQ(check.worst, "");
  }
}

TEST(RingCheck, AcceptsRoundingAndRefusesAHundredth) {
  const Finished run(DType::f32, false);
  constexpr const Tensor Workload::*kTensors[] = {&Workload::out, &Workload::lse, &Workload::dq, &Workload::dk,
                                                  &Workload::dv};
  for (std::size_t i = 0; i < std::size(kTensors); ++i) {
    const RingCheck rounding = ring_checks(run, kTensors[i], 1 + 0x1p-22, 100)[i];
    EXPECT_FALSE(rounding.same_bits);
    EXPECT_TRUE(rounding.ok()) << rounding.worst;
    EXPECT_GT(rounding.largest_difference, 0);
    const RingCheck wrong = ring_checks(run, kTensors[i], 1.01, 100)[i];
    EXPECT_FALSE(wrong.ok()) << wrong.name << ' ' << wrong.over_tolerance;
    EXPECT_NE(wrong.worst.find("one device has"), std::string::npos) << wrong.worst;
    EXPECT_EQ(ring_checks(run, kTensors[(i + 1) % 5], 1.01, 100)[i].over_tolerance, 0) << "another tensor's error";
  }
}

TEST(RingCheck, NumbersThatAreNotFiniteReachRankZeroAsAVerdict) {
  const Finished run(DType::f32, false);
  for (const double factor : {std::numeric_limits<double>::infinity(), std::numeric_limits<double>::quiet_NaN()}) {
    const RingCheck wrong = ring_checks(run, &Workload::out, factor, 100)[0];
    EXPECT_FALSE(wrong.ok());
    const Json told = Json::parse(describe(wrong).dump());
    for (const char* key : {"over_tolerance", "largest_error", "largest_difference"}) {
      ASSERT_TRUE(told[key].is_number()) << key;
      EXPECT_GT(told[key].get<double>(), 1e30) << key;
    }
  }
}

TEST(RingCheck, MoreRoundsMayErrMore) {
  const Finished run(DType::f32, false);
  const double few = ring_checks(run, &Workload::out, 1.0001, 1)[0].over_tolerance;
  const double many = ring_checks(run, &Workload::out, 1.0001, 10000)[0].over_tolerance;
  EXPECT_GT(few, 1.5 * many);
}

}  // namespace
}  // namespace longspan::cli
