// longspan bench: forward and backward, GFLOP/s and the fraction of a peak measured in the same run.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <memory>
#include <optional>
#include <thread>

#include "command.h"
#include "console.h"
#include "gpu/gpu.h"
#include "interrupt.h"
#include "json.h"
#include "longspan/error.h"
#include "longspan/memory.h"
#include "longspan/threads.h"
#include "longspan/version.h"
#include "machine.h"
#include "peak.h"
#include "problem_options.h"
#include "tensor.h"

namespace longspan::cli {
namespace {

constexpr std::int64_t kDefaultTokens = 8192;

struct BenchCommand {
  ProblemOptions problem;
  std::string what;
  int repeats = 5;
  bool forward_only = false;
  bool json = false;
};

struct Timing {
  std::string kernel;
  double median_seconds = 0;
  double best_seconds = 0;
  double sustained_seconds = 0;  ///< GPUs: of one call among many back to back, where the card meets its power cap
  double flops = 0;
  double extra_bytes = 0;
  double gflops() const { return flops / median_seconds * 1e-9; }
};

/// What the library's pool has lent at most since `reset`.
double peak_used_bytes(Device device, bool reset) {
  if (reset) device.type == DeviceType::cpu ? host_memory::reset_peak() : device_memory::reset_peak(device.index);
  return static_cast<double>(device.type == DeviceType::cpu ? host_memory::statistics().peak_used_bytes
                                                            : device_memory::statistics(device.index).peak_used_bytes);
}

/// Runs to warm up, then several times; GPUs rest before the first, and then run without a rest.
template <class Body>
Timing measure(const CallReport& ran, double flops, int repeats, Device device, Progress& progress,
               double progress_begin, double progress_end, Body&& body) {
  constexpr double kSustainedSeconds = 0.15;
  const bool gpu = device.type == DeviceType::cuda;
  const double before = peak_used_bytes(device, true);
  std::vector<double> seconds;
  for (int repeat = gpu ? -3 : -1; repeat < repeats; ++repeat) {
    stop_if_interrupted();
    progress.update(progress_begin + (progress_end - progress_begin) * std::max(repeat + 1, 0) / (repeats + 1));
    if (gpu && repeat == 0) std::this_thread::sleep_for(std::chrono::milliseconds(250));
    const double taken = seconds_on(device, body);
    if (repeat >= 0) seconds.push_back(taken);
  }
  std::sort(seconds.begin(), seconds.end());
  Timing timing{std::string(ran.kernel),
                seconds[seconds.size() / 2],
                seconds.front(),
                0,
                flops,
                peak_used_bytes(device, false) - (gpu ? 0 : before)};
  timing.sustained_seconds = timing.median_seconds;
  if (gpu) {
    const int calls = std::clamp(static_cast<int>(kSustainedSeconds / timing.best_seconds), 3, 1000);
    timing.sustained_seconds = seconds_on(device,
                                          [&] {
                                            for (int call = 0; call < calls; ++call) body();
                                          }) /
                               calls;
  }
  return timing;
}

Json describe_timing(const Timing& timing, double peak) {
  return {{"kernel", timing.kernel},
          {"seconds", timing.median_seconds},
          {"best_seconds", timing.best_seconds},
          {"sustained_seconds", timing.sustained_seconds},
          {"flops", timing.flops},
          {"gflops", timing.gflops()},
          {"peak_gflops", peak},
          {"fraction_of_peak", timing.gflops() / peak},
          {"extra_bytes", timing.extra_bytes}};
}

/// What GFLOP/s are a fraction of. Measured before and after the runs, since clocks move: the higher counts.
struct Peak {
  double gflops = 0;
  std::string source;

