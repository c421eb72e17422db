// The Hopper backward on the host: what it can run, where its workspace goes, and its launches.
#include <algorithm>
#include <cmath>

#include "device/error.h"
#include "kernels/cuda/adaptive.h"
#include "kernels/cuda/call.h"
#include "kernels/cuda/kernels.h"
#include "kernels/cuda/prepare.h"
#include "kernels/hopper/hopper.h"
#include "kernels/hopper/hopper_backward.h"
#include "kernels/hopper/kernels.h"
#include "kernels/hopper/maps.h"
#include "memory/arena.h"

namespace longspan::hopper {
namespace {

constexpr std::int64_t kWidest = 256, kWidestInOrder = 128;
// Strands that are worked on together: sums of dq, Q and dO of all of them should stay in L2.
constexpr std::int64_t kCacheBytes = std::int64_t{32} << 20, kFewestStrands = 4, kMostStrands = 32, kMostInOrder = 48;
// Tiles of queries by which a tile of keys comes after the one before it, where they add in order.
constexpr std::int64_t kLag = 7;
// Items of a call, in rounds of blocks, of which the last round is worth a thought.
constexpr int kFewRounds = 6;
// Short strands and many branches take more sums than dq has rows; this often at most, unless they are small.
constexpr double kMostSums = 3.0;
constexpr std::int64_t kSmallSums = std::int64_t{64} << 20;

/// Whether sums of dq are in the order of q's rows: where branches share these, and with block masks of wide heads, so
/// that fewer kernels are compiled.
bool sums_by_rows(const Plan& plan) {
  return plan.merges_branches() || (has_masks(plan) && plan.problem().head_dim > kWidestStaged);
}

BackwardExtras extras_of(const Plan& plan) {
  const Problem& problem = plan.problem();
  if (plan.options().dropout * 65536 >= 1) return BackwardExtras::dropout;
  const bool some = problem.has_key_mask || problem.has_alibi || static_cast<float>(plan.scale()) < kLeastScale ||
                    (has_masks(plan) && sums_by_rows(plan));
  return some ? BackwardExtras::some : BackwardExtras::none;
}

/// Whether key_mask is all that a call has of options, so that tiles of which it leaves the leading keys need none.
bool only_masks_keys(const Plan& plan) {
  const Problem& problem = plan.problem();
  return extras_of(plan) == BackwardExtras::some && problem.has_key_mask && !problem.has_alibi && !has_masks(plan) &&
         !plan.options().deterministic && static_cast<float>(plan.scale()) >= kLeastScale;
}

/// Columns of a row of sums.
std::int64_t sum_columns(const Plan& plan) {
  const std::int64_t columns = plan.problem().head_dim;
  const bool narrow = columns <= 48 && !has_masks(plan) && extras_of(plan) == BackwardExtras::none;
  const bool three_blocks = columns <= 192 && !has_masks(plan) && extras_of(plan) == BackwardExtras::none;
  return narrow ? 48 : columns <= 64 ? 64 : columns <= 128 ? 128 : three_blocks ? 192 : 256;
}

/// Columns of a row of sums that branches share: those of dq, in whole blocks of the copy engine's boxes, or of what a
/// warp group adds from registers.
std::int64_t merged_columns(const Problem& problem) {
  const std::int64_t block = problem.head_dim > kWidestStaged ? kBlockColumns : kSumBlockColumns;
  return (problem.head_dim + block - 1) / block * block;
}

/// Queries of a tile, as BackwardShape has them.
int tile_queries(const Problem& problem) { return problem.head_dim <= 64 ? 128 : 64; }
int tile_keys(const Problem& problem) { return problem.head_dim <= 128 ? kKeyTileRows : kGroupRows; }

/// Items at the end that are two each, so that they fill the last round of blocks. Under a causal mask items of many
/// lengths do that. Counted for one number of blocks, so that bits are the same on every Hopper GPU.
int halved_items(const Plan& plan) {
  constexpr int kBlocks = 2 * kMostHalved;
  const Problem& problem = plan.problem();
  if (plan.options().causal || problem.query_rows != problem.tokens || has_masks(plan) || cuda::sums_keys(plan, 1) ||
      cuda::longest_sum(plan) > cuda::kRowsOfSum)
    return 0;
  const double items = plan.items(tile_keys(problem));
  if (items >= kFewRounds * kBlocks) return 0;
  const int rest = static_cast<int>(items) % kBlocks;
  return rest <= kMostHalved ? rest : 0;
}

/// Whether branches have deltas of their own (detached_mix). Where they share no rows, that is no other delta.
bool has_own_deltas(const Plan& plan) { return plan.options().detached_mix && plan.merges_branches(); }

/// One of several branches that share rows, alone: its own softmax.
Plan alone(const Plan& plan, std::size_t branch) {
  const Pattern& all = plan.pattern();
  const Branch& of = all.branches()[branch];
  Options options = plan.options();
  options.detached_mix = false;
  options.scale = plan.scale();
  options.output_scale = plan.output_scale();
  return {Pattern::longnet({of.segment}, {of.dilation}, all.phase_rule())
              .with_pad_keys(all.pad_keys())
              .with_long_segments(all.long_segments()),
          options, plan.problem()};
}

/// Tiles of queries that the lists of a branch have at most, as the plan of a call or a cached one may count them:
/// masks that calls with lengths draw are one for each entry, and each may have what was drawn and what was given.
std::int64_t most_listed_tiles(const Plan& plan, std::size_t branch) {
  const Problem& problem = plan.problem();
  const BranchPlan& of = plan.branches()[branch];
  const std::int64_t size = of.mask->block_size();
  std::int64_t entries = 0;
  if (of.adaptive_density > 0) {
    entries = cuda::adaptive_shape(plan, of).entries();
  } else {
    const bool draws = problem.has_lengths && of.mask_entry_stride == 0 && cuda::made_by_calls(plan, branch);
    entries = of.mask->active_blocks() * (draws ? 2 * problem.batch : 1);
  }
  return entries * std::max<std::int64_t>(1, size / tile_queries(problem)) *
         std::max<std::int64_t>(1, size / tile_keys(problem));
}

/// What a call has of its workspace; null without one, and where a plan needs none of it.
struct BackwardScratch {
  float *lse, *delta, *sums, *halves = nullptr, *totals = nullptr, *dk_sum = nullptr, *dv_sum = nullptr;
  std::uint8_t* far_lse;
  unsigned *ticket, *joined = nullptr, *turns = nullptr, *key_turns = nullptr;
  ListedTile* listed[cuda::kMaxBranches] = {};
  std::byte *branch_out = nullptr, *branch_workspace = nullptr;
  std::size_t bytes;

