// The kernel for few query rows: what it takes, its grid, its workspace.
#include "kernels/cuda/decode.h"

#include <algorithm>

#include "device/device_pool.h"
#include "device/error.h"
#include "kernels/cuda/call.h"
#include "kernels/cuda/cuda.h"
#include "kernels/cuda/prepare.h"
#include "kernels/strand_cache.h"
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
}

struct Sizes {
  Arena arena;
  std::size_t records = 0;
  Sizes(const Plan& plan) : arena(nullptr, 256) {
    arena.place(layout(plan, Pass::forward, false).total);
    records = arena.place(static_cast<std::size_t>(decode_bounds(plan).records) *
                          decode_record_bytes(plan.problem().head_dim));
  }
};

DecodeMemory memory_of(const Problem& problem) { return {problem.dtype == DType::f32, decode_width(problem.head_dim)}; }

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
  const DecodeMemory memory = memory_of(problem);
  const int needed = memory.bytes + (memory.warps - 1) * 16 * memory.pitch;  // with a tile of Q for each warp
  const int available = devices()[static_cast<std::size_t>(problem.device.index)].shared_bytes;
  if (available < needed)
    return no("needs {} bytes of shared memory in a block, {} has {}", needed, to_string(problem.device), available);
  constexpr double kMost = 2147483647;
  const double results = static_cast<double>(problem.batch * problem.heads * problem.query_rows);
  if (const double blocks = std::max(decode_bounds(plan).blocks, results); blocks > kMost)
    return no("starts up to {} blocks, here are {}: pass fewer entries at a time", kMost, blocks);
  return yes();
}

bool overlaps(int device) { return devices()[static_cast<std::size_t>(device)].compute >= 90; }

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
    const Decode decode{launch.tensors, launch.rules, decode_grid(launch, memory_of(a.plan.problem()).warps),
                        reinterpret_cast<float*>(a.workspace + sizes.records)};
    check(start_decode(decode, a.q.dtype, overlaps(a.q.device.index), stream),
          "starting the kernel for few query rows");
  });
}

}  // namespace

DecodeGrid decode_grid(const Launch& launch, int warps) {
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
  grid.last_position = *std::max_element(grid.positions, grid.positions + grid.rows);
  int tiles = 0;
  for (int b = 0; b < grid.branch_count; ++b) {
    grid.rules[b] = schedule.branches[b];
    cut_branch(grid.branches[b], grid, grid.rules[b], tensors.tokens);
    tiles = std::max(tiles, grid.branches[b].tiles);
  }
  grid.warps = warps;
  grid.shares = warps > 1 && tiles > 2;
  for (int b = 0; b < grid.branch_count; ++b) {
    DecodeBranch& of = grid.branches[b];
    of.strands = tensors.batch * of.kv_count * of.segments * of.variants;
    of.block_tiles = grid.shares ? ceil_divide(of.tiles, warps) : of.tiles;
    of.block_chunks = grid.shares ? of.chunks : ceil_divide(of.chunks, warps);
    of.first_block = grid.blocks;
    of.first_record = grid.records;
    grid.blocks += static_cast<unsigned>(of.strands * of.block_tiles) * static_cast<unsigned>(of.block_chunks);
    grid.records += static_cast<std::int64_t>(tensors.batch) * grid.rules[b].head_count * grid.rows * of.chunks;
  }
  return grid;
}

DecodeBounds decode_bounds(const Plan& plan) {
  const Problem& problem = plan.problem();
  const int group = static_cast<int>(problem.heads / problem.kv_heads);
  const double batch = static_cast<double>(problem.batch), rows = static_cast<double>(problem.query_rows);
  DecodeBounds bounds;
  for (const BranchPlan& planned : plan.branches()) {
    const DeviceBranch branch = branch_of<int>(planned);
    const HeadSplit split = split_heads(branch, group);
    const int chunks = chunks_of(branch.longest_strand(static_cast<int>(problem.tokens)));
    const double segments = std::min(rows, static_cast<double>(branch.segments(static_cast<int>(problem.tokens))));
    const double tiles =
        std::max(1.0, static_cast<double>(ceil_divide(static_cast<int>(problem.query_rows) * split.together, 16)));
    bounds.blocks += batch * static_cast<double>((planned.head_count - 1) / group + 2) * std::max(segments, 1.0) *
                     split.variants * tiles * chunks;
    bounds.records += batch * static_cast<double>(planned.head_count) * rows * chunks;
  }
  return bounds;
}

void append_token(const StrandCache& cache, const TokenRows& key, const TokenRows& value, int device, void* stream) {
  if (units_of(cache) == 0) return;
  const DeviceGuard guard(device);
  const auto bits = [](const TokenRows& token) {
    return reinterpret_cast<std::uintptr_t>(token.data) | static_cast<std::uintptr_t>(token.entry | token.head);
  };
  const std::uintptr_t all = bits(key) | bits(value) | reinterpret_cast<std::uintptr_t>(cache.rows) |
                             static_cast<std::uintptr_t>(cache.row_bytes);
  check(start_append(cache, key, value, all % 16 == 0, static_cast<cudaStream_t>(stream)),
        "starting the kernel that appends a token");
}

const Kernel kDecode = {.name = "cuda-decode",
                        .can_run = can_run,
                        .workspace_bytes = [](const Plan& plan, Pass, int) { return Sizes(plan).arena.used(); },
                        .forward = forward,
                        .backward = [](const BackwardArguments&) { throw Unsupported("cuda-decode has no backward"); },
                        .accepts_forward = accepts};

}  // namespace longspan::cuda
