// longspan show: draws any pattern, on the terminal and as SVG, and writes block masks as arrays.
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <memory>

#include "command.h"
#include "console.h"
#include "files/names.h"
#include "files/output.h"
#include "json.h"
#include "longspan/error.h"
#include "longspan/picture.h"
#include "problem_options.h"

namespace longspan::cli {
namespace {

constexpr std::int64_t kDefaultTokens = 4096;

struct ShowCommand {
  ProblemOptions problem;
  std::int64_t head = 0;
  std::int64_t cells = 48;
  std::string svg, mask;
  bool ascii = false;
  bool json = false;
};

/// The mask of the first branch that has one.
const BlockMask& only_mask(const Plan& plan) {
  for (const BranchPlan& branch : plan.branches()) {
    if (branch.mask && branch.adaptive_density == 0) return *branch.mask;
  }
  throw InvalidArgument(
      "mask-out",
      "--mask-out: the pattern has no block mask that is known without data; use a block pattern such as bigbird");
}

void check_names(const ShowCommand& command) {
  const NamedFile svg = text_file("svg", command.svg), mask = array_file("mask-out", command.mask);
  check_ending(svg, {".svg"});
  check_ending(mask, {".npy", ".safetensors"});
  check_outputs({svg, mask}, {array_file("mask", command.problem.mask_file())}, command.json);
}

int run(const ShowCommand& command) {
  check_names(command);
  const ProblemChoice choice = command.problem.resolve();
  const auto plan = Attention(choice.pattern, choice.options).plan(choice.problem(kDefaultTokens));
  const Problem& problem = plan->problem();
  const PatternPicture drawn = picture(*plan, command.head, command.cells);
  const double tokens = static_cast<double>(problem.tokens);
  const double all = static_cast<double>(problem.batch) * static_cast<double>(problem.heads) * tokens * tokens;
  const double pairs = plan->totals().pairs, share = all > 0 ? pairs / all : 0;

  if (!command.svg.empty()) {
    OutputFile file(command.svg);
    file.write(
        picture(*plan, command.head, std::max<std::int64_t>(command.cells, 128)).to_svg(choice.pattern.to_string()));
    file.commit();
  }
  if (!command.mask.empty()) {
    const BlockMask& mask = only_mask(*plan);
    const std::vector<std::uint8_t> dense = mask.to_dense();
    ArrayWriter writer;
    writer.add(command.mask, DType::boolean, {mask.heads(), mask.blocks(), mask.blocks()}, dense.data());
    writer.commit();
  }
  if (command.json) {
    Json json = {{"pattern", choice.pattern.to_string()},
                 {"problem", describe(problem)},
                 {"options", describe(choice.options)},
                 {"head", command.head},
                 {"cells", drawn.cells},
                 {"cell_tokens", drawn.cell_tokens},
                 {"share", drawn.share},
                 {"pairs", pairs},
                 {"pairs_of_dense", share}};
    for (const BranchPlan& branch : plan->branches()) {
      if (!branch.mask) continue;
      json["masks"].push_back({{"block_size", branch.mask->block_size()},
                               {"blocks", branch.mask->blocks()},
                               {"heads", branch.mask->heads()},
                               {"active_blocks", branch.mask->active_blocks()},
                               {"density", branch.mask->density()},
                               {"adaptive_density", branch.adaptive_density}});
    }
    print_json(json);
    return kSuccess;
  }
  print("{}{}\n", bold(choice.pattern.to_string()), choice.options.causal ? ", causal" : "");
  print("{} tokens, head {} of {}; queries down, keys across, {} tokens a cell\n\n", with_commas(tokens), command.head,
        problem.heads, with_commas(static_cast<double>(drawn.cell_tokens)));
  print_text(drawn.to_text(command.ascii));
  print("\n{} pairs, {:.3g}% of dense\n", short_count(pairs), 100 * share);
  for (const BranchPlan& branch : plan->branches()) {
    if (branch.adaptive_density > 0)
      print("adaptive: each call keeps {:.3g} of the blocks, chosen from its data\n", branch.adaptive_density);
    else if (branch.mask)
      print("{}, {} active blocks\n", branch.mask->to_string(),
            with_commas(static_cast<double>(branch.mask->active_blocks())));
  }
  return kSuccess;
}

}  // namespace

Command add_show(CLI::App& app) {
  CLI::App* parser = app.add_subcommand("show", "Draw a pattern on the terminal or as SVG");
  parser->footer(
      "\nDefault: 4096 tokens.\n"
      "Examples: longspan show --pattern bigbird\n"
      "          longspan show --pattern 'block=32 local_window(256)+random(0.05,7)' --tokens 8K --svg pattern.svg\n"
      "          longspan show --segments 512,2048 --dilations 1,4 --heads 2 --head 1 --causal");
  const auto command = std::make_shared<ShowCommand>();
  command->problem.add_to(*parser);
  parser->add_option("--head", command->head, "Head to draw (default: 0)")->type_name("HEAD");
  parser->add_option("--cells", command->cells, "Most cells a side (default: 48)")->type_name("COUNT");
  add_file_option(*parser, "--svg", command->svg, "Write a drawing", "FILE.svg");
  add_file_option(*parser, "--mask-out", command->mask, "Write the block mask, bool [heads, blocks, blocks]",
                  "FILE.npy");
  parser->add_flag("--ascii", command->ascii, "Letters instead of block elements");
  parser->add_flag("--json", command->json, "Machine-readable output");
  return {parser, [command] { return run(*command); }};
}

}  // namespace longspan::cli
