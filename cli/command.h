// What a command is to main: a parser entry and a function. One file per command.
#pragma once

#include <functional>

namespace CLI {
class App;
}

namespace longspan::cli {

/// Exit codes of the command; documented in --help and docs/cli.md.
enum ExitCode : int {
  kSuccess = 0,
  kOverTolerance = 1,  ///< results differ from the reference by more than the tolerance
  kBadInput = 2,       ///< usage, arguments, input files, or a problem that no kernel here can run
  kFailure = 3,        ///< input/output, memory, or anything else at run time
};

struct Command {
  CLI::App* parser = nullptr;
  std::function<int()> run;
};

/// What main() does once signals are handled: parses, runs one command, and turns errors into one line on stderr and an
/// exit code.
int run_command_line(int count, const char* const* values);

Command add_demo(CLI::App& app);
Command add_attend(CLI::App& app);
Command add_ring(CLI::App& app);
Command add_plan(CLI::App& app);
Command add_show(CLI::App& app);
Command add_info(CLI::App& app);
Command add_check(CLI::App& app);
Command add_doctor(CLI::App& app);
Command add_bench(CLI::App& app);

}  // namespace longspan::cli
