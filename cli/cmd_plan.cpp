// longspan plan: what attends to what, and what it costs. Closed form: instant for any number of tokens.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <cmath>
#include <memory>

#include "command.h"
#include "console.h"
#include "json.h"
#include "longspan/error.h"
#include "machine.h"
#include "problem_options.h"
#include "ring/predicted.h"

namespace longspan::cli {
namespace {

constexpr std::int64_t kDefaultTokens = 131072;
constexpr std::int64_t kQueryTile = 64;  // rows of one work item; kernels choose their own, near this

struct PlanCommand {
  ProblemOptions problem;
  RingForecast ring;
  bool json = false;
};

/// Keys of the longest strand, or with a block mask the mean over rows, for people who ask "how much does a row see".
Json describe_branch(const Plan& plan, std::size_t index) {
  const BranchPlan& branch = plan.branches()[index];
  const std::int64_t tokens = plan.problem().tokens;
  const bool active = branch.active(tokens);
  std::int64_t keys = 0;
  if (active && branch.head_count > 0) keys = branch.strand(branch.head_begin, 0, tokens).count;
  const double pairs = plan.pairs(index);
  const double rows = static_cast<double>(plan.problem().batch) * static_cast<double>(branch.head_count) *
                      std::ceil(static_cast<double>(tokens) / static_cast<double>(branch.dilation));
  if (branch.mask && rows > 0) keys = static_cast<std::int64_t>(std::round(pairs / rows));
  Json json = {{"index", index},
               {"segment", std::min(branch.segment, tokens)},
               {"dilation", plan.pattern().branches()[index].dilation},
               {"head_begin", branch.head_begin},
               {"head_count", branch.head_count},
               {"segments", active ? branch.segments(tokens) : 0},
               {"keys_per_row", keys},
               {"pairs", pairs},
               {"active", active}};
  json["phase"] =
      branch.fixed_phase ? Json(*branch.fixed_phase) : Json(branch.heads_per_phase ? "torchscale" : "paper");
  if (branch.mask) json["mask"] = {{"block_size", branch.mask->block_size()}, {"density", branch.mask->density()}};
  return json;
}

void print_branches(const Plan& plan) {
  Table table({{"branch", Align::left},
               {"heads", Align::left},
               {"segment"},
               {"dilation"},
               {"phase", Align::left},
               {"segments"},
               {"keys per row"},
               {"pairs"}});
  for (std::size_t index = 0; index < plan.branches().size(); ++index) {
    const Json branch = describe_branch(plan, index);
    const std::int64_t first = branch["head_begin"], count = branch["head_count"];
    const auto number = [&](const char* key) {
      const Json& value = branch[key];
      return value.is_number_integer() ? with_commas(value.get<std::int64_t>()) : with_commas(value.get<double>());
    };
    table.add({fmt::format("{}{}", index, branch["active"].get<bool>() ? "" : " (skipped)"),
               count == 1 ? fmt::format("{}", first) : fmt::format("{}-{}", first, first + count - 1),
               number("segment"), number("dilation"),
               branch["phase"].is_string() ? branch["phase"].get<std::string>() : number("phase"), number("segments"),
               number("keys_per_row"), short_count(branch["pairs"].get<double>())});
  }
  print_text(table.to_string());
}

int run(const PlanCommand& command) {
  const ProblemChoice choice = command.problem.resolve();
  const auto plan = Attention(choice.pattern, choice.options).plan(choice.problem(kDefaultTokens));
  const std::string_view forward = plan->kernel_name(Pass::forward), backward = plan->kernel_name(Pass::backward);
  if (!choice.options.kernel.empty() && forward.empty()) throw Unsupported(why_no_kernel(*plan, Pass::forward));
  const PlanTotals totals = plan->totals();
  const Problem& problem = plan->problem();

  const Json ring = command.ring.describe(*plan, choice.device_model);
  if (command.json) {
    Json branches = Json::array();
    for (std::size_t index = 0; index < plan->branches().size(); ++index)
      branches.push_back(describe_branch(*plan, index));
    Json json = {
        {"pattern", choice.pattern.to_string()},
        {"problem", describe(problem)},
        {"options", describe(choice.options)},
        {"totals",
         {{"pairs", totals.pairs},
          {"exact", totals.exact},
          {"dense_pairs", totals.dense_pairs},
          {"strand_rows", totals.strand_rows},
          {"forward_flops", totals.forward_flops},
          {"backward_flops", totals.backward_flops},
          {"forward_bytes", totals.forward_bytes},
          {"backward_bytes", totals.backward_bytes},
          {"work_items", plan->items(kQueryTile)},
          {"query_tile", kQueryTile},
          {"forward_workspace_bytes", forward.empty() ? Json() : Json(plan->workspace_bytes(Pass::forward))},
          {"backward_workspace_bytes", backward.empty() ? Json() : Json(plan->workspace_bytes(Pass::backward))}}},
        {"kernels",
         {{"forward", forward.empty() ? Json() : Json(forward)},
          {"backward", backward.empty() ? Json() : Json(backward)},
          {"why_none", why_no_kernel(*plan, Pass::forward)}}},
        {"branches", branches}};
    if (!ring.is_null()) json["ring"] = ring;
    print_json(json);
    return kSuccess;
  }

  print("{}{}\n", bold(heading(choice.pattern)), choice.options.causal ? ", causal" : "");
  print("{} tokens, batch {}, {} heads of {} ({} for keys and values), {} on {}\n\n", with_commas(problem.tokens),
        problem.batch, problem.heads, problem.head_dim, problem.kv_heads, name_of(problem.dtype),
        to_string(problem.device));
  print_branches(*plan);
  const auto bytes_of = [&](Pass pass, std::string_view kernel) {
    return kernel.empty()
               ? "no kernel"
               : fmt::format("{} ({})", short_bytes(static_cast<double>(plan->workspace_bytes(pass))), kernel);
  };
  Table table({{"", Align::left}, {"forward"}, {"backward"}});
  table.add({"FLOPs", short_count(totals.forward_flops), short_count(totals.backward_flops)});
  table.add({"bytes read and written", short_bytes(totals.forward_bytes), short_bytes(totals.backward_bytes)});
  table.add({"workspace", bytes_of(Pass::forward, forward), bytes_of(Pass::backward, backward)});
  print("\n{}; {} work items of {} rows\n", share_of_dense(totals, choice.options.causal),
        short_count(plan->items(kQueryTile)), kQueryTile);
  print_text(table.to_string());
  RingForecast::print_for_people(ring);
  if (choice.device_model != "cpu" && choice.device_model != "cuda") return kSuccess;  // not this machine's
  const std::string why[] = {why_no_kernel(*plan, Pass::forward), why_no_kernel(*plan, Pass::backward)};
  if (forward.empty()) print("{}\n", bad(why[0]));
  if (backward.empty() && why[1] != why[0]) print("{}\n", bad(why[1]));
  return kSuccess;
}

}  // namespace

Command add_plan(CLI::App& app) {
  CLI::App* parser = app.add_subcommand("plan", "Print what attends to what, pairs, FLOPs, bytes and work items");
  parser->footer(
      "\nInstant up to 1T tokens (2^40): nothing is computed, and pairs are counted in closed form. Random blocks that "
      "are too\n"
      "many to draw are counted by their expected number. Default: 131072 tokens.\nExample: longspan plan --tokens "
      "1G "
      "--assign all --segments 2048,32768 --dilations 1,16 --json");
  const auto command = std::make_shared<PlanCommand>();
  command->problem.allow_rated_devices();
  command->problem.add_to(*parser);
  command->ring.add_to(*parser);
  parser->add_flag("--json", command->json, "Machine-readable output");
  return {parser, [command] { return run(*command); }};
}

}  // namespace longspan::cli
