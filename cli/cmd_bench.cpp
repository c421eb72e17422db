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
  Peak peak;  ///< of the instructions that the kernel uses
  double gflops() const { return flops / median_seconds * 1e-9; }
  double fraction() const { return gflops() / peak.gflops; }
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
  Timing timing;
  timing.kernel = ran.kernel;
  timing.median_seconds = seconds[seconds.size() / 2];
  timing.best_seconds = seconds.front();
  timing.flops = flops;
  timing.extra_bytes = peak_used_bytes(device, false) - (gpu ? 0 : before);
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

Json describe_timing(const Timing& timing) {
  return {{"kernel", timing.kernel},
          {"seconds", timing.median_seconds},
          {"best_seconds", timing.best_seconds},
          {"sustained_seconds", timing.sustained_seconds},
          {"flops", timing.flops},
          {"gflops", timing.gflops()},
          {"peak_gflops", timing.peak.gflops},
          {"peak_source", timing.peak.source},
          {"fraction_of_peak", timing.fraction()},
          {"extra_bytes", timing.extra_bytes}};
}

/// Options of a pattern contradict `bench dense`.
void check_pattern_options(const BenchCommand& command) {
  if (command.what != "dense") return;
  for (const char* part : {"segments", "dilations", "assign", "phase", "pad-keys", "pattern", "mask"}) {
    if (command.problem.given(part)) {
      throw InvalidArgument(
          part, fmt::format("--{} with bench dense: every position sees every other; use bench dilated", part));
    }
  }
}

/// Times the passes. Peaks are measured before and after, since clocks move: the higher counts.
std::vector<Timing> time_passes(const BenchCommand& command, const ProblemChoice& choice, const Attention& attention,
                                const Plan& plan) {
  const Problem& shape = plan.problem();
  const Workload work(shape, choice.layout, choice.seed);
  Call call;
  call.cancel = &interrupted();
  call.dropout_seed = choice.seed;
  CallReport ran;
  call.report = &ran;
  Progress progress("bench");
  const auto time = [&](Pass pass, double flops, double begin, double end, const std::function<void()>& body) {
    const std::string_view kernel = plan.kernel_name(pass);
    const Peak before = measured_peak(shape.device, shape.dtype, kernel);
    Timing timing = measure(ran, flops, command.repeats, shape.device, progress, begin, end, body);
    const Peak after = measured_peak(shape.device, shape.dtype, timing.kernel);
    timing.peak = timing.kernel == kernel && before.gflops > after.gflops ? before : after;
    return timing;
  };
  const PlanTotals totals = plan.totals();
  std::vector<Timing> timings;
  timings.push_back(time(Pass::forward, totals.forward_flops, 0.0, command.forward_only ? 1.0 : 0.3, [&] {
    attention.forward(work.q.view(), work.k.view(), work.v.view(), work.out.view(), work.lse.view(), call);
  }));
  if (command.forward_only) return timings;
  timings.push_back(time(Pass::backward, totals.backward_flops, 0.3, 1.0, [&] {
    attention.backward(work.q.view(), work.k.view(), work.v.view(), work.out.view(), work.lse.view(), work.dout.view(),
                       work.dq.view(), work.dk.view(), work.dv.view(), call);
  }));
  return timings;
}

