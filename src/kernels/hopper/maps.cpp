// Tensor maps for TMA, and what the Hopper kernels ask of a plan and of the machine.
#include "kernels/hopper/maps.h"

#include <cudaTypedefs.h>
#include <cuda_runtime_api.h>

#include <algorithm>
#include <array>
#include <limits>

#include "device/error.h"
#include "kernels/cuda/call.h"
#include "kernels/cuda/cuda.h"
#include "kernels/hopper/backward_launch.h"

namespace longspan::hopper {
namespace {

constexpr int kCompute = 90;           // instructions of sm_90a run on 9.0 and on nothing else, newer or older
constexpr int kOldestDriver = 12010;   // whose launches take more than 4 KB of parameters
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

}  // namespace

bool has_masks(const Plan& plan) {
  return std::any_of(plan.branches().begin(), plan.branches().end(),
                     [](const BranchPlan& branch) { return branch.mask.has_value(); });
}

int smallest_block(const Plan& plan) {
  int smallest = std::numeric_limits<int>::max();
  for (const BranchPlan& branch : plan.branches()) {
    if (branch.mask) smallest = std::min(smallest, branch.mask->block_size());
  }
  return smallest;
}

namespace {

/// Everything that a map of ours says.
struct MapKey {
  const void* data;
  DType dtype;
  std::array<cuuint32_t, 5> box;
  std::array<cuuint64_t, 5> sizes;
  std::array<cuuint64_t, 4> strides;  // bytes
  bool operator==(const MapKey&) const = default;
  /// Addresses differ in their upper bits, which the product brings together.
  std::size_t place() const {
    const std::uint64_t mixed = reinterpret_cast<std::uintptr_t>(data) + sizes[1] * 31 + sizes[2] * 977 + box[1];
    return static_cast<std::size_t>(mixed * 0x9E37'79B9'7F4A'7C15u >> 56);
  }
};

bool encode(CUtensorMap& map, const MapKey& key) {
  const cuuint32_t every[5] = {1, 1, 1, 1, 1};
  const CUtensorMapDataType type = key.dtype == DType::f32    ? CU_TENSOR_MAP_DATA_TYPE_FLOAT32
                                   : key.dtype == DType::bf16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
                                                              : CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
  // Rows of a box are 128 bytes of 16-bit numbers, or 64 of sums. A promotion to 256 bytes would fetch neighbouring
  // heads that nobody wants.
  return encoder()(&map, type, 5, const_cast<void*>(key.data), key.sizes.data(), key.strides.data(), key.box.data(),
                   every, CU_TENSOR_MAP_INTERLEAVE_NONE,
                   key.dtype == DType::f32 ? CU_TENSOR_MAP_SWIZZLE_64B : CU_TENSOR_MAP_SWIZZLE_128B,
                   CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

/// Maps of earlier calls of this thread: making one takes 0.1 us, a call has up to a hundred, and steps of a loop find
/// their tensors where the step before had them.
struct KeptMap {
  MapKey key;
  CUtensorMap map;
};
thread_local std::array<KeptMap, 256> kept_maps;

cuuint64_t extent(std::int64_t size) { return static_cast<cuuint64_t>(std::max<std::int64_t>(size, 1)); }

/// Fills in strides (bytes) and finds the map or makes it.
bool find(CUtensorMap& map, MapKey& key, const std::array<std::int64_t, 4>& strides) {
  for (std::size_t d = 0; d < 4; ++d) {
    if (key.sizes[d + 1] > 1 && strides[d] <= 0) return false;
    key.strides[d] = key.sizes[d + 1] > 1 ? static_cast<cuuint64_t>(strides[d]) : 16;
  }
  KeptMap& kept = kept_maps[key.place()];
  if (kept.key == key) {
    map = kept.map;
    return true;
  }
  if (!encode(map, key)) return false;
  kept = {key, map};
  return true;
}

}  // namespace

bool encode(CUtensorMap& map, const ConstTensorView& view, std::int64_t dilation, std::int64_t rows, int box_rows) {
  const std::int64_t element = static_cast<std::int64_t>(size_of(view.dtype)), row = view.strides[1] * element;
  MapKey key{view.data, view.dtype, {kBlockColumns, static_cast<cuuint32_t>(box_rows), 1, 1, 1}, {}, {}};
  key.sizes = {extent(view.columns()), extent(rows), extent(dilation), extent(view.heads()), extent(view.batch())};
  return find(map, key, {row * dilation, row, view.strides[2] * element, view.strides[0] * element});
}

bool encode(CUtensorMap& map, const MergedSums& sums, std::int64_t dilation, std::int64_t rows) {
  constexpr std::int64_t kElement = sizeof(float);
  const std::int64_t row = sums.columns * kElement;
  const cuuint32_t box_blocks = static_cast<cuuint32_t>(sums.box_columns / kSumBlockColumns);
  MapKey key{sums.data, DType::f32, {kSumBlockColumns, kSumTileRows, box_blocks, 1, 1}, {}, {}};
  key.sizes = {kSumBlockColumns, extent(rows), extent(sums.columns / kSumBlockColumns), extent(dilation),
               extent(sums.heads)};
  return find(map, key, {row * dilation, kSumBlockColumns * kElement, row, row * sums.rows});
}

std::int64_t dilation_of(const BranchPlan& branch) { return std::min(branch.dilation, kMost); }

int maps_of(const BranchPlan& branch, const Problem& problem) {
  const std::int64_t dilation = dilation_of(branch);
  return key_rows(problem) % dilation == 0 && problem.query_rows % dilation == 0 ? 1 : 2;
}

int multiprocessors(const Problem& problem) {
  return cuda::devices()[static_cast<std::size_t>(problem.device.index)].multiprocessors;
}

Verdict fits(const Plan& plan) {
  if (Verdict verdict = cuda::fits(plan); !verdict.ok) return verdict;
  const Problem& problem = plan.problem();
  const auto& device = cuda::devices()[static_cast<std::size_t>(problem.device.index)];
  if (device.compute != kCompute)
    return no("is made for compute capability 9.0 (Hopper), {} has {}.{}", to_string(problem.device),
              device.compute / 10, device.compute % 10);
  if (problem.dtype != DType::bf16 && problem.dtype != DType::f16)
    return no("multiplies 16-bit numbers, tensors are {}", name_of(problem.dtype));
  if (problem.alignment < 16)
    return no("loads rows by TMA: addresses and strides must be multiples of 16 bytes, here of {}", problem.alignment);
  if (problem.has_pieces) return no("takes keys in one piece");
  if (problem.is_share && has_masks(plan)) return no("takes no block masks over a ring");
  if (problem.query_rows > kMost) return no("counts rows in 32 bits, there are {}", problem.query_rows);
  int maps = 0;
  for (const BranchPlan& branch : plan.branches()) maps += maps_of(branch, problem);
  if (maps > kMaxMaps)
    return no("holds {} views of rows, this pattern needs {} (two for each dilation that does not divide {} rows)",
              kMaxMaps, maps, key_rows(problem));
  if (device.shared_bytes < kSharedBytes)
    return no("needs {} bytes of shared memory in a block, {} has {}", kSharedBytes, to_string(problem.device),
              device.shared_bytes);
  int driver = 0;
  cuda::check(cudaDriverGetVersion(&driver), "asking for the driver's version");
  if (driver < kOldestDriver)
    return no("has more than 4 KB of launch parameters: they need a driver of CUDA 12.1 or newer, this one is of {}.{}",
              driver / 1000, driver % 1000 / 10);
  if (!encoder()) return no("needs a driver that makes tensor maps (CUDA 12.0 or newer)");
  return yes();
}

}  // namespace longspan::hopper
