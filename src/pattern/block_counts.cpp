// Closed forms by inclusion and exclusion: classes of rows and multiples of strides become sums over arithmetic
// progressions, and sums of floor((a u + b) / m) over u take logarithmic time.
#include "pattern/block_counts.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "pattern/kept_columns.h"

namespace longspan {
namespace {

using Kind = BlockTerm::Kind;
constexpr std::size_t kMostSummands = 1024;
constexpr std::int64_t kMostListed = 1 << 22;  // distances: tens of milliseconds
constexpr double kMostDrawn = 1 << 28;         // random words: a fraction of a second
constexpr std::int64_t kSampledRows = 1 << 14;

/// Sum over u in [0, n) of floor((a u + b) / m), for a, b >= 0.
WideInteger floor_sum(WideInteger n, WideInteger m, WideInteger a, WideInteger b) {
  WideInteger sum = 0;
  while (n > 0) {
    sum += n * (n - 1) / 2 * (a / m) + n * (b / m);
    a %= m;
    b %= m;
    const WideInteger top = a * n + b;
    if (top < m) break;
    n = top / m;  // the same sum with axes exchanged
    b = top % m;
    std::swap(a, m);
  }
  return sum;
}

std::int64_t common_multiple(std::int64_t a, std::int64_t b, std::int64_t most) {
  const WideInteger multiple = WideInteger{a / std::gcd(a, b)} * b;
  return multiple < most ? static_cast<std::int64_t>(multiple) : most;
}

std::int64_t round_up(std::int64_t value, std::int64_t step) { return (value + step - 1) / step * step; }

void add(std::map<std::int64_t, std::int64_t>& sums, std::int64_t key, std::int64_t value) {
  if ((sums[key] += value) == 0) sums.erase(key);
}

}  // namespace

RegularBlocks::RegularBlocks(const BlockRecipe& recipe) : terms_(recipe) {
  const bool steps_united = unite_steps(), levels_united = unite_levels();
  if (steps_united && levels_united) return;
  complete_ = terms_.blocks <= kMostListed;
  if (complete_) list_distances();
}

/// False where too many common multiples would have to be summed.
bool RegularBlocks::unite_steps() {
  for (const std::int64_t step : terms_.steps) {
    auto with_step = multiples_;
    add(with_step, step, 1);
    for (const auto& [multiple, coefficient] : multiples_) {
      const std::int64_t common = common_multiple(multiple, step, terms_.blocks);
      if (common < terms_.blocks) add(with_step, common, -coefficient);
    }
    if (with_step.size() > kMostSummands) return false;
    multiples_ = std::move(with_step);
  }
  return true;
}

bool RegularBlocks::unite_levels() {
  const std::int64_t beyond = std::max<std::int64_t>(1, terms_.blocks);  // as a modulus: row 0 alone
  std::map<std::int64_t, std::int64_t> left = {{1, 1}};                  // rows that no level so far has
  bool united = true;
  for (const auto& [step, reach] : terms_.levels) {
    std::map<std::int64_t, std::int64_t> taken;
    for (const auto& [modulus, coefficient] : left) add(taken, common_multiple(modulus, step, beyond), coefficient);
    united = rows_.size() + taken.size() <= kMostSummands;
    if (!united) break;
    for (const auto& [modulus, coefficient] : taken) {
      add(left, modulus, -coefficient);
      rows_.push_back({modulus, reach, coefficient});
    }
  }
  for (const auto& [modulus, coefficient] : left) rows_.push_back({modulus, terms_.reach, coefficient});
  return united;
}

void RegularBlocks::list_distances() {
  seen_.resize(static_cast<std::size_t>(terms_.blocks));
  for (const std::int64_t step : terms_.steps) {
    for (std::int64_t distance = step; distance < terms_.blocks; distance += step)
      seen_[static_cast<std::size_t>(distance)] = 1;
  }
  for (const std::int64_t rate : terms_.rates) seen_[static_cast<std::size_t>(rate)] = 1;
  std::partial_sum(seen_.begin(), seen_.end(), seen_.begin());
}

/// Distances from 1 to `distance` that are multiples of a step, or rates.
std::int64_t RegularBlocks::far_seen(std::int64_t distance) const {
  if (!seen_.empty()) return seen_[static_cast<std::size_t>(std::min(distance, terms_.blocks - 1))];
  const auto& rates = terms_.rates;
  std::int64_t seen = std::upper_bound(rates.begin(), rates.end(), distance) - rates.begin();
  for (const auto& [multiple, coefficient] : multiples_) seen += coefficient * (distance / multiple);
  return seen;
}

/// Distances from reach + 1 to `farthest` that are not seen.
std::int64_t RegularBlocks::unseen(std::int64_t farthest, std::int64_t reach) const {
  return farthest > reach ? farthest - reach - far_seen(farthest) + far_seen(reach) : 0;
}

/// The same, summed over farthest = first, first + step, ..., all beyond the reach.
WideInteger RegularBlocks::unseen(std::int64_t first, std::int64_t step, std::int64_t count, std::int64_t reach) const {
  const WideInteger n = count;
  WideInteger sum = n * first + n * (n - 1) / 2 * step - n * reach + n * far_seen(reach);
  for (const auto& [multiple, coefficient] : multiples_) sum -= coefficient * floor_sum(n, multiple, step, first);
  for (const std::int64_t rate : terms_.rates)
    sum -= std::max<std::int64_t>(0, count - (rate <= first ? 0 : blocks_of(rate - first, step)));
  return sum;
}

std::int64_t RegularBlocks::lower_row(std::int64_t row) const {
  return row + 1 - unseen(row - terms_.global, terms_.reach_of(row));
}

WideInteger RegularBlocks::lower(std::int64_t n) const {
  WideInteger sum = WideInteger{n} * (n + 1) / 2;
  if (!seen_.empty()) {
    for (std::int64_t row = 0; row < n; ++row) sum -= unseen(row - terms_.global, terms_.reach_of(row));
    return sum;
  }
  for (const Rows& rows : rows_) {
    // The key blocks of row I that are not global lie up to I - global away.
    const std::int64_t first = round_up(rows.reach + terms_.global + 1, rows.modulus);
    if (first >= n) continue;
    sum -=
        rows.coefficient * unseen(first - terms_.global, rows.modulus, (n - 1 - first) / rows.modulus + 1, rows.reach);
  }
  return sum;
}

WideInteger RegularBlocks::square(std::int64_t n) const {
  // Above the diagonal: n - 1 - I key blocks, of rows that are not global.
  WideInteger sum = lower(n) + WideInteger{n} * (n - 1) / 2;
  if (!seen_.empty()) {
    for (std::int64_t row = terms_.global; row < n; ++row) sum -= unseen(n - 1 - row, terms_.reach_of(row));
    return sum;
  }
  for (const Rows& rows : rows_) {
    const std::int64_t first = round_up(terms_.global, rows.modulus), most = n - 2 - rows.reach;
    if (first > most) continue;
    const std::int64_t last = most / rows.modulus * rows.modulus;
    sum -= rows.coefficient * unseen(n - 1 - last, rows.modulus, (last - first) / rows.modulus + 1, rows.reach);
  }
  return sum;
}

BlockCounts::BlockCounts(const BlockRecipe& recipe)
    : regular_(recipe),
      block_size_(recipe.block_size),
      blocks_(recipe.blocks()),
      causal_(recipe.causal),
      empty_(recipe.blocks() == 0 || recipe.terms.empty() || recipe.adaptive()) {
  for (const BlockTerm& term : recipe.terms) {
    if (term.kind == Kind::random) densities_[term.seed] = std::max(densities_[term.seed], term.density);
  }
}

std::optional<BlockCounts> BlockCounts::of(const BlockRecipe& recipe) {
  if (recipe.custom) return std::nullopt;
  BlockCounts counts(recipe);
  const double blocks = static_cast<double>(recipe.blocks());
  const double words = static_cast<double>(recipe.heads) * blocks * blocks * (recipe.causal ? 0.5 : 1);
  const bool few = !counts.densities_.empty() && words <= kMostDrawn;
  if (few || !counts.regular_.complete()) return std::nullopt;
  return counts;
}

double BlockCounts::at_least(const BlockRecipe& recipe) {
  return static_cast<double>(RegularBlocks(recipe).square(recipe.blocks()));
}

BlockCounts BlockCounts::expected(BlockRecipe recipe) {
  for (BlockTerm& term : recipe.terms) {
    if (term.kind == Kind::adaptive) term.kind = Kind::random;
  }
  return BlockCounts(recipe);
}

/// Of a block that no other term keeps, among so many candidates of its row: that it is drawn.
double BlockCounts::chance(std::int64_t candidates) const {
  if (candidates <= 1) return 0;
  double none = 1;
  for (const auto& [seed, density] : densities_) {
    const double kept = static_cast<double>(kept_columns(density, candidates) - 1);  // beside the diagonal
    none *= 1 - kept / static_cast<double>(candidates - 1);
  }
  return 1 - none;
}

/// Expected number of blocks that only random terms keep, among the first `n` rows and columns.
double BlockCounts::drawn(std::int64_t n, bool causal) const {
  if (densities_.empty()) return 0;
  if (!causal_) {
    const double all = static_cast<double>(n) * static_cast<double>(causal ? n + 1 : n) / (causal ? 2 : 1);
    return (all - static_cast<double>(causal ? regular_.lower(n) : regular_.square(n))) * chance(blocks_);
  }
  // Each row has its own number of candidates: rows spread over all, none twice.
  const std::int64_t rows = std::min(n, kSampledRows);
  const double width = static_cast<double>(n) / static_cast<double>(rows);
  double sum = 0;
  for (std::int64_t i = 0; i < rows; ++i) {
    double inside = static_cast<double>(i) * 0.6180339887498949;
    inside -= std::floor(inside);  // anywhere in its stretch, so that strides do not resonate
    const auto row = rows == n ? i : static_cast<std::int64_t>((static_cast<double>(i) + inside) * width);
    sum += width * static_cast<double>(row + 1 - regular_.lower_row(row)) * chance(row + 1);
  }
  return sum;
}

BlockCount BlockCounts::blocks() const {
  if (empty_) return {};
  return {static_cast<double>(regular_.square(blocks_)) + drawn(blocks_, causal_), densities_.empty()};
}

BlockCount BlockCounts::pairs(std::int64_t rows, bool causal) const {
  if (empty_ || rows == 0) return {};
  const WideInteger b = block_size_, n = blocks_of(rows, block_size_), last = rows - (n - 1) * b;
  const auto blocks = static_cast<std::int64_t>(n);
  // The diagonal belongs to every pattern; of the last row and column only `last` positions exist.
  WideInteger pairs = 0;
  if (causal) {
    const WideInteger before = regular_.lower(blocks - 1), own = regular_.lower(blocks) - before - 1;
    pairs = b * b * (before - (n - 1)) + last * b * own + (n - 1) * b * (b + 1) / 2 + last * (last + 1) / 2;
  } else {
    const WideInteger before = regular_.square(blocks - 1), own = regular_.square(blocks) - before - 1;
    pairs = b * b * before + last * b * own + last * last;
  }
  const double filled = static_cast<double>(rows) / static_cast<double>(n);  // rows per block
  return {static_cast<double>(pairs) + drawn(blocks, causal) * filled * filled, densities_.empty()};
}

}  // namespace longspan
