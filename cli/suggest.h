// "Did you mean": the known word nearest to a mistyped command or option.
#pragma once

#include <string>
#include <vector>

namespace CLI {
class App;
}

namespace longspan::cli {

/// "did you mean --tokens?", or where to read on if no word is near.
std::string suggest(const CLI::App& app, const std::vector<std::string>& arguments);

}  // namespace longspan::cli
