// Asking the CPU and the operating system.
#include "machine.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <fstream>

#include "console.h"
#include "longspan/error.h"
#include "longspan/machine.h"
#include "longspan/threads.h"
#include "text.h"

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

std::vector<std::string> instruction_sets_of(std::string_view flags) {
  constexpr std::pair<std::string_view, const char*> kSets[] = {{"sse4_2", "sse4.2"},
                                                                {"avx", "avx"},
                                                                {"avx2", "avx2"},
                                                                {"fma", "fma"},
                                                                {"avx512f", "avx512f"},
                                                                {"avx512bw", "avx512bw"},
                                                                {"avx512vl", "avx512vl"},
                                                                {"avx512_vnni", "avx512vnni"},
                                                                {"avx512_bf16", "avx512bf16"},
                                                                {"amx_tile", "amx-tile"},
                                                                {"amx_bf16", "amx-bf16"},
                                                                {"asimd", "neon"},
                                                                {"asimdhp", "neon-fp16"},
                                                                {"sve", "sve"}};
  const std::string padded = fmt::format(" {} ", flags);
  std::vector<std::string> names;
  for (const auto& [flag, name] : kSets) {
    if (padded.find(fmt::format(" {} ", flag)) != std::string::npos) names.emplace_back(name);
  }
  return names;
}

std::vector<std::string> instruction_sets() {
  std::ifstream file("/proc/cpuinfo");
  for (std::string line; std::getline(file, line);) {
    if (!line.starts_with("flags") && !line.starts_with("Features")) continue;  // x86, ARM
    return instruction_sets_of(std::string_view(line).substr(std::min(line.find(':') + 1, line.size())));
  }
  return {};
}

std::string why_no_kernel(const Plan& plan, Pass pass) {
  const Device device = plan.problem().device;
  if (device.type == DeviceType::cpu || !gpus().empty() || !plan.options().kernel.empty())
    return printable(plan.why_no_kernel(pass));  // it quotes an environment variable
  return fmt::format("no kernel can run this {} on {}: {}", pass == Pass::forward ? "forward" : "backward",
                     to_string(device), why_no_gpu());
}

}  // namespace longspan::cli
