// Maps for the copy engine, and what the Hopper kernels ask of a plan and of the machine.
#include "kernels/hopper/maps.h"

#include <cudaTypedefs.h>
#include <cuda_runtime_api.h>

#include <algorithm>
#include <limits>

#include "kernels/cuda/call.h"
#include "kernels/cuda/cuda.h"
#include "kernels/cuda/error.h"

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

int maps_of(const BranchPlan& branch, const Problem& problem) {
  const std::int64_t dilation = dilation_of(branch);
  return problem.tokens % dilation == 0 && problem.query_rows % dilation == 0 ? 1 : 2;
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
    return no("loads rows by the copy engine: addresses and strides must be multiples of 16 bytes, here of {}",
              problem.alignment);
  if (problem.has_key_mask) return no("has no key_mask");
  for (const BranchPlan& branch : plan.branches()) {
    if (branch.mask) return no("has no block masks");
  }
  if (problem.has_alibi) return no("has no ALiBi");
  if (problem.has_pieces) return no("takes keys in one piece");
  if (plan.options().dropout > 0) return no("has no dropout, here it is {}", plan.options().dropout);
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
    return no("has more than 4 KB of launch parameters: they need a driver of CUDA 12.1 or newer, this one is of {}.{}",
              driver / 1000, driver % 1000 / 10);
  if (!encoder()) return no("needs a driver that makes tensor maps (CUDA 12.0 or newer)");
  return yes();
}

}  // namespace longspan::hopper
