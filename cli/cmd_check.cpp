#include <CLI/CLI.hpp>
#include "command.h"
namespace longspan::cli {
Command add_check(CLI::App& app) { return {app.add_subcommand("check", ""), [] { return 0; }}; }
}
