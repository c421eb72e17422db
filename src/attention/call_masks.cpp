// Which calls need masks of their own, and the random ones. Adaptive ones are in choose_blocks.cpp.
#include "attention/call_masks.h"

#include <algorithm>
#include <iterator>

#include "plan/key_rows.h"
#include "util/reject.h"

namespace longspan {
namespace {

bool entries_draw_alone(const Plan& plan, std::size_t branch, const Call& call) {
  const auto& blocks = plan.pattern().branches()[branch].mask;
  return call.lengths.given() && blocks && blocks->depends_on_length(plan.options().causal);
}

/// Every entry's mask as its own length makes it, one after the other; rows beyond an entry's end keep nothing.
BlockMask masks_of_entries(const Plan& plan, std::size_t index, const Call& call) {
  if (call.lengths.device.type != DeviceType::cpu) {
    raise<Unsupported>(
        "random blocks with lengths on {}: blocks are drawn on the CPU for each length; pass lengths on the host",
        to_string(call.lengths.device));
  }
  const Branch& branch = plan.pattern().branches()[index];
  const Problem& problem = plan.problem();
  const std::int64_t blocks = plan.branches()[index].mask->blocks();
  const auto& custom = branch.mask->custom();
  std::vector<std::int64_t> offsets = {0};
  std::vector<std::int32_t> columns;
  for (std::int64_t entry = 0; entry < problem.batch; ++entry) {
    const std::int64_t rows = std::min(branch.segment, rows_of_entry(call.lengths, entry, problem.tokens));
    const BlockMask drawn =
        branch.mask->entry_mask(rows == 0 ? 0 : (rows - 1) / branch.dilation + 1, problem.heads, plan.options().causal);
    for (std::int64_t head = 0; head < problem.heads; ++head) {
      const std::int64_t custom_head = plan.branches()[index].mask_head(entry, head);
      for (std::int64_t row = 0; row < blocks; ++row) {
        const auto own = row < drawn.blocks() ? drawn.row(head, row) : std::span<const std::int32_t>{};
        const auto given = custom ? custom->row(custom_head, row) : std::span<const std::int32_t>{};
        std::set_union(own.begin(), own.end(), given.begin(), given.end(), std::back_inserter(columns));
        offsets.push_back(static_cast<std::int64_t>(columns.size()));
      }
    }
  }
  return BlockMask::from_lists(branch.mask->block_size(), problem.batch * problem.heads, blocks, std::move(offsets),
                               std::move(columns));
}

}  // namespace

CallPlan::CallPlan(const Plan& plan, const Call& call) : cached_(plan) {
  if (plan.problem().batch == 0) return;
  for (std::size_t branch = 0; branch < plan.branches().size(); ++branch) {
    const auto& mask = plan.branches()[branch].mask;
    if (!entries_draw_alone(plan, branch, call)) {
      if (mask) mask->make_lists(call.cancel);
      continue;
    }
    own_ = (**this).with_mask(branch, masks_of_entries(plan, branch, call));
  }
}

void CallPlan::choose(const ConstTensorView& q, const ConstTensorView& k, const Call& call,
                      std::span<const RowRange> ranges, int threads) {
  if (cached_.problem().device.type != DeviceType::cpu) return;  // kernels choose
  for (std::size_t branch = 0; branch < cached_.branches().size(); ++branch) {
    if (cached_.branches()[branch].adaptive_density > 0)
      own_ = (**this).with_mask(branch, choose_blocks(cached_, branch, q, k, call, ranges, threads));
  }
}

}  // namespace longspan
