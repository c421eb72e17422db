// longspan bench: forward and backward, GFLOP/s and the fraction of a peak measured in the same run.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <memory>
#include <optional>

#include "command.h"
#include "console.h"
#include "interrupt.h"
#include "json.h"
#include "kernels/kernel.h"
#include "longspan/error.h"
#include "longspan/memory.h"
#include "longspan/threads.h"
#include "machine.h"
#include "peak.h"
#include "problem_options.h"
#include "tensor.h"
#include "timing.h"

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
  double flops = 0;
  double extra_bytes = 0;
  double gflops() const { return flops / median_seconds * 1e-9; }
};

/// Runs once to warm up, then several times.
template <class Body>
Timing measure(std::string_view kernel, double flops, int repeats, Progress& progress, double progress_begin,
               double progress_end, Body&& body) {
  host_memory::reset_peak();
  const std::size_t before = host_memory::statistics().used_bytes;
  std::vector<double> seconds;
  for (int repeat = -1; repeat < repeats; ++repeat) {
    stop_if_interrupted();
    progress.update(progress_begin + (progress_end - progress_begin) * (repeat + 1) / (repeats + 1));
    const Stopwatch watch;
    body();
    if (repeat >= 0) seconds.push_back(watch.seconds());
  }
  std::sort(seconds.begin(), seconds.end());
  const std::size_t peak = host_memory::statistics().peak_used_bytes;
  return {std::string(kernel), seconds[seconds.size() / 2], seconds.front(), flops, static_cast<double>(peak - before)};
}

Json describe_timing(const Timing& timing, double peak) {
  return {{"kernel", timing.kernel},
          {"seconds", timing.median_seconds},
          {"best_seconds", timing.best_seconds},
          {"flops", timing.flops},
          {"gflops", timing.gflops()},
          {"peak_gflops", peak},
          {"fraction_of_peak", timing.gflops() / peak},
          {"extra_bytes", timing.extra_bytes}};
}

int run(const BenchCommand& command) {
  if (command.what == "dense") {
    for (const char* part : {"segments", "dilations", "assign", "phase", "pad-keys", "pattern"}) {
      if (command.problem.given(part)) {
        throw InvalidArgument(
            part, fmt::format("--{} with bench dense: every position sees every other; use bench dilated", part));
      }
    }
  }
  ProblemChoice choice = command.problem.resolve();
  require_host(choice.device);
  if (command.what == "dense") choice.pattern = Pattern::dense();
  if (command.repeats < 1)
    throw InvalidArgument("repeats", fmt::format("--repeats is {}: give at least 1", command.repeats));
  const Problem shape = choice.problem(kDefaultTokens);
  const Attention attention(choice.pattern, choice.options);
  const auto plan = attention.plan(shape);
  for (const Pass pass : {Pass::forward, Pass::backward}) {
    if (plan->kernel(pass) == nullptr) throw Unsupported(plan->why_no_kernel(pass));
  }
  if (shape.tokens == 0 || shape.batch == 0)
    throw InvalidArgument("tokens", "nothing to time: give at least 1 token and 1 entry");
  const PlanTotals totals = plan->totals();

  const Workload work(shape, choice.layout, choice.seed);
  Call call;
  call.cancel = &interrupted();
  call.dropout_seed = choice.seed;
  std::vector<Timing> timings;
  double peak = 0;
  std::optional<double> tile_peak;
  {
    Progress progress("bench");
    peak = measured_peak_gflops(shape.dtype, num_threads());
    timings.push_back(measure(plan->kernel(Pass::forward)->name, totals.forward_flops, command.repeats, progress, 0.0,
                              command.forward_only ? 1.0 : 0.3, [&] {
                                attention.forward(work.q.view(), work.k.view(), work.v.view(), work.out.view(),
                                                  work.lse.view(), call);
                              }));
    if (!command.forward_only) {
      timings.push_back(
          measure(plan->kernel(Pass::backward)->name, totals.backward_flops, command.repeats, progress, 0.3, 1.0, [&] {
            attention.backward(work.q.view(), work.k.view(), work.v.view(), work.out.view(), work.lse.view(),
                               work.dout.view(), work.dq.view(), work.dk.view(), work.dv.view(), call);
          }));
    }
    peak = std::max(peak, measured_peak_gflops(shape.dtype, num_threads()));  // before and after: clocks move
    if (shape.dtype == DType::bf16) tile_peak = measured_tile_peak_gflops(num_threads());
  }
  Timing whole;
  for (const Timing& timing : timings) {
    whole.flops += timing.flops;
    whole.median_seconds += timing.median_seconds;
    whole.extra_bytes = std::max(whole.extra_bytes, timing.extra_bytes);
  }

  if (command.json) {
    Json json = {{"bench", command.what},
                 {"tokens", shape.tokens},
                 {"pattern", choice.pattern.to_string()},
                 {"problem", describe(shape)},
                 {"options", describe(choice.options)},
                 {"machine", machine_summary()},
                 {"threads", num_threads()},
                 {"kernel", timings.front().kernel},
                 {"repeats", command.repeats},
                 {"pairs", totals.pairs},
                 {"seconds", whole.median_seconds},
                 {"gflops", whole.gflops()},
                 {"peak_gflops", peak},
                 {"fraction_of_peak", whole.gflops() / peak},
                 {"extra_bytes", whole.extra_bytes}};
    if (tile_peak) {
      json["tile_peak_gflops"] = *tile_peak;
      json["fraction_of_tile_peak"] = whole.gflops() / *tile_peak;
    }
    json["forward"] = describe_timing(timings[0], peak);
    if (timings.size() > 1) json["backward"] = describe_timing(timings[1], peak);
    print_json(json);
    return kSuccess;
  }
  print("{}{}, {} tokens, batch {}, {} heads of {}, {}\n", bold(choice.pattern.to_string()),
        choice.options.causal ? ", causal" : "", with_commas(static_cast<double>(shape.tokens)), shape.batch,
        shape.heads, shape.head_dim, name_of(shape.dtype));
  print("{}, {} threads, FMA peak {:.1f} GFLOP/s{}, measured in this run\n\n", machine_summary(), num_threads(), peak,
        tile_peak ? fmt::format(" ({:.0f} on AMX tiles)", *tile_peak) : "");
  Table table({{"pass", Align::left},
               {"kernel", Align::left},
               {"median"},
               {"best"},
               {"GFLOP/s"},
               {"of FMA peak"},
               {"extra memory"}});
  const char* names[] = {"forward", "backward"};
  for (std::size_t i = 0; i < timings.size(); ++i) {
    const Timing& timing = timings[i];
    table.add({names[i], timing.kernel, short_duration(timing.median_seconds), short_duration(timing.best_seconds),
               fmt::format("{:.1f}", timing.gflops()), fmt::format("{:.1f}%", 100 * timing.gflops() / peak),
               short_bytes(timing.extra_bytes)});
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
      "Example: longspan bench dilated --tokens 64K --dtype bf16 --json");
  const auto command = std::make_shared<BenchCommand>();
  parser->add_option("what", command->what, "dilated (or whatever the pattern options say) or dense")
      ->required()
      ->check(CLI::IsMember({"dilated", "dense"}));
  command->problem.add_to(*parser);
  parser->add_option("--repeats", command->repeats, "Timed runs of each pass (default: 5)")->type_name("COUNT");
  parser->add_flag("--forward-only", command->forward_only, "Leave the backward out");
  parser->add_flag("--json", command->json, "Machine-readable output");
  return {parser, [command] { return run(*command); }};
}

}  // namespace longspan::cli
