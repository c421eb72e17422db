// JSON on stdout, and the descriptions of a problem that several commands share.
#pragma once

#include <nlohmann/json.hpp>

#include "longspan/plan.h"

namespace longspan::cli {

using Json = nlohmann::ordered_json;

/// Prints a value, indented, with a line end.
void print_json(const Json& value);

Json describe(const Problem& problem);
Json describe(const Options& options);

}  // namespace longspan::cli
