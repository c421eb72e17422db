// Drawing plans: counts keys of a few rows per cell, by strand arithmetic and block lists, never pair by pair.
#include "longspan/picture.h"

#include <fmt/format.h>

#include <algorithm>

#include "longspan/error.h"

namespace longspan {
namespace {

constexpr std::int64_t kRowsPerCell = 16;  // looked at, spread over the cell

constexpr std::int64_t ceil_divide(std::int64_t a, std::int64_t b) { return a / b + (a % b != 0); }

/// Rows of [0, count) whose position start + row * stride lies below `position`.
std::int64_t rows_below(const Strand& strand, std::int64_t position) {
  return std::clamp<std::int64_t>(ceil_divide(position - strand.start, strand.stride), 0, strand.count);
}

/// Adds the keys of strand rows [begin, end) to the cells they lie in.
void add_keys(const Strand& strand, std::int64_t begin, std::int64_t end, std::int64_t cell,
              std::vector<double>& keys) {
  while (begin < end) {
    const std::int64_t column = (strand.start + begin * strand.stride) / cell;
    const std::int64_t stop = std::min(end, std::max(begin + 1, rows_below(strand, (column + 1) * cell)));
    keys[static_cast<std::size_t>(column)] += static_cast<double>(stop - begin);
    begin = stop;
  }
}

std::string shade(float share, bool ascii) {
  static constexpr const char* kBlocks[] = {"··", "░░", "▒▒", "▓▓", "██"};
  static constexpr const char* kLetters[] = {"..", "::", "++", "xx", "##"};
  const int level = share <= 0 ? 0 : std::min(4, 1 + static_cast<int>(share * 4));
  return ascii ? kLetters[level] : kBlocks[level];
}

}  // namespace

PatternPicture picture(const Plan& plan, std::int64_t head, std::int64_t most_cells) {
  const Problem& problem = plan.problem();
  if (head < 0 || head >= problem.heads)
    throw InvalidArgument("head", fmt::format("head {}: the problem has {}", head, problem.heads));
  if (most_cells < 1 || most_cells > 4096)
    throw InvalidArgument("cells", fmt::format("cells is {}: give 1 to 4096", most_cells));
  std::int64_t grain = 1;
  for (const BranchPlan& branch : plan.branches()) {
    if (branch.mask && branch.owns(head)) grain = std::max(grain, branch.mask->block_size() * branch.dilation);
  }
  PatternPicture result;
  if (problem.tokens == 0) return result;
  const std::int64_t cell = ceil_divide(ceil_divide(problem.tokens, most_cells), grain) * grain;
  result.cell_tokens = cell;
  result.cells = ceil_divide(problem.tokens, cell);
  const auto cells = static_cast<std::size_t>(result.cells);
  result.share.resize(cells * cells);
  std::vector<double> seen(cells), all(cells);
  for (std::int64_t row_cell = 0; row_cell < result.cells; ++row_cell) {
    for (const BranchPlan& branch : plan.branches()) {
      if (!branch.owns(head) || !branch.active(problem.tokens)) continue;
      std::fill(seen.begin(), seen.end(), 0.0);
      std::fill(all.begin(), all.end(), 0.0);
      const std::int64_t first = row_cell * cell, last = std::min(first + cell, problem.tokens);
      const std::int64_t step =
          std::max<std::int64_t>(1, (last - first) / branch.dilation / kRowsPerCell) * branch.dilation;
      std::int64_t position = first;
      while (position < last && !branch.covers(head, position)) ++position;
      for (; position < last; position += step) {
        while (position < last && !branch.covers(head, position)) ++position;
        if (position >= last) break;
        const Strand strand = branch.strand(head, position / branch.segment, problem.tokens);
        const std::int64_t own = (position - strand.start) / strand.stride,
                           end = plan.options().causal ? own + 1 : strand.count;
        add_keys(strand, 0, strand.count, cell, all);
        if (!branch.mask) {
          add_keys(strand, 0, end, cell, seen);
          continue;
        }
        const std::int64_t size = branch.mask->block_size();
        for (const std::int64_t block : branch.mask->row(branch.mask_head(0, head), own / size)) {
          add_keys(strand, block * size, std::min((block + 1) * size, end), cell, seen);
        }
      }
      for (std::size_t column = 0; column < cells; ++column) {
        float& share = result.share[static_cast<std::size_t>(row_cell) * cells + column];
        if (seen[column] > 0) share = std::max(share, static_cast<float>(seen[column] / all[column]));
      }
    }
  }
  return result;
}

std::string PatternPicture::to_text(bool ascii) const {
  std::string text;
  for (std::int64_t row = 0; row < cells; ++row) {
    for (std::int64_t column = 0; column < cells; ++column) text += shade(at(row, column), ascii);
    text += '\n';
  }
  return text;
}

std::string PatternPicture::to_svg(std::string_view title) const {
  std::string safe;
  for (const char letter : title) {
    if (letter == '&') safe += "&amp;";
    else if (letter == '<') safe += "&lt;";
    else safe += letter;
  }
  std::string svg = fmt::format(
      "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {0} {0}\" width=\"480\" height=\"480\" "
      "shape-rendering=\"crispEdges\" "
      "role=\"img\"><title>{1}</title>\n<rect width=\"{0}\" height=\"{0}\" fill=\"#8a94a6\" "
      "fill-opacity=\"0.15\"/>\n<g fill=\"#3d6bd6\">\n",
      cells, safe);
  for (std::int64_t row = 0; row < cells; ++row) {
    for (std::int64_t column = 0; column < cells;) {
      std::int64_t end = column + 1;
      while (end < cells && at(row, end) == at(row, column)) ++end;
      if (at(row, column) > 0) {
        svg += fmt::format("<rect x=\"{}\" y=\"{}\" width=\"{}\" height=\"1\" fill-opacity=\"{:.2g}\"/>\n", column, row,
                           end - column, 0.25 + 0.75 * at(row, column));
      }
      column = end;
    }
  }
  return svg + "</g>\n</svg>\n";
}

}  // namespace longspan
