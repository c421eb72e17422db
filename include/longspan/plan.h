// A pattern compiled for one problem: closed form, O(branches), printable. Only block masks hold lists.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "longspan/export.h"
#include "longspan/limits.h"
#include "longspan/pattern.h"
#include "longspan/tensor_view.h"

namespace longspan {

struct KernelChoice;

/// What is fixed for an Attention object; part of the plan's key.
struct Options {
  bool causal = false;
  std::optional<double> scale{};         ///< factor on scores; default 1 / sqrt(head_dim)
  std::optional<double> output_scale{};  ///< factor on the output; default the pattern's own
  double dropout = 0.0;                  ///< probability of dropping a pair, in [0, 1), rounded down to 1/65536
  bool deterministic = false;            ///< same gradient bits on every run (the CPU always is)
  bool detached_mix = false;             ///< gradients hold the weights between branches constant, as torchscale does
  bool allow_tf32 = false;               ///< GPU, float32: TF32 tensor cores may be used
  std::string kernel{};                  ///< run this kernel or throw; empty picks the best (or LONGSPAN_FORCE_KERNEL)
  bool operator==(const Options&) const = default;
};

enum class Pass : std::uint8_t { forward, backward };

/// Shapes and layout of one call, and which optional call data it has (never their values).
struct Problem {
  DType dtype = DType::f32;
  Device device{};
  std::int64_t batch = 1;
  std::int64_t tokens = 0;      ///< N: rows of k and v
  std::int64_t query_rows = 0;  ///< Nq: rows of q and out
  std::int64_t heads = 1;
  std::int64_t kv_heads = 1;
  std::int64_t head_dim = 64;
  int alignment = 64;  ///< largest power of two up to 128 that divides every tensor's address and row strides, in bytes
  bool has_lengths = false;
  bool has_key_mask = false;
  bool has_alibi = false;
  bool has_pieces = false;
  bool has_piece_gradients = false;  ///< backward adds dk and dv to rows that pieces name
  bool is_share = false;             ///< a ring's rank: q, k and v are its rows of a problem of `tokens` queries
  bool operator==(const Problem&) const = default;
};

/// Positions start .. start + count - 1.
struct RowRange {
  std::int64_t start = 0;
  std::int64_t count = 0;
  bool operator==(const RowRange&) const = default;
};

/// Rows start, start + stride, ... of one head inside one segment.
struct Strand {
  std::int64_t start = 0;
  std::int64_t stride = 1;
  std::int64_t count = 0;
  bool operator==(const Strand&) const = default;
};

/// One branch with its heads resolved.
struct LONGSPAN_API BranchPlan {
  std::int64_t segment = kWholeSequence;
  std::int64_t dilation = 1;
  std::int64_t head_begin = 0;
  std::int64_t head_count = 0;
  std::optional<std::int64_t> fixed_phase{};      ///< phase of all heads (head groups)
  std::optional<std::int64_t> heads_per_phase{};  ///< phase = head / this (torchscale); else head mod dilation (paper)
  bool skip_if_longer = false;  ///< policy skip: the branch vanishes for sequences shorter than its segment
  bool pad_keys = false;
  std::optional<BlockMask> mask{};
  std::int64_t mask_entry_stride = 0;  ///< heads of the mask from one batch entry to the next; 0: entries share them
  double adaptive_density = 0;  ///< above 0: each call chooses the mask from its data; until then it keeps nothing

