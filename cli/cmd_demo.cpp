// longspan demo: dilated attention over a long sequence, computed, verified and drawn.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <memory>
#include <optional>

#include "command.h"
#include "console.h"
#include "files/names.h"
#include "files/output.h"
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
#include "report/report.h"
#include "ring/rank_run.h"
#include "ring/ranks.h"
#include "tensor.h"
#include "text.h"
#include "verify.h"

namespace longspan::cli {
namespace {

constexpr std::int64_t kMostTokens = 131072;
constexpr double kWholeSeconds = 20;    // what the default size aims at
constexpr double kComputeSeconds = 14;  // of which forward and backward; the rest is inputs and verification
constexpr double kProbeSeconds = 0.4;   // long enough to extrapolate from

struct DemoCommand {
  ProblemOptions problem;
  std::string out;
  bool json = false;
};

struct Times {
  double forward = 0;
  double backward = 0;
  CallReport forward_ran, backward_ran;
};

/// One training step with a progress bar.
Times run_both(const Attention& attention, const Workload& work, Call call, Progress& progress) {
  const auto part = [&](double begin, double end) {
    return [&progress, begin, end](double fraction) {
      progress.update(begin + (end - begin) * fraction);
      return true;
    };
  };
  const Device device = work.q.view().device;
  Times times;
  call.progress = part(0, 0.28);  // 4 of 14 parts
  call.report = &times.forward_ran;
  times.forward = seconds_on(device, [&] {
    attention.forward(work.q.view(), work.k.view(), work.v.view(), work.out.view(), work.lse.view(), call);
  });
  call.progress = part(0.28, 1);
  call.report = &times.backward_ran;
  times.backward = seconds_on(device, [&] {
    attention.backward(work.q.view(), work.k.view(), work.v.view(), work.out.view(), work.lse.view(), work.dout.view(),
                       work.dq.view(), work.dk.view(), work.dv.view(), call);
  });
  return times;
}

/// Runs small problems until one takes long enough, then finds the largest whose share of pairs fits the time.
std::int64_t choose_tokens(const Attention& attention, const ProblemChoice& choice, const Call& call) {
  const auto pairs_of = [&](std::int64_t tokens) { return attention.plan(choice.problem(tokens))->totals().pairs; };
  Progress progress("sizing the demo");
  double seconds = 0, pairs = 0;
  std::int64_t probe = 512;
  while (seconds < kProbeSeconds && probe < kMostTokens) {
    probe *= 2;
    const Workload work(choice.problem(probe), choice.layout, choice.seed);
    if (choice.device.type == DeviceType::cuda) run_both(attention, work, call, progress);  // loads the code
    const Times times = run_both(attention, work, call, progress);
    seconds = times.forward + times.backward;
    pairs = pairs_of(probe);
  }
  constexpr std::int64_t kStep = 1024;
  std::int64_t low = 1, high = kMostTokens / kStep;
  while (low < high) {
    const std::int64_t middle = (low + high + 1) / 2;
    const double predicted = seconds * pairs_of(middle * kStep) / std::max(pairs, 1.0);
    if (predicted <= kComputeSeconds) low = middle;
    else high = middle - 1;
  }
  const std::int64_t tokens = low * kStep;
  note("{} tokens took {}; {} will finish in about {:.0f} seconds or less (default: at most {}; --tokens sets it)",
       with_commas(probe), short_duration(seconds), with_commas(tokens), kWholeSeconds, with_commas(kMostTokens));
  return tokens;
}

/// A ring of four over a smaller sequence whose far branches cross ranks.
struct RingDemo {
  std::int64_t tokens = 0;
  bool bit_identical = false;
  std::vector<std::int64_t> bytes_received;
  std::int64_t naive_bytes = 0;  // what a ring that moves all of K and V would bring each rank
};

RingDemo run_ring(const ProblemChoice& choice, std::int64_t most_tokens) {
  constexpr int kRanks = 4;
  constexpr std::int64_t kRingTokens = 8192;
  RingDemo demo;
  demo.tokens = std::min(most_tokens, kRingTokens);
  RingInputs inputs;
  inputs.problem = choice.problem(demo.tokens);
  inputs.problem.tokens = inputs.problem.query_rows = demo.tokens;
  inputs.problem.device = {};
  inputs.seed = choice.seed;
  RingSettings settings;
  const auto part = [&](std::int64_t share) { return std::max<std::int64_t>(1, demo.tokens / share); };
  settings.pattern = Pattern::longnet({part(32), part(4), part(1)}, {1, 8, 32});
  settings.options.causal = choice.options.causal;
  settings.shards = Shards::even(demo.tokens, kRanks);
  settings.verify = true;
  OneDevice whole(inputs, settings);
  std::vector<Json> ranks(kRanks);
  run_local_ranks(kRanks, [&](const std::shared_ptr<Communicator>& communicator) {
    ranks[static_cast<std::size_t>(communicator->rank())] = run_rank(inputs, settings, communicator, whole);
  });
  demo.bit_identical = true;
  for (const Json& rank : ranks) {
    demo.bit_identical = demo.bit_identical && rank["bit_identical"].get<bool>();
    demo.bytes_received.push_back(rank["bytes_received"]);
  }
  const Problem& p = inputs.problem;
  demo.naive_bytes = 2 * p.batch * (p.tokens - settings.shards.rows(0)) * p.kv_heads * p.head_dim * size_of(p.dtype);
  return demo;
}

Json describe_run(const ReportRun& run) {
  Json json = {{"device", run.device}, {"where", run.summary}, {"verified", run.verified}};
  for (const ReportPass& pass : run.passes) {
    json[pass.name] = {{"kernel", pass.kernel},
                       {"seconds", pass.seconds},
                       {"gflops", pass.gflops},
                       {"fraction_of_peak", pass.gflops / pass.peak.gflops}};
  }
  json["peak_gflops"] = run.passes.front().peak.gflops;
  json["peak_source"] = run.passes.front().peak.source;
  json["extra_bytes"] = run.extra_bytes;
  json["checks"] = Json::array();
  for (const RowCheck& check : run.checks) {
    json["checks"].push_back({{"name", check.name},
                              {"rows", check.rows},
                              {"largest_error", check.largest_error},
                              {"over_tolerance", check.over_tolerance},
                              {"rms_over_model", check.rms_over_model},
                              {"ok", check.ok}});
  }
  return json;
}

/// The first device's run at the top, where scripts look; every device's under "runs".
Json describe_report(const Report& report, const RingDemo& ring, const std::string& path) {
  Json json = {{"verified", report.verified()},
               {"tokens", report.plan->problem().tokens},
               {"pattern", report.plan->pattern().to_string()},
               {"problem", describe(report.plan->problem())},
               {"options", describe(report.plan->options())},
               {"machine", report.machine},
               {"threads", num_threads()},
               {"dense_score_bytes", report.dense_bytes},
               {"runs", Json::array()}};
  for (const ReportRun& run : report.runs) json["runs"].push_back(describe_run(run));
  const Json& first = json["runs"].front();
  for (const char* key : {"forward", "backward", "peak_gflops", "extra_bytes", "checks"}) json[key] = first[key];
  json["ring"] = {{"ranks", ring.bytes_received.size()},
                  {"tokens", ring.tokens},
                  {"bit_identical", ring.bit_identical},
                  {"bytes_received", ring.bytes_received},
                  {"naive_ring_bytes", ring.naive_bytes}};
  if (!path.empty()) json["report"] = path;
  return json;
}

void print_report(const Report& report, const RingDemo& ring, const std::string& path) {
  for (const auto& [name, value] : summary_rows(report)) print("{:<18}{}\n", name, value);
  print("\n");
  Table table({{"device", Align::left},
               {"compared", Align::left},
               {"rows"},
               {"largest error"},
               {"of tolerance"},
               {"", Align::left}});
  for (const ReportRun& run : report.runs) {
    for (const RowCheck& check : run.checks) {
      table.add({run.device, check.name, with_commas(check.rows), fmt::format("{:.2e}", check.largest_error),
                 fmt::format("{:.1f}%", 100 * check.over_tolerance), check.ok ? good("ok") : bad("over")});
    }
  }
  print_text(table.to_string());
  print("\n{}\n", report.verified() ? good("verified: every sampled row agrees with the float64 reference")
                                    : bad("NOT verified: results differ from the float64 reference"));
  for (const ReportRun& run : report.runs) {
    for (const RowCheck& check : run.checks) {
      if (!check.ok) print("{} {}: {}\n", run.device, check.name, check.worst);
    }
  }
  const std::int64_t most = *std::max_element(ring.bytes_received.begin(), ring.bytes_received.end());
  print("{}\n", ring.bit_identical
                    ? good(fmt::format("a ring of {} over {} tokens has the same bits; each rank received at most {} "
                                       "(a ring that moves all keys: {})",
                                       ring.bytes_received.size(), with_commas(ring.tokens),
                                       short_bytes(static_cast<double>(most)),
                                       short_bytes(static_cast<double>(ring.naive_bytes))))
                    : bad("a ring of ranks gives OTHER bits than one device"));
  if (!path.empty()) print("report: {}\n", printable(path));
}

std::string repeat_command(const ProblemChoice& choice, const Problem& problem, bool with_device) {
  std::string text = fmt::format(
      "longspan demo --tokens {} --batch {} --heads {} --kv-heads {} --head-dim {} --dtype {} --pattern '{}'",
      problem.tokens, problem.batch, problem.heads, problem.kv_heads, problem.head_dim, name_of(problem.dtype),
      choice.pattern.to_string());
  if (choice.options.causal) text += " --causal";
  if (choice.options.dropout > 0) text += fmt::format(" --dropout {}", choice.options.dropout);
  if (with_device) text += fmt::format(" --device {}", to_string(choice.device));
  return text + fmt::format(" --seed {}", choice.seed);
}

/// Whether kernels of this device run the problem's two passes.
bool runs_on(const Attention& attention, const ProblemChoice& choice, Device device) {
  Problem problem = choice.problem(kMostTokens);
  problem.device = device;
  const auto plan = attention.plan(problem);
  return !plan->kernel_name(Pass::forward).empty() && !plan->kernel_name(Pass::backward).empty();
}

/// The device that was asked for; otherwise the CPU, and beside it the first GPU where there is one.
std::vector<Device> choose_devices(const DemoCommand& command, const ProblemChoice& choice,
                                   const Attention& attention) {
  std::vector<Device> devices = {choice.device};
  if (!command.problem.given("device")) {
    const Device gpu{DeviceType::cuda, 0};
    if (runs_on(attention, choice, gpu)) devices.push_back(gpu);
    if (devices.size() > 1 && !runs_on(attention, choice, devices.front())) devices.erase(devices.begin());
  }
  for (const Device device : devices) {
    Problem problem = choice.problem(kMostTokens);
    problem.device = device;
    const auto plan = attention.plan(problem);
    for (const Pass pass : {Pass::forward, Pass::backward}) {
      if (plan->kernel_name(pass).empty()) throw Unsupported(why_no_kernel(*plan, pass));
    }
  }
  return devices;
}

/// Computes, times and verifies the step on one device. GPUs get a first run to load their code.
ReportRun run_on(Device device, const Attention& attention, const Plan& host_plan, const Workload& host,
                 const Call& call) {
  const bool gpu = device.type == DeviceType::cuda;
  Problem problem = host_plan.problem();
  problem.device = device;
  const auto plan = attention.plan(problem);
  std::optional<Workload> copy;
  if (gpu) copy = host.on(device);
  const Workload& work = gpu ? *copy : host;
  Times times;
  std::size_t before = 0;
  {
    Progress progress(fmt::format("{} tokens, forward and backward", with_commas(problem.tokens)));
    if (gpu) {
      run_both(attention, work, call, progress);
      device_memory::reset_peak(device.index);
    } else {
      host_memory::trim();
      host_memory::reset_peak();
      before = host_memory::statistics().used_bytes;
    }
    times = run_both(attention, work, call, progress);
  }
  const MemoryStatistics memory = gpu ? device_memory::statistics(device.index) : host_memory::statistics();
  ReportRun run;
  run.device = to_string(device);
  run.summary = device_summary(device);
  run.extra_bytes = static_cast<double>(memory.peak_used_bytes - before);
  {
    Progress progress("comparing rows with the reference");
    progress.update(0);
    std::optional<Workload> results;
    if (gpu) results = copy->on({});
    run.checks = verify(host_plan, call, gpu ? *results : host);
    stop_if_interrupted();
  }
  run.verified = !run.checks.empty() &&
                 std::all_of(run.checks.begin(), run.checks.end(), [](const auto& check) { return check.ok; });
  const PlanTotals totals = plan->totals();
  const auto add = [&](const char* name, const CallReport& ran, double seconds, double flops) {
    run.passes.push_back({name, std::string(ran.kernel), seconds, flops / seconds * 1e-9,
                          measured_peak(device, problem.dtype, ran.kernel)});
  };
  add("forward", times.forward_ran, times.forward, totals.forward_flops);
  add("backward", times.backward_ran, times.backward, totals.backward_flops);
  return run;
}

int run(const DemoCommand& command) {
  const NamedFile out = text_file("out", command.out);
  check_ending(out, {".html", ".htm"});
  check_outputs({out}, {array_file("mask", command.problem.mask_file())}, command.json);
  ProblemChoice choice = command.problem.resolve();
  require_device(choice.device);
  if (choice.tokens == 0 || choice.batch == 0)
    throw InvalidArgument("tokens", "nothing to show: give at least 1 token and 1 entry");
  const Attention attention(choice.pattern, choice.options);
  const std::vector<Device> devices = choose_devices(command, choice, attention);
  choice.device = devices.front();
  std::optional<OutputFile> page;
  if (!command.out.empty()) page.emplace(command.out);
  Call call;
  call.cancel = &interrupted();
  call.dropout_seed = choice.seed;

  Problem problem = choice.problem(choice.tokens ? *choice.tokens : choose_tokens(attention, choice, call));
  problem.device = {};
  const auto plan = attention.plan(problem);
  const Workload work(problem, choice.layout, choice.seed);
  Report report;
  report.plan = plan.get();
  for (const Device device : devices) report.runs.push_back(run_on(device, attention, *plan, work, call));
  const double rows = static_cast<double>(problem.tokens);
  report.dense_bytes = static_cast<double>(problem.batch) * static_cast<double>(problem.heads) * rows * rows * 4;
  report.machine = machine_summary();
  report.command = repeat_command(choice, problem, command.problem.given("device"));
  report.version = fmt::format("longspan {} ({})", version(), commit());
  if (page) {
    page->write(render_report(report));
    page->commit();
  }
  const RingDemo ring = run_ring(choice, problem.tokens);
  if (command.json) print_json(describe_report(report, ring, command.out));
  else print_report(report, ring, command.out);
  return report.verified() && ring.bit_identical ? kSuccess : kOverTolerance;
}

}  // namespace

Command add_demo(CLI::App& app) {
  CLI::App* parser = app.add_subcommand("demo", "Compute, verify and draw dilated attention over a long sequence");
  parser->footer(
      "\nRuns forward and backward on the fastest kernel there is, and compares rows of every branch, from the first "
      "and the\n"
      "last segment, with a float64 computation of the definition. Without --device: on the CPU and, where there is "
      "one, "
      "on\n"
      "the first GPU. Without --tokens: as many as finish in about 20 seconds, up to 131072.\n"
      "Example: longspan demo --tokens 64K --out report.html");
  const auto command = std::make_shared<DemoCommand>();
  command->problem.add_to(*parser);
  add_file_option(*parser, "--out", command->out, "Write a self-contained HTML report", "FILE.html");
  parser->add_flag("--json", command->json, "Machine-readable output");
  return {parser, [command] { return run(*command); }};
}

}  // namespace longspan::cli
