// Which kernel runs: what a plan says of it, what a call reports, and who takes tensors that the first cannot.
#include "attention/kernel_choice.h"

#include <gtest/gtest.h>

#include "support/case.h"

namespace longspan::testing {
namespace {

TEST(KernelChoice, APlanNamesItsKernelAndWhatOthersSay) {
  const Case c(Pattern::dense(), {}, {});
  const auto plan = Attention(c.pattern).plan(Attention::problem(c.q.view(), c.k.view()));
  for (const Pass pass : {Pass::forward, Pass::backward}) {
    const std::vector<KernelVerdict> verdicts = plan->kernel_verdicts(pass);
    ASSERT_EQ(verdicts.size(), all_kernels().size());
    bool first = true;
    for (const KernelVerdict& verdict : verdicts) {
      EXPECT_EQ(verdict.reason.empty(), verdict.can_run) << verdict.kernel;
      if (verdict.can_run && std::exchange(first, false)) {
        EXPECT_EQ(plan->kernel_name(pass), verdict.kernel);
      }
    }
    EXPECT_EQ(plan->why_no_kernel(pass), "");
    // A plan that no Attention made says the same.
    const Plan own(c.pattern, {}, plan->problem());
    EXPECT_EQ(own.kernel_name(pass), plan->kernel_name(pass));
    EXPECT_EQ(own.workspace_bytes(pass), plan->workspace_bytes(pass));
  }
  const auto refused = Attention(c.pattern, {.kernel = "cuda-mma"}).plan(plan->problem());
  EXPECT_EQ(refused->kernel_name(Pass::forward), "");
  EXPECT_NE(refused->why_no_kernel(Pass::forward).find("cuda-mma"), std::string::npos);
}

TEST(KernelChoice, CallsReportTheKernelThatRan) {
  Case c(Pattern::dilated({16, 64}, {1, 4}), {}, {});
  Tensor out(DType::f32, 1, 64, 2, 16), dq = out, dk = out, dv = out;
  Tensor lse = Tensor::lse(DType::f32, 1, 64, 2);
  for (const std::string& name : kernels_here()) {
    const Attention attention(c.pattern, {.kernel = name});
    CallReport forward, backward;
    attention.forward(c.q.view(), c.k.view(), c.v.view(), out.view(), lse.view(), {.report = &forward});
    attention.backward(c.q.view(), c.k.view(), c.v.view(), out.view(), lse.view(), c.dout.view(), dq.view(), dk.view(),
                       dv.view(), {.report = &backward});
    EXPECT_EQ(forward.kernel, name);
    EXPECT_EQ(backward.kernel, name);
  }
}

TEST(KernelChoice, TensorsThatAKernelRefusesGoToTheNext) {
  const Case c(Pattern::dense(), {}, {});
  const Plan plan(c.pattern, {}, Attention::problem(c.q.view(), c.k.view()));
  const Call call;
  const RowRange whole{0, 64};
  ForwardArguments arguments{plan, call, {&whole, 1}, c.q.view(), c.k.view(), c.v.view(), {}, {}};
  Kernel picky = *all_kernels().back();
  picky.name = "picky";
  picky.accepts_forward = [](const ForwardArguments& a) {
    return a.q.strides[1] < 0 ? no("reads rows upwards, here they go down") : yes();
  };
  KernelChoice choice(plan);
  choice.kernels[0] = {&picky, all_kernels().back()};
  EXPECT_EQ(&choice.taking(Pass::forward, arguments), &picky);
  arguments.q.strides[1] = -1;
  EXPECT_EQ(&choice.taking(Pass::forward, arguments), all_kernels().back());
  choice.kernels[0] = {&picky};  // as if forced by name
  try {
    choice.taking(Pass::forward, arguments);
    ADD_FAILURE() << "tensors that the only kernel refuses were taken";
  } catch (const Unsupported& error) {
    EXPECT_STREQ(error.what(), "no kernel takes these tensors: picky reads rows upwards, here they go down");
  }
}

}  // namespace
}  // namespace longspan::testing
