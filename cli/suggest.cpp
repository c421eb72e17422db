// Edit distance between what was typed and what exists.
#include "suggest.h"

#include <fmt/format.h>
#include <CLI/CLI.hpp>

#include <algorithm>
#include <numeric>
#include <string_view>

namespace longspan::cli {
namespace {

std::size_t edit_distance(std::string_view left, std::string_view right) {
  std::vector<std::size_t> row(right.size() + 1);
  std::iota(row.begin(), row.end(), std::size_t{0});
  for (std::size_t i = 0; i < left.size(); ++i) {
    std::size_t diagonal = row[0];
    row[0] = i + 1;
    for (std::size_t j = 0; j < right.size(); ++j) {
      const std::size_t substituted = diagonal + (left[i] != right[j] ? 1 : 0);
      diagonal = row[j + 1];
      row[j + 1] = std::min({substituted, row[j] + 1, diagonal + 1});
    }
  }
  return row[right.size()];
}

std::string nearest(std::string_view typed, const std::vector<std::string>& known) {
  std::string best;
  std::size_t least = typed.size() / 2 + 1;
  for (const std::string& word : known) {
    const std::size_t distance = edit_distance(typed, word);
    if (distance == 0) return {};  // the word itself is right: something else is wrong
    if (distance < least) {
      least = distance;
      best = word;
    }
  }
  return best;
}

}  // namespace

std::string suggest(const CLI::App& app, const std::vector<std::string>& arguments) {
  const CLI::App* command = nullptr;
  std::vector<std::string> commands;
  for (const CLI::App* known : app.get_subcommands([](const CLI::App*) { return true; })) {
    commands.push_back(known->get_name());
    if (!arguments.empty() && arguments[0] == known->get_name()) command = known;
  }
  if (command == nullptr) {
    const std::string word = arguments.empty() ? "" : nearest(arguments[0], commands);
    return word.empty() ? fmt::format("commands are {}", fmt::join(commands, ", "))
                        : fmt::format("did you mean {}?", word);
  }
  std::vector<std::string> options;
  for (const CLI::Option* option : command->get_options()) {
    for (const std::string& name : option->get_lnames()) options.push_back("--" + name);
  }
  for (const std::string& argument : arguments) {
    if (!argument.starts_with("--")) continue;
    const std::string word = nearest(std::string_view(argument).substr(0, argument.find('=')), options);
    if (!word.empty()) return fmt::format("did you mean {}?", word);
  }
  return fmt::format("see longspan {} --help", command->get_name());
}

}  // namespace longspan::cli
