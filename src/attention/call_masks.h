// Block masks that only a call can make: adaptive ones from its q and k (on GPUs kernels choose them), and random ones
// of batch entries whose lengths differ (an entry sees what it would see alone).
#pragma once

#include "longspan/attention.h"

namespace longspan {

/// What adaptive(density) chooses: per batch entry and head, the best columns of each block row by the product of mean
/// query and mean key. Rows that lengths or key_mask exclude do not enter the means; a block without rows ranks last.
BlockMask choose_blocks(const Plan& plan, std::size_t branch, const ConstTensorView& q, const ConstTensorView& k,
                        const Call& call, std::span<const RowRange> ranges, int threads);

/// The plan of a call: the cached one, or a copy with the call's own masks. Random masks are drawn at once, without a
/// look at the tensors; choose() makes the adaptive ones, once the call's arguments have been checked.
class CallPlan {
 public:
  CallPlan(const Plan& plan, const Call& call);
  void choose(const ConstTensorView& q, const ConstTensorView& k, const Call& call, std::span<const RowRange> ranges,
              int threads);
  const Plan& operator*() const { return own_ ? *own_ : cached_; }

 private:
  const Plan& cached_;
  std::optional<Plan> own_;
};

}  // namespace longspan
