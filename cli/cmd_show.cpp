// longspan show: draws any pattern, on the terminal and as SVG, and writes block masks as arrays.
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <memory>
#include <optional>

#include "command.h"
#include "console.h"
#include "files/names.h"
#include "files/output.h"
#include "interrupt.h"
#include "json.h"
#include "longspan/error.h"
#include "longspan/picture.h"
#include "problem_options.h"
#include "text.h"

namespace longspan::cli {
namespace {

constexpr std::int64_t kDefaultTokens = 4096;
constexpr int kDefaultCells = 48;

struct ShowCommand {
  ProblemOptions problem;
  std::string heads = "0";
  std::optional<std::int64_t> cells;
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

/// As many cells as were asked for, or as the terminal has room for.
std::int64_t cells_of(const ShowCommand& command) {
  if (command.cells) return *command.cells;
  const int columns = text_columns();
  return columns > 0 ? std::clamp(columns / 2, 4, kDefaultCells) : kDefaultCells;
}

std::vector<PatternPicture> pictures_of(const ShowCommand& command, const Plan& plan, std::int64_t cells) {
  std::vector<PatternPicture> pictures;
  for (const std::int64_t head : parse_sizes("head", command.heads)) {
    stop_if_interrupted();
    pictures.push_back(picture(plan, head, cells));
  }
  if (pictures.empty()) throw InvalidArgument("head", "--head is empty: give the heads to draw, such as 0 or 0,3,6");
  return pictures;
}

void write_files(const ShowCommand& command, const Plan& plan) {
  if (!command.svg.empty()) {
    constexpr std::int64_t kDrawnCells = 128;
    OutputFile file(command.svg);
    std::string title = plan.pattern().to_string();
    title.erase(0, title.find(' ') + 1);  // the text's version says nothing here
    if (plan.options().causal) title += ", causal";
    file.write(to_svg(pictures_of(command, plan, command.cells.value_or(kDrawnCells)), title));
    file.commit();
  }
  if (!command.mask.empty()) {
    const BlockMask& mask = only_mask(plan);
    const std::vector<std::uint8_t> dense = mask.to_dense();
    ArrayWriter writer;
    writer.add(command.mask, DType::boolean, {mask.heads(), mask.blocks(), mask.blocks()}, dense.data());
    writer.commit();
  }
}

Json describe_masks(const Plan& plan) {
  Json masks;
  for (const BranchPlan& branch : plan.branches()) {
    if (!branch.mask) continue;
    const BlockCount active = branch.mask->count_blocks();
    masks.push_back({{"block_size", branch.mask->block_size()},
                     {"blocks", branch.mask->blocks()},
                     {"heads", branch.mask->heads()},
                     {"active_blocks", active.value},
                     {"exact", active.exact},
                     {"density", branch.mask->density()},
                     {"adaptive_density", branch.adaptive_density}});
  }
  return masks;
}

int run(const ShowCommand& command) {
  check_names(command);
  const ProblemChoice choice = command.problem.resolve();
  const auto plan = Attention(choice.pattern, choice.options).plan(choice.problem(kDefaultTokens));
  const Problem& problem = plan->problem();
  const std::vector<PatternPicture> pictures = pictures_of(command, *plan, cells_of(command));
  const PlanTotals totals = plan->totals();
  write_files(command, *plan);
  if (command.json) {
    Json json = {{"pattern", choice.pattern.to_string()},
                 {"problem", describe(problem)},
                 {"options", describe(choice.options)},
                 {"head", pictures[0].head},
                 {"cells", pictures[0].cells},
                 {"cell_tokens", pictures[0].cell_tokens},
                 {"share", pictures[0].share},
                 {"pairs", totals.pairs},
                 {"exact", totals.exact},
                 {"pairs_of_dense", totals.dense_pairs > 0 ? totals.pairs / totals.dense_pairs : 0.0}};
    for (const PatternPicture& drawn : pictures)
      json["heads"].push_back({{"head", drawn.head}, {"share", drawn.share}});
    if (Json masks = describe_masks(*plan); !masks.is_null()) json["masks"] = std::move(masks);
    print_json(json);
    return kSuccess;
  }
  print("{}{}\n", bold(heading(choice.pattern)), choice.options.causal ? ", causal" : "");
  for (const PatternPicture& drawn : pictures) {
    print("{} tokens, head {} of {}; queries down, keys across, {} tokens a cell\n\n", with_commas(problem.tokens),
          drawn.head, problem.heads, with_commas(drawn.cell_tokens));
    print("{}\n", drawn.to_text(command.ascii));
  }
  const std::string legend = shade_legend(command.ascii);
  const int columns = text_columns();
  print("{}\n", columns > 0 ? wrapped(legend, static_cast<std::size_t>(columns)) : legend);
  print("{}\n", share_of_dense(totals, choice.options.causal));
  for (const BranchPlan& branch : plan->branches()) {
    if (branch.adaptive_density > 0)
      print("adaptive: each call keeps {:.3g} of the blocks, chosen from its data\n", branch.adaptive_density);
    else if (branch.mask)
      print("{}, {} active blocks\n", branch.mask->to_string(), with_commas(branch.mask->count_blocks().value));
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
  parser->add_option("--head", command->heads, "Heads to draw: 0 (the default), or several such as 0,3,6")
      ->type_name("HEAD");
  parser
      ->add_option("--cells", command->cells,
                   "Most cells a side (default: what the terminal has room for, up to 48; in drawings 128)")
      ->type_name("COUNT");
  add_file_option(*parser, "--svg", command->svg,
                  "Write a drawing with axes and legend, all heads of --head side by side", "FILE.svg");
  add_file_option(*parser, "--mask-out", command->mask, "Write the block mask, bool [heads, blocks, blocks]",
                  "FILE.npy");
  parser->add_flag("--ascii", command->ascii, "Letters instead of block elements");
  parser->add_flag("--json", command->json, "Machine-readable output");
  return {parser, [command] { return run(*command); }};
}

}  // namespace longspan::cli
