// The reference as a call sees it: with the masks that the call chooses.
#include <cstring>

#include "attention/call_masks.h"
#include "kernels/reference/expectation.h"
#include "longspan/threads.h"
#include "plan/query_rows.h"

namespace longspan::reference {

Expectation expected(const Attention& attention, const ConstTensorView& q, const ConstTensorView& k,
                     const ConstTensorView& v, const ConstTensorView& dout, const Call& call, bool gradients) {
  const auto plan = attention.plan(Attention::problem(q, k, call));
  const RowRange whole{0, k.rows()};
  const auto ranges = ranges_of(call, whole);
  CallPlan own(*plan, call);
  own.choose(q, k, call, ranges, num_threads());
  return expect({*own, call, ranges, q, k, v, {}, {}, dout, {}, {}, {}, num_threads()}, gradients);
}

GatheredRows::GatheredRows(const ConstTensorView& tensor, std::span<const std::int64_t> rows) {
  const auto row_bytes = static_cast<std::size_t>(tensor.columns() * size_of(tensor.dtype));
  const auto count = static_cast<std::int64_t>(rows.size());
  memory_.resize(row_bytes * static_cast<std::size_t>(tensor.batch() * count * tensor.heads()));
  view_ = ConstTensorView::bnhd(memory_.data(), tensor.dtype, tensor.batch(), count, tensor.heads(), tensor.columns());
  std::byte* to = memory_.data();
  for (std::int64_t entry = 0; entry < tensor.batch(); ++entry) {
    for (const std::int64_t row : rows) {
      for (std::int64_t head = 0; head < tensor.heads(); ++head, to += row_bytes)
        std::memcpy(to, tensor.bytes_at(entry, row, head), row_bytes);
    }
  }
}

Expectation expected_rows(const Attention& attention, const ConstTensorView& q, const ConstTensorView& k,
                          const ConstTensorView& v, const ConstTensorView& out, const ConstTensorView& lse,
                          const ConstTensorView& dout, const Call& call, std::span<const std::int64_t> positions) {
  const auto cached = attention.plan(Attention::problem(q, k, call));
  const RowRange whole{0, k.rows()};
  CallPlan own(*cached, call);
  own.choose(q, k, call, {&whole, 1}, num_threads());
  const Plan& plan = *own;
  Problem problem = plan.problem();
  problem.query_rows = static_cast<std::int64_t>(positions.size());
  Plan few(plan.pattern(), plan.options(), problem);
  for (std::size_t branch = 0; branch < plan.branches().size(); ++branch) {  // masks of all rows, not of these few
    if (plan.branches()[branch].mask) few = few.with_mask(branch, *plan.branches()[branch].mask);
  }
  std::vector<RowRange> ranges;
  for (const std::int64_t position : positions) ranges.push_back({position, 1});
  const GatheredRows few_q(q, positions), few_dout(dout, positions);
  Expectation result =
      expect_queries({few, call, ranges, few_q.view(), k, v, {}, {}, few_dout.view(), {}, {}, {}, num_threads()});
  Expectation keys =
      expect_keys({plan, call, {&whole, 1}, q, k, v, out, lse, dout, {}, {}, {}, num_threads()}, positions);
  result.dk = std::move(keys.dk);
  result.dv = std::move(keys.dv);
  return result;
}

}  // namespace longspan::reference
