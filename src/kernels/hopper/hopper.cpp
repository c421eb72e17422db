// The Hopper forward on the host: what it can run, which tile shape, and the maps for the copy engine.
#include "kernels/hopper/hopper.h"

#include <cudaTypedefs.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "kernels/cuda/call.h"
#include "kernels/cuda/cuda.h"
#include "kernels/cuda/error.h"
#include "kernels/cuda/prepare.h"
#include "kernels/hopper/kernels.h"

namespace longspan::hopper {
namespace {

constexpr int kCompute = 90;          // instructions of sm_90a run on 9.0 and on nothing else, newer or older
constexpr int kOldestDriver = 12010;  // whose launches take more than 4 KB of parameters
constexpr int kShortStrand = 1024;
constexpr int kChunk = 32;             // strands whose tiles are interleaved under a causal mask, longest first
constexpr int kTurns = 2;              // items for each block that are dealt out in turn whatever their length
constexpr int kSharedBytes = 232'000;  // most of any shape
constexpr std::int64_t kMost = std::numeric_limits<int>::max();

using Encode = PFN_cuTensorMapEncodeTiled_v12000;

/// The driver's function that makes maps, or null; it is asked for at run time so that nothing links the driver.
Encode encoder() {
  static const Encode found = [] {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult result = cudaDriverEntryPointSymbolNotFound;
#if CUDART_VERSION >= 12050
    const cudaError_t status =
        cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &result);
#else
    const cudaError_t status = cudaGetDriverEntryPoint("cuTensorMapEncodeTiled", &function, cudaEnableDefault, &result);
#endif
    if (status != cudaSuccess) cudaGetLastError();  // this query's own; errors before it are the caller's
    return result == cudaDriverEntryPointSuccess ? reinterpret_cast<Encode>(function) : nullptr;
  }();
  return found;
}

/// Rows of a tensor as the grid of one dilation (launch.h), phases of one kind; false if the copy engine cannot address
/// it.
bool encode(CUtensorMap& map, const ConstTensorView& view, std::int64_t dilation, std::int64_t rows, int box_rows) {
  const std::uint64_t element = static_cast<std::uint64_t>(size_of(view.dtype));
  const auto extent = [](std::int64_t size) { return static_cast<cuuint64_t>(std::max<std::int64_t>(size, 1)); };
  const cuuint64_t sizes[5] = {extent(view.columns()), extent(rows), extent(dilation), extent(view.heads()),
                               extent(view.batch())};
  const std::int64_t steps[4] = {view.strides[1] * dilation, view.strides[1], view.strides[2], view.strides[0]};
  cuuint64_t strides[4];
  for (int d = 0; d < 4; ++d) {
    if (sizes[d + 1] > 1 && steps[d] <= 0) return false;
    strides[d] = sizes[d + 1] > 1 ? static_cast<cuuint64_t>(steps[d]) * element : 16;
  }
  const cuuint32_t box[5] = {kBlockColumns, static_cast<cuuint32_t>(box_rows), 1, 1, 1}, every[5] = {1, 1, 1, 1, 1};
  // A promotion to 256 bytes would fetch neighbouring heads that nobody wants.
  return encoder()(&map, view.dtype == DType::bf16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
                   5, const_cast<void*>(view.data), sizes, strides, box, every, CU_TENSOR_MAP_INTERLEAVE_NONE,
                   CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
                   CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

std::int64_t dilation_of(const BranchPlan& branch) { return std::min(branch.dilation, kMost); }

/// Maps of a branch: one, or two where phases differ in length.
int maps_of(const BranchPlan& branch, const Problem& problem) {
  const std::int64_t dilation = dilation_of(branch);
  return problem.tokens % dilation == 0 && problem.query_rows % dilation == 0 ? 1 : 2;
}

bool make_maps(HopperLaunch& launch, const ForwardArguments& a, const Choice& choice) {
  const Problem& problem = a.plan.problem();
  int count = 0, index = 0;
  for (const BranchPlan& branch : a.plan.branches()) {
    const std::int64_t dilation = dilation_of(branch);
    launch.first_map[index] = count;
    launch.longer_queries[index] = static_cast<int>(problem.query_rows % dilation);
    launch.longer_keys[index++] = static_cast<int>(problem.tokens % dilation);
    for (int kind = 0; kind < maps_of(branch, problem); ++kind, ++count) {
      const auto rows = [&](std::int64_t all) { return all / dilation + (kind == 0 && all % dilation != 0); };
      if (!encode(launch.q[count], a.q, dilation, rows(problem.query_rows), kGroupRows) ||
          !encode(launch.out[count], a.out, dilation, rows(problem.query_rows), kGroupRows) ||
          !encode(launch.k[count], a.k, dilation, rows(problem.tokens), choice.keys) ||
          !encode(launch.v[count], a.v, dilation, rows(problem.tokens), choice.keys))
        return false;
    }
  }
  return true;
}

/// Whether rows of q are all positions in order.
bool is_whole(const cuda::Launch& base) {
  return base.range_count == 1 && base.ranges[0].start == 0 && base.ranges[0].first_row == 0 &&
         base.ranges[0].count == base.tokens && base.query_rows == base.tokens;
}

/// Whether uncovered rows are whole phases of every head, so that boxes of zeros fill them.
bool fills_by_boxes(const ForwardArguments& a, const cuda::Launch& base) {
  const std::int64_t tokens = a.plan.problem().tokens;
  if (a.plan.problem().head_dim > kWidestWithZeros) return false;
  if (!base.fill || base.merges || base.lengths || !is_whole(base)) return false;
  if (static_cast<double>(base.batch) * base.heads * static_cast<double>(tokens) > 1e9) return false;
  return std::all_of(a.plan.branches().begin(), a.plan.branches().end(), [&](const BranchPlan& branch) {
    return branch.active(tokens) && branch.dilation <= tokens &&
           (branch.segment >= tokens || branch.segment % branch.dilation == 0);
  });
}

int multiprocessors(const Problem& problem) {
  return cuda::devices()[static_cast<std::size_t>(problem.device.index)].multiprocessors;
}

/// Items of equal length, or few of them, are dealt out in turn; others are taken as blocks become free, which takes a
/// counter.
bool takes_turns(const Plan& plan) {
  const Problem& problem = plan.problem();
  if (plan.merges_branches()) return false;
  const Choice choice = choose(plan);
  if (plan.items(choice.groups * kGroupRows) <= kTurns * choice.packed * multiprocessors(problem)) return true;
  if (plan.options().causal || problem.has_lengths) return false;
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

std::size_t workspace_bytes(const Plan& plan, Pass pass, int) {
  const std::size_t shared = cuda::layout(plan, pass, true).total;
  return shared + (takes_turns(plan) || plan.merges_branches() ? 0 : 256);
}

Verdict can_run(const Plan& plan, Pass pass) {
  if (Verdict verdict = cuda::fits(plan); !verdict.ok) return verdict;
  const Problem& problem = plan.problem();
  const auto& device = cuda::devices()[static_cast<std::size_t>(problem.device.index)];
  if (device.compute != kCompute)
    return no("is made for compute capability 9.0 (Hopper), {} has {}.{}", to_string(problem.device),
              device.compute / 10, device.compute % 10);
  if (pass == Pass::backward) return no("has the forward only");
  if (problem.dtype != DType::bf16 && problem.dtype != DType::f16)
    return no("multiplies 16-bit numbers, tensors are {}", name_of(problem.dtype));
  if (problem.alignment < 16)
    return no("loads rows by the copy engine: addresses and strides must be multiples of 16 bytes, here of {}",
              problem.alignment);
  if (problem.has_key_mask) return no("has no key_mask");
  if (problem.has_alibi) return no("has no ALiBi");
  if (problem.has_pieces) return no("takes keys in one piece");
  if (plan.options().dropout > 0) return no("has no dropout, here it is {}", plan.options().dropout);
  if (!(static_cast<float>(plan.scale()) > 0))
    return no("finds maxima before scaling: scale must be positive in float32, here it is {}", plan.scale());
  if (problem.query_rows > kMost) return no("counts rows in 32 bits, there are {}", problem.query_rows);
  int maps = 0;
  for (const BranchPlan& branch : plan.branches()) maps += maps_of(branch, problem);
  if (maps > kMaxMaps)
    return no("holds {} views of rows, this pattern needs {} (two for each dilation that does not divide {} rows)",
              kMaxMaps, maps, problem.tokens);
  if (device.shared_bytes < kSharedBytes)
    return no("needs {} bytes of shared memory in a block, {} has {}", kSharedBytes, to_string(problem.device),
              device.shared_bytes);
  int driver = 0;
  cuda::check(cudaDriverGetVersion(&driver), "asking for the driver's version");
  if (driver < kOldestDriver)
    return no("has 12 KB of launch parameters: they need a driver of CUDA 12.1 or newer, this one is of {}.{}",
              driver / 1000, driver % 1000 / 10);
  if (!encoder()) return no("needs a driver that makes tensor maps (CUDA 12.0 or newer)");
  return yes();
}

void forward(const ForwardArguments& a) {
  const cuda::DeviceGuard guard(a.q.device.index);
  const Problem& problem = a.plan.problem();
  Choice choice = choose(a.plan);
  HopperLaunch launch{};
  if (problem.batch == 0 || problem.tokens == 0 || problem.query_rows == 0) return;
  cuda::check_pointers(a);
  if (!make_maps(launch, a, choice)) return cuda::forward_matrix(a);  // rows that repeat or run backwards in memory
  const bool counts = !takes_turns(a.plan);
  const cudaStream_t stream = static_cast<cudaStream_t>(a.call.stream);
  cuda::for_each_launch(a, {choice.groups * kGroupRows, false}, true, [&](cuda::Launch& base) {
    if (base.items == 0) return;
    launch.base = base;
    launch.items = static_cast<unsigned>(base.items);
    for (int w = base.work_count - 1; w >= 0 && base.work[w].branch < 0; --w)
      launch.items = static_cast<unsigned>(base.work[w].first_item);
    launch.query_group = base.heads / base.kv_heads;
    launch.whole = is_whole(base);
    launch.fill_boxes = fills_by_boxes(a, base);
    launch.fill_items = static_cast<unsigned>(base.items) - launch.items;
    for (int w = 0; w < base.work_count && base.causal; ++w) launch.base.work[w].chunk = kChunk;
    launch.packed = choice.packed;
    const unsigned taken =
        (launch.items + static_cast<unsigned>(choice.packed) - 1) / static_cast<unsigned>(choice.packed);
    choice.blocks =
        static_cast<int>(std::min<std::int64_t>(multiprocessors(problem), std::max(taken, launch.fill_items)));
    launch.ticket = base.ticket;
    if (counts && !launch.ticket) {
      launch.ticket = reinterpret_cast<unsigned*>(a.workspace + cuda::layout(a.plan, Pass::forward, true).total);
      cuda::check(cudaMemsetAsync(launch.ticket, 0, sizeof(unsigned), stream), "clearing a counter");
    }
    // Off a counter items are better taken late, but strands of few tiles leave little time to look them up.
    launch.ahead = !launch.ticket ? 4 : choice.groups == 4 ? 3 : 2;
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
  for (const int columns : {48, 64, 96, 128, 192, 256}) {
    choice.columns = columns;
    if (problem.head_dim <= columns) break;
  }
  if (choice.columns > 192) set(2, 48, 2);
  else if (choice.columns > 128) set(2, 80, 2);
  else if (choice.columns > 64) set(3, 80, 3);
  else if (choice.strand <= kShortStrand || suits_wide_tiles(plan)) set(4, 64, plan.merges_branches() ? 4 : 6);
  else set(3, 128, plan.merges_branches() ? 3 : 4);
  // Branches that merge wait for one another, which strands of one block must not.
  if (!plan.merges_branches() && longest * 2 <= choice.groups * kGroupRows)
    choice.packed = choice.groups / static_cast<int>(std::ceil(longest / kGroupRows));
  return choice;
}

std::string to_string(const Choice& choice) {
  return fmt::format("{} x {} tiles for strands of about {} rows{}, head dim as {}, {} stages",
                     choice.groups * kGroupRows, choice.keys, choice.strand,
                     choice.packed > 1 ? fmt::format(", {} to a tile", choice.packed) : "", choice.columns,
                     choice.stages);
}

const Kernel kForward = {"hopper-wgmma", can_run, workspace_bytes, forward, [](const BackwardArguments&) {
                           throw Unsupported("hopper-wgmma has the forward only: leave the kernel to be chosen");
                         }};

}  // namespace longspan::hopper
