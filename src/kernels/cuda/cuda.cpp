// The CUDA engine: which GPUs there are, what they can run, and the calls.
#include "kernels/cuda/cuda.h"

#include <cuda_runtime_api.h>

#include <algorithm>

#include "device/error.h"
#include "kernels/cuda/adaptive.h"
#include "kernels/cuda/call.h"
#include "kernels/cuda/counters.h"
#include "kernels/cuda/kernels.h"
#include "kernels/cuda/prepare.h"
#include "memory/arena.h"

namespace longspan::cuda {
namespace {

constexpr int kOldestCompute = 80;
constexpr std::int64_t kMostInGrid = 65535;  // thread blocks in y and z

struct Machine {
  std::vector<DeviceFacts> devices;
  std::string why_none;
};

Machine look() {
  Machine machine;
  int count = 0;
  const cudaError_t status = cudaGetDeviceCount(&count);
  if (status != cudaSuccess || count == 0) {
    cudaGetLastError();
    machine.why_none =
        status == cudaErrorInsufficientDriver
            ? "no NVIDIA driver was found, or it is older than the CUDA run time of this build: install or update it"
        : status == cudaErrorNoDevice || count == 0
            ? "no NVIDIA GPU was found: check nvidia-smi and CUDA_VISIBLE_DEVICES"
            : fmt::format("CUDA does not start: {}", cudaGetErrorString(status));
    return machine;
  }
  for (int device = 0; device < count; ++device) {
    cudaDeviceProp properties;
    if (cudaGetDeviceProperties(&properties, device) != cudaSuccess) {
      cudaGetLastError();
      continue;
    }
    machine.devices.push_back({properties.name, properties.major * 10 + properties.minor,
                               properties.multiProcessorCount, static_cast<int>(properties.sharedMemPerBlockOptin),
                               properties.totalGlobalMem});
  }
  return machine;
}

const Machine& machine() {
  static const Machine found = look();
  return found;
}

}  // namespace

Verdict fits(const Plan& plan) {
  const Problem& problem = plan.problem();
  if (problem.device.type != DeviceType::cuda) return no("runs on GPUs, tensors are on {}", to_string(problem.device));
  const auto& found = devices();
  if (found.empty()) return no("has no GPU to run on: {}", why_none());
  if (problem.device.index < 0 || problem.device.index >= static_cast<int>(found.size())) {
    return no("does not find {}: this machine has {} GPUs", to_string(problem.device), found.size());
  }
  const int compute = found[static_cast<std::size_t>(problem.device.index)].compute;
  if (compute < kOldestCompute)
    return no("needs compute capability 8.0 (Ampere), {} has {}.{}", to_string(problem.device), compute / 10,
              compute % 10);
  if (problem.dtype == DType::f64) return no("sums in float32, tensors are f64");
  if (problem.head_dim % 8 != 0) {
    return no("head_dim {} on {}: multiples of 8 up to 256 run there; use {} with zero columns, or the CPU",
              problem.head_dim, to_string(problem.device), (problem.head_dim + 7) / 8 * 8);
  }
  if (problem.tokens >= std::int64_t{1} << 31) return no("counts rows in 32 bits, there are {}", problem.tokens);
  if (plan.branches().size() > kMaxBranches)
    return no("takes up to {} branches, the pattern has {}", kMaxBranches, plan.branches().size());
  const int shared_bytes = found[static_cast<std::size_t>(problem.device.index)].shared_bytes;
  for (const BranchPlan& branch : plan.branches()) {
    if (branch.adaptive_density == 0) continue;
    if (problem.batch > kMostInGrid || problem.heads + problem.kv_heads > kMostInGrid)
      return no(
          "chooses blocks of up to {} batch entries, and as many heads of queries and keys, here are {} and {}: "
          "pass fewer at a time",
          kMostInGrid, problem.batch, problem.heads + problem.kv_heads);
    const int most = most_adaptive_blocks(shared_bytes, static_cast<int>(problem.head_dim));
    if (branch.mask->blocks() > most)
      return no("chooses from up to {} blocks on {}, here are {}: use larger blocks", most, to_string(problem.device),
                branch.mask->blocks());
  }
  return yes();
}

namespace {

/// How the matrix-unit kernels multiply a storage type.
struct Arithmetic {
  bool wide;
  StartPass forward, backward, backward_queries;
};

const Arithmetic& arithmetic_of(const Plan& plan) {
  static constexpr Arithmetic kBf16{false, forward_bf16, backward_bf16, backward_queries_bf16};
  static constexpr Arithmetic kF16{false, forward_f16, backward_f16, backward_queries_f16};
  static constexpr Arithmetic kTf32{true, forward_tf32, backward_tf32, backward_queries_tf32};
  static constexpr Arithmetic kF32{true, forward_f32, backward_f32, backward_queries_f32};
  const DType dtype = plan.problem().dtype;
  if (dtype == DType::f32) return plan.options().allow_tf32 ? kTf32 : kF32;
  return dtype == DType::bf16 ? kBf16 : kF16;
}

Verdict can_run_matrix(const Plan& plan, Pass pass) {
  if (Verdict verdict = fits(plan); !verdict.ok) return verdict;
  const Problem& problem = plan.problem();
  const bool wide = problem.dtype == DType::f32;
  const int columns = static_cast<int>(problem.head_dim);
  if (pass == Pass::backward && wide && columns > 128)
    return no("has backward of float32 up to head_dim 128, here it is {}", columns);
  const int needed = pass == Pass::forward ? forward_shared_bytes(wide, columns) : backward_shared_bytes(wide, columns);
  const int available = devices()[static_cast<std::size_t>(problem.device.index)].shared_bytes;
  if (available < needed)
    return no("needs {} bytes of shared memory in a block, {} has {}", needed, to_string(problem.device), available);
  return yes();
}

/// Only what cuda-mma needs more shared memory for than many GPUs have; the rest would be the same kernels again.
Verdict can_run_compact(const Plan& plan, Pass pass) {
  if (Verdict verdict = fits(plan); !verdict.ok) return verdict;
  const Problem& problem = plan.problem();
  if (problem.dtype == DType::f32 || problem.head_dim <= 64 || problem.head_dim > 128)
    return no("is for head dims 72 to 128 of 16-bit types, here is {} of {}", problem.head_dim, name_of(problem.dtype));
  if (pass == Pass::forward) return can_run_matrix(plan, pass);
  const int available = devices()[static_cast<std::size_t>(problem.device.index)].shared_bytes;
  if (available < kCompactBytes)
    return no("needs {} bytes of shared memory in a block, {} has {}", kCompactBytes, to_string(problem.device),
              available);
  return yes();
}

Verdict can_run_simt(const Plan& plan, Pass) { return fits(plan); }

/// Host memory handed over as a CUDA tensor would only fail later, and take the process's GPU with it.
void check_pointer(const char* name, const ConstTensorView& view) {
  if (!view.data) return;
  cudaPointerAttributes attributes;
  check(cudaPointerGetAttributes(&attributes, view.data), "looking up a tensor's memory");
  if (attributes.type == cudaMemoryTypeUnregistered) {
    throw InvalidArgument(
        name, fmt::format("{} is said to be on {}, but {} is host memory: copy it to the GPU, or pass device cpu", name,
                          to_string(view.device), view.data));
  }
  if (attributes.type == cudaMemoryTypeDevice && attributes.device != view.device.index) {
    throw InvalidArgument(name, fmt::format("{} is said to be on {}, but its memory is on cuda:{}", name,
                                            to_string(view.device), attributes.device));
  }
}

template <class Arguments>
void check_inputs(const Arguments& a) {
  refuse_earlier_errors();
  check_pointer("q", a.q);
  if (a.call.pieces.empty()) {
    check_pointer("k", a.k);
    check_pointer("v", a.v);
  }
  check_pointer("out", a.out);
  check_pointer("lse", a.lse);
  check_pointer("key_mask", a.call.key_mask);
  check_pointer("alibi_slopes", a.call.alibi_slopes);
  if (a.call.lengths.device.type == DeviceType::cuda) check_pointer("lengths", a.call.lengths);
  for (const KeyPiece& piece : a.call.pieces) {
    for (const ConstTensorView& view : {piece.k, piece.v, ConstTensorView(piece.dk), ConstTensorView(piece.dv)})
      check_pointer("pieces", view);
  }
  const auto check_memory = [&](const char* name, const void* memory) {
    check_pointer(name, ConstTensorView{memory, DType::boolean, a.q.device, {1, 1, 1, 1}, {}});
  };
  if (a.call.workspace) check_memory("workspace", a.call.workspace);
  else if (a.call.allocate) check_memory("allocate", a.workspace);
  if (a.plan.options().dropout > 0) check_memory("dropout_seed_pointer", a.call.dropout_seed_pointer);
  if (a.call.cancel && a.call.cancel->load()) throw Cancelled("the call was cancelled before it started");
}

template <class Arguments>
int device_of(const Arguments& a) {
  return a.q.device.index;
}
template <class Arguments>
cudaStream_t stream_of(const Arguments& a) {
  return static_cast<cudaStream_t>(a.call.stream);
}

/// Anything that the lean instantiations of the matrix-unit kernels leave out.
bool wants_features(const Launch& launch) {
  return launch.rules.key_mask || launch.rules.alibi || launch.rules.dropout || launch.tensors.piece_count > 0 ||
         !launch.tensors.aligned || launch.gradients.deltas || !(launch.rules.scale > 0);
}

/// What cuda-mma keeps of closed sums (closed_sums.cuh), after what all CUDA kernels take of workspace.
struct Totals {
  static constexpr int kEach = 3;  // places for each multiprocessor, which runs that many blocks or fewer
  float* sums = nullptr;
  unsigned* places = nullptr;
  int count = 0, floats = 0;
  std::size_t end;

