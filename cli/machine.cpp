// Asking the CPU and the operating system.
#include "machine.h"

#include <fmt/format.h>
#include <unistd.h>
#if defined(__aarch64__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif

#include "console.h"
#include "longspan/error.h"
#include "longspan/machine.h"
#include "longspan/threads.h"

namespace longspan::cli {

double memory_bytes() {
  return static_cast<double>(sysconf(_SC_PHYS_PAGES)) * static_cast<double>(sysconf(_SC_PAGE_SIZE));
}

std::string machine_summary() {
  const int cpus = cpu().usable;
  return fmt::format("{}, {} CPU{}, {}", cpu().model, cpus, cpus == 1 ? "" : "s", short_bytes(memory_bytes()));
}

void require_device(Device device) {
  if (device.type == DeviceType::cpu) return;
  const std::size_t count = gpus().size();
  if (count == 0) {
    throw Unsupported(fmt::format("--device {}: {}; or leave --device out", to_string(device), why_no_gpu()));
  }
  if (device.index >= static_cast<int>(count)) {
    throw Unsupported(fmt::format("--device {}: this machine has {} GPU{}; give cuda:0{}", to_string(device), count,
                                  count == 1 ? "" : "s", count == 1 ? "" : fmt::format(" to cuda:{}", count - 1)));
  }
}

std::string device_summary(Device device) {
  if (device.type == DeviceType::cpu) return fmt::format("{} thread{}", num_threads(), num_threads() == 1 ? "" : "s");
  require_device(device);
  const GpuFacts& facts = gpus()[static_cast<std::size_t>(device.index)];
  return fmt::format("{} (compute capability {}.{}, {})", facts.name, facts.compute / 10, facts.compute % 10,
                     short_bytes(static_cast<double>(facts.memory_bytes)));
}

std::vector<std::string> instruction_sets() {
  std::vector<std::string> names;
  [[maybe_unused]] const auto add = [&](bool present, const char* name) {
    if (present) names.emplace_back(name);
  };
#if defined(__x86_64__)
  __builtin_cpu_init();
  add(__builtin_cpu_supports("sse4.2"), "sse4.2");
  add(__builtin_cpu_supports("avx"), "avx");
  add(__builtin_cpu_supports("avx2"), "avx2");
  add(__builtin_cpu_supports("fma"), "fma");
  add(__builtin_cpu_supports("avx512f"), "avx512f");
  add(__builtin_cpu_supports("avx512bw"), "avx512bw");
  add(__builtin_cpu_supports("avx512vl"), "avx512vl");
  add(__builtin_cpu_supports("avx512vnni"), "avx512vnni");
  add(__builtin_cpu_supports("avx512bf16"), "avx512bf16");
#elif defined(__aarch64__)
  const unsigned long capabilities = getauxval(AT_HWCAP);
  add((capabilities & HWCAP_ASIMD) != 0, "neon");
  add((capabilities & HWCAP_ASIMDHP) != 0, "neon-fp16");
  add((capabilities & HWCAP_SVE) != 0, "sve");
#endif
  return names;
}

}  // namespace longspan::cli
