// longspan demo: dilated attention over a long sequence, computed, verified and drawn.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <memory>
#include <optional>

#include "command.h"
#include "console.h"
#include "files/output.h"
#include "interrupt.h"
#include "json.h"
#include "kernels/kernel.h"
#include "longspan/error.h"
#include "longspan/memory.h"
#include "longspan/threads.h"
#include "longspan/version.h"
#include "machine.h"
#include "peak.h"
#include "problem_options.h"
#include "report/report.h"
#include "tensor.h"
#include "timing.h"
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
};

/// One training step with a progress bar.
Times run_both(const Attention& attention, const Workload& work, Call call, Progress& progress) {
  const auto part = [&](double begin, double end) {
    return [&progress, begin, end](double fraction) {
      progress.update(begin + (end - begin) * fraction);
      return true;
    };
  };
  Times times;
  call.progress = part(0, 0.28);  // 4 of 14 parts
  const Stopwatch forward;
  attention.forward(work.q.view(), work.k.view(), work.v.view(), work.out.view(), work.lse.view(), call);
  times.forward = forward.seconds();
  call.progress = part(0.28, 1);
  const Stopwatch backward;
  attention.backward(work.q.view(), work.k.view(), work.v.view(), work.out.view(), work.lse.view(), work.dout.view(),
                     work.dq.view(), work.dk.view(), work.dv.view(), call);
  times.backward = backward.seconds();
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
    const Problem shape = choice.problem(probe);
    const Times times = run_both(attention, Workload(shape, choice.layout, choice.seed), call, progress);
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
       with_commas(static_cast<double>(probe)), short_duration(seconds), with_commas(static_cast<double>(tokens)),
       kWholeSeconds, with_commas(static_cast<double>(kMostTokens)));
  return tokens;
}

Json describe_run(const Report& report, const std::vector<RowCheck>& checks, const std::string& path) {
  Json passes = Json::object(), compared = Json::array();
  for (const ReportPass& pass : report.passes) {
    passes[pass.name] = {{"kernel", pass.kernel},
                         {"seconds", pass.seconds},
                         {"gflops", pass.gflops},
                         {"fraction_of_peak", pass.gflops / report.peak_gflops}};
  }
  for (const RowCheck& check : checks) {
    compared.push_back({{"name", check.name},
                        {"rows", check.rows},
                        {"largest_error", check.largest_error},
                        {"over_tolerance", check.over_tolerance},
                        {"rms_over_model", check.rms_over_model},
                        {"ok", check.ok}});
  }
  Json json = {{"verified", report.verified},
               {"tokens", report.plan->problem().tokens},
               {"pattern", report.plan->pattern().to_string()},
               {"problem", describe(report.plan->problem())},
               {"options", describe(report.plan->options())},
               {"machine", report.machine},
               {"threads", report.threads}};
  json.update(passes);
  json["peak_gflops"] = report.peak_gflops;
  json["extra_bytes"] = report.extra_bytes;
  json["dense_score_bytes"] = report.dense_bytes;
  json["checks"] = compared;
  if (!path.empty()) json["report"] = path;
  return json;
}

void print_run(const Report& report, const std::vector<RowCheck>& checks, const std::string& path) {
  for (const auto& [name, value] : summary_rows(report)) print("{:<14}{}\n", name, value);
  print("\n");
  Table table({{"compared", Align::left}, {"rows"}, {"largest error"}, {"of tolerance"}, {"", Align::left}});
  for (const RowCheck& check : checks) {
    table.add({check.name, with_commas(check.rows), fmt::format("{:.2e}", check.largest_error),
               fmt::format("{:.1f}%", 100 * check.over_tolerance), check.ok ? good("ok") : bad("over")});
  }
  print_text(table.to_string());
  print("\n{}\n", report.verified ? good("verified: every sampled row agrees with the float64 reference")
                                  : bad("NOT verified: results differ from the float64 reference"));
  for (const RowCheck& check : checks) {
    if (!check.ok) print("{}: {}\n", check.name, check.worst);
  }
  if (!path.empty()) print("report: {}\n", path);
}

