// longspan check: every kernel of this machine against the float64 reference.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <map>
#include <memory>
#include <optional>
#include <span>

#include "check/cases.h"
#include "check/run.h"
#include "command.h"
#include "console.h"
#include "interrupt.h"
#include "json.h"
#include "longspan/error.h"
#include "longspan/machine.h"
#include "longspan/threads.h"
#include "longspan/version.h"
#include "machine.h"
#include "problem_options.h"
#include "tensor.h"

namespace longspan::cli {
namespace {

constexpr std::int64_t kDefaultTokens = 512;
constexpr std::int64_t kMostRandom = 100'000;  // they are made before the first one runs

struct CheckCommand {
  ProblemOptions problem;
  std::int64_t random = 0;
  std::optional<std::int64_t> first_case;
  bool json = false;
};

/// A case and the command that runs it alone.
struct Numbered {
  CheckCase one;
  std::string command;
};

/// Everything one kernel did with one element type.
struct Tally {
  int cases = 0;
  std::array<double, kQuantities.size()> largest_error{};
  std::array<double, kQuantities.size()> over_tolerance{};
  double rms_over_model = 0;
};

struct Failure {
  std::string kernel, problem, description, command;
};

/// Options that describe a problem, as opposed to how to run it.
constexpr const char* kShapeOptions[] = {"tokens",   "batch",     "heads",  "kv-heads", "head-dim", "dtype",
                                         "segments", "dilations", "assign", "phase",    "pad-keys", "pattern",
                                         "causal",   "dropout",   "scale",  "layout"};

std::vector<Numbered> choose_cases(const CheckCommand& command, const ProblemChoice& choice) {
  std::vector<Numbered> cases;
  const char* given = nullptr;
  for (const char* option : kShapeOptions) {
    if (command.problem.given(option)) given = option;
  }
  if (given != nullptr) {
    if (command.random > 0 || command.first_case) {
      throw InvalidArgument(
          given,
          fmt::format("--{} with --random or --case: those choose their own problems; give one or the other", given));
    }
    CheckCase one;
    one.pattern = choice.pattern;
    one.options = choice.options;
    one.options.kernel.clear();
    one.dtype = choice.dtype;
    one.batch = choice.batch;
    one.tokens = choice.tokens.value_or(kDefaultTokens);
    one.heads = choice.heads;
    one.kv_heads = choice.kv_heads;
    one.head_dim = choice.head_dim;
    one.layout = choice.layout;
    one.seed = choice.seed;
    cases.push_back({std::move(one), "the same command"});
    return cases;
  }
  const std::int64_t first = command.first_case.value_or(0);
  if (command.random == 0 || !command.first_case) {
    std::vector<CheckCase> grid = check_grid();
    if (first >= static_cast<std::int64_t>(grid.size())) {
      throw InvalidArgument(
          "case", fmt::format("--case is {}: the grid has cases 0 to {}; add --random 1 for a random one", first,
                              grid.size() - 1));
    }
    for (std::size_t i = 0; i < grid.size(); ++i) {
      if (command.first_case && static_cast<std::int64_t>(i) != first) continue;
      cases.push_back({std::move(grid[i]), fmt::format("longspan check --case {}", i)});
    }
  }
  for (std::int64_t i = 0; i < command.random; ++i) {
    const auto index = static_cast<std::uint64_t>(first + i);
    cases.push_back({random_case(choice.seed, index),
                     fmt::format("longspan check --random 1 --seed {} --case {}", choice.seed, index)});
  }
  return cases;
}

void check_kernel_name(const std::string& name) {
  std::string names;
  for (const std::string& kernel : kernel_names()) {
    if (name.empty() || kernel == name) return;
    names += fmt::format("{}{}", names.empty() ? "" : ", ", kernel);
  }
  throw InvalidArgument("kernel", fmt::format("--kernel is '{}': this build has {}", name, names));
}

/// What all kernels did with all cases.
struct Outcome {
  std::map<std::pair<std::string, std::string>, Tally> tallies;  // by kernel and element type
  std::vector<Failure> failures;
  std::size_t cases = 0;
  std::size_t left_out = 0;  // no kernel runs them
  Device device;
  std::string on_device;  // the option that repeats a case there
};

Outcome run_cases(const std::vector<Numbered>& cases, Device device, const std::string& kernel) {
  Outcome outcome;
  outcome.cases = cases.size();
  outcome.device = device;
  if (device.type != DeviceType::cpu) outcome.on_device = " --device " + to_string(device);
  Progress progress(fmt::format("{} cases", cases.size()));
  for (std::size_t i = 0; i < cases.size(); ++i) {
    progress.update(static_cast<double>(i) / static_cast<double>(cases.size()));
    const std::vector<CaseResult> results = run_case(cases[i].one, device, kernel);
    outcome.left_out += results.empty();
    for (const CaseResult& result : results) {
      Tally& tally = outcome.tallies[{result.kernel, std::string(name_of(cases[i].one.dtype))}];
      ++tally.cases;
      for (std::size_t quantity = 0; quantity < kQuantities.size(); ++quantity) {
        tally.largest_error[quantity] = std::max(tally.largest_error[quantity], result.largest_error[quantity]);
        tally.over_tolerance[quantity] = std::max(tally.over_tolerance[quantity], result.over_tolerance[quantity]);
      }
      tally.rms_over_model = std::max(tally.rms_over_model, result.rms_over_model);
      if (!result.ok) {
        outcome.failures.push_back(
            {result.kernel, result.problem, cases[i].one.to_string(),
             fmt::format("{} --kernel {}{}", cases[i].command, result.kernel, outcome.on_device)});
      }
    }
  }
  return outcome;
}

Json describe_outcome(const Outcome& outcome, std::uint64_t seed) {
  Json json = {{"ok", outcome.failures.empty()}, {"version", version()},         {"commit", commit()},
               {"cases", outcome.cases},         {"left_out", outcome.left_out}, {"seed", seed},
               {"threads", num_threads()},       {"machine", machine_summary()}, {"device", to_string(outcome.device)},
               {"kernels", Json::array()},       {"failures", Json::array()}};
  if (outcome.device.type == DeviceType::cuda) json["gpu"] = device_summary(outcome.device);
  for (const auto& [key, tally] : outcome.tallies) {
    Json one = {
        {"kernel", key.first}, {"dtype", key.second}, {"cases", tally.cases}, {"rms_over_model", tally.rms_over_model}};
    for (std::size_t quantity = 0; quantity < kQuantities.size(); ++quantity) {
      one[std::string(kQuantities[quantity])] = {{"largest_error", tally.largest_error[quantity]},
                                                 {"over_tolerance", tally.over_tolerance[quantity]}};
    }
    json["kernels"].push_back(one);
  }
  for (const Failure& failure : outcome.failures) {
    json["failures"].push_back({{"kernel", failure.kernel},
                                {"problem", failure.problem},
                                {"case", failure.description},
                                {"command", failure.command}});
  }
  return json;
}

void print_outcome(const Outcome& outcome) {
  std::vector<Table::Column> columns = {{"kernel", Align::left}, {"dtype", Align::left}, {"cases"}};
  for (const std::string_view quantity : kQuantities) columns.push_back({std::string(quantity)});
  columns.push_back({"rms/model"});
  Table table(columns);
  for (const std::string& kernel : kernel_names()) {  // in the library's order, fastest first
    for (const auto& [key, tally] : outcome.tallies) {
      if (key.first != kernel) continue;
      std::vector<std::string> cells = {key.first, key.second, fmt::format("{}", tally.cases)};
      for (std::size_t quantity = 0; quantity < kQuantities.size(); ++quantity) {
        const double over = tally.over_tolerance[quantity];
        const std::string cell = fmt::format("{:.1e} ({:.0f}%)", tally.largest_error[quantity], 100 * over);
        cells.push_back(over > 1 ? bad(cell) : cell);
      }
      cells.push_back(tally.rms_over_model > 0 ? fmt::format("{:.2f}", tally.rms_over_model) : "");
      table.add(std::move(cells));
    }
  }
  print("{} cases on {} against the float64 reference: largest error (and its part of the tolerance)\n\n",
        outcome.cases - outcome.left_out, to_string(outcome.device));
  print_text(table.to_string());
  constexpr std::size_t kMostShown = 8;
  const std::vector<Failure>& failures = outcome.failures;
  for (const Failure& failure : std::span(failures).first(std::min(failures.size(), kMostShown))) {
    print("\n{} {}\n  {}\n  case: {}\n  repeat: {}\n", bad("FAILED"), failure.kernel, failure.problem,
          failure.description, failure.command);
  }
  if (failures.size() > kMostShown) print("\n{} more failures; --json lists them all\n", failures.size() - kMostShown);
  if (outcome.left_out > 0) {
    print("\n{} cases were left out: no kernel on {} runs them (longspan info --why{} says what it takes)\n",
          outcome.left_out, to_string(outcome.device), outcome.on_device);
  }
  if (failures.empty()) print("\n{}\n", good("every kernel agrees"));
}

int run(const CheckCommand& command) {
  const ProblemChoice choice = command.problem.resolve();
  if (command.random < 0 || command.random > kMostRandom)
    throw InvalidArgument("random", fmt::format("--random is {}: give 0 to {}", command.random, kMostRandom));
  if (command.first_case && *command.first_case < 0)
    throw InvalidArgument("case", fmt::format("--case is {}: give 0 or more", *command.first_case));
  check_kernel_name(choice.options.kernel);
  require_device(choice.device);
  const Outcome outcome = run_cases(choose_cases(command, choice), choice.device, choice.options.kernel);
  if (outcome.tallies.empty()) {
    throw Unsupported(fmt::format("no kernel can run these cases; longspan info --why{} says why", outcome.on_device));
  }
  if (command.json) print_json(describe_outcome(outcome, choice.seed));
  else print_outcome(outcome);
  return outcome.failures.empty() ? kSuccess : kOverTolerance;
}

}  // namespace

Command add_check(CLI::App& app) {
  CLI::App* parser = app.add_subcommand("check", "Compare every kernel with the float64 reference");
  parser->footer(
      "\nWithout problem options: a fixed grid, plus --random N problems drawn from --seed that reach every option of "
      "the\n"
      "operator. With them: that one problem (default 512 tokens). Exit code 1 if an error is over its tolerance; the\n"
      "command that repeats the case is printed.\n"
      "Examples: longspan check --random 200 --seed 7\n"
      "          longspan check --random 1000 --device cuda");
  const auto command = std::make_shared<CheckCommand>();
  command->problem.add_to(*parser);
  parser->add_option("--random", command->random, "Random problems to run besides the grid (default: 0)")
      ->type_name("COUNT");
  parser
      ->add_option("--case", command->first_case,
                   "Only this case of the grid; with --random: the first random case, and no grid")
      ->type_name("INDEX");
  parser->add_flag("--json", command->json, "Machine-readable output");
  return {parser, [command] { return run(*command); }};
}

}  // namespace longspan::cli