  explicit BackwardScratch(const Plan& plan, std::byte* workspace = nullptr) {
    const Problem& problem = plan.problem();
    Arena arena(workspace, 256);
    arena.place(cuda::layout(plan, Pass::forward, false).total);  // where calls put lengths and adaptive masks
    const std::int64_t rows = sum_rows(plan), tile_numbers = tile_keys(problem) * sum_columns(plan);
    // A last tile of row values may end after the last strand.
    lse = arena.take<float>(rows + kKeyTileRows);
    delta = arena.take<float>(rows + kKeyTileRows);
    sums = arena.take<float>(sum_count(plan));
    far_lse = arena.take<std::uint8_t>(rows / kSumTileRows + 1);
    ticket = arena.take<unsigned>(1);
    if (const int halved = halved_items(plan); halved > 0) {
      joined = arena.take<unsigned>(kMostHalved * kWarpsOfKeys);
      halves = arena.take<float>(halved * 2 * 2 * tile_numbers);
    }
    if (cuda::longest_sum(plan) > cuda::kRowsOfSum)  // dk and dv of each block's tile of keys
      totals = arena.take<float>(multiprocessors(problem) * 2 * tile_numbers);
    for (std::size_t b = 0; b < plan.branches().size(); ++b)
      if (plan.branches()[b].mask) listed[b] = arena.take<ListedTile>(most_listed_tiles(plan, b));
    if (plan.options().deterministic) {
      turns = arena.take<unsigned>(rows / kSumTileRows * 2);
      if (has_masks(plan)) key_turns = arena.take<unsigned>(rows / kSumTileRows * 2);
    }
    if (!problem.is_share &&
        (cuda::sums_keys(plan, problem.query_rows == problem.tokens ? 1 : 2) || cuda::cuts_lists(plan))) {
      const std::int64_t keys = problem.batch * problem.kv_heads * problem.tokens * problem.head_dim;
      dk_sum = arena.take<float>(keys);
      dv_sum = arena.take<float>(keys);
    }
    if (has_own_deltas(plan)) {
      std::size_t most = 0;
      for (std::size_t b = 0; b < plan.branches().size(); ++b)
        most = std::max(most, kKernel.workspace_bytes(alone(plan, b), Pass::forward, 1));
      branch_out = arena.take(problem.batch * problem.query_rows * problem.heads * problem.head_dim *
                              static_cast<std::int64_t>(size_of(problem.dtype)));
      branch_workspace = arena.take(static_cast<std::int64_t>(most));
    }
    bytes = arena.used();
  }
};

std::int64_t strands_together(const cuda::Work& work, const Plan& plan) {
  if (has_masks(plan) && !plan.options().deterministic) return 1;  // few tiles of keys share queries
  const std::int64_t bytes = std::int64_t{work.tiles} * tile_keys(plan.problem()) * sum_columns(plan) * 8;
  return std::clamp(kCacheBytes / bytes, kFewestStrands, kMostStrands);
}
/// So many that few tiles of keys of one strand are under way, which wait for one another: a block must not come round
/// to a strand before its turn there. Chunks are even, since the last one would wait most.
std::int64_t strands_in_order(const cuda::Work& work, const Plan& plan, int blocks) {
  if (has_masks(plan)) return strands_together(work, plan);
  const std::int64_t tiles = std::int64_t{work.tiles} * kKeyTileRows / tile_queries(plan.problem());
  const std::int64_t strands = std::clamp(kLag * blocks / tiles, strands_together(work, plan), kMostInOrder);
  const std::int64_t chunks = std::max<std::int64_t>(1, work.strands / strands);
  return std::max<std::int64_t>(1, (work.strands + chunks - 1) / chunks);
}

/// Where each work is one chunk, and all strands together are not more than one may have, they are: a work of few
/// strands, whose tiles would all wait for one another, does not come alone at the end then.
unsigned strands_of_all(const cuda::Launch& part) {
  unsigned strands = 0;
  for (int w = 0; w < part.schedule.work_count; ++w) {
    strands += part.schedule.work[w].strands;
    if (part.schedule.work[w].chunk < part.schedule.work[w].strands) return 0;
  }
  return strands <= kMostInOrder ? strands : 0;
}

bool make_maps(BackwardLaunch& launch, const BackwardArguments& a) {
  const int query_box = tile_queries(a.plan.problem()), key_box = tile_keys(a.plan.problem());
  if (a.packed && !(encode(launch.k[kPackedMap], a.packed->k, 1, a.packed->k.rows(), key_box) &&
                    encode(launch.v[kPackedMap], a.packed->v, 1, a.packed->v.rows(), key_box)))
    return false;
  return for_each_map(launch, a.plan, [&](int map, std::int64_t dilation, std::int64_t rows, std::int64_t key_rows) {
    return encode(launch.q[map], a.q, dilation, rows, query_box) &&
           encode(launch.dout[map], a.dout, dilation, rows, query_box) &&
           encode(launch.k[map], a.k, dilation, key_rows, key_box) &&
           encode(launch.v[map], a.v, dilation, key_rows, key_box) &&
           (a.packed || (encode(launch.dk[map], a.dk, dilation, key_rows, kGroupRows) &&
                         encode(launch.dv[map], a.dv, dilation, key_rows, kGroupRows)));
  });
}

/// Of the sums of dq, where branches share rows.
bool make_sum_maps(BackwardLaunch& launch, const Plan& plan) {
  const Problem& problem = plan.problem();
  if (!sums_by_rows(plan) || problem.head_dim > kWidestStaged) return true;
  const MergedSums sums{launch.parts.sums, problem.query_rows, merged_columns(problem), problem.batch * problem.heads,
                        static_cast<int>(std::min<std::int64_t>(sum_columns(plan), kBlockColumns))};
  return for_each_map(launch, plan, [&](int map, std::int64_t dilation, std::int64_t rows, std::int64_t) {
    return encode(launch.sums[map], sums, dilation, rows);
  });
}

/// Where strands of each branch in each range of a launch have their rows.
void place_strands(PartsLaunch& parts) {
  const cuda::Launch& base = parts.base;
  std::int64_t next = 0;
  for (int r = 0; r < base.schedule.range_count; ++r) {
    for (int b = 0; b < base.schedule.branch_count; ++b) {
      StrandPlaces& places = parts.places[r * base.schedule.branch_count + b];
      if (!base.schedule.branches[b].active(base.tensors.tokens)) continue;
      places = places_of(base.schedule.branches[b], base.schedule.ranges[r], base.tensors.tokens);
      places.first = next;
      next += places.per_head * base.schedule.branches[b].head_count * base.tensors.batch;
    }
  }
}

/// Plans take as many query rows as tokens for the whole sequence, which a list of ranges may contradict.
bool fits_workspace(const BackwardArguments& a) {
  if (a.plan.problem().query_rows != a.plan.problem().tokens) return true;
  return std::all_of(a.ranges.begin(), a.ranges.end(),
                     [&](const RowRange& range) { return range.count == 0 || range.count == a.q.rows(); });
}

bool is_adaptive(const Plan& plan) {
  return std::any_of(plan.branches().begin(), plan.branches().end(),
                     [](const BranchPlan& branch) { return branch.adaptive_density > 0; });
}

bool is_whole(const BackwardArguments& a) {
  return a.ranges.size() == 1 && a.ranges[0].count == a.plan.problem().tokens;
}

void count_items(PartsLaunch& parts) {
  const cuda::Launch& base = parts.base;
  parts.items = static_cast<unsigned>(base.schedule.items);
  for (int w = base.schedule.work_count - 1; w >= 0 && base.schedule.work[w].branch < 0; --w)
    parts.items = base.schedule.work[w].first_item;
  parts.fill_items = static_cast<unsigned>(base.schedule.items) - parts.items;
}

}  // namespace

std::int64_t sum_rows(const Plan& plan) {
  const Problem& problem = plan.problem();
  const bool whole = problem.query_rows == problem.tokens;
  const std::int64_t rows = problem.query_rows;
  const std::int64_t ranges = std::min<std::int64_t>(static_cast<std::int64_t>(cuda::ranges_per_launch(plan)), rows);
  std::int64_t total = 0;
  for (const BranchPlan& branch : plan.branches()) {
    if (rows == 0 || !branch.active(problem.tokens)) continue;
    const std::int64_t segment = std::min(branch.segment, problem.tokens);
    const std::int64_t dilation = dilation_of(branch);
    std::int64_t per_head;
    if (whole) {
      const auto padded = [&](std::int64_t positions) {
        const std::int64_t strand = (positions + dilation - 1) / dilation;
        return (strand + kSumTileRows - 1) / kSumTileRows * kSumTileRows;
      };
      const std::int64_t segments = (problem.tokens + segment - 1) / segment;
      per_head = (segments - 1) * padded(segment) + padded(problem.tokens - (segments - 1) * segment);
    } else {
      // Whatever the ranges are: a strand has at most its share of them and a row, rounded up.
      per_head = rows / dilation + kSumTileRows * (rows / segment + 2 * ranges + 1);
    }
    total += per_head * branch.head_count * problem.batch;
  }
  return total;
}

std::int64_t sum_count(const Plan& plan) {
  const Problem& problem = plan.problem();
  if (!sums_by_rows(plan)) return sum_rows(plan) * sum_columns(plan);
  return problem.batch * problem.heads * problem.query_rows * merged_columns(problem);
}

Verdict can_run_backward(const Plan& plan) {
  if (Verdict verdict = fits(plan); !verdict.ok) return verdict;
  const Problem& problem = plan.problem();
  if (problem.head_dim > kWidest)
    return no("takes head dims up to {} in the backward, here it is {}", kWidest, problem.head_dim);
  if (problem.head_dim > kWidestInOrder && plan.options().deterministic)
    return no("has deterministic gradients of head dims up to {}, here it is {}", kWidestInOrder, problem.head_dim);
  if (has_own_deltas(plan)) {
    if (has_masks(plan)) return no("has no detached_mix with block masks where branches share rows");
    for (std::size_t b = 0; b < plan.branches().size(); ++b)
      if (Verdict verdict = kKernel.can_run(alone(plan, b), Pass::forward); !verdict.ok) return verdict;
  }
  const std::int64_t rows = sum_rows(plan), columns = sum_columns(plan);
  const double rows_of_dq =
      static_cast<double>(problem.batch * problem.heads) * static_cast<double>(problem.query_rows);
  const double ratio = static_cast<double>(rows) / std::max(rows_of_dq, 1.0);
  if (ratio > kMostSums && rows * columns * static_cast<std::int64_t>(sizeof(float)) > kSmallSums)
    return no("goes strand by strand in steps of {} rows: here that takes {:.1f} times the rows of dq, {} at most",
              kSumTileRows, ratio, kMostSums);
  if (rows / kSumTileRows * 2 > std::int64_t{1} << 30)
    return no("counts tiles of sums in 32 bits, there are {} rows of them", rows);
  return yes();
}

std::size_t backward_workspace_bytes(const Plan& plan) { return BackwardScratch(plan).bytes; }

Verdict accepts_backward(const BackwardArguments& a) {
  if (!cuda::has_key_sums(a) || !fits_workspace(a))
    return no("takes as many query rows as tokens for the whole sequence, here are {} ranges", a.ranges.size());
  // Lists of blocks go by tiles of queries on the strand's grid, as sums do where the queries are all rows.
  if (has_masks(a.plan) && !is_whole(a)) return no("has gradients of block masks of all query rows at once");
  BackwardLaunch launch;
  return make_maps(launch, a) ? yes() : no("{}", kNoMap);
}

namespace {

/// The launches of a call.
class BackwardCall {
 public:
  explicit BackwardCall(const BackwardArguments& arguments)
      : a_(arguments),
        plan_(arguments.plan),
        starts_(plan_.problem().dtype == DType::bf16 ? kBackwardBf16 : kBackwardF16),
        stream_(static_cast<cudaStream_t>(arguments.call.stream)),
        scratch_(plan_, arguments.workspace),
        rows_left_(plan_.problem().query_rows) {
    launch_.halves = scratch_.halves;
    launch_.totals = scratch_.totals;
    parts_.extras = extras_of(plan_);
    parts_.lse = scratch_.lse, parts_.delta = scratch_.delta, parts_.sums = scratch_.sums;
    parts_.far_lse = scratch_.far_lse;
    parts_.ticket = scratch_.ticket, parts_.joined = scratch_.joined;
    parts_.turns = scratch_.turns, parts_.key_turns = scratch_.key_turns;
    std::copy(std::begin(scratch_.listed), std::end(scratch_.listed), parts_.listed);
    parts_.sum_columns = static_cast<int>(merged_columns(plan_.problem()));
    const std::int64_t columns = a_.q.columns(), heads = a_.q.heads(), rows = a_.q.rows();
    out_ = {scratch_.branch_out,
            a_.q.dtype,
            a_.q.device,
            a_.q.sizes,
            {rows * heads * columns, heads * columns, columns, 1}};
    parts_.lists = has_masks(plan_);
    if (!make_maps(launch_, a_) || !make_sum_maps(launch_, plan_))
      throw Unsupported(fmt::format("hopper-wgmma {}", kNoMap));
  }

