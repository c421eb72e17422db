// The kernel for few query rows: what it takes, its grid, its workspace.
#include "kernels/cuda/decode.h"

#include <algorithm>

#include "device/device_pool.h"
#include "device/error.h"
#include "kernels/cuda/call.h"
#include "kernels/cuda/counters.h"
#include "kernels/cuda/cuda.h"
#include "kernels/cuda/prepare.h"
#include "memory/arena.h"
#include "plan/branch.h"

namespace longspan::cuda {
namespace {

using strands::ceil_divide;

/// Heads of a group that may share a strand, and strands that they may have in one segment.
struct HeadSplit {
  int together, variants;
};
HeadSplit split_heads(const DeviceBranch& branch, int group) {
  if (branch.fixed_phase >= 0 || branch.dilation == 1) return {group, 1};
  const int alike = branch.phase_divisor > 0 ? branch.phase_divisor : ceil_divide(group, branch.dilation);
  return {std::min(group, alike), group};
}

/// Segments, tiles and chunks of one branch.
void cut_branch(DecodeBranch& of, const DecodeGrid& grid, const DeviceBranch& branch, int tokens) {
  const HeadSplit split = split_heads(branch, grid.group);
  int keys = 0, most = 0;
  for (int row = 0; row < grid.rows && branch.active(tokens); ++row) {
    const int position = grid.positions[row], offset = position % branch.segment, phase = offset % branch.dilation;
    if (branch.fixed_phase >= 0 && phase != branch.fixed_phase) continue;
    keys = std::max(keys, grid.causal ? offset / branch.dilation + 1 : branch.longest_strand(tokens));
    int alike = 0;  // rows of its strand up to here
    bool leads = true;
    for (int other = 0; other <= row; ++other) {
      const int at = grid.positions[other];
      const bool same = at / branch.segment == position / branch.segment;
      alike += same && at % branch.segment % branch.dilation == phase ? 1 : 0;
      leads = leads && (other == row || !same ||
                        (branch.fixed_phase >= 0 && at % branch.segment % branch.dilation != branch.fixed_phase));
    }
    if (leads) of.segment[of.segments++] = position / branch.segment;
    most = std::max(most, alike);
  }
  of.kv_begin = branch.head_begin / grid.group;
  of.kv_count = (branch.head_begin + branch.head_count - 1) / grid.group + 1 - of.kv_begin;
  of.variants = split.variants;
  of.tiles = std::max(1, ceil_divide(most * split.together, 16));
  of.chunks = chunks_of(keys);
  if (of.segments == 0) {  // one block for each key/value head all the same, since somebody has to finish it
    of.segments = of.variants = of.chunks = 1;
    of.segment[0] = 0;
  }
  of.groups = of.chunks > kDecodeFan ? ceil_divide(of.chunks, kDecodeFan) : 0;
}

struct Sizes {
  Arena arena;
  std::size_t counters = 0, counters_bytes = 0, records = 0;
  Sizes(const Plan& plan) : arena(nullptr, 256) {
    arena.place(layout(plan, Pass::forward, false).total);
    const DecodeBounds bounds = decode_bounds(plan);
    counters_bytes = static_cast<std::size_t>(bounds.counters) * sizeof(unsigned);
    counters = arena.place(counters_bytes);
    records = arena.place(static_cast<std::size_t>(bounds.records) * decode_record_bytes(plan.problem().head_dim));
  }
};

Verdict can_run(const Plan& plan, Pass pass) {
  if (pass == Pass::backward) return no("has the forward only");
  if (Verdict verdict = fits(plan); !verdict.ok) return verdict;
  const Problem& problem = plan.problem();
  if (problem.query_rows > kDecodeRows)
    return no("splits up to {} query rows over their keys, here are {}", kDecodeRows, problem.query_rows);
  if (plan.options().dropout > 0) return no("has no dropout, p is {}", plan.options().dropout);
  for (const BranchPlan& branch : plan.branches()) {
    if (branch.mask) return no("has no block masks, here is one of blocks of {}", branch.mask->block_size());
  }
  const int needed = DecodeMemory(problem.dtype == DType::f32, decode_width(problem.head_dim)).bytes;
  const int available = devices()[static_cast<std::size_t>(problem.device.index)].shared_bytes;
  if (available < needed)
    return no("needs {} bytes of shared memory in a block, {} has {}", needed, to_string(problem.device), available);
  constexpr double kMost = 2147483647;
  if (const DecodeBounds bounds = decode_bounds(plan); bounds.blocks > kMost || bounds.counters > kMost)
    return no("starts up to {} blocks, here are {}: pass fewer entries at a time", kMost, bounds.blocks);
  return yes();
}

/// A rank's share of a larger problem takes the kernel that the whole problem takes.
Verdict accepts(const ForwardArguments& a) {
  if (a.share_of <= kDecodeRows) return yes();
  return no("splits up to {} query rows over their keys, the ranks together have {}", kDecodeRows, a.share_of);
}

void forward(const ForwardArguments& a) {
  const DeviceGuard guard(a.q.device.index);
  check_pointers(a);
  const cudaStream_t stream = static_cast<cudaStream_t>(a.call.stream);
  const Sizes sizes(a.plan);
  for_each_launch(a, {}, false, [&](Launch& launch) {
    Decode decode{launch.tensors, launch.rules, decode_grid(launch), nullptr, nullptr};
    decode.records = reinterpret_cast<float*>(a.workspace + sizes.records);
    decode.counters =
        resting_counters({stream, decode.grid.counters, reinterpret_cast<unsigned*>(a.workspace + sizes.counters),
                          decode.grid.counters * sizeof(unsigned)})
            .first;
    check(start_decode(decode, a.q.dtype, stream), "starting the kernel for few query rows");
  });
}

}  // namespace

DecodeGrid decode_grid(const Launch& launch) {
  DecodeGrid grid{};
  const Tensors& tensors = launch.tensors;
  const Schedule& schedule = launch.schedule;
  grid.heads = tensors.heads, grid.kv_heads = tensors.kv_heads, grid.group = tensors.heads / tensors.kv_heads;
  grid.branch_count = schedule.branch_count;
  grid.causal = launch.rules.causal;
  grid.first_row = schedule.ranges[0].first_row;
  for (int r = 0; r < schedule.range_count; ++r) {
    for (int i = 0; i < schedule.ranges[r].count; ++i) grid.positions[grid.rows++] = schedule.ranges[r].start + i;
  }
  grid.counters = static_cast<unsigned>(tensors.batch * tensors.kv_heads);
  for (int b = 0; b < grid.branch_count; ++b) {
    grid.rules[b] = schedule.branches[b];
    DecodeBranch& of = grid.branches[b];
    cut_branch(of, grid, grid.rules[b], tensors.tokens);
    of.strands = tensors.batch * of.kv_count * of.segments * of.variants;
    of.first_block = grid.blocks;
    of.first_counter = grid.counters;
    of.first_record = grid.records;
    const unsigned tiles = static_cast<unsigned>(of.strands * of.tiles);
    grid.blocks += tiles * static_cast<unsigned>(of.chunks);
    grid.counters += tiles * static_cast<unsigned>(of.groups);
    grid.records +=
        static_cast<std::int64_t>(tensors.batch) * grid.rules[b].head_count * grid.rows * (of.chunks + of.groups);
  }
  return grid;
}

DecodeBounds decode_bounds(const Plan& plan) {
  const Problem& problem = plan.problem();
  const int group = static_cast<int>(problem.heads / problem.kv_heads);
  const double batch = static_cast<double>(problem.batch), rows = static_cast<double>(problem.query_rows);
  DecodeBounds bounds;
  bounds.counters = batch * static_cast<double>(problem.kv_heads);
  for (const BranchPlan& planned : plan.branches()) {
    const DeviceBranch branch = branch_of<int>(planned);
    const HeadSplit split = split_heads(branch, group);
    const int longest = branch.longest_strand(static_cast<int>(problem.tokens));
    const int chunks = std::max(1, chunks_of(longest)),
              groups = chunks > kDecodeFan ? ceil_divide(chunks, kDecodeFan) : 0;
    const double segments = std::min(rows, static_cast<double>(branch.segments(static_cast<int>(problem.tokens))));
    const double tiles =
        std::max(1.0, static_cast<double>(ceil_divide(static_cast<int>(problem.query_rows) * split.together, 16)));
    const double strands = batch * static_cast<double>((planned.head_count - 1) / group + 2) * std::max(segments, 1.0) *
                           split.variants * tiles;
    bounds.blocks += strands * chunks;
    bounds.counters += strands * groups;
    bounds.records += batch * static_cast<double>(planned.head_count) * rows * (chunks + groups);
  }
  return bounds;
}

const Kernel kDecode = {.name = "cuda-decode",
                        .can_run = can_run,
                        .workspace_bytes = [](const Plan& plan, Pass, int) { return Sizes(plan).arena.used(); },
                        .forward = forward,
                        .backward = [](const BackwardArguments&) { throw Unsupported("cuda-decode has no backward"); },
                        .accepts_forward = accepts};

}  // namespace longspan::cuda
