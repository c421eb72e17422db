// The machine as the library sees it.
#include "longspan/machine.h"

#include "kernels/cuda/cuda.h"
#include "util/cpu_info.h"

namespace longspan {

const CpuFacts& cpu() {
  static const CpuFacts facts{cpu_model(), usable_cpus(), {cache_bytes(1), cache_bytes(2), cache_bytes(3)}};
  return facts;
}

const std::vector<GpuFacts>& gpus() { return cuda::devices(); }
const std::string& why_no_gpu() { return cuda::why_none(); }

std::vector<std::string> kernel_names() {
  std::vector<std::string> names;
  for (const Kernel* kernel : all_kernels()) names.emplace_back(kernel->name);
  return names;
}

}  // namespace longspan
