// Shared JSON descriptions.
#include "json.h"

#include "console.h"

namespace longspan::cli {

// Non-ASCII is escaped, as Python does it: a file's name may hold characters that a terminal takes for commands.
void print_json(const Json& value) { print_text(value.dump(2, ' ', true, Json::error_handler_t::replace) + "\n"); }

Json describe(const Problem& problem) {
  return {{"tokens", problem.tokens},           {"batch", problem.batch},       {"heads", problem.heads},
          {"kv_heads", problem.kv_heads},       {"head_dim", problem.head_dim}, {"dtype", name_of(problem.dtype)},
          {"device", to_string(problem.device)}};
}

Json describe(const Options& options) {
  Json json = {{"causal", options.causal}, {"dropout", options.dropout}};
  if (options.scale) json["scale"] = *options.scale;
  return json;
}

}  // namespace longspan::cli
