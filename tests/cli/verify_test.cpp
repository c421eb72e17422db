// The demo's verification finds a wrong row in any output, and accepts right ones.
#include <gtest/gtest.h>

#include <algorithm>

#include "longspan/attention.h"
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

}  // namespace
}  // namespace longspan::cli