  void run() {
    // Where all fits in L2, long items of every branch come before short ones of any.
    const bool fits_cache = sum_rows(plan_) * sum_columns(plan_) * 8 <= kCacheBytes;
    const cuda::Tiling tiling{.rows = tile_keys(plan_.problem()),
                              .by_keys = true,
                              .fills = false,
                              .parts = !in_order_ && !parts_.lists && fits_cache,
                              .splits = cuda::splits_lists(plan_) || cuda::cuts_lists(plan_)};
    // Where nothing else adds up, only the keys of lists that are cut do; which these are, adaptive masks do not say.
    parts_.splits = tiling.splits && plan_.problem().heads == plan_.problem().kv_heads && !is_adaptive(plan_) &&
                    !plan_.merges_branches();
    cuda::for_each_launch(a_, tiling, true, [&](cuda::Launch& base) {
      base.gradients.dk_sum = a_.packed ? a_.packed->dk_sum : scratch_.dk_sum;
      base.gradients.dv_sum = a_.packed ? a_.packed->dv_sum : scratch_.dv_sum;
      base.gradients.sum_keys = base.gradients.sum_keys && !parts_.splits;
      base.schedule.merges = sums_by_rows(plan_);
      parts_.packed = packed_places(a_, base);
      const PartsLaunch around = prepare(base);
      if (in_order_ && base.gradients.sum_keys)
        cuda::for_each_writer(base, base.tensors.heads / base.tensors.kv_heads,
                              [&](const cuda::Launch& part) { add(part); });
      else add(base);
      cuda::check(starts_.convert(around, stream_), "starting the conversion of gradients");
      parts_.base = base;
      if (parts_.splits) cuda::check(starts_.split(parts_, true, stream_), "converting sums of keys");
    });
  }

