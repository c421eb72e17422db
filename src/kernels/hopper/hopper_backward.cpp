// The Hopper backward on the host: what it can run, where its workspace goes, and its launches.
#include <algorithm>
#include <cmath>

#include "device/error.h"
#include "kernels/cuda/call.h"
#include "kernels/cuda/kernels.h"
#include "kernels/cuda/prepare.h"
#include "kernels/hopper/hopper.h"
#include "kernels/hopper/hopper_backward.h"
#include "kernels/hopper/kernels.h"
#include "kernels/hopper/maps.h"

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

/// Columns of a row of sums.
std::int64_t sum_columns(const Plan& plan) {
  const std::int64_t columns = plan.problem().head_dim;
  return columns <= 48 && !has_masks(plan) ? 48 : columns <= 64 ? 64 : columns <= 128 ? 128 : 256;
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

struct Space {
  std::size_t lse = 0, delta = 0, sums = 0, turns = 0, ticket = 0, joined = 0, halves = 0, totals = 0, dk = 0, dv = 0,
              total = 0;
};

Space layout(const Plan& plan) {
  const Problem& problem = plan.problem();
  Space space;
  const auto take = [&](std::size_t& offset, std::int64_t bytes) {
    offset = space.total;
    space.total += (static_cast<std::size_t>(bytes) + 255) / 256 * 256;
  };
  const auto size = [](std::int64_t count) { return count * static_cast<std::int64_t>(sizeof(float)); };
  space.total = cuda::layout(plan, Pass::forward, false).total;  // where calls put lengths and adaptive masks
  const std::int64_t rows = sum_rows(plan);
  // A last tile of row values may end after the last strand.
  take(space.lse, size(rows + kKeyTileRows));
  take(space.delta, size(rows + kKeyTileRows));
  take(space.sums, size(sum_count(plan)));
  take(space.ticket, size(1));
  if (const int halved = halved_items(plan); halved > 0) {
    take(space.joined, size(kMostHalved * kWarpsOfKeys));
    take(space.halves, size(std::int64_t{halved} * 2 * 2 * tile_keys(problem) * sum_columns(plan)));
  }
  if (cuda::longest_sum(plan) > cuda::kRowsOfSum)  // dk and dv of each block's tile of keys
    take(space.totals, size(std::int64_t{multiprocessors(problem)} * 2 * tile_keys(problem) * sum_columns(plan)));
  if (plan.options().deterministic) take(space.turns, size(rows / kSumTileRows * 2));
  if (cuda::sums_keys(plan, problem.query_rows == problem.tokens ? 1 : 2)) {
    const std::int64_t keys = problem.batch * problem.kv_heads * problem.tokens * problem.head_dim;
    take(space.dk, size(keys));
    take(space.dv, size(keys));
  }
  return space;
}

std::int64_t strands_together(const cuda::Work& work, const Plan& plan) {
  if (has_masks(plan)) return 1;  // few tiles of keys share queries
  const std::int64_t bytes = std::int64_t{work.tiles} * tile_keys(plan.problem()) * sum_columns(plan) * 8;
  return std::clamp(kCacheBytes / bytes, kFewestStrands, kMostStrands);
}
/// So many that few tiles of keys of one strand are under way, which wait for one another: a block must not come round
/// to a strand before its turn there. Chunks are even, since the last one would wait most.
std::int64_t strands_in_order(const cuda::Work& work, const Plan& plan, int blocks) {
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
  return for_each_map(launch, a.plan, [&](int map, std::int64_t dilation, std::int64_t rows, std::int64_t key_rows) {
    return encode(launch.q[map], a.q, dilation, rows, query_box) &&
           encode(launch.dout[map], a.dout, dilation, rows, query_box) &&
           encode(launch.k[map], a.k, dilation, key_rows, key_box) &&
           encode(launch.v[map], a.v, dilation, key_rows, key_box) &&
           encode(launch.dk[map], a.dk, dilation, key_rows, kGroupRows) &&
           encode(launch.dv[map], a.dv, dilation, key_rows, kGroupRows);
  });
}

/// Of the sums of dq, where branches share rows.
bool make_sum_maps(BackwardLaunch& launch, const Plan& plan) {
  const Problem& problem = plan.problem();
  if (!plan.merges_branches() || problem.head_dim > kWidestStaged) return true;
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
  if (!plan.merges_branches()) return sum_rows(plan) * sum_columns(plan);
  return problem.batch * problem.heads * problem.query_rows * merged_columns(problem);
}

Verdict can_run_backward(const Plan& plan) {
  if (Verdict verdict = fits(plan); !verdict.ok) return verdict;
  const Problem& problem = plan.problem();
  if (problem.head_dim > kWidest)
    return no("takes head dims up to {} in the backward, here it is {}", kWidest, problem.head_dim);
  if (problem.head_dim > kWidestInOrder && plan.options().deterministic)
    return no("has deterministic gradients of head dims up to {}, here it is {}", kWidestInOrder, problem.head_dim);
  if (plan.options().detached_mix) return no("has no detached_mix");
  if (!(static_cast<float>(plan.scale()) > 0))
    return no("takes positive scales (in float32) in the backward, here it is {}", plan.scale());
  if (problem.has_key_mask) return no("has no key_mask in the backward");
  if (problem.has_alibi) return no("has no ALiBi in the backward");
  if (plan.options().dropout > 0) return no("has no dropout in the backward, here it is {}", plan.options().dropout);
  if (has_masks(plan) && plan.options().deterministic)
    return no("has no block masks with gradients that repeat bit for bit");
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

std::size_t backward_workspace_bytes(const Plan& plan) { return layout(plan).total; }

Verdict accepts_backward(const BackwardArguments& a) {
  if (!cuda::has_key_sums(a) || !fits_workspace(a))
    return no("takes as many query rows as tokens for the whole sequence, here are {} ranges", a.ranges.size());
  // Lists of blocks go by tiles of queries on the strand's grid, as sums do where the queries are all rows.
  if (has_masks(a.plan) && !is_whole(a)) return no("has gradients of block masks of all query rows at once");
  BackwardLaunch launch;
  return make_maps(launch, a) ? yes() : no("{}", kNoMap);
}

void backward(const BackwardArguments& a) {
  const Problem& problem = a.plan.problem();
  BackwardLaunch launch{};
  const bool masked = has_masks(a.plan);
  const Space space = layout(a.plan);
  const auto at = [&](std::size_t offset) { return reinterpret_cast<float*>(a.workspace + offset); };
  PartsLaunch& parts = launch.parts;
  parts.lse = at(space.lse), parts.delta = at(space.delta), parts.sums = at(space.sums);
  parts.sum_columns = static_cast<int>(merged_columns(problem));
  const cuda::DeviceGuard guard(a.q.device.index);
  cuda::check_pointers(a);
  if (!make_maps(launch, a) || !make_sum_maps(launch, a.plan))
    throw Unsupported(fmt::format("hopper-wgmma {}", kNoMap));
  const cudaStream_t stream = static_cast<cudaStream_t>(a.call.stream);
  const BackwardStarts& starts = problem.dtype == DType::bf16 ? kBackwardBf16 : kBackwardF16;
  const bool in_order = a.plan.options().deterministic;
  parts.ticket = reinterpret_cast<unsigned*>(at(space.ticket));
  parts.turns = in_order ? reinterpret_cast<unsigned*>(at(space.turns)) : nullptr;
  const int halved = halved_items(a.plan);
  parts.joined = halved > 0 ? reinterpret_cast<unsigned*>(at(space.joined)) : nullptr;
  launch.halves = at(space.halves);
  launch.totals = space.totals > 0 ? at(space.totals) : nullptr;
  bool cleared = false;
  std::int64_t rows_left = problem.query_rows;
  parts.lists = masked;
  // Where all fits in L2, long items of every branch come before short ones of any.
  const bool in_parts = !in_order && !masked && sum_rows(a.plan) * sum_columns(a.plan) * 8 <= kCacheBytes;
  const cuda::Tiling tiling{.rows = tile_keys(problem),
                            .by_keys = true,
                            .fills = false,
                            .parts = in_parts,
                            .splits = cuda::splits_lists(a.plan)};
  cuda::for_each_launch(a, tiling, true, [&](cuda::Launch& base) {
    base.gradients.dk_sum = at(space.dk), base.gradients.dv_sum = at(space.dv);
    // Where nothing else adds up, only the keys of lists that are cut do; which these are, adaptive masks do not say.
    parts.splits = tiling.splits && problem.heads == problem.kv_heads && !is_adaptive(a.plan);
    base.gradients.sum_keys = base.gradients.sum_keys && !parts.splits;
    parts.base = base;
    if (parts.splits) cuda::check(starts.split(parts, false, stream), "clearing sums of keys");
    if (base.gradients.sum_keys && !cleared) cuda::check(cuda::clear_key_sums(base, stream), "clearing accumulators");
    cleared = true;
    // Around the main kernel: tiles of query rows, and all rows where several branches may share one.
    parts.base = base;
    parts.base.schedule.fill = base.schedule.fill || base.schedule.merges;
    cuda::add_work(parts.base, a.plan, {.rows = kSumTileRows});
    for (int w = 0; w < parts.base.schedule.work_count;
         ++w) {  // heads of one tile after the other: they are neighbours in memory
      cuda::Work& work = parts.base.schedule.work[w];
      work.chunk = static_cast<unsigned>(work.head_count);
    }
    parts.zero_keys = !base.gradients.sum_keys;
    for (int r = 0; r < base.schedule.range_count; ++r) rows_left -= base.schedule.ranges[r].count;
    parts.finish_keys = base.gradients.sum_keys && rows_left == 0;
    place_strands(parts);
    count_items(parts);
    const PartsLaunch around = parts;
    cuda::check(starts.prepare(around, stream), "starting the preparation of backward");

    launch.first_ticket = 0;
    const auto run = [&](const cuda::Launch& part) {
      if (part.schedule.items == 0) return;
      parts.base = part;
      parts.base.schedule.descending = in_order && part.rules.causal;  // BackwardTask::turn
      parts.items = static_cast<unsigned>(part.schedule.items);
      launch.query_group = part.tensors.heads / part.tensors.kv_heads;
      launch.halved = static_cast<unsigned>(part.schedule.items == a.plan.items(tile_keys(problem)) ? halved : 0);
      launch.blocks =
          static_cast<int>(std::min<std::int64_t>(part.schedule.items + launch.halved, multiprocessors(problem)));
      for (int w = 0; w < part.schedule.work_count; ++w) {
        cuda::Work& work = parts.base.schedule.work[w];
        work.chunk = static_cast<unsigned>(in_order ? strands_in_order(work, a.plan, launch.blocks)
                                                    : strands_together(work, a.plan));
      }
      launch.together = in_order ? strands_of_all(parts.base) : 0;
      if (launch.together > 0) {
        int tiles = 0;
        for (int w = 0; w < part.schedule.work_count; ++w) tiles = std::max(tiles, part.schedule.work[w].tiles);
        parts.items = launch.together * static_cast<unsigned>(tiles);
      }
      // Asking and telling takes longer than a tile of queries, but a strand's tiles of keys follow sooner: that
      // matters where a call has few.
      launch.told_tiles = part.schedule.items < kFewRounds * std::int64_t{launch.blocks} ? 1 : 2;
      cuda::check(starts.run(launch, stream), "starting the Hopper backward kernel");
      // Every block takes one number that is no item any more.
      launch.first_ticket += parts.items + launch.halved + static_cast<unsigned>(launch.blocks);
    };
    if (in_order && base.gradients.sum_keys)
      cuda::for_each_writer(base, base.tensors.heads / base.tensors.kv_heads, run);
    else run(base);
    cuda::check(starts.convert(around, stream), "starting the conversion of gradients");
    if (parts.splits) {
      parts.base = base;
      cuda::check(starts.split(parts, true, stream), "converting sums of keys");
    }
  });
}

}  // namespace longspan::hopper