  /// Which of the mask's heads serves a head of a batch entry.
  std::int64_t mask_head(std::int64_t entry, std::int64_t head) const { return entry * mask_entry_stride + head; }
  bool owns(std::int64_t head) const;
  std::int64_t phase(std::int64_t head) const;
  /// Whether the branch takes part for a sequence of `length` rows.
  bool active(std::int64_t length) const;
  /// Number of segments of a sequence of `length` rows.
  std::int64_t segments(std::int64_t length) const;
  /// The strand of a head in segment `index` of a sequence of `length` rows.
  Strand strand(std::int64_t head, std::int64_t index, std::int64_t length) const;
  /// Rows of the longest strand in a sequence of `length` rows.
  std::int64_t longest_strand(std::int64_t length) const;
  bool covers(std::int64_t head, std::int64_t position) const;
  /// Zero keys that torchscale would have attended to beside the strand's own rows.
  std::int64_t padding(const Strand& strand, std::int64_t length, bool causal) const;
};

/// What one kernel of this build says to a pass of a plan.
struct KernelVerdict {
  std::string kernel{};
  bool can_run = false;
  std::string reason{};  ///< why not; empty if it can
};

/// Totals of a plan. Doubles, since 2^40 tokens squared overflow an integer; exact below 2^53.
struct PlanTotals {
  double pairs = 0;           ///< attended (query, key) pairs over batch and heads
  double dense_pairs = 0;     ///< those of dense attention, causal if this is
  double strand_rows = 0;     ///< rows of all strands: (row, head) pairs, once for each branch that covers them
  double forward_flops = 0;   ///< 4 * pairs * head_dim
  double backward_flops = 0;  ///< 10 * pairs * head_dim
  double forward_bytes = 0;   ///< every input read once, every output written once
  double backward_bytes = 0;
  bool exact = true;  ///< false: pairs of random blocks too many to draw, or of adaptive ones, are expected numbers
};

class LONGSPAN_API Plan {
 public:
  /// Resolves heads and checks the pattern against the problem (H < G, mask sizes, ...). Throws InvalidArgument.
  Plan(Pattern pattern, Options options, Problem problem);

  const Pattern& pattern() const { return pattern_; }
  const Options& options() const { return options_; }
  const Problem& problem() const { return problem_; }
  const std::vector<BranchPlan>& branches() const { return branches_; }
  double scale() const { return scale_; }
  double output_scale() const { return output_scale_; }
  /// Whether some row may be covered by several branches, whose results are then merged in branch order.
  bool merges_branches() const { return merges_branches_; }

  /// The same plan with another block mask of one branch (1, H or B * H heads). Throws InvalidArgument.
  Plan with_mask(std::size_t branch, BlockMask mask) const;

  /// Work items of a kernel that gives each item up to `query_tile` rows of one strand.
  double items(std::int64_t query_tile) const;
  /// pairs, FLOPs and bytes when queries are all positions.
  PlanTotals totals() const;
  /// Pairs of one branch over the batch.
  double pairs(std::size_t branch) const;
  /// What a call needs at most, in bytes, whichever kernel takes its tensors. 0 where nothing is needed.
  std::size_t workspace_bytes(Pass pass) const;
  /// Name of the kernel that runs a pass, empty if none can; why_no_kernel() then says what each one refused. A call
  /// whose tensors this kernel cannot take (alignment, strides) goes to the next that can: Call::report names it.
  std::string_view kernel_name(Pass pass) const;
  std::string why_no_kernel(Pass pass) const;
  /// What every kernel of this build says to a pass, fastest first.
  std::vector<KernelVerdict> kernel_verdicts(Pass pass) const;
  /// Several lines for people.
  std::string to_string() const;
  /// Bytes the plan itself holds; what PlanCache counts.
  std::size_t bytes() const;

 private:
  friend struct KernelChoice;
  BlockCount count_pairs(std::size_t branch) const;
  void make_mask(std::size_t branch, const BlockPattern& blocks);
  void check_branch(std::size_t branch) const;

  Pattern pattern_;
  Options options_;
  Problem problem_;
  std::vector<BranchPlan> branches_;
  double scale_ = 1;
  double output_scale_ = 1;
  bool merges_branches_ = false;
  std::shared_ptr<const KernelChoice> choice_;  // made by Attention::plan
};

struct PlanCacheStatistics {
  std::uint64_t hits = 0;
  std::uint64_t misses = 0;
  std::uint64_t evictions = 0;
  std::size_t entries = 0;
  std::size_t bytes = 0;
  std::size_t limit_bytes = 0;
};

/// The process-wide cache of plans: least recently used goes first, bounded in bytes (0: no plans; else the newest
/// stays), safe from any thread.
namespace plan_cache {
LONGSPAN_API PlanCacheStatistics statistics();
LONGSPAN_API void clear();
LONGSPAN_API void set_limit_bytes(std::size_t limit);
}  // namespace plan_cache

}  // namespace longspan
