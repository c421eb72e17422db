// Closed forms on the host: O(branches * ranges) per call, nothing uploaded.
#include "kernels/cuda/prepare.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <optional>

#include "device/device_pool.h"
#include "device/error.h"
#include "kernels/cuda/adaptive.h"
#include "kernels/cuda/counters.h"
#include "kernels/cuda/cuda.h"
#include "kernels/cuda/mask_lists.h"
#include "memory/arena.h"
#include "plan/branch.h"
#include "util/philox.h"

namespace longspan::cuda {
namespace {

using strands::ceil_divide;

constexpr std::int64_t kMost = std::numeric_limits<int>::max();
constexpr std::int64_t kItemsByLength = 1024;  // a few times what runs at once, few enough that strands stay in L2
constexpr int kMaxParts = 4;

int clamp(std::int64_t value) { return static_cast<int>(std::min(value, kMost)); }

template <class View>
Rows rows_of(const View& view) {
  return {static_cast<char*>(const_cast<void*>(static_cast<const void*>(view.data))), view.strides[0], view.strides[1],
          view.strides[2]};
}

/// Without data where there is no tensor.
RowValues values_of(const ConstTensorView& view) {
  if (!view.given()) return {};
  return {static_cast<float*>(const_cast<void*>(view.data)), view.strides[0], view.strides[1], view.strides[2]};
}

bool aligned(const ConstTensorView& view) {
  std::uint64_t bits = reinterpret_cast<std::uintptr_t>(view.data);
  for (int d = 0; d < 3; ++d) {
    if (view.sizes[d] > 1) bits |= static_cast<std::uint64_t>(view.strides[d] * size_of(view.dtype));
  }
  return bits % 16 == 0;
}

/// Lengths on the host as int64 on the GPU, whatever their stride. Pageable memory, such as an array here, is read
/// before the copy returns, so the caller's may change.
void upload_lengths(std::byte* target, const ConstTensorView& lengths, std::int64_t batch, cudaStream_t stream) {
  cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
  check(cudaStreamIsCapturing(stream, &capture), "asking whether the stream is being captured");
  if (capture != cudaStreamCaptureStatusNone) {
    throw InvalidArgument(
        "lengths", "lengths is on the host inside a graph capture: move it to the GPU, where replays can read it");
  }
  constexpr std::int64_t kAtOnce = 256;
  std::int64_t values[kAtOnce];
  for (std::int64_t first = 0; first < batch; first += kAtOnce) {
    const std::int64_t count = std::min(kAtOnce, batch - first);
    for (std::int64_t i = 0; i < count; ++i) {
      const std::int64_t place = (first + i) * lengths.strides[0];
      values[i] = lengths.dtype == DType::i64 ? static_cast<const std::int64_t*>(lengths.data)[place]
                                              : static_cast<const std::int32_t*>(lengths.data)[place];
    }
    check(cudaMemcpyAsync(target + static_cast<std::size_t>(first) * sizeof(std::int64_t), values,
                          static_cast<std::size_t>(count) * sizeof(std::int64_t), cudaMemcpyHostToDevice, stream),
          "copying lengths to the GPU");
  }
}

/// What forward and backward have in common. Ranges and work are filled in per launch.
template <class Arguments>
Launch describe(const Arguments& a, const Workspace& space, bool matrix) {
  const Plan& plan = a.plan;
  const Problem& problem = plan.problem();
  Launch launch{};
  launch.tensors.q = rows_of(a.q);
  launch.tensors.k = rows_of(a.k);
  launch.tensors.v = rows_of(a.v);
  launch.tensors.out = rows_of(a.out);
  launch.tensors.lse = values_of(a.lse);
  const Call& call = a.call;
  if (call.lengths.given()) {
    launch.tensors.lengths_64 = call.lengths.dtype == DType::i64;
    launch.tensors.lengths = call.lengths.data;
    launch.tensors.lengths_batch = call.lengths.strides[0];
    if (call.lengths.device.type == DeviceType::cpu) {
      upload_lengths(space.lengths, call.lengths, problem.batch, static_cast<cudaStream_t>(call.stream));
      launch.tensors.lengths = space.lengths;
      launch.tensors.lengths_batch = 1;
      launch.tensors.lengths_64 = true;
    }
  }
  if (call.key_mask.given()) {
    launch.rules.key_mask = static_cast<const std::uint8_t*>(call.key_mask.data);
    launch.rules.key_mask_batch = call.key_mask.strides[0], launch.rules.key_mask_row = call.key_mask.strides[1];
  }
  if (call.alibi_slopes.given()) {
    launch.rules.alibi = static_cast<const float*>(call.alibi_slopes.data);
    launch.rules.alibi_head = call.alibi_slopes.strides[2];
  }
  const DropoutRule dropout(plan.options().dropout, call.dropout_seed);
  launch.rules.dropout = dropout.drops();
  launch.rules.seed = dropout.seed;
  launch.rules.seed_pointer = launch.rules.dropout ? call.dropout_seed_pointer : nullptr;
  launch.rules.drop_threshold = dropout.threshold;
  launch.rules.keep_factor = static_cast<float>(dropout.keep_factor());
  launch.tensors.query_rows = problem.query_rows;
  launch.rules.scale = static_cast<float>(plan.scale());
  launch.rules.output_scale = static_cast<float>(plan.output_scale());
  // A large scale goes with peaked probabilities and tiny dS, which float16 would flush: it is applied before rounding.
  launch.gradients.dscore_scale = std::abs(launch.rules.scale) > 1 ? launch.rules.scale : 1.0f;
  launch.gradients.sum_scale = std::abs(launch.rules.scale) > 1 ? 1.0f : launch.rules.scale;
  launch.tensors.batch = clamp(problem.batch), launch.tensors.tokens = clamp(problem.tokens),
  launch.tensors.heads = clamp(problem.heads);
  launch.tensors.kv_heads = clamp(problem.kv_heads), launch.tensors.columns = clamp(problem.head_dim);
  launch.rules.causal = plan.options().causal;
  launch.schedule.merges = matrix && plan.merges_branches();
  launch.gradients.detached = plan.options().detached_mix;
  launch.tensors.aligned = problem.alignment >= 16;
  launch.schedule.fill = !covers_everything(plan) || problem.has_lengths;
  for (const BranchPlan& branch : plan.branches()) {
    launch.schedule.branches[launch.schedule.branch_count++] = branch_of<int>(branch);
  }
  return launch;
}

/// The pieces of a call: in the launch itself, or, where they are many or have gradients, in memory of the device.
class PieceTable {
 public:
  PieceTable(Launch& launch, const Call& call, Device device) {
    std::vector<DevicePiece> list;
    for (const KeyPiece& piece : call.pieces) {
      list.push_back({.k = rows_of(piece.k),
                      .v = rows_of(piece.v),
                      .first = clamp(piece.first),
                      .step = clamp(piece.step),
                      .rows = clamp(piece.k.rows()),
                      .kv_head = clamp(piece.kv_head),
                      .heads = clamp(piece.k.heads())});
      launch.tensors.aligned = launch.tensors.aligned && aligned(piece.k) && aligned(piece.v);
    }
    launch.tensors.piece_count = static_cast<int>(list.size());
    const bool gradients = !call.pieces.empty() && call.pieces[0].dk.given();
    if (list.size() <= kMaxPieces) std::copy(list.begin(), list.end(), launch.tensors.pieces);
    else launch.tensors.piece_table = upload(pieces_, list, call, device);
    if (!gradients) return;
    std::vector<PieceGradients> sums;
    for (const KeyPiece& piece : call.pieces) {
      if (!aligned(piece.dk) || !aligned(piece.dv)) {
        throw InvalidArgument("pieces", fmt::format("gradients of a piece at {} and {}: align their rows to 16 bytes",
                                                    piece.dk.data, piece.dv.data));
      }
      sums.push_back({rows_of(piece.dk), rows_of(piece.dv)});
    }
    launch.gradients.piece_gradients = upload(gradients_, sums, call, device);
  }

