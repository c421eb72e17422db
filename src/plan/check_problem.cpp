// The bounds themselves. They are far beyond what any machine holds, and low enough that no product below overflows.
#include "plan/check_problem.h"
#include "util/reject.h"

#include <algorithm>
#include <cfloat>
#include <cmath>

namespace longspan {
namespace {

void check_size(std::string_view name, std::int64_t value, std::int64_t least, std::int64_t most) {
  if (value < least || value > most) reject(name, "{} is {}: give {} to {}", name, value, least, most);
}

}  // namespace

bool is_usable_factor(double factor) { return std::abs(factor) <= static_cast<double>(FLT_MAX) / 2; }

void check_options(const Options& options) {
  if (!(options.dropout >= 0.0 && options.dropout < 1.0))
    reject("dropout", "dropout is {}: give a probability from 0 up to, but not including, 1", options.dropout);
  if (options.scale && !is_usable_factor(*options.scale))
    reject("scale", "scale is {}: give a factor that float32 can hold, or none for 1 / sqrt(head_dim)", *options.scale);
  if (options.output_scale && !is_usable_factor(*options.output_scale))
    reject("output_scale", "output_scale is {}: give a factor that float32 can hold", *options.output_scale);
}

void check_problem(const Problem& problem) {
  constexpr std::int64_t kMostColumns = std::int64_t{1} << 31;
  check_size("tokens", problem.tokens, 0, kMostTokens);
  check_size("query_rows", problem.query_rows, 0, kMostTokens);
  check_size("batch", problem.batch, 0, kMostTokens);
  check_size("heads", problem.heads, 1, kMostHeads);
  check_size("kv_heads", problem.kv_heads, 1, kMostHeads);
  check_size("head_dim", problem.head_dim, 1, kMostColumns);
  if (problem.heads % problem.kv_heads != 0)
    reject("kv_heads", "kv_heads is {}: it must divide the number of heads, {}", problem.kv_heads, problem.heads);
  const double rows = static_cast<double>(std::max(problem.tokens, problem.query_rows));
  const double elements = rows * static_cast<double>(problem.batch) * static_cast<double>(problem.heads) *
                          static_cast<double>(problem.head_dim);
  if (elements > 9.0e18 / 8) {  // with 8 bytes each
    reject("tokens",
           "{} tokens, batch {}, {} heads of {} are more than 64-bit offsets can address: "
           "give smaller sizes",
           problem.tokens, problem.batch, problem.heads, problem.head_dim);
  }
}

}  // namespace longspan
