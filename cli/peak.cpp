// Independent chains of multiply-adds in registers, with the widest instructions the CPU has for a type. CMake compiles
// this file with -ffp-contract=fast, so that a product and a sum become one instruction.
#include "peak.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <numeric>
#include <vector>

#include "gpu/gpu.h"
#include "interrupt.h"
#include "longspan/machine.h"
#include "longspan/threads.h"
#include "util/parallel.h"

namespace longspan::cli {
namespace {

// Many short rounds: some of them no other process disturbs.
constexpr int kRounds = 60;
constexpr double kRoundSeconds = 0.005;

/// A vector type of GCC and Clang; wrapped, since the attribute would be lost on a template argument.
template <class Element, int kBytes>
struct Lanes {
  typedef Element Vector __attribute__((vector_size(kBytes)));
  static constexpr int kCount = kBytes / static_cast<int>(sizeof(Element));
};

/// Twelve chains hide a latency of 4 cycles at up to 3 instructions per cycle, and fit in 16 registers. Returns FLOPs.
template <class Element, int kBytes>
[[gnu::always_inline]] inline double fma_chains(std::int64_t steps) {
  using Vector = typename Lanes<Element, kBytes>::Vector;
  constexpr int kChains = 12;
  volatile Element half = 0.5, one = 1;  // volatile: the compiler must not know where the chains converge
  const Vector factor = Vector{} + half;
  const Vector addend = Vector{} + one;
  Vector chains[kChains];
  for (int chain = 0; chain < kChains; ++chain) chains[chain] = Vector{} + static_cast<Element>(chain);
  for (std::int64_t step = 0; step < steps; ++step) {
    for (int chain = 0; chain < kChains; ++chain) chains[chain] = chains[chain] * factor + addend;
  }
  Vector sum = chains[0];
  for (int chain = 1; chain < kChains; ++chain) sum += chains[chain];
  volatile Element sink = 0;
  for (int lane = 0; lane < Lanes<Element, kBytes>::kCount; ++lane) sink = sink + sum[lane];
  return 2.0 * kChains * Lanes<Element, kBytes>::kCount * static_cast<double>(steps);
}

using FmaFunction = double (*)(std::int64_t steps);

// `target` lets one function use instructions that the rest of the file may not.
#if defined(__x86_64__)
template <class Element>
[[gnu::target("avx512f")]] double fma_avx512(std::int64_t steps) {
  return fma_chains<Element, 64>(steps);
}
template <class Element>
[[gnu::target("avx2,fma")]] double fma_avx2(std::int64_t steps) {
  return fma_chains<Element, 32>(steps);
}

/// Products of bfloat16 pairs with float32 sums: 32 products in one instruction.
[[gnu::target("avx512f,avx512bf16")]] double dot_bf16(std::int64_t steps) {
  constexpr int kChains = 12;
  volatile float one = 1;
  const __m512 ones = _mm512_set1_ps(one);
  const __m512bh factor = _mm512_cvtne2ps_pbh(ones, ones);
  __m512 chains[kChains];
  for (int chain = 0; chain < kChains; ++chain) chains[chain] = _mm512_setzero_ps();
  for (std::int64_t step = 0; step < steps; ++step) {
    for (int chain = 0; chain < kChains; ++chain) chains[chain] = _mm512_dpbf16_ps(chains[chain], factor, factor);
  }
  __m512 sum = chains[0];
  for (int chain = 1; chain < kChains; ++chain) sum = _mm512_add_ps(sum, chains[chain]);
  alignas(64) float lanes[16];
  _mm512_store_ps(lanes, sum);
  volatile float sink = lanes[0];  // the sums must be seen to be used
  (void)sink;
  return 2.0 * kChains * 32 * static_cast<double>(steps);
}

/// The same on tiles: 16 x 16 sums of 32 products in one instruction, four of them independent.
[[gnu::target("amx-tile,amx-bf16")]] double tiles_bf16(std::int64_t steps) {
  struct alignas(64) Shapes {
    std::uint8_t palette = 1, start_row = 0, reserved[14] = {};
    std::uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    std::uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
  };
  // Static: GCC does not see that the instructions read memory, and would drop the stores to a local.
  static constexpr Shapes shapes;
  alignas(64) static constexpr std::uint16_t zeros[16 * 32] = {};
  _tile_loadconfig(&shapes);
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  _tile_loadd(4, zeros, 64);
  _tile_loadd(5, zeros, 64);
  _tile_loadd(6, zeros, 64);
  _tile_loadd(7, zeros, 64);
  for (std::int64_t step = 0; step < steps; ++step) {
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
  _tile_release();
  return 2.0 * 4 * 16 * 16 * 32 * static_cast<double>(steps);
}
#endif
template <class Element>
double fma_baseline(std::int64_t steps) {
  return fma_chains<Element, 16>(steps);
}

template <class Element>
FmaFunction widest_fma() {
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx512f")) return fma_avx512<Element>;
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return fma_avx2<Element>;
#endif
  return fma_baseline<Element>;
}

/// The instructions exist: a kernel that uses them has run.
FmaFunction products_of(Arithmetic arithmetic) {
  switch (arithmetic) {
#if defined(__x86_64__)
    case Arithmetic::bf16_tiles:
      return tiles_bf16;
    case Arithmetic::bf16_pairs:
      return dot_bf16;
#endif
    case Arithmetic::float64:
      return widest_fma<double>();
    default:
      return widest_fma<float>();
  }
}

const char* source_of(Arithmetic arithmetic) {
  switch (arithmetic) {
    case Arithmetic::bf16_tiles:
      return "products of AMX tiles on registers";
    case Arithmetic::bf16_pairs:
      return "AVX512-BF16 products of pairs on registers";
    case Arithmetic::float64:
      return "multiply-adds of float64 vectors on registers";
    default:
      return "multiply-adds of float32 vectors on registers";
  }
}

double seconds_since(std::chrono::steady_clock::time_point begin) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

/// GFLOP/s of a function on some threads, the best of several rounds.
double measure(FmaFunction function, int threads) {
  double best = 0;
  LoopControl control;
  control.cancel = &interrupted();
  for (int round = 0; round < kRounds; ++round) {
    // Every thread works until the same moment; what it did is divided by its own time, which a late start thus
    // excludes.
    std::vector<double> rates(static_cast<std::size_t>(threads), 0.0);
    const auto begin = std::chrono::steady_clock::now();
    parallel_for(threads, threads, control, [&](int, std::int64_t item) {
      const auto mine = std::chrono::steady_clock::now();
      double flops = 0;
      do {
        flops += function(5000);
      } while (seconds_since(begin) < kRoundSeconds);
      rates[static_cast<std::size_t>(item)] = flops / seconds_since(mine);
    });
    best = std::max(best, std::accumulate(rates.begin(), rates.end(), 0.0));
  }
  return best * 1e-9;
}

}  // namespace

Arithmetic arithmetic_of(std::string_view kernel, DType dtype) {
  if (kernel == "cpu-amx") return Arithmetic::bf16_tiles;
  if (kernel == "cpu-avx512-bf16") return Arithmetic::bf16_pairs;
  return dtype == DType::f64 || kernel == "reference" ? Arithmetic::float64 : Arithmetic::float32;
}

Peak measured_peak(Device device, DType dtype, std::string_view kernel) {
  if (device.type == DeviceType::cuda) {
    const GpuPeak found = measured_gpu_peak(device, dtype);
    return {found.gflops, found.source};
  }
  const Arithmetic arithmetic = arithmetic_of(kernel, dtype);
  // More threads than processors would be measured one after the other.
  return {measure(products_of(arithmetic), std::min(num_threads(), cpu().usable)), source_of(arithmetic)};
}

}  // namespace longspan::cli
