// Rates of devices: the one table of them. Fitted to committed measurements by bench/device_rates.py where there are
// any, whose test compares; else a share of a data sheet.
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>

#include "longspan/cost.h"
#include "longspan/threads.h"
#include "util/reject.h"

namespace longspan {
namespace {

/// TFLOP/s, GB/s and microseconds, of a whole GPU or one core.
struct Rates {
  double teraflops, row_gigabytes, call_micros;
};

struct Entry {
  std::string_view name;
  bool wide_dtype;        // float32 and float64, or 16 bits
  std::int64_t head_dim;  // narrower heads cost as much as these, wider ones are further entries
  bool measured;
  Rates forward, backward;
  std::string_view source;
};

constexpr std::array kEntries = {
    // rates: begin
    Entry{"h200", false, 64, true, {561.9, 6364, 17.2}, {582.3, 1862, 17.5}, "bench/results/h200_hopper.json"},
    Entry{"h200", false, 128, true, {762.5, 2398, 17.2}, {598.0, 2907, 17.5}, "bench/results/h200_hopper.json"},
    Entry{"h200", true, 64, true, {49.8, 6364, 17.2}, {45.1, 1862, 17.5}, "bench/results/h200_hopper.json"},
    Entry{"cpu", true, 64, true, {0.1018, 4.04, 20}, {0.1025, 2.49, 20}, "bench/results/cpu_vs_torch.json"},
    Entry{"cpu", false, 64, true, {0.2010, 2.82, 20}, {0.1875, 2.96, 20}, "bench/results/cpu_vs_torch.json"},
    // rates: end
    Entry{"a100",
          false,
          64,
          false,
          {156, 1000, 20},
          {125, 500, 20},
          "data sheet: 312 TFLOP/s, 2.0 TB/s; half of both assumed, 0.4 and a quarter backward"},
    Entry{"a100",
          true,
          64,
          false,
          {9.7, 1000, 20},
          {7.8, 500, 20},
          "data sheet: 19.5 TFLOP/s, 2.0 TB/s; half of both assumed, 0.4 and a quarter backward"},
};

struct Memory {
  std::string_view name;
  double bytes, forward_message_gigabytes, backward_message_gigabytes, exchange_micros, message_micros;
};
constexpr std::array kMemories = {
    Memory{"h200", 141e9, 1000, 1000, 60, 1},
    Memory{"a100", 80e9, 500, 500, 60, 1},
    Memory{"cpu", 0, 4.0, 0.3, 50, 5},
};

PassRates scaled(const Rates& rates, double cores, double narrow) {
  return {rates.teraflops * 1e12 * cores * narrow, rates.row_gigabytes * 1e9 * cores, rates.call_micros * 1e-6, 0};
}

}  // namespace

std::vector<std::string> rated_devices() {
  std::vector<std::string> names;
  for (const Memory& memory : kMemories) names.emplace_back(memory.name);
  return names;
}

DeviceRates device_rates(std::string_view name, DType dtype, std::int64_t head_dim) {
  const Memory* const memory =
      std::find_if(kMemories.begin(), kMemories.end(), [&](const Memory& one) { return one.name == name; });
  if (memory == kMemories.end())
    reject("device", "no rates of device '{}': there are those of {}", name, fmt::join(rated_devices(), ", "));
  const bool wide = size_of(dtype) >= 4;
  const Entry* best = nullptr;
  for (const Entry& entry : kEntries) {
    if (entry.name != name || entry.wide_dtype != wide) continue;
    if (!best || head_dim > best->head_dim) best = &entry;
  }
  const bool cpu = name == "cpu";
  const double cores = cpu ? num_threads() : 1;
  // Float64 runs at half the rate of float32; heads narrower than the entry's are as slow as it.
  const double narrow = std::min(1.0, static_cast<double>(head_dim) / static_cast<double>(best->head_dim)) *
                        (dtype == DType::f64 ? 0.5 : 1.0);
  DeviceRates rates;
  rates.name = name;
  rates.source = cpu ? fmt::format("{}, per core, {} cores", best->source, cores) : std::string(best->source);
  rates.measured = best->measured;
  rates.forward = scaled(best->forward, cores, narrow);
  rates.backward = scaled(best->backward, cores, narrow);
  rates.forward.message_bytes_per_second = memory->forward_message_gigabytes * 1e9 * cores;
  rates.backward.message_bytes_per_second = memory->backward_message_gigabytes * 1e9 * cores;
  rates.exchange_seconds = memory->exchange_micros * 1e-6;
  rates.message_seconds = memory->message_micros * 1e-6;
  rates.memory_bytes = memory->bytes;
  return rates;
}

}  // namespace longspan