 private:
  /// Row values, and sums that start from zero. The work is tiles of query rows, and all rows where several branches
  /// may share one; the conversion has the same.
  PartsLaunch prepare(const cuda::Launch& base) {
    parts_.base = base;
    if (parts_.splits) cuda::check(starts_.split(parts_, false, stream_), "clearing sums of keys");
    if (base.gradients.sum_keys && !a_.packed && rows_left_ == plan_.problem().query_rows)
      cuda::check(cuda::clear_key_sums(base, stream_), "clearing accumulators");
    cuda::Schedule& schedule = parts_.base.schedule;
    schedule.fill = schedule.fill || schedule.merges;
    cut_queries(cuda::kEveryBranch);
    parts_.zero_keys = !base.gradients.sum_keys;
    for (int r = 0; r < base.schedule.range_count; ++r) rows_left_ -= base.schedule.ranges[r].count;
    parts_.finish_keys = base.gradients.sum_keys && !a_.packed && rows_left_ == 0;
    place_strands(parts_);
    launch_.first_ticket = 0;
    parts_.list_blocks = parts_.lists ? list_blocks(base) : 0;
    const PartsLaunch all = parts_;
    if (!has_own_deltas(plan_)) {
      cuda::check(starts_.prepare(all, stream_), "starting the preparation of backward");
      if (in_order_ && parts_.lists) order_lists(all);
      return all;
    }
    parts_.base.tensors.out = {reinterpret_cast<char*>(scratch_.branch_out), out_.strides[0], out_.strides[1],
                               out_.strides[2]};
    for (int b = 0; b < base.schedule.branch_count; ++b) {
      if (!base.schedule.branches[b].active(base.tensors.tokens)) continue;
      const Plan plan = alone(plan_, static_cast<std::size_t>(b));
      PackedStrands packed = a_.packed ? *a_.packed : PackedStrands{};
      if (a_.packed) packed.places += b * 2 * (1 + a_.q.heads());
      kKernel.forward({.plan = plan,
                       .call = a_.call,
                       .ranges = a_.ranges,
                       .q = a_.q,
                       .k = a_.k,
                       .v = a_.v,
                       .out = out_,
                       .lse = {},
                       .workspace = scratch_.branch_workspace,
                       .packed = a_.packed ? &packed : nullptr,
                       .first_branch = b});
      prepare_part(b);
      parts_.list_blocks = 0;  // once is enough
    }
    prepare_part(cuda::kNoBranch);
    if (in_order_ && parts_.lists) order_lists(all);
    return all;
  }

