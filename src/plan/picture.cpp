// Drawing plans: counts keys of a few rows per cell, by strand arithmetic and block rows, never pair by pair.
#include "longspan/picture.h"
#include "plan/branch.h"
#include "util/reject.h"

#include <fmt/format.h>

#include <algorithm>

namespace longspan {
namespace {

constexpr std::int64_t kRowsPerCell = 16;                    // looked at, spread over the cell
constexpr double kMostEntries = 1 << 28;                     // of block rows that are made for one picture
constexpr std::int64_t kMostBlocks = std::int64_t{1} << 26;  // a row of these takes a fraction of a second

using strands::ceil_divide;

/// Adds `weight` for each key of strand rows [begin, end) to the cells they lie in.
void add_keys(const Strand& strand, std::int64_t begin, std::int64_t end, std::int64_t cell, double weight,
              std::vector<double>& keys) {
  while (begin < end) {
    const std::int64_t column = (strand.start + begin * strand.stride) / cell;
    const std::int64_t stop = std::min(end, std::max(begin + 1, rows_below(strand, (column + 1) * cell)));
    keys[static_cast<std::size_t>(column)] += weight * static_cast<double>(stop - begin);
    begin = stop;
  }
}

/// Counts the attended pairs of one row of cells.
class CellRow {
 public:
  CellRow(const Plan& plan, std::int64_t head, std::int64_t cell, std::int64_t cells)
      : plan_(plan), head_(head), cell_(cell), cells_(cells), pairs_(static_cast<std::size_t>(cells)) {}

  /// Pairs of rows first .. last - 1 in each column of cells.
  const std::vector<double>& count(std::int64_t first, std::int64_t last) {
    std::fill(pairs_.begin(), pairs_.end(), 0.0);
    for (const BranchPlan& branch : plan_.branches()) {
      if (!branch.owns(head_) || !branch.active(plan_.problem().tokens)) continue;
      const CoveredRows rows(branch, head_, plan_.problem().tokens);
      const std::int64_t begin = rows.below(first), covered = rows.below(last) - begin;
      const std::int64_t looked_at = std::min(covered, rows_per_cell(branch));
      for (std::int64_t i = 0; i < looked_at; ++i) {
        const auto [segment, row] = rows.at(begin + (2 * i + 1) * covered / (2 * looked_at));
        add_row(branch, rows.strand(segment), row, static_cast<double>(covered) / static_cast<double>(looked_at));
      }
    }
    return pairs_;
  }

 private:
  std::int64_t rows_per_cell(const BranchPlan& branch) const {
    if (!branch.mask) return kRowsPerCell;
    const double entries = static_cast<double>(branch.mask->blocks()) * static_cast<double>(cells_);
    return std::clamp<std::int64_t>(static_cast<std::int64_t>(kMostEntries / entries), 1, kRowsPerCell);
  }

  void add_row(const BranchPlan& branch, const Strand& strand, std::int64_t row, double weight) {
    const std::int64_t end = plan_.options().causal ? row + 1 : strand.count;
    if (!branch.mask) return add_keys(strand, 0, end, cell_, weight, pairs_);
    const std::int64_t size = branch.mask->block_size();
    for (const std::int64_t block : branch.mask->make_row(branch.mask_head(0, head_), row / size))
      add_keys(strand, block * size, std::min((block + 1) * size, end), cell_, weight, pairs_);
  }

  const Plan& plan_;
  std::int64_t head_, cell_, cells_;
  std::vector<double> pairs_;
};

/// Levels a factor of four apart, since dilation r leaves 1 / r^2 of the pairs: 4 from half of the pairs on.
int shade_of(float share) {
  return share <= 0 ? 0 : share >= 0.5f ? 4 : share >= 0.125f ? 3 : share >= 1.0f / 32 ? 2 : 1;
}

constexpr const char* kShades[2][5] = {{"··", "░░", "▒▒", "▓▓", "██"}, {"..", "::", "++", "xx", "##"}};

}  // namespace

PatternPicture picture(const Plan& plan, std::int64_t head, std::int64_t most_cells) {
  const Problem& problem = plan.problem();
  if (head < 0 || head >= problem.heads) reject("head", "head {}: the problem has {}", head, problem.heads);
  if (most_cells < 1 || most_cells > 4096) reject("cells", "cells is {}: give 1 to 4096", most_cells);
  std::int64_t grain = 1;
  for (const BranchPlan& branch : plan.branches()) {
    if (!branch.mask || !branch.owns(head)) continue;
    if (branch.mask->blocks() > kMostBlocks) {
      reject("tokens",
             "{} tokens are {} blocks: pictures are drawn of up to {}; a shorter "
             "sequence shows the same pattern",
             problem.tokens, branch.mask->blocks(), kMostBlocks);
    }
    grain = std::max(grain, branch.mask->block_size() * branch.dilation);
  }
  PatternPicture result;
  result.tokens = problem.tokens;
  result.head = head;
  if (problem.tokens == 0) return result;
  const std::int64_t cell = ceil_divide(ceil_divide(problem.tokens, most_cells), grain) * grain;
  result.cell_tokens = cell;
  result.cells = ceil_divide(problem.tokens, cell);
  result.share.resize(static_cast<std::size_t>(result.cells * result.cells));
  const auto positions_in = [&](std::int64_t index) {
    return static_cast<double>(std::min(cell, problem.tokens - index * cell));
  };
  CellRow counted(plan, head, cell, result.cells);
  for (std::int64_t row = 0; row < result.cells; ++row) {
    const std::vector<double>& pairs = counted.count(row * cell, std::min((row + 1) * cell, problem.tokens));
    for (std::int64_t column = 0; column < result.cells; ++column) {
      const double share = pairs[static_cast<std::size_t>(column)] / (positions_in(row) * positions_in(column));
      result.share[static_cast<std::size_t>(row * result.cells + column)] = static_cast<float>(std::min(share, 1.0));
    }
  }
  return result;
}

std::string PatternPicture::to_text(bool ascii) const {
  std::string text;
  for (std::int64_t row = 0; row < cells; ++row) {
    for (std::int64_t column = 0; column < cells; ++column) text += kShades[ascii][shade_of(at(row, column))];
    text += '\n';
  }
  return text;
}

std::string shade_legend(bool ascii) {
  const auto& shades = kShades[ascii];
  return fmt::format("share of pairs that attend: {} 1/2  {} 1/8  {} 1/32  {} less  {} none", shades[4], shades[3],
                     shades[2], shades[1], shades[0]);
}

}  // namespace longspan
