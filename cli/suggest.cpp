// What may have been meant by what was typed.
#include "suggest.h"

#include <fmt/format.h>
#include <CLI/CLI.hpp>

#include <string_view>

#include "util/nearest_word.h"

namespace longspan::cli {

std::string suggest(const CLI::App& app, const std::vector<std::string>& arguments) {
  const CLI::App* command = nullptr;
  std::vector<std::string> commands;
  for (const CLI::App* known : app.get_subcommands([](const CLI::App*) { return true; })) {
    commands.push_back(known->get_name());
    if (!arguments.empty() && arguments[0] == known->get_name()) command = known;
  }
  if (command == nullptr) {
    const std::string word = arguments.empty() ? "" : nearest_word(arguments[0], commands);
    return word.empty() ? fmt::format("commands are {}", fmt::join(commands, ", "))
                        : fmt::format("did you mean {}?", word);
  }
  std::vector<std::string> options;
  for (const CLI::Option* option : command->get_options()) {
    for (const std::string& name : option->get_lnames()) options.push_back("--" + name);
  }
  for (const std::string& argument : arguments) {
    if (!argument.starts_with("--")) continue;
    const std::string word = nearest_word(std::string_view(argument).substr(0, argument.find('=')), options);
    if (!word.empty()) return fmt::format("did you mean {}?", word);
  }
  return fmt::format("see longspan {} --help", command->get_name());
}

}  // namespace longspan::cli
