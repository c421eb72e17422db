// What the library found on this machine, and what it has for it.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "longspan/export.h"

namespace longspan {

struct CpuFacts {
  std::string model{};                          ///< as the operating system reports it, or "unknown"
  int usable = 1;                               ///< CPUs the process may run on, as affinity and cgroup limits say
  std::array<std::int64_t, 3> cache_bytes{{}};  ///< data caches of levels 1 to 3; 0 if unknown
};
LONGSPAN_API const CpuFacts& cpu();

struct GpuFacts {
  std::string name{};
  int compute = 0;  ///< 90 for compute capability 9.0
  int multiprocessors = 0;
  int shared_bytes = 0;  ///< most that one thread block may use
  std::size_t memory_bytes = 0;
};
/// The GPUs of this machine; empty where there is none, or no driver, and why_no_gpu() then says so.
LONGSPAN_API const std::vector<GpuFacts>& gpus();
LONGSPAN_API const std::string& why_no_gpu();

/// Every kernel of this build, fastest first. Plan::kernel_verdicts says which of them run a problem here.
LONGSPAN_API std::vector<std::string> kernel_names();

}  // namespace longspan
