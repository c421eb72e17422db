// Checks, finds the plan, lends workspace and runs the kernel.
#include "longspan/attention.h"

#include <fmt/format.h>

#include <cstring>

#include "attention/call_masks.h"
#include "attention/check.h"
#include "attention/kernel_choice.h"
#include "attention/run.h"
#include "device/scratch.h"
#include "kernels/cuda/cuda.h"
#include "longspan/error.h"
#include "longspan/threads.h"
#include "plan/check_problem.h"
#include "plan/plan_cache.h"
#include "plan/query_rows.h"
#include "util/hash.h"

namespace longspan {

struct Attention::Specification : PlanSpecification {};

namespace {

/// The caller's workspace if there is one, else a lease from the pool of the device that computes.
class Workspace {
 public:
  Workspace(const Call& call, Device device, std::size_t bytes)
      : callers_(callers_memory(call, bytes)), own_(device, call.stream, callers_ ? 0 : bytes) {}
  std::byte* data() const { return callers_ ? callers_ : own_.data(); }

 private:
  static std::byte* callers_memory(const Call& call, std::size_t bytes) {
    if (call.workspace) {
      if (call.workspace_size >= bytes) return static_cast<std::byte*>(call.workspace);
      throw InvalidArgument("workspace",
                            fmt::format("workspace has {} bytes: this call needs {} (Plan::workspace_bytes)",
                                        call.workspace_size, bytes));
    }
    if (!call.allocate || bytes == 0) return nullptr;
    void* const memory = call.allocate(bytes);
    if (!memory) throw OutOfMemory(fmt::format("workspace of {} bytes: the caller's allocator has none", bytes));
    if (reinterpret_cast<std::uintptr_t>(memory) % 64 != 0) {
      throw InvalidArgument("allocate", fmt::format("allocate returned {}: align workspace to 64 bytes", memory));
    }
    return static_cast<std::byte*>(memory);
  }

  std::byte* callers_;
  Scratch own_;
};

bool must_have_all_keys(const Problem& problem, KeysGiven given) {
  return problem.has_pieces && (given == KeysGiven::all || problem.device.type == DeviceType::cpu);
}

/// Lends workspace to the first kernel that takes the call, and runs it.
template <class Arguments>
void run_kernel(const KernelChoice& choice, Pass pass, void (*Kernel::*run)(const Arguments&), Arguments arguments) {
  const Kernel& kernel = choice.taking(pass, arguments);
  const Call& call = arguments.call;
  const Workspace workspace(call, arguments.q.device, kernel.workspace_bytes(arguments.plan, pass, arguments.threads));
  arguments.workspace = workspace.data();
  (kernel.*run)(arguments);
  if (call.report) call.report->kernel = kernel.name;
}

/// Zeroes every element of a strided tensor.
void fill_zero(const TensorView& view, const Call& call) {
  if (view.device.type == DeviceType::cuda) return cuda::fill_zero(view, call.stream);
  const std::size_t row_bytes = static_cast<std::size_t>(view.columns() * size_of(view.dtype));
  for (std::int64_t entry = 0; entry < view.batch(); ++entry) {
    for (std::int64_t row = 0; row < view.rows(); ++row) {
      for (std::int64_t head = 0; head < view.heads(); ++head) {
        std::memset(static_cast<std::byte*>(view.data) + view.offset(entry, row, head) * size_of(view.dtype), 0,
                    row_bytes);
      }
    }
  }
}

}  // namespace

Attention::Attention(Pattern pattern, Options options) {
  check_options(options);
  Hasher hasher;
  hasher.add(pattern.hash());
  hasher.add(static_cast<std::uint64_t>(options.causal) | static_cast<std::uint64_t>(options.deterministic) << 1 |
             static_cast<std::uint64_t>(options.detached_mix) << 2 |
             static_cast<std::uint64_t>(options.allow_tf32) << 3);
  hasher.add(options.scale.value_or(0));
  hasher.add(options.output_scale.value_or(0));
  hasher.add(options.dropout);
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

void run_forward(const Attention& attention, const ConstTensorView& q, const ConstTensorView& k,
                 const ConstTensorView& v, const TensorView& out, const TensorView& lse, const Call& call,
                 KeysGiven given) {
  const Problem problem = check_forward(attention.options(), q, k, v, out, lse, call);
  if (call.report) *call.report = {};
  const auto plan = attention.plan(problem);
  const RowRange whole{0, problem.tokens};
  const auto ranges = ranges_of(call, whole);
  CallPlan own(*plan, call);
  if (must_have_all_keys(problem, given)) check_pieces(*own, k, v, call, ranges);
  const auto choice = KernelChoice::of(*plan);
  choice->require(Pass::forward);
  if (problem.batch == 0 || problem.query_rows == 0) return;
  const int threads = num_threads();
  own.choose(q, k, call, ranges, threads);
  run_kernel(*choice, Pass::forward, &Kernel::forward,
             ForwardArguments{*own, call, ranges, q, k, v, out, lse, threads});
}

void run_backward(const Attention& attention, const ConstTensorView& q, const ConstTensorView& k,
                  const ConstTensorView& v, const ConstTensorView& out, const ConstTensorView& lse,
                  const ConstTensorView& dout, const TensorView& dq, const TensorView& dk, const TensorView& dv,
                  const Call& call, KeysGiven given) {
  const Problem problem = check_backward(attention.options(), q, k, v, out, lse, dout, dq, dk, dv, call);
  if (call.report) *call.report = {};
  const auto plan = attention.plan(problem);
  const RowRange whole{0, problem.tokens};
  const auto ranges = ranges_of(call, whole);
  CallPlan own(*plan, call);
  if (must_have_all_keys(problem, given)) check_pieces(*own, k, v, call, ranges);
  const auto choice = KernelChoice::of(*plan);
  choice->require(Pass::backward);
  if (problem.batch == 0 || problem.tokens == 0) return;
  if (problem.query_rows == 0) {
    if (problem.has_piece_gradients) return;
    fill_zero(dk, call);
    fill_zero(dv, call);
    return;
  }
  const int threads = num_threads();
  own.choose(q, k, call, ranges, threads);
  run_kernel(*choice, Pass::backward, &Kernel::backward,
             BackwardArguments{*own, call, ranges, q, k, v, out, lse, dout, dq, dk, dv, threads});
}

void Attention::forward(const ConstTensorView& q, const ConstTensorView& k, const ConstTensorView& v,
                        const TensorView& out, const TensorView& lse, const Call& call) const {
  run_forward(*this, q, k, v, out, lse, call, KeysGiven::all);
}

void Attention::backward(const ConstTensorView& q, const ConstTensorView& k, const ConstTensorView& v,
                         const ConstTensorView& out, const ConstTensorView& lse, const ConstTensorView& dout,
                         const TensorView& dq, const TensorView& dk, const TensorView& dv, const Call& call) const {
  run_backward(*this, q, k, v, out, lse, dout, dq, dk, dv, call, KeysGiven::all);
}

}  // namespace longspan
