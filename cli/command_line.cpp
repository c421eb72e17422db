// The longspan command: parses, runs one command, turns errors into one line on stderr and an exit code.
#include <CLI/CLI.hpp>
#include <memory>
#include <new>
#include <system_error>
#include <vector>

#include "command.h"
#include "console.h"
#include "interrupt.h"
#include "longspan/error.h"
#include "longspan/version.h"
#include "suggest.h"
#include "text.h"

namespace longspan::cli {
namespace {

constexpr const char* kDescription =
    "Attention over very long sequences: exact dilated, multi-branch and block-sparse attention.";

constexpr const char* kFooter = R"(
Examples:
  longspan demo --out report.html            compute, verify and draw dilated attention on this machine
  longspan plan --tokens 1G                  what attends to what, and what it costs, without computing it
  longspan show --pattern bigbird            draw any pattern, on the terminal or as SVG
  longspan attend --q q.npy --k k.npy --v v.npy --out out.npy --segments 2048,4096 --dilations 1,2
  longspan attend --q model.safetensors#q --k model.safetensors#k --v model.safetensors#v \
                  --out result.safetensors#out --lse result.safetensors#lse --causal
  longspan ring --ranks 4 --segments 2K,128K --dilations 1,64 --verify    the same over four ranks
  longspan check --random 100 --seed 7       every kernel of this machine against the float64 reference
  longspan bench dilated --tokens 64K        GFLOP/s, and which part of the machine's peak that is
  longspan info --why --dtype bf16           which kernel runs this problem, and why the others do not
  longspan doctor                            what this machine lacks, and three seconds of every kernel

Exit codes:
  0    success
  1    results differ from the reference by more than the tolerance
  2    bad input or usage, or a problem that no kernel here can run
  3    input/output, memory or another failure at run time
  130  interrupted

Data goes to standard output (--json makes it machine-readable), progress and errors to standard error.
`longspan help COMMAND` explains a command.)";

constexpr std::size_t kMostColumns = 2000;  // of a message, which may quote a file or an argument

struct Failure {
  int code;
  std::string message;
};

/// What an exception means to the caller of the command.
Failure describe(const std::exception& error) {
  if (dynamic_cast<const Cancelled*>(&error)) return {interrupt_exit_code(), "interrupted"};
  if (dynamic_cast<const InvalidArgument*>(&error)) return {kBadInput, error.what()};
  if (dynamic_cast<const Unsupported*>(&error)) return {kBadInput, error.what()};
  if (dynamic_cast<const std::bad_alloc*>(&error))
    return {kFailure, "out of memory: use fewer tokens, heads or threads"};
  if (dynamic_cast<const std::system_error*>(&error))  // of a thread
    return {kFailure, fmt::format("{}: use fewer threads", error.what())};
  return {kFailure, error.what()};
}

/// No command: of them all. (App::help() would explain the command that was parsed, also if that is `help`.)
void print_help(const CLI::App& app, const CLI::App* command) {
  print_text(command ? command->help(app.get_name())
                     : app.get_formatter()->make_help(&app, app.get_name(), CLI::AppFormatMode::Normal));
}

/// `longspan help` and `longspan help COMMAND`.
Command add_help(CLI::App& app) {
  CLI::App* parser = app.add_subcommand("help", "Explain a command, or list them all");
  const auto name = std::make_shared<std::string>();
  parser->add_option("command", *name, "The command to explain");
  return {parser, [&app, name] {
            const CLI::App* command = nullptr;
            for (const CLI::App* known : app.get_subcommands([](const CLI::App*) { return true; })) {
              if (known->get_name() == *name) command = known;
            }
            if (!command && !name->empty())
              throw InvalidArgument("command", fmt::format("'{}' is not a command; {}", *name, suggest(app, {*name})));
            print_help(app, command);
            return static_cast<int>(kSuccess);
          }};
}

/// What the parser has to say, in users' words: they know commands, not subcommands.
std::string message_of(const CLI::ParseError& error, const CLI::App& app, const std::vector<std::string>& arguments) {
  if (dynamic_cast<const CLI::RequiredError*>(&error) && app.get_subcommands().empty())
    return arguments.empty() ? "no command given" : fmt::format("'{}' is not a command", arguments[0]);
  if (dynamic_cast<const CLI::ExtrasError*>(&error)) {  // which names them last first
    const std::vector<std::string> extras = app.remaining(true);
    return fmt::format("unexpected argument{} '{}'", extras.size() == 1 ? "" : "s", fmt::join(extras, "' '"));
  }
  std::string message = error.what();
  const std::string option = message.substr(0, message.find_first_of(": "));
  if (message.find("At Most 1 required but received ") != message.npos) return option + " is given twice: give it once";
  if (option.front() != '-' && dynamic_cast<const CLI::RequiredError*>(&error) != nullptr) {  // an argument
    const CLI::App& command = *app.get_subcommands().front();
    return fmt::format("longspan {} needs '{}': {}", command.get_name(), option,
                       command.get_option(option)->get_description());
  }
  while (!message.empty() && message.back() == '\n') message.pop_back();
  return message;
}

int report(const CLI::ParseError& error, const CLI::App& app, const std::vector<std::string>& arguments) {
  if (error.get_exit_code() == static_cast<int>(CLI::ExitCodes::Success)) {  // --help, --version
    if (dynamic_cast<const CLI::CallForVersion*>(&error) != nullptr) print("{}\n", error.what());
    else print_help(app, app.get_subcommands().empty() ? nullptr : app.get_subcommands().front());
    finish_output();
    return kSuccess;
  }
  note("longspan: {}; {}", elided(message_of(error, app, arguments), kMostColumns), suggest(app, arguments));
  return kBadInput;
}

int parse_and_run(int count, const char* const* values) {
  CLI::App app(kDescription, "longspan");
  app.footer(kFooter);
  app.set_version_flag("--version", fmt::format("longspan {} ({})", version(), commit()));
  app.require_subcommand(1);
  const Command commands[] = {add_demo(app), add_attend(app), add_ring(app),  add_plan(app),  add_show(app),
                              add_info(app), add_doctor(app), add_check(app), add_bench(app), add_help(app)};
  try {
    app.parse(count, values);
  } catch (const CLI::ParseError& error) {
    return report(error, app, {values + 1, values + count});
  }
  for (const Command& command : commands) {
    if (!command.parser->parsed()) continue;
    const int code = command.run();
    finish_output();
    return code;
  }
  return kBadInput;
}

}  // namespace

int run_command_line(int count, const char* const* values) {
  try {
    return parse_and_run(count, values);
  } catch (const std::exception& error) {
    const auto [code, message] = describe(error);
    try {
      finish_output();  // what was said before the error
    } catch (const std::exception&) {}
    note("longspan: {}", elided(message, kMostColumns));
    return code;
  }
}

}  // namespace longspan::cli
