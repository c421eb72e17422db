// The Hopper kernels on the host: the forward, what it can run, and which tile shape.
#include "kernels/hopper/hopper.h"

#include <algorithm>
#include <array>
#include <cmath>

#include "device/error.h"
#include "kernels/cuda/call.h"
#include "kernels/cuda/counters.h"
#include "kernels/cuda/cuda.h"
#include "kernels/cuda/prepare.h"
#include "kernels/hopper/kernels.h"
#include "kernels/hopper/maps.h"

namespace longspan::hopper {
namespace {

constexpr int kShortStrand = 1024;
constexpr int kChunk = 32;  // strands whose tiles are interleaved under a causal mask, longest first
constexpr int kTurns = 2;   // items for each block that are dealt out in turn whatever their length

bool make_maps(HopperLaunch& launch, const ForwardArguments& a, const Choice& choice) {
  const int key_box = choice.part_rows > 0 ? choice.part_rows : choice.keys;
  if (a.packed && !(encode(launch.k[kPackedMap], a.packed->k, 1, a.packed->k.rows(), key_box) &&
                    encode(launch.v[kPackedMap], a.packed->v, 1, a.packed->v.rows(), key_box)))
    return false;
  return for_each_map(launch, a.plan, [&](int map, std::int64_t dilation, std::int64_t rows, std::int64_t key_rows) {
    return encode(launch.q[map], a.q, dilation, rows, kGroupRows) &&
           encode(launch.out[map], a.out, dilation, rows, kGroupRows) &&
           encode(launch.k[map], a.k, dilation, key_rows, key_box) &&
           encode(launch.v[map], a.v, dilation, key_rows, key_box);
  });
}

/// Whether rows of q are all positions in order.
bool is_whole(const cuda::Launch& base) {
  return base.schedule.range_count == 1 && base.schedule.ranges[0].start == 0 &&
         base.schedule.ranges[0].first_row == 0 && base.schedule.ranges[0].count == base.tensors.tokens &&
         base.tensors.query_rows == base.tensors.tokens;
}

/// What plain calls do without.
bool has_extras(const Plan& plan) {
  return plan.problem().has_key_mask || plan.problem().has_alibi || plan.options().dropout > 0 ||
         !(static_cast<float>(plan.scale()) > 0);
}

/// Whether uncovered rows are whole phases of every head, so that boxes of zeros fill them.
bool fills_by_boxes(const ForwardArguments& a, const cuda::Launch& base) {
  const std::int64_t tokens = a.plan.problem().tokens;
  if (a.plan.problem().head_dim > kWidestWithZeros || has_masks(a.plan) || has_extras(a.plan)) return false;
  if (!base.schedule.fill || base.schedule.merges || base.tensors.lengths || !is_whole(base)) return false;
  if (static_cast<double>(base.tensors.batch) * base.tensors.heads * static_cast<double>(tokens) > 1e9) return false;
  return std::all_of(a.plan.branches().begin(), a.plan.branches().end(), [&](const BranchPlan& branch) {
    return branch.active(tokens) && branch.dilation <= tokens &&
           (branch.segment >= tokens || branch.segment % branch.dilation == 0);
  });
}

/// Items of equal length, or few of them, are dealt out in turn; others are taken as blocks become free, which takes a
/// counter.
bool takes_turns(const Plan& plan) {
  const Problem& problem = plan.problem();
  if (plan.merges_branches()) return false;
  const Choice choice = choose(plan);
  if (plan.items(choice.groups * kGroupRows) <= kTurns * choice.packed * multiprocessors(problem)) return true;
  if (plan.options().causal || problem.has_lengths || problem.has_key_mask || has_masks(plan)) return false;
  const auto strand = [&](const BranchPlan& b) { return std::min(b.segment, problem.tokens) / dilation_of(b); };
  return std::all_of(plan.branches().begin(), plan.branches().end(),
                     [&](const BranchPlan& branch) { return strand(branch) == strand(plan.branches()[0]); });
}

/// Whether tiles of 256 rows are done sooner than those of 192, which have a higher rate, because they fill the last
/// round of blocks better. Counted for one number of blocks, so that bits are the same on every Hopper GPU.
bool suits_wide_tiles(const Plan& plan) {
  constexpr double kBlocks = 132, kSlower = 1.035;
  if (plan.options().causal || plan.problem().has_lengths || plan.merges_branches()) return false;
  const auto rows = [&](int tile) { return std::ceil(plan.items(tile) / kBlocks) * tile; };
  return rows(256) * kSlower < rows(192);
}

struct Space {
  std::size_t ticket = 0, totals = 0, parts = 0, total = 0;
  // Of lists that are cut, of each branch: where its slots begin, and slots of a strand.
  std::array<std::int64_t, cuda::kMaxBranches> first_slot{};
  std::array<int, cuda::kMaxBranches> slots{};
};

/// What the forward takes after what all CUDA kernels take.
Space layout(const Plan& plan) {
  Space space;
  space.ticket = space.totals = cuda::layout(plan, Pass::forward, true).total;
  if (!takes_turns(plan) && !plan.merges_branches()) space.totals += 256;
  space.total = space.totals;
  const Choice choice = choose(plan);
  if (cuda::longest_sum(plan) > cuda::kRowsOfSum / choice.keys * choice.keys) {
    const std::size_t consumers =
        static_cast<std::size_t>(multiprocessors(plan.problem()) * choice.streams * choice.groups * kGroupThreads);
    space.total += consumers * static_cast<std::size_t>(total_floats(choice.columns)) * sizeof(float);
  }
  space.parts = space.total;
  std::int64_t slots = 0;
  const Problem& problem = plan.problem();
  for (std::size_t b = 0; b < plan.branches().size() && choice.lists; ++b) {
    space.first_slot[b] = slots;
    space.slots[b] = static_cast<int>(cuda::slots_of(plan, b, choice.groups * kGroupRows));
    slots += problem.batch * problem.heads * strands::ceil_divide(problem.tokens, plan.branches()[b].segment) *
             space.slots[b];
  }
  const int slot_threads = choice.groups * kGroupThreads;
  space.total += static_cast<std::size_t>(slots * slot_threads * total_floats(choice.columns)) * sizeof(float);
  return space;
}

std::size_t workspace_bytes(const Plan& plan, Pass pass, int) {
  return pass == Pass::backward ? backward_workspace_bytes(plan) : layout(plan).total;
}

Verdict can_run(const Plan& plan, Pass pass) {
  if (pass == Pass::backward) return can_run_backward(plan);
  return fits(plan);
}

Verdict accepts_forward(const ForwardArguments& a) {
  HopperLaunch launch;
  if (make_maps(launch, a, choose(a.plan))) return yes();
  return no("{}", kNoMap);
}

void forward(const ForwardArguments& a) {
  const cuda::DeviceGuard guard(a.q.device.index);
  const Problem& problem = a.plan.problem();
  Choice choice = choose(a.plan);
  HopperLaunch launch{};
  if (problem.batch == 0 || problem.tokens == 0 || problem.query_rows == 0) return;
  cuda::check_pointers(a);
  if (!make_maps(launch, a, choice)) throw Unsupported(fmt::format("hopper-wgmma {}", kNoMap));
  const Space space = layout(a.plan);
  const bool counts = space.totals > space.ticket || a.plan.merges_branches();
  if (space.parts > space.totals) launch.totals = reinterpret_cast<float*>(a.workspace + space.totals);
  if (space.total > space.parts) launch.parts = reinterpret_cast<float*>(a.workspace + space.parts);
  std::copy(space.first_slot.begin(), space.first_slot.end(), launch.first_slot);
  std::copy(space.slots.begin(), space.slots.end(), launch.slots);
  const cudaStream_t stream = static_cast<cudaStream_t>(a.call.stream);
  cuda::for_each_launch(
      a, {.rows = choice.groups * kGroupRows, .splits = true, .restores = true}, true, [&](cuda::Launch& base) {
        if (base.schedule.items == 0) return;
        launch.base = base;
        launch.items = static_cast<unsigned>(base.schedule.items);
        for (int w = base.schedule.work_count - 1; w >= 0 && base.schedule.work[w].branch < 0; --w)
          launch.items = static_cast<unsigned>(base.schedule.work[w].first_item);
        launch.query_group = base.tensors.heads / base.tensors.kv_heads;
        launch.first_branch = a.first_branch;
        launch.whole = is_whole(base);
        launch.places = packed_places(a, base);
        launch.fill_boxes = fills_by_boxes(a, base);
        launch.fill_items = static_cast<unsigned>(base.schedule.items) - launch.items;
        // Lists are as long in one tile as in another: a strand after the other, for the sake of the L2 cache.
        for (int w = 0; w < base.schedule.work_count && base.rules.causal; ++w)
          launch.base.schedule.work[w].chunk = choice.lists ? 1 : kChunk;
        launch.packed = choice.packed;
        launch.part_rows = choice.part_rows;
        const unsigned taken =
            (launch.items + static_cast<unsigned>(choice.packed) - 1) / static_cast<unsigned>(choice.packed);
        const unsigned streams = static_cast<unsigned>(choice.streams);
        choice.blocks = static_cast<int>(std::min<std::int64_t>(
            multiprocessors(problem), (std::max(taken, launch.fill_items) + streams - 1) / streams));
        launch.ticket = base.scratch.ticket;
        if (counts && !launch.ticket) {
          const auto own = reinterpret_cast<unsigned*>(a.workspace + space.ticket);
          const cuda::Counters counters = cuda::resting_counters({stream, 1, own, sizeof(unsigned)});
          launch.base.scratch.leaving = counters.leaving;
          launch.ticket = counters.first;
        }
        // Off a counter items are better taken late, but strands of few tiles leave little time to look them up.
        launch.ahead = !launch.ticket ? 4 : choice.groups == 4 || choice.lists ? 3 : 2;
        const auto run = a.q.dtype == DType::bf16 ? forward_bf16 : forward_f16;
        cuda::check(run(launch, choice, stream), "starting the Hopper forward kernel");
      });
}

}  // namespace

Choice choose(const Plan& plan) {
  const Problem& problem = plan.problem();
  Choice choice;
  // The strand length that a multiply-add meets on average, and the longest.
  double rows = 0, pairs = 0, longest = 1;
  for (const BranchPlan& branch : plan.branches()) {
    if (!branch.active(problem.tokens)) continue;
    const double strand =
        std::ceil(static_cast<double>(std::min(branch.segment, problem.tokens)) / static_cast<double>(branch.dilation));
    const double weight = static_cast<double>(branch.head_count) * strand / static_cast<double>(branch.dilation);
    rows += weight * strand;
    pairs += weight;
    longest = std::max(longest, strand);
  }
  choice.strand = pairs > 0 ? static_cast<int>(std::min(rows / pairs, 2e9)) : 0;
  const auto set = [&](int groups, int keys, int stages) {
    choice.groups = groups, choice.keys = keys, choice.stages = stages;
  };
  choice.extras = has_extras(plan);
  choice.drops = plan.options().dropout > 0;
  for (const int columns : {48, 64, 96, 128, 192, 256}) {
    if (choice.extras && columns != 64 && columns != 128 && columns != 256) continue;
    choice.columns = columns;
    if (problem.head_dim <= columns) break;
  }
  choice.lists = has_masks(plan);
  if (choice.lists) {
    // Tiles of 128 rows, as few lists as the masks have. Narrow heads leave registers for two of them in a block.
    const int block = smallest_block(plan);
    choice.columns = problem.head_dim <= 64 ? 64 : problem.head_dim <= 128 ? 128 : 256;
    choice.extras |= choice.columns > 128 || plan.merges_branches();
    choice.streams = choice.columns == 64 && !choice.extras ? 2 : 1;
    choice.passes = choice.extras || block <= kGroupRows;
    if (choice.columns == 256) set(2, 32, 2);
    else if (choice.columns == 128 && block >= 128 && !choice.extras) set(2, 128, 2);
    else set(2, 64, 4);
    if (choice.extras || block < kGroupRows) choice.part_rows = std::min(block, choice.keys);
    return choice;
  }
  if (choice.columns > 192) set(2, 48, 2);
  else if (choice.columns > 128) set(2, 80, 2);
  else if (choice.columns > 64) set(3, 80, 3);
  else if (!choice.extras && (choice.strand <= kShortStrand || suits_wide_tiles(plan)))
    set(4, 64, plan.merges_branches() ? 4 : 6);
  else set(3, 128, plan.merges_branches() ? 3 : 4);
  // Branches that merge wait for one another, which strands of one block must not.
  if (!plan.merges_branches() && longest * 2 <= choice.groups * kGroupRows)
    choice.packed = choice.groups / static_cast<int>(std::ceil(longest / kGroupRows));
  return choice;
}

std::string to_string(const Choice& choice) {
  return fmt::format("{} x {} tiles for strands of about {} rows{}{}, head dim as {}, {} stages{}",
                     choice.groups * kGroupRows, choice.keys, choice.strand,
                     choice.packed > 1 ? fmt::format(", {} to a tile", choice.packed) : "",
                     choice.lists ? fmt::format(" by lists of blocks, {} side by side", choice.streams) : "",
                     choice.columns, choice.stages, choice.extras ? ", with options" : "");
}

const Kernel kKernel = {.name = "hopper-wgmma",
                        .can_run = can_run,
                        .workspace_bytes = workspace_bytes,
                        .forward = forward,
                        .backward = backward,
                        .takes_packed = true,
                        .accepts_forward = accepts_forward,
                        .accepts_backward = accepts_backward};

}  // namespace longspan::hopper