  /// Heads of a branch's mask.
  static unsigned mask_heads(const cuda::Launch& base, int branch) {
    const cuda::BlockLists& lists = base.schedule.lists[branch];
    if (!lists.places) return 0;
    return static_cast<unsigned>((lists.entry_places ? base.tensors.batch : 1) *
                                 (lists.head_places ? base.tensors.heads : 1));
  }
  /// Of threads, one for each place.
  static unsigned list_blocks(const cuda::Launch& base) {
    unsigned places = 0;
    for (int b = 0; b < base.schedule.branch_count; ++b)
      places += mask_heads(base, b) * static_cast<unsigned>(base.schedule.lists[b].place_count);
    return (places + kPartsThreads - 1) / kPartsThreads;
  }
  void order_lists(const PartsLaunch& all) const {
    unsigned blocks = 0;
    for (int b = 0; b < all.base.schedule.branch_count; ++b) {
      if (const unsigned heads = mask_heads(all.base, b)) blocks += heads * all.ordered_blocks(b);
    }
    cuda::check(starts_.order(all, blocks, stream_), "ordering the items of block masks");
  }

  /// Row values of one branch, of its own output; or only sums of rows.
  void prepare_part(int branch) {
    cut_queries(branch);
    if (parts_.items + parts_.fill_items > 0)
      cuda::check(starts_.prepare(parts_, stream_), "starting the preparation of a branch");
  }