  Totals(const Plan& plan, Pass pass, std::byte* workspace = nullptr) {
    Arena arena(workspace, 256);
    arena.place(layout(plan, pass, true).total);
    if (longest_sum(plan) > kRowsOfSum) {
      const Problem& problem = plan.problem();
      const int width = problem.head_dim <= 64 ? 64 : problem.head_dim <= 128 ? 128 : 256;
      floats = 2 * tile_rows(arithmetic_of(plan).wide, width) * width;
      count = kEach * devices()[static_cast<std::size_t>(problem.device.index)].multiprocessors;
      sums = arena.take<float>(std::int64_t{count} * floats);
      places = arena.take<unsigned>(count);
    }
    end = arena.used();
  }
  /// Nobody has a place yet.
  void clear(cudaStream_t stream) const {
    if (count > 0)
      check(cudaMemsetAsync(places, 0, static_cast<std::size_t>(count) * sizeof(unsigned), stream),
            "clearing the table of totals");
  }
  void tell(Launch& launch) const {
    launch.scratch.totals = sums;
    launch.scratch.total_places = places;
    launch.scratch.total_count = count;
    launch.scratch.total_floats = floats;
  }
};

Tiling tiling_of(const Plan& plan, bool by_keys, bool fills) {
  const int rows = tile_rows(arithmetic_of(plan).wide, static_cast<int>(plan.problem().head_dim));
  return {.rows = rows, .by_keys = by_keys, .fills = fills, .parts = true};
}

}  // namespace

void check_pointers(const ForwardArguments& a) { check_inputs(a); }

void check_pointers(const BackwardArguments& a) {
  check_inputs(a);
  check_pointer("dout", a.dout);
  check_pointer("dq", a.dq);
  check_pointer("dk", a.dk);
  check_pointer("dv", a.dv);
  check_pointer("dlse", a.call.dlse);
}

namespace {

void forward_matrix(const ForwardArguments& a) {
  const DeviceGuard guard(device_of(a));
  check_pointers(a);
  const Arithmetic& arithmetic = arithmetic_of(a.plan);
  const Totals totals(a.plan, Pass::forward, a.workspace);
  totals.clear(stream_of(a));
  for_each_launch(a, tiling_of(a.plan, false, true), true, [&](Launch& launch) {
    if (launch.schedule.items == 0) return;
    totals.tell(launch);
    const bool features = wants_features(launch);
    if (crowded(arithmetic.wide, launch, features))
      halve_last_tiles(launch, devices()[static_cast<std::size_t>(device_of(a))].multiprocessors, kCrowdedBlocks);
    if (!launch.schedule.merges) {
      const Counters counters = launch.schedule.halved_tiles > 0 ? resting_counters(stream_of(a)) : Counters{};
      launch.scratch.leaving = counters.leaving;
      launch.scratch.ticket = counters.first;
    }
    check(arithmetic.forward(launch, features, stream_of(a)), "starting the forward kernel");
  });
}

void forward_simt_call(const ForwardArguments& a) {
  const DeviceGuard guard(device_of(a));
  check_pointers(a);
  for_each_launch(a, {}, false, [&](Launch& launch) {
    check(forward_simt(launch, a.q.dtype, stream_of(a)), "starting the forward kernel");
  });
}

void backward_simt_call(const BackwardArguments& a) {
  const DeviceGuard guard(device_of(a));
  check_pointers(a);
  if (a.ranges.size() > kMaxRanges) {
    throw Unsupported(fmt::format("{} query ranges in a backward on {}: up to {} run there; join adjacent ones",
                                  a.ranges.size(), to_string(a.q.device), kMaxRanges));
  }
  for_each_launch(a, {}, false, [&](Launch& launch) {
    check(backward_queries_simt(launch, a.q.dtype, stream_of(a)), "starting the kernel for dq");
  });
  for_each_launch(a, {.by_keys = true, .masks_chosen = true}, false, [&](Launch& launch) {
    check(backward_keys_simt(launch, a.q.dtype, stream_of(a)), "starting the kernel for dk and dv");
  });
}

/// Backward with matrix units: deltas; dk and dv, and dq with them; conversion. `deterministic` takes dq in a pass of
/// its own and launches what adds to the same rows one after the other.
void backward_shaped(const BackwardArguments& a, bool compact) {
  const DeviceGuard guard(device_of(a));
  check_pointers(a);
  const Arithmetic& arithmetic = arithmetic_of(a.plan);
  const bool in_order = a.plan.options().deterministic;
  const cudaStream_t stream = stream_of(a);
  const Totals totals(a.plan, Pass::backward, a.workspace);
  totals.clear(stream);
  bool prepared = false;
  Launch last{};
  const auto prepare = [&](Launch& launch) {
    totals.tell(launch);
    if (!prepared) check(prepare_backward(launch, a.q.dtype, stream), "starting the preparation of backward");
    prepared = true;
    last = launch;
  };
  if (a.plan.options().detached_mix) {
    for_each_launch(a, tiling_of(a.plan, false, false), true, [&](Launch& launch) {
      prepare(launch);
      launch.gradients.deltas = true;
      launch.schedule.merges = false;
      if (launch.schedule.items > 0)
        check(arithmetic.forward(launch, true, stream), "starting the kernel for detached_mix");
      launch.gradients.deltas = false;
    });
  }
  Tiling by_keys = tiling_of(a.plan, true, false);
  by_keys.splits = splits_lists(a.plan);
  by_keys.masks_chosen = a.plan.options().detached_mix;
  if (compact) by_keys.rows = kCompactKeys;
  for_each_launch(a, by_keys, true, [&](Launch& launch) {
    prepare(launch);
    launch.gradients.compact = compact;
    launch.gradients.separate_dq = in_order;
    const auto run = [&](const Launch& part) {
      if (part.schedule.items == 0) return;
      check(arithmetic.backward(part, wants_features(part), stream), "starting the backward kernel");
    };
    if (in_order && launch.gradients.sum_keys)
      for_each_writer(launch, launch.tensors.heads / launch.tensors.kv_heads, run);
    else run(launch);
  });
  if (in_order) {
    for_each_launch(
        a, {.rows = kQueryPassRows, .fills = false, .parts = true, .masks_chosen = true}, true, [&](Launch& launch) {
          for_each_writer(launch, 1, [&](const Launch& part) {
            if (part.schedule.items > 0)
              check(arithmetic.backward_queries(part, wants_features(part), stream), "starting the kernel for dq");
          });
        });
  }
  check(finish_backward(last, a.q.dtype, stream), "starting the conversion of gradients");
}

void backward_compact(const BackwardArguments& a) { backward_shaped(a, true); }

void backward_matrix(const BackwardArguments& a) { backward_shaped(a, false); }

Verdict accepts_backward(const BackwardArguments& a) {
  if (has_key_sums(a)) return yes();
  return no(
      "adds up dk and dv over query ranges where their rows are not as many as tokens, here are {} ranges of {} rows",
      a.ranges.size(), a.q.rows());
}

std::size_t matrix_workspace(const Plan& plan, Pass pass, int) { return Totals(plan, pass).end; }

}  // namespace

const Kernel kMatrix = {.name = "cuda-mma",
                        .can_run = can_run_matrix,
                        .workspace_bytes = matrix_workspace,
                        .forward = forward_matrix,
                        .backward = backward_matrix,
                        .runs_parts = true,
                        .accepts_backward = accepts_backward};
const Kernel kCompact = {.name = "cuda-mma-compact",
                         .can_run = can_run_compact,
                         .workspace_bytes = matrix_workspace,
                         .forward = forward_matrix,
                         .backward = backward_compact,
                         .runs_parts = true,
                         .accepts_backward = accepts_backward};
const Kernel kSimt = {
    .name = "cuda-simt",
    .can_run = can_run_simt,
    .workspace_bytes = [](const Plan& plan, Pass pass, int) { return layout(plan, pass, false).total; },
    .forward = forward_simt_call,
    .backward = backward_simt_call};
const std::vector<DeviceFacts>& devices() { return machine().devices; }
const std::string& why_none() { return machine().why_none; }

void fill_zero(const TensorView& view, void* stream) {
  const DeviceGuard guard(view.device.index);
  const Rows rows{static_cast<char*>(view.data), view.strides[0], view.strides[1], view.strides[2]};
  check(fill_zero(rows, static_cast<int>(size_of(view.dtype)), view.batch(), view.rows(), view.heads(),
                  static_cast<int>(view.columns()), static_cast<cudaStream_t>(stream)),
        "zeroing a tensor");
}

}  // namespace longspan::cuda
