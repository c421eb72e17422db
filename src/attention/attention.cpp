// Checks, finds the plan, lends workspace and runs the kernel.
#include "longspan/attention.h"

#include "attention/run.h"
#include "attention/tensors.h"
#include "longspan/threads.h"
#include "plan/check_problem.h"
#include "plan/plan_cache.h"
#include "plan/query_rows.h"
#include "util/hash.h"
#include "util/reject.h"

namespace longspan {

struct Attention::Specification : PlanSpecification {};

Attention::Attention(Pattern pattern, Options options) {
  check_options(options);
  Hasher hasher;
  hasher.add(pattern.hash());
  hasher.add(int{options.causal} | int{options.deterministic} << 1 | int{options.detached_mix} << 2 |
             int{options.allow_tf32} << 3);
  for (const double factor : {options.scale.value_or(0), options.output_scale.value_or(0), options.dropout})
    hasher.add(factor);
  hasher.add(std::string_view(options.kernel));
  specification_ = std::make_shared<const Specification>(
      Specification{PlanSpecification{std::move(pattern), std::move(options), hasher.value()}});
}

const Pattern& Attention::pattern() const { return specification_->pattern; }
const Options& Attention::options() const { return specification_->options; }

std::shared_ptr<const Plan> Attention::plan(const Problem& problem) const {
  const auto compile = [](const PlanSpecification& specification, const Problem& of) -> std::shared_ptr<const Plan> {
    auto plan = std::make_shared<Plan>(specification.pattern, specification.options, of);
    KernelChoice::keep(*plan);
    return plan;
  };
  return PlanCache::instance().get(specification_, problem, compile);
}

PreparedCall::PreparedCall(const Attention& attention, const Problem& problem, Pass pass, const ConstTensorView& k,
                           const ConstTensorView& v, const Call& call, KeysGiven given)
    : cached_(attention.plan(problem)),
      whole_{0, problem.tokens},
      choice(KernelChoice::of(*cached_)),
      ranges(ranges_of(call, whole_)),
      plan(*cached_, call),
      threads(num_threads()) {
  const bool must_have_all =
      given == KeysGiven::all || (given == KeysGiven::some && problem.device.type == DeviceType::cpu);
  if (problem.has_pieces && must_have_all) check_pieces(*plan, k, v, call, ranges);
  choice->require(pass);
}

void KernelRun::lend(const Call& call, Device device, std::size_t bytes) {
  if (call.workspace) {
    if (call.workspace_size < bytes)
      reject("workspace", "workspace has {} bytes: this call needs {} (Plan::workspace_bytes)", call.workspace_size,
             bytes);
    memory_ = static_cast<std::byte*>(call.workspace);
  } else if (call.allocate && bytes > 0) {
    void* const memory = call.allocate(bytes);
    if (!memory) raise<OutOfMemory>("workspace of {} bytes: the caller's allocator has none", bytes);
    if (reinterpret_cast<std::uintptr_t>(memory) % 64 != 0)
      reject("allocate", "allocate returned {}: align workspace to 64 bytes", memory);
    memory_ = static_cast<std::byte*>(memory);
  } else {
    memory_ = own_.emplace(device, call.stream, bytes).data();
  }
  lent_ = true;
}

template <class Arguments>
void KernelRun::operator()(void (*Kernel::*run)(const Arguments&), Arguments arguments) {
  const Call& call = arguments.call;
  if (!lent_) lend(call, arguments.q.device, kernel.workspace_bytes(arguments.plan, pass_, arguments.threads));
  arguments.workspace = memory_;
  (kernel.*run)(arguments);
  if (call.report) call.report->kernel = kernel.name;
}

SplitForward::SplitForward(const Attention& attention, const ForwardTensors& tensors, const Call& call)
    : prepared_(attention, check_forward(tensors, call), Pass::forward, tensors.k, tensors.v, call, KeysGiven::later),
      t_(tensors),
      run_(*prepared_.choice, Pass::forward, arguments(call)) {}

void SplitForward::run(const ForwardPart& part, const Call& call) {
  if (t_.q.batch() > 0 && t_.q.rows() > 0) run_(&Kernel::forward, arguments(call, &part));
}

void run_forward(const Attention& attention, const ForwardTensors& tensors, const Call& call, KeysGiven given,
                 std::int64_t share_of) {
  const auto& [q, k, v, out, lse] = tensors;
  const Problem problem = check_forward(tensors, call);
  if (call.report) *call.report = {};
  PreparedCall prepared(attention, problem, Pass::forward, k, v, call, given);
  if (problem.batch == 0 || problem.query_rows == 0) return;
  prepared.plan.choose(q, k, call, prepared.ranges, prepared.threads);
  const ForwardArguments arguments{*prepared.plan,   call,    prepared.ranges, q,       k, v, out, lse,
                                   prepared.threads, nullptr, nullptr,         share_of};
  KernelRun(*prepared.choice, Pass::forward, arguments)(&Kernel::forward, arguments);
}

void run_backward(const Attention& attention, const BackwardTensors& tensors, const Call& call, KeysGiven given) {
  const auto& [q, k, v, out, lse, dout, dq, dk, dv] = tensors;
  const Problem problem = check_backward(attention.options(), tensors, call);
  if (call.report) *call.report = {};
  PreparedCall prepared(attention, problem, Pass::backward, k, v, call, given);
  if (problem.batch == 0 || problem.tokens == 0) return;
  if (problem.query_rows == 0) {
    if (problem.has_piece_gradients) return;
    clear(dk, call.stream);
    return clear(dv, call.stream);
  }
  prepared.plan.choose(q, k, call, prepared.ranges, prepared.threads);
  const BackwardArguments arguments{*prepared.plan,  call, prepared.ranges, q, k, v, out, lse, dout, dq, dk, dv,
                                    prepared.threads};
  KernelRun(*prepared.choice, Pass::backward, arguments)(&Kernel::backward, arguments);
}

void Attention::forward(const ConstTensorView& q, const ConstTensorView& k, const ConstTensorView& v,
                        const TensorView& out, const TensorView& lse, const Call& call) const {
  run_forward(*this, {q, k, v, out, lse}, call, KeysGiven::all);
}

void Attention::backward(const ConstTensorView& q, const ConstTensorView& k, const ConstTensorView& v,
                         const ConstTensorView& out, const ConstTensorView& lse, const ConstTensorView& dout,
                         const TensorView& dq, const TensorView& dk, const TensorView& dv, const Call& call) const {
  run_backward(*this, {q, k, v, out, lse, dout, dq, dk, dv}, call, KeysGiven::all);
}

}  // namespace longspan
