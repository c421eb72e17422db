// Instructions for kernels that read memory once: programmatic dependent launch, and loads that leave L2 first.
#pragma once

#include <cstdint>

namespace longspan::cuda {

/// The next kernel may begin once all blocks of this one have begun, and waits there until this one has ended. Every
/// block has to wait: a kernel that did not could end before the one that it depends on.
__device__ __forceinline__ void start_next_kernel() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}
__device__ __forceinline__ void wait_for_kernel_before() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

/// What L2 does with lines that are loaded: `once`: they are the first ones to leave.
__device__ __forceinline__ std::uint64_t cache_policy(bool once) {
  std::uint64_t policy;
  if (once) asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  else asm("createpolicy.fractional.L2::evict_normal.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}
/// copy_async by a policy.
__device__ __forceinline__ void copy_async(std::uint32_t target, const void* source, bool valid, std::uint64_t policy) {
  const int bytes = valid ? 16 : 0;
  asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2, %3;\n" ::"r"(target), "l"(source),
               "r"(bytes), "l"(policy)
               : "memory");
}

}  // namespace longspan::cuda