 private:
  template <class Entry>
  static const Entry* upload(std::optional<DeviceLease>& memory, const std::vector<Entry>& list, const Call& call,
                             Device device) {
    const std::size_t bytes = list.size() * sizeof(Entry);
    memory.emplace(device.index, call.stream, bytes);
    check(cudaMemcpyAsync(memory->data(), list.data(), bytes, cudaMemcpyHostToDevice,
                          static_cast<cudaStream_t>(call.stream)),
          "copying the list of pieces to the GPU");
    return reinterpret_cast<const Entry*>(memory->data());
  }
  std::optional<DeviceLease> pieces_, gradients_;
};

}  // namespace

/// Tables of one launch: items branch by branch (so that merging finds earlier branches started), then uncovered rows.
void add_work(Launch& launch, const Plan& plan, Tiling tiling) {
  launch.schedule.work_count = 0;
  launch.schedule.items = 0;
  launch.schedule.whole_tiles = launch.schedule.halved_tiles = launch.schedule.whole_each = 0;
  if (tiling.rows == 0) return;
  int finished[kMaxRanges] = {};
  launch.schedule.descending = launch.rules.causal && !tiling.by_keys;
  const auto add = [&](Work work) {
    const std::int64_t per_head = static_cast<std::int64_t>(work.segments) * work.tiles;
    work.first_item = static_cast<unsigned>(std::min(launch.schedule.items, kMost));  // more than that is refused below
    work.strands =
        static_cast<unsigned>(static_cast<std::int64_t>(work.segments) * work.head_count * launch.tensors.batch);
    work.chunk = static_cast<unsigned>(launch.rules.causal ? ceil_divide<std::int64_t>(kItemsByLength, work.tiles) : 1);
    launch.schedule.items += per_head * work.head_count * launch.tensors.batch;
    if (work.branch >= 0) finished[work.range] += clamp(per_head);
    launch.schedule.work[launch.schedule.work_count++] = work;
  };
  // Branches that merge come one after the other; only the rest may be interleaved.
  const bool in_parts = tiling.parts && launch.rules.causal && (tiling.by_keys || !launch.schedule.merges);
  const int works = std::max(1, launch.schedule.branch_count * launch.schedule.range_count);
  const int parts = in_parts ? std::clamp((kMaxWork - launch.schedule.range_count) / works, 1, kMaxParts) : 1;
  for (int part = 0; part < parts; ++part) {
    for (int b = 0; b < launch.schedule.branch_count; ++b) {
      const DeviceBranch& branch = launch.schedule.branches[b];
      if (tiling.branch != kEveryBranch && tiling.branch != b) continue;
      // With lengths a branch that N leaves out may come in: segments longer than N are longer than every length, so
      // no.
      if (!branch.active(launch.tensors.tokens)) continue;
      const std::int64_t longest = branch.longest_strand(launch.tensors.tokens);
      for (int r = 0; r < launch.schedule.range_count; ++r) {
        const DeviceRange& range = launch.schedule.ranges[r];
        const int first = range.start / branch.segment, last = (range.start + range.count - 1) / branch.segment;
        const std::int64_t rows =
            tiling.by_keys ? longest : std::min(longest, ceil_divide<std::int64_t>(range.count, branch.dilation));
        std::int64_t first_tile = 0, tiles = ceil_divide<std::int64_t>(rows, tiling.rows);
        if (launch.schedule.lists[b].places) {  // its tiles are those of the strand, not of the range
          const bool by_place =
              tiling.by_keys || (tiling.splits && slots_of(plan, static_cast<std::size_t>(b), tiling.rows) > 0);
          tiles = by_place ? launch.schedule.lists[b].place_count : ceil_divide<std::int64_t>(longest, tiling.rows);
          if (!by_place && first == last) {
            const std::int64_t before = range.start - static_cast<std::int64_t>(first) * branch.segment;
            first_tile = std::max<std::int64_t>(0, before - branch.dilation + 1) / branch.dilation / tiling.rows;
            tiles =
                std::min(tiles, ceil_divide<std::int64_t>(
                                    ceil_divide<std::int64_t>(before + range.count, branch.dilation), tiling.rows)) -
                first_tile;
          }
        }
        const std::int64_t place = launch.schedule.descending ? parts - 1 - part : part;
        const std::int64_t begin = first_tile + tiles * place / parts, end = first_tile + tiles * (place + 1) / parts;
        if (begin >= end) continue;
        add({.branch = b,
             .range = r,
             .head_begin = branch.head_begin,
             .head_count = branch.head_count,
             .first_segment = first,
             .segments = last - first + 1,
             .first_tile = clamp(begin),
             .tiles = clamp(end - begin),
             .finished_before = finished[r]});
      }
    }
  }
  if (launch.schedule.fill && tiling.fills && !tiling.by_keys) {
    for (int r = 0; r < launch.schedule.range_count; ++r) {
      add({.branch = -1,
           .range = r,
           .head_count = launch.tensors.heads,
           .tiles = strands::ceil_divide(launch.schedule.ranges[r].count, kFillRows)});
    }
  }
  if (launch.schedule.items > kMost) {
    throw Unsupported(fmt::format("{} work items on {}: up to {} run in one launch; pass query_ranges in several calls",
                                  launch.schedule.items, to_string(plan.problem().device), kMost));
  }
}

namespace {

/// For what is found once for all queries of a call.
Launch with_all_ranges(const Launch& launch, const Plan& plan, std::span<const RowRange> ranges) {
  Launch all = launch;
  all.schedule.range_count = 0;
  std::int64_t first_row = 0;
  for (const RowRange& range : ranges) {
    if (range.count == 0) continue;
    if (all.schedule.range_count == kMaxRanges)
      throw Unsupported(
          fmt::format("{} query ranges with an adaptive mask on {}: up to {} run there; join adjacent ones",
                      ranges.size(), to_string(plan.problem().device), kMaxRanges));
    all.schedule.ranges[all.schedule.range_count++] = {clamp(range.start), clamp(range.count), first_row};
    first_row += range.count;
  }
  return all;
}

/// Lists of block masks for the tiles of a launch (or for block rows, where rows are all that a kernel knows). Fixed
/// masks have theirs already, adaptive ones are chosen here.
template <class Arguments>
void add_lists(Launch& launch, const Arguments& a, const Workspace& space, Tiling tiling) {
  const Plan& plan = a.plan;
  const auto& branches = plan.branches();
  launch.schedule.listed =
      std::any_of(branches.begin(), branches.end(), [](const BranchPlan& branch) { return branch.mask.has_value(); });
  if (!launch.schedule.listed) return;
  const auto stream = static_cast<cudaStream_t>(a.call.stream);
  const int device = plan.problem().device.index;
  cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
  check(cudaStreamIsCapturing(stream, &capture), "asking whether the stream is being captured");
  std::byte* adaptive = space.adaptive;
  const int shared_bytes = devices()[static_cast<std::size_t>(device)].shared_bytes;
  for (std::size_t b = 0; b < branches.size(); ++b) {
    const BranchPlan& branch = branches[b];
    if (!branch.mask) continue;
    const int rows = tiling.rows > 0 ? tiling.rows : branch.mask->block_size();
    const bool splits = tiling.splits && (tiling.by_keys || slots_of(plan, b, rows) > 0);
    const ListShape shape{rows, tiling.by_keys, splits, launch.rules.causal};
    if (branch.adaptive_density > 0) {
      const AdaptiveShape chosen = adaptive_shape(plan, branch);
      const Launch all = with_all_ranges(launch, plan, a.ranges);
      const AdaptiveCall call{all, chosen, static_cast<int>(b), plan.problem().dtype, shared_bytes, adaptive, stream};
      check(adaptive_lists(call, shape, tiling.masks_chosen, launch.schedule.lists[b]),
            "starting the kernels that choose blocks and list them");
      adaptive += AdaptivePlaces(chosen).total;
      continue;
    }
    launch.schedule.lists[b] = lists_of(*branch.mask, shape, device, capture != cudaStreamCaptureStatusNone);
    if (branch.mask_entry_stride > 0)
      launch.schedule.lists[b].entry_places = clamp(branch.mask_entry_stride) * launch.schedule.lists[b].head_places;
  }
}

void split_ranges(Launch& launch, const Plan& plan, std::span<const RowRange> ranges, Tiling tiling,
                  const std::function<void(Launch&)>& run) {
  const std::size_t at_once = tiling.rows > 0 ? ranges_per_launch(plan) : kMaxRanges;
  std::int64_t first_row = 0;
  const auto run_part = [&] {
    if (launch.schedule.range_count == 0) return;
    add_work(launch, plan, tiling);
    run(launch);
    launch.schedule.range_count = 0;
  };
  launch.schedule.range_count = 0;
  for (const RowRange& range : ranges) {
    if (range.count == 0) continue;  // else calls of one range that has rows would not be known as such everywhere
    launch.schedule.ranges[launch.schedule.range_count++] = {clamp(range.start), clamp(range.count), first_row};
    first_row += range.count;
    if (static_cast<std::size_t>(launch.schedule.range_count) == at_once) run_part();
  }
  run_part();
}

/// A part of a forward: branch by branch, since each has windows of its own and later ones go on from earlier ones.
void split_windows(Launch& launch, const ForwardArguments& a, Tiling tiling, const std::function<void(Launch&)>& run) {
  if (a.part->first && tiling.fills) {
    tiling.branch = kNoBranch;
    split_ranges(launch, a.plan, a.ranges, tiling, run);
  }
  tiling.fills = false;
  for (int b = 0; b < launch.schedule.branch_count; ++b) {
    tiling.branch = b;
    std::int64_t first_row = 0;
    for (const RowRange& range : a.ranges) {
      for (const RowRange& window : a.part->windows[static_cast<std::size_t>(b)]) {
        const std::int64_t begin = std::max(range.start, window.start),
                           end = std::min(range.start + range.count, window.start + window.count);
        if (begin >= end) continue;
        launch.schedule.range_count = 1;
        launch.schedule.ranges[0] = {clamp(begin), clamp(end - begin), first_row + begin - range.start};
        add_work(launch, a.plan, tiling);
        run(launch);
      }
      first_row += range.count;
    }
  }
}

}  // namespace

std::size_t ranges_per_launch(const Plan& plan) {
  return std::clamp<std::size_t>(kMaxWork / (plan.branches().size() + 1), 1, kMaxRanges);
}

bool covers_everything(const Plan& plan) {
  const auto dense = [&](const BranchPlan& branch) {
    return branch.dilation == 1 && branch.active(plan.problem().tokens);
  };
  const auto& branches = plan.branches();
  if (plan.merges_branches()) return std::any_of(branches.begin(), branches.end(), dense);
  return std::all_of(branches.begin(), branches.end(), dense);
}

bool made_by_calls(const Plan& plan, std::size_t branch) {
  const auto& blocks = plan.pattern().branches()[branch].mask;
  const bool drawn = plan.problem().has_lengths && blocks && blocks->depends_on_length(plan.options().causal);
  return plan.branches()[branch].adaptive_density > 0 || drawn;
}

bool splits_lists(const Plan& plan) {
  if (plan.options().deterministic) return false;
  for (std::size_t b = 0; b < plan.branches().size(); ++b) {
    const auto& mask = plan.branches()[b].mask;
    if (mask && (made_by_calls(plan, b) || has_long_columns(*mask))) return true;
  }
  return false;
}

std::int64_t slots_of(const Plan& plan, std::size_t branch, int tile_rows) {
  const auto& mask = plan.branches()[branch].mask;
  if (!mask || plan.merges_branches() || made_by_calls(plan, branch)) return 0;
  return slots_of(*mask, {.tile_rows = tile_rows, .splits = true, .causal = plan.options().causal});
}

bool cuts_lists(const Plan& plan) {
  bool long_ones = false;
  for (std::size_t b = 0; b < plan.branches().size(); ++b) {
    const auto& mask = plan.branches()[b].mask;
    if (mask && made_by_calls(plan, b)) return false;
    long_ones = long_ones || (mask && has_long_columns(*mask));
  }
  return long_ones;
}

std::int64_t longest_sum(const Plan& plan) {
  const std::int64_t tokens = plan.problem().tokens;
  std::int64_t longest = 0;
  for (std::size_t b = 0; b < plan.branches().size(); ++b) {
    const BranchPlan& branch = plan.branches()[b];
    if (!branch.active(tokens)) continue;
    const std::int64_t strand = branch_of(branch).longest_strand(tokens);
    const bool listed = branch.mask && strand > kRowsOfSum && !made_by_calls(plan, b);
    longest = std::max(longest, listed ? std::min(strand, most_listed_rows(*branch.mask)) : strand);
  }
  return longest;
}

bool sums_keys(const Plan& plan, std::size_t ranges) {
  return plan.merges_branches() || plan.problem().heads != plan.problem().kv_heads || ranges != 1 || splits_lists(plan);
}

bool has_key_sums(const BackwardArguments& a) {
  const Workspace space = layout(a.plan, Pass::backward, true);
  return space.sums_keys || a.plan.problem().has_piece_gradients || !sums_keys(a.plan, a.ranges.size());
}

Workspace layout(const Plan& plan, Pass pass, bool matrix, std::byte* memory) {
  const Problem& problem = plan.problem();
  Workspace space;
  Arena arena(memory, 256);
  const std::int64_t queries = problem.batch * problem.heads * problem.query_rows,
                     keys = problem.batch * problem.kv_heads * problem.tokens, columns = problem.head_dim,
                     deltas = plan.options().detached_mix ? static_cast<std::int64_t>(plan.branches().size()) : 1;
  if (problem.has_lengths) space.lengths = arena.take(problem.batch * static_cast<std::int64_t>(sizeof(std::int64_t)));
  space.adaptive = arena.take(0);
  for (const BranchPlan& branch : plan.branches())  // one after the other
    if (branch.adaptive_density > 0) arena.place(AdaptivePlaces(adaptive_shape(plan, branch)).total);
  if (pass == Pass::backward) {
    space.delta = arena.take<float>(queries * deltas * (matrix ? 2 : 1));
    if (matrix) space.dq = arena.take<float>(queries * columns);
    space.sums_keys =
        matrix && !problem.has_piece_gradients && sums_keys(plan, problem.query_rows == problem.tokens ? 1 : 2);
    if (space.sums_keys) space.dk = arena.take<float>(keys * columns), space.dv = arena.take<float>(keys * columns);
  } else if (matrix && plan.merges_branches()) {
    const std::int64_t words = 1 + kMaxWork * problem.batch * problem.heads;  // a range, or a branch in a range, each
    space.counters_bytes = static_cast<std::size_t>(words) * sizeof(unsigned);
    space.counters = arena.take<unsigned>(words);
    space.state_sums = arena.take<float>(queries * 2);
    space.state = arena.take<float>(queries * columns);
  }
  space.total = arena.used();
  return space;
}

void halve_last_tiles(Launch& launch, int multiprocessors, int blocks_at_once) {
  if (launch.schedule.merges) return;  // items of earlier branches are counted there
  std::int64_t tiles = 0;
  for (int w = 0; w < launch.schedule.work_count; ++w) {
    const Work& work = launch.schedule.work[w];
    if (work.branch >= 0) tiles += static_cast<std::int64_t>(work.strands) * work.tiles;
  }
  const std::int64_t last = tiles % multiprocessors;
  if (tiles > static_cast<std::int64_t>(blocks_at_once) * multiprocessors || 2 * last > multiprocessors) return;
  launch.schedule.whole_tiles = static_cast<unsigned>(tiles - last);
  launch.schedule.halved_tiles = static_cast<unsigned>(last);
  launch.schedule.whole_each = static_cast<unsigned>(tiles / multiprocessors);
  launch.schedule.items += last;
}

void for_each_writer(const Launch& launch, int group, const std::function<void(const Launch&)>& run) {
  Launch one = launch;
  one.schedule.work_count = 1;
  for (int w = 0; w < launch.schedule.work_count; ++w) {
    const Work& all = launch.schedule.work[w];
    for (int member = 0; member < group; ++member) {
      Work& work = one.schedule.work[0] = all;
      const int skip = (member - all.head_begin % group + group) % group;  // to the first head that is this member
      work.head_begin = all.head_begin + skip;
      work.head_step = group;
      work.head_count = skip < all.head_count ? (all.head_count - skip - 1) / group + 1 : 0;
      work.first_item = 0;
      work.strands = static_cast<unsigned>(work.segments * work.head_count * launch.tensors.batch);
      one.schedule.items = static_cast<std::int64_t>(work.strands) * work.tiles;
      if (one.schedule.items > 0) run(one);
    }
  }
}

void for_each_launch(const ForwardArguments& a, Tiling tiling, bool matrix, const std::function<void(Launch&)>& run) {
  const Workspace space = layout(a.plan, Pass::forward, matrix, a.workspace);
  Launch launch = describe(a, space, matrix);
  const PieceTable pieces(launch, a.call, a.q.device);
  launch.scratch.state_sums = space.state_sums;
  launch.scratch.state = space.state;
  add_lists(launch, a, space, tiling);
  const auto run_part = [&](Launch& part) {
    if (part.schedule.merges) {
      const CounterRequest request{static_cast<cudaStream_t>(a.call.stream),
                                   1 + static_cast<std::int64_t>(part.schedule.range_count) *
                                           part.schedule.branch_count * part.tensors.batch * part.tensors.heads,
                                   space.counters, space.counters_bytes};
      const Counters counters = tiling.restores ? resting_counters(request) : cleared_counters(request);
      part.scratch.leaving = counters.leaving;
      part.scratch.ticket = counters.first;
      part.scratch.finished = part.scratch.ticket + 1;
    }
    run(part);
  };
  if (a.part) split_windows(launch, a, tiling, run_part);
  else split_ranges(launch, a.plan, a.ranges, tiling, run_part);
}

void for_each_launch(const BackwardArguments& a, Tiling tiling, bool matrix, const std::function<void(Launch&)>& run) {
  const Workspace space = layout(a.plan, Pass::backward, matrix, a.workspace);
  Launch launch = describe(a, space, matrix);
  const PieceTable pieces(launch, a.call, a.q.device);
  launch.gradients.dout = rows_of(a.dout);
  launch.gradients.dq = rows_of(a.dq);
  launch.gradients.dk = rows_of(a.dk);
  launch.gradients.dv = rows_of(a.dv);
  launch.gradients.dlse = values_of(a.call.dlse);
  launch.gradients.delta = space.delta;
  if (matrix) {
    launch.gradients.dq_sum = space.dq;
    launch.gradients.sum_keys =
        launch.gradients.piece_gradients || a.packed ||
        sums_keys(a.plan, a.plan.problem().query_rows == a.plan.problem().tokens ? a.ranges.size() : 2);
    if (launch.gradients.sum_keys && !launch.gradients.piece_gradients) {
      launch.gradients.dk_sum = space.dk;
      launch.gradients.dv_sum = space.dv;
    }
  }
  add_lists(launch, a, space, tiling);
  split_ranges(launch, a.plan, a.ranges, tiling, run);
}

}  // namespace longspan::cuda