Json describe_bench(const BenchCommand& command, const Plan& plan, const std::vector<Timing>& timings) {
  const Problem& shape = plan.problem();
  double seconds = 0, flops = 0, at_peak = 0, extra_bytes = 0;
  for (const Timing& timing : timings) {
    seconds += timing.median_seconds;
    flops += timing.flops;
    at_peak += timing.flops / timing.peak.gflops * 1e-9;  // seconds at that rate
    extra_bytes = std::max(extra_bytes, timing.extra_bytes);
  }
  const Peak& peak = timings.front().peak;
  Json json = {{"bench", command.what},
               {"version", version()},
               {"commit", commit()},
               {"pattern", plan.pattern().to_string()},
               {"problem", describe(shape)},
               {"options", describe(plan.options())},
               {"tokens", shape.tokens},
               {"machine", machine_summary()},
               {"device", to_string(shape.device)},
               {"device_name", device_summary(shape.device)},
               {"threads", num_threads()},
               {"kernel", timings.front().kernel},
               {"repeats", command.repeats},
               {"pairs", plan.totals().pairs},
               {"seconds", seconds},
               {"gflops", flops / seconds * 1e-9},
               {"peak_gflops", peak.gflops},
               {"peak_source", peak.source},
               {"fraction_of_peak", at_peak / seconds},
               {"extra_bytes", extra_bytes}};
  if (shape.device.type == DeviceType::cuda) json["gpu_driver"] = gpu_driver();
  json["forward"] = describe_timing(timings[0]);
  if (timings.size() > 1) json["backward"] = describe_timing(timings[1]);
  return json;
}

void print_bench(const Plan& plan, const std::vector<Timing>& timings) {
  const Problem& shape = plan.problem();
  print("{}{}, {} tokens, batch {}, {} heads of {}, {}\n", bold(plan.pattern().to_string()),
        plan.options().causal ? ", causal" : "", with_commas(shape.tokens), shape.batch, shape.heads, shape.head_dim,
        name_of(shape.dtype));
  const bool gpu = shape.device.type == DeviceType::cuda;
  const double unit = gpu ? 1e-3 : 1;
  const char* const per_second = gpu ? "TFLOP/s" : "GFLOP/s";
  print("{}, {}\n\n", gpu ? to_string(shape.device) : machine_summary(), device_summary(shape.device));
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
                                      fmt::format("{:.1f}%", 100 * timing.fraction()),
                                      short_bytes(timing.extra_bytes)};
    if (gpu) cells.insert(cells.begin() + 5, fmt::format("{:.1f}", timing.flops / timing.sustained_seconds * 1e-12));
    table.add(std::move(cells));
  }
  print_text(table.to_string());
  print("\n");
  for (std::size_t i = 0; i < timings.size(); ++i) {
    const Peak& peak = timings[i].peak;
    print("peak of the {}: {:.1f} {}, measured in this run: {}\n", names[i], peak.gflops * unit, per_second,
          peak.source);
  }
}

int run(const BenchCommand& command) {
  check_pattern_options(command);
  ProblemChoice choice = command.problem.resolve();
  require_device(choice.device);
  if (command.what == "dense") choice.pattern = Pattern::dense();
  if (command.what == "block-sparse" && !command.problem.given("pattern") && !command.problem.given("mask"))
    choice.pattern = Pattern::block_sparse(BlockPattern::bigbird());
  if (command.repeats < 1)
    throw InvalidArgument("repeat", fmt::format("--repeat is {}: give at least 1", command.repeats));
  const Problem shape = choice.problem(kDefaultTokens);
  const Attention attention(choice.pattern, choice.options);
  const auto plan = attention.plan(shape);
  for (const Pass pass : {Pass::forward, Pass::backward}) {
    if (pass == Pass::backward && command.forward_only) continue;
    if (plan->kernel_name(pass).empty()) throw Unsupported(why_no_kernel(*plan, pass));
  }
  if (shape.tokens == 0 || shape.batch == 0)
    throw InvalidArgument("tokens", "nothing to time: give at least 1 token and 1 entry");
  const std::vector<Timing> timings = time_passes(command, choice, attention, *plan);
  if (command.json) print_json(describe_bench(command, *plan, timings));
  else print_bench(*plan, timings);
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
  parser->add_option("--repeat,--repeats", command->repeats, "Timed runs of each pass (default: 5)")
      ->type_name("COUNT");
  parser->add_flag("--forward-only", command->forward_only, "Leave the backward out");
  parser->add_flag("--json", command->json, "Machine-readable output");
  return {parser, [command] { return run(*command); }};
}

}  // namespace longspan::cli