  void measure(Device device, DType dtype) {
    if (device.type == DeviceType::cuda) {
      const GpuPeak found = measured_gpu_peak(device, dtype);
      gflops = std::max(gflops, found.gflops);
      source = found.source;
    } else {
      gflops = std::max(gflops, measured_peak_gflops(dtype, num_threads()));
      source = "multiply-adds of vectors on registers";
    }
  }
};

int run(const BenchCommand& command) {
  if (command.what == "dense") {
    for (const char* part : {"segments", "dilations", "assign", "phase", "pad-keys", "pattern", "mask"}) {
      if (command.problem.given(part)) {
        throw InvalidArgument(
            part, fmt::format("--{} with bench dense: every position sees every other; use bench dilated", part));
      }
    }
  }
  ProblemChoice choice = command.problem.resolve();
  require_device(choice.device);
  if (command.what == "dense") choice.pattern = Pattern::dense();
  if (command.what == "block-sparse" && !command.problem.given("pattern") && !command.problem.given("mask")) {
    choice.pattern = Pattern::block_sparse(BlockPattern::bigbird());
  }
  if (command.repeats < 1)
    throw InvalidArgument("repeats", fmt::format("--repeats is {}: give at least 1", command.repeats));
  const Problem shape = choice.problem(kDefaultTokens);
  const Attention attention(choice.pattern, choice.options);
  const auto plan = attention.plan(shape);
  for (const Pass pass : {Pass::forward, Pass::backward}) {
    if (pass == Pass::backward && command.forward_only) continue;
    if (plan->kernel_name(pass).empty()) throw Unsupported(plan->why_no_kernel(pass));
  }
  if (shape.tokens == 0 || shape.batch == 0)
    throw InvalidArgument("tokens", "nothing to time: give at least 1 token and 1 entry");
  const PlanTotals totals = plan->totals();

  const Workload work(shape, choice.layout, choice.seed);
  Call call;
  call.cancel = &interrupted();
  call.dropout_seed = choice.seed;
  CallReport ran;
  call.report = &ran;
  std::vector<Timing> timings;
  Peak peak;
  std::optional<double> tile_peak;
  {
    Progress progress("bench");
    peak.measure(shape.device, shape.dtype);
    timings.push_back(measure(
        ran, totals.forward_flops, command.repeats, shape.device, progress, 0.0, command.forward_only ? 1.0 : 0.3, [&] {
          attention.forward(work.q.view(), work.k.view(), work.v.view(), work.out.view(), work.lse.view(), call);
        }));
    if (!command.forward_only) {
      timings.push_back(measure(ran, totals.backward_flops, command.repeats, shape.device, progress, 0.3, 1.0, [&] {
        attention.backward(work.q.view(), work.k.view(), work.v.view(), work.out.view(), work.lse.view(),
                           work.dout.view(), work.dq.view(), work.dk.view(), work.dv.view(), call);
      }));
    }
    peak.measure(shape.device, shape.dtype);
    if (shape.dtype == DType::bf16 && shape.device.type == DeviceType::cpu)
      tile_peak = measured_tile_peak_gflops(num_threads());
  }
  Timing whole;
  for (const Timing& timing : timings) {
    whole.flops += timing.flops;
    whole.median_seconds += timing.median_seconds;
    whole.extra_bytes = std::max(whole.extra_bytes, timing.extra_bytes);
  }

  if (command.json) {
    Json json = {{"bench", command.what},
                 {"version", version()},
                 {"commit", commit()},
                 {"tokens", shape.tokens},
                 {"pattern", choice.pattern.to_string()},
                 {"problem", describe(shape)},
                 {"options", describe(choice.options)},
                 {"machine", machine_summary()},
                 {"device", device_summary(shape.device)},
                 {"threads", num_threads()},
                 {"kernel", timings.front().kernel},
                 {"repeats", command.repeats},
                 {"pairs", totals.pairs},
                 {"seconds", whole.median_seconds},
                 {"gflops", whole.gflops()},
                 {"peak_gflops", peak.gflops},
                 {"peak_source", peak.source},
                 {"fraction_of_peak", whole.gflops() / peak.gflops},
                 {"extra_bytes", whole.extra_bytes}};
    if (shape.device.type == DeviceType::cuda) json["gpu_driver"] = gpu_driver();
    if (tile_peak) {
      json["tile_peak_gflops"] = *tile_peak;
      json["fraction_of_tile_peak"] = whole.gflops() / *tile_peak;
    }
    json["forward"] = describe_timing(timings[0], peak.gflops);
    if (timings.size() > 1) json["backward"] = describe_timing(timings[1], peak.gflops);
    print_json(json);
    return kSuccess;
  }
  print("{}{}, {} tokens, batch {}, {} heads of {}, {}\n", bold(choice.pattern.to_string()),
        choice.options.causal ? ", causal" : "", with_commas(static_cast<double>(shape.tokens)), shape.batch,
        shape.heads, shape.head_dim, name_of(shape.dtype));
  const bool gpu = shape.device.type == DeviceType::cuda;
  const double unit = gpu ? 1e-3 : 1;
  const char* const per_second = gpu ? "TFLOP/s" : "GFLOP/s";
  print("{}, {}; peak {:.1f} {}{}, measured in this run: {}\n\n", gpu ? to_string(shape.device) : machine_summary(),
        device_summary(shape.device), peak.gflops * unit, per_second,
        tile_peak ? fmt::format(" ({:.0f} on AMX tiles)", *tile_peak) : "", peak.source);
  std::vector<Table::Column> columns = {
      {"pass", Align::left}, {"kernel", Align::left}, {"median"}, {"best"}, {per_second},
      {"of peak"},           {"extra memory"}};
  if (gpu) columns.insert(columns.begin() + 5, {"sustained"});
  Table table(columns);
  const char* names[] = {"forward", "backward"};
  for (std::size_t i = 0; i < timings.size(); ++i) {
    const Timing& timing = timings[i];
    std::vector<std::string> cells = {names[i],
                                      timing.kernel,
                                      short_duration(timing.median_seconds),
                                      short_duration(timing.best_seconds),
                                      fmt::format("{:.1f}", timing.gflops() * unit),
                                      fmt::format("{:.1f}%", 100 * timing.gflops() / peak.gflops),
                                      short_bytes(timing.extra_bytes)};
    if (gpu) cells.insert(cells.begin() + 5, fmt::format("{:.1f}", timing.flops / timing.sustained_seconds * 1e-12));
    table.add(std::move(cells));
  }
  print_text(table.to_string());
  return kSuccess;
}

}  // namespace

Command add_bench(CLI::App& app) {
  CLI::App* parser =
      app.add_subcommand("bench", "Time forward and backward, with GFLOP/s and the fraction of the peak");
  parser->footer(
      "\nFLOPs are 4 (forward) and 10 (backward) x pairs x head-dim; times are medians. Default: 8192 tokens.\n"
      "On a GPU the peak is that of a matrix product by cuBLAS, where the machine has it.\n"
      "Examples: longspan bench dilated --tokens 64K --dtype bf16 --json\n"
      "          longspan bench dense --tokens 16K --dtype bf16 --device cuda");
  const auto command = std::make_shared<BenchCommand>();
  parser
      ->add_option(
          "what", command->what,
          "dilated (or whatever the pattern options say), block-sparse (bigbird unless --pattern or --mask) or dense")
      ->required()
      ->check(CLI::IsMember({"dilated", "dense", "block-sparse"}));
  command->problem.add_to(*parser);
  parser->add_option("--repeats", command->repeats, "Timed runs of each pass (default: 5)")->type_name("COUNT");
  parser->add_flag("--forward-only", command->forward_only, "Leave the backward out");
  parser->add_flag("--json", command->json, "Machine-readable output");
  return {parser, [command] { return run(*command); }};
}

}  // namespace longspan::cli