  /// The work of the preparation: tiles of query rows of a branch or of all.
  void cut_queries(int branch) {
    cuda::Schedule& schedule = parts_.base.schedule;
    const bool rows = branch == cuda::kEveryBranch || branch == cuda::kNoBranch;
    cuda::add_work(parts_.base, plan_, {.rows = kSumTileRows, .fills = rows, .branch = branch});
    for (int w = 0; w < schedule.work_count; ++w)  // heads of one tile together: they are neighbours in memory
      schedule.work[w].chunk = static_cast<unsigned>(schedule.work[w].head_count);
    count_items(parts_);
  }

  /// The main kernel.
  void add(const cuda::Launch& part) {
    if (part.schedule.items == 0) return;
    const int keys = tile_keys(plan_.problem());
    parts_.base = part;
    cuda::Schedule& schedule = parts_.base.schedule;
    schedule.descending = in_order_ && part.rules.causal && !parts_.lists;  // BackwardTask::turn
    parts_.items = static_cast<unsigned>(schedule.items);
    launch_.query_group = part.tensors.heads / part.tensors.kv_heads;
    launch_.halved = static_cast<unsigned>(schedule.items == plan_.items(keys) ? halved_items(plan_) : 0);
    launch_.blocks =
        static_cast<int>(std::min<std::int64_t>(schedule.items + launch_.halved, multiprocessors(plan_.problem())));
    int tiles = 0;
    for (int w = 0; w < schedule.work_count; ++w) {
      cuda::Work& work = schedule.work[w];
      work.chunk = static_cast<unsigned>(in_order_ ? strands_in_order(work, plan_, launch_.blocks)
                                                   : strands_together(work, plan_));
      tiles = std::max(tiles, work.tiles);
    }
    launch_.together = in_order_ && !parts_.lists ? strands_of_all(parts_.base) : 0;
    if (launch_.together > 0) parts_.items = launch_.together * static_cast<unsigned>(tiles);
    // Asking and telling takes longer than a tile of queries, but a strand's tiles of keys follow sooner: that matters
    // where a call has few.
    launch_.told_tiles = schedule.items < kFewRounds * std::int64_t{launch_.blocks} ? 1 : 2;
    if (only_masks_keys(plan_) && schedule.items >= kFewRounds / 2 * std::int64_t{launch_.blocks}) {
      parts_.extras = BackwardExtras::none;
      start(KeysTaken::leading);
      parts_.extras = BackwardExtras::some;
      start(KeysTaken::scattered);
      parts_.taken = KeysTaken::all;
    } else {
      start(KeysTaken::all);
    }
  }
  void start(KeysTaken taken) {
    parts_.taken = taken;
    cuda::check(starts_.run(launch_, stream_), "starting the Hopper backward kernel");
    // Every block takes one number that is no item any more.
    launch_.first_ticket += parts_.items + launch_.halved + static_cast<unsigned>(launch_.blocks);
  }

  const BackwardArguments& a_;
  const Plan& plan_;
  const BackwardStarts& starts_;
  const cudaStream_t stream_;
  const BackwardScratch scratch_;
  const bool in_order_ = plan_.options().deterministic;
  BackwardLaunch launch_{};
  PartsLaunch& parts_ = launch_.parts;
  std::int64_t rows_left_;  // of the query ranges
  TensorView out_;          // of one branch, for its own deltas
};

}  // namespace

void backward(const BackwardArguments& a) {
  const cuda::DeviceGuard guard(a.q.device.index);
  cuda::check_pointers(a);
  BackwardCall(a).run();
}

}  // namespace longspan::hopper
