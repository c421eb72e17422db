// What the process may use of this machine.
#pragma once

#include <cstdint>
#include <string>

namespace longspan {

/// CPUs the process may run on: the smallest of its affinity mask and its cgroup's quota, at least 1.
int usable_cpus();

/// usable_cpus(), or fewer where OMP_NUM_THREADS says so.
int default_threads();

/// Model name as the operating system reports it, or "unknown".
std::string cpu_model();

/// Size of a data cache of CPU 0 in bytes (level 1, 2 or 3), or 0 if it cannot be learned.
std::int64_t cache_bytes(int level);

}  // namespace longspan
