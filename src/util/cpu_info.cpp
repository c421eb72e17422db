// Linux: affinity, cgroup limits (v2 and v1) and caches, read from the kernel's files.
#include "util/cpu_info.h"

#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <sstream>
#include <thread>

namespace longspan {
namespace {

int affinity_cpus() {
  cpu_set_t set;
  CPU_ZERO(&set);
  if (sched_getaffinity(0, sizeof(set), &set) == 0 && CPU_COUNT(&set) > 0) return CPU_COUNT(&set);
  return static_cast<int>(std::max(1u, std::thread::hardware_concurrency()));
}

/// quota / period of one cgroup folder, rounded up; 0 where it sets no limit.
int quota_cpus(const std::string& folder) {
  double quota = -1, period = 0;
  if (std::ifstream both(folder + "/cpu.max"); both) {
    std::string first;
    both >> first >> period;
    if (first != "max") quota = std::strtod(first.c_str(), nullptr);
  } else {
    std::ifstream(folder + "/cpu.cfs_quota_us") >> quota;
    std::ifstream(folder + "/cpu.cfs_period_us") >> period;
  }
  if (quota <= 0 || period <= 0) return 0;
  return std::max(1, static_cast<int>((quota + period - 1) / period));
}

/// The tightest quota on the way from the process's own cgroup up to the root.
int cgroup_cpus() {
  int limit = 0;
  std::ifstream membership("/proc/self/cgroup");
  for (std::string line; std::getline(membership, line);) {
    // id:controllers:path, where v2 has no controllers and v1 names "cpu".
    const std::size_t first = line.find(':'), second = line.find(':', first + 1);
    if (first == std::string::npos || second == std::string::npos) continue;
    const std::string controllers = line.substr(first + 1, second - first - 1);
    if (!controllers.empty() && controllers.find("cpu") == std::string::npos) continue;
    const std::string root = controllers.empty() ? "/sys/fs/cgroup" : "/sys/fs/cgroup/cpu";
    std::string path = line.substr(second + 1);
    while (true) {
      const int cpus = quota_cpus(root + (path == "/" ? "" : path));
      if (cpus > 0) limit = limit > 0 ? std::min(limit, cpus) : cpus;
      if (path.empty() || path == "/") break;
      path.resize(path.rfind('/'));
    }
  }
  return limit;
}

}  // namespace

int usable_cpus() {
  const int affinity = affinity_cpus();
  const int quota = cgroup_cpus();
  return quota > 0 ? std::min(affinity, quota) : affinity;
}

int default_threads() {
  int threads = usable_cpus();
  if (const char* text = std::getenv("OMP_NUM_THREADS")) {
    // A list ("4,2") names nested levels; ours is the outermost.
    const int asked = std::atoi(text);
    if (asked >= 1) threads = std::min(threads, asked);
  }
  return threads;
}

std::string cpu_model() {
  std::ifstream info("/proc/cpuinfo");
  for (std::string line; std::getline(info, line);) {
    if (line.rfind("model name", 0) == 0 || line.rfind("Model", 0) == 0) {
      const std::size_t colon = line.find(':');
      if (colon != std::string::npos && colon + 2 <= line.size()) return line.substr(colon + 2);
    }
  }
  return "unknown";
}

std::int64_t cache_bytes(int level) {
  for (int index = 0; index < 8; ++index) {
    const std::string folder = "/sys/devices/system/cpu/cpu0/cache/index" + std::to_string(index);
    int found = 0;
    std::string type, size;
    std::ifstream(folder + "/level") >> found;
    std::ifstream(folder + "/type") >> type;
    std::ifstream(folder + "/size") >> size;
    if (found != level || type == "Instruction" || size.empty()) continue;
    const std::int64_t unit = size.back() == 'K' ? 1024 : size.back() == 'M' ? 1024 * 1024 : 1;
    return std::atoll(size.c_str()) * unit;
  }
  return 0;
}

}  // namespace longspan