std::string repeat_command(const ProblemChoice& choice, const Problem& problem) {
  std::string text = fmt::format(
      "longspan demo --tokens {} --batch {} --heads {} --kv-heads {} --head-dim {} --dtype {} --pattern '{}'",
      problem.tokens, problem.batch, problem.heads, problem.kv_heads, problem.head_dim, name_of(problem.dtype),
      choice.pattern.to_string());
  if (choice.options.causal) text += " --causal";
  if (choice.options.dropout > 0) text += fmt::format(" --dropout {}", choice.options.dropout);
  return text + fmt::format(" --seed {}", choice.seed);
}

int run(const DemoCommand& command) {
  ProblemChoice choice = command.problem.resolve();
  require_host(choice.device);
  if (choice.tokens == 0 || choice.batch == 0)
    throw InvalidArgument("tokens", "nothing to show: give at least 1 token and 1 entry");
  const Attention attention(choice.pattern, choice.options);
  {
    const auto plan = attention.plan(choice.problem(kMostTokens));
    for (const Pass pass : {Pass::forward, Pass::backward}) {
      if (plan->kernel(pass) == nullptr) throw Unsupported(plan->why_no_kernel(pass));
    }
  }
  std::optional<OutputFile> page;
  if (!command.out.empty()) page.emplace(command.out);
  Call call;
  call.cancel = &interrupted();
  call.dropout_seed = choice.seed;

  const std::int64_t tokens = choice.tokens ? *choice.tokens : choose_tokens(attention, choice, call);
  const auto plan = attention.plan(choice.problem(tokens));
  const Problem& problem = plan->problem();
  const Workload work(problem, choice.layout, choice.seed);
  Times times;
  host_memory::trim();
  host_memory::reset_peak();
  const std::size_t before = host_memory::statistics().used_bytes;
  {
    Progress progress(fmt::format("{} tokens, forward and backward", with_commas(static_cast<double>(tokens))));
    times = run_both(attention, work, call, progress);
  }
  const PlanTotals totals = plan->totals();
  Report report;
  report.extra_bytes = static_cast<double>(host_memory::statistics().peak_used_bytes - before);
  std::vector<RowCheck> checks;
  {
    Progress progress("comparing rows with the reference");
    progress.update(0);
    checks = verify(*plan, call, work);
    stop_if_interrupted();
    report.peak_gflops = measured_peak_gflops(problem.dtype, num_threads());
  }

  report.plan = plan.get();
  report.verified =
      !checks.empty() && std::all_of(checks.begin(), checks.end(), [](const RowCheck& check) { return check.ok; });
  for (const RowCheck& check : checks) {
    report.checks.push_back({check.name, check.rows, check.largest_error, check.over_tolerance, check.ok});
  }
  report.passes = {{"forward", std::string(plan->kernel(Pass::forward)->name), times.forward,
                    totals.forward_flops / times.forward * 1e-9},
                   {"backward", std::string(plan->kernel(Pass::backward)->name), times.backward,
                    totals.backward_flops / times.backward * 1e-9}};
  const double rows = static_cast<double>(problem.tokens);
  report.dense_bytes = static_cast<double>(problem.batch) * static_cast<double>(problem.heads) * rows * rows * 4;
  report.machine = machine_summary();
  report.threads = num_threads();
  report.command = repeat_command(choice, problem);
  report.version = fmt::format("longspan {} ({})", version(), commit());
  if (page) {
    page->write(render_report(report));
    page->commit();
  }
  if (command.json) print_json(describe_run(report, checks, command.out));
  else print_run(report, checks, command.out);
  return report.verified ? kSuccess : kOverTolerance;
}

}  // namespace

Command add_demo(CLI::App& app) {
  CLI::App* parser = app.add_subcommand("demo", "Compute, verify and draw dilated attention over a long sequence");
  parser->footer(
      "\nRuns forward and backward on the fastest kernel there is, and compares rows of every branch, from the first "
      "and the\n"
      "last segment, with a float64 computation of the definition. Without --tokens: as many as finish in about 20\n"
      "seconds, up to 131072.\nExample: longspan demo --tokens 64K --out report.html");
  const auto command = std::make_shared<DemoCommand>();
  command->problem.add_to(*parser);
  parser->add_option("--out", command->out, "Write a self-contained HTML report")->type_name("FILE");
  parser->add_flag("--json", command->json, "Machine-readable output");
  return {parser, [command] { return run(*command); }};
}

}  // namespace longspan::cli
