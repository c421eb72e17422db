// What an engine can run, the workspace it wants, and what all tasks of a call share.
#include "kernels/cpu/drive.h"

namespace longspan::cpu {
namespace {

constexpr std::int64_t kCachedFloats = 2 * 1024 * 1024;  // of a result that may stay in a cache

}  // namespace

Verdict can_run(const Engine& engine, const Plan& plan, Pass) {
  const Problem& problem = plan.problem();
  if (problem.device.type != DeviceType::cpu)
    return no("runs on the CPU, the tensors are on {}", to_string(problem.device));
  if (const char* missing = engine.missing()) return no("needs {}, which this machine lacks", missing);
  if (problem.head_dim > kMaxHeadDim) return no("runs head_dim up to {}, this is {}", kMaxHeadDim, problem.head_dim);
  if (engine.bf16_products && problem.dtype != DType::bf16)
    return no("multiplies bf16 only, the tensors are {}", name_of(problem.dtype));
  if (problem.dtype != DType::f32 && problem.dtype != DType::bf16 && problem.dtype != DType::f16) {
    return no("runs f32, bf16 and f16, the tensors are {}", name_of(problem.dtype));
  }
  return yes();
}

std::size_t workspace_bytes(const Engine& engine, const Plan& plan, Pass pass, int threads) {
  return pass == Pass::forward ? forward_workspace(engine, plan, threads) : backward_workspace(engine, plan, threads);
}

CallShared::CallShared(const Plan& the_plan, const Call& the_call, std::span<const RowRange> the_ranges,
                       const ConstTensorView& the_q, const ConstTensorView& the_k, const ConstTensorView& the_v)
    : plan(the_plan),
      call(the_call),
      ranges(the_ranges),
      q(the_q),
      k(the_k),
      v(the_v),
      keys(k, v, call.pieces),
      dropout(plan.options().dropout, call.dropout_seed_pointer ? *call.dropout_seed_pointer : call.dropout_seed),
      causal(plan.options().causal),
      extras(dropout.drops() || call.key_mask.given() || call.alibi_slopes.given()),
      non_temporal(plan.problem().dtype == DType::f32 &&
                   q.sizes[0] * q.sizes[1] * q.sizes[2] * q.sizes[3] > kCachedFloats),
      scale(static_cast<float>(plan.scale())),
      keep_factor(static_cast<float>(dropout.keep_factor())),
      output_scale(static_cast<float>(plan.output_scale())) {}

}  // namespace longspan::cpu
