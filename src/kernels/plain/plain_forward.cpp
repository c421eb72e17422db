// Forward of the fallback kernel: one softmax per row, over all branches that cover it.
#include "kernels/plain/plain.h"
#include "kernels/plain/rows.h"
#include "util/dispatch.h"
#include "util/parallel.h"

namespace longspan {
namespace plain {
namespace {

constexpr std::int64_t kRowsPerItem = 16;

template <class Storage>
void forward_rows(const ForwardArguments& a) {
  const Rows<Storage> rows(a);
  const Problem& problem = a.plan.problem();
  const float output_scale = static_cast<float>(a.plan.output_scale());
  const std::int64_t blocks = (problem.query_rows + kRowsPerItem - 1) / kRowsPerItem;
  const LoopControl control{a.call.cancel, &a.call.progress, 0, 1};
  parallel_for(a.threads, problem.batch * problem.heads * blocks, control, [&](int, std::int64_t item) {
    const std::int64_t block = item % blocks, head = item / blocks % problem.heads,
                       entry = item / blocks / problem.heads;
    const std::int64_t last = std::min((block + 1) * kRowsPerItem, problem.query_rows);
    PositionCursor cursor(a.ranges, block * kRowsPerItem);
    for (std::int64_t row = block * kRowsPerItem; row < last; ++row) {
      const std::int64_t position = cursor.next();
      FloatRow q;
      load<Storage>(q.data(), reinterpret_cast<const std::byte*>(a.q.at<Storage>(entry, row, head)), rows.columns);
      SoftmaxState state;
      RowInBranch found;
      for (std::size_t b = 0; b < a.plan.branches().size(); ++b) {
        if (rows.find(b, entry, head, position, found)) state.add(rows, found, q.data(), entry, head, position);
      }
      store(a.out.at<Storage>(entry, row, head), state.out.data(), output_scale * state.inverse(), rows.columns);
      if (a.lse.given()) *a.lse.at<float>(entry, row, head) = state.lse();
    }
  });
}

}  // namespace

void forward(const ForwardArguments& arguments) {
  dispatch_storage(arguments.q.dtype, [&]<class Storage>() {
    if constexpr (!std::is_same_v<Storage, double>) forward_rows<Storage>(arguments);
  });
}

}  // namespace plain

namespace {

Verdict can_run(const Plan& plan, Pass) {
  const Problem& problem = plan.problem();
  if (problem.device.type != DeviceType::cpu)
    return no("runs on the CPU, tensors are on {}", to_string(problem.device));
  if (problem.dtype == DType::f64) return no("sums in float32, tensors are f64");
  return yes();
}

std::size_t workspace_bytes(const Plan& plan, Pass pass, int) {
  return pass == Pass::backward ? plain::backward_workspace(plan) : 0;
}

}  // namespace

const Kernel kPlainKernel = {"plain", can_run, workspace_bytes, plain::forward, plain::backward};

}  // namespace longspan
