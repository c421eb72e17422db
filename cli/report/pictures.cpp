// Strips, grids and bars. Every picture is drawn in its own units and stretched by CSS to the width there is.
#include "report/pictures.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <optional>

#include "console.h"

namespace longspan::cli {
namespace {

constexpr int kColours = 8;           // .c0 to .c7 in the page's style sheet
constexpr std::int64_t kWindow = 64;  // positions in the close-up views
constexpr std::int64_t kMostMarks = 400;

std::string colour_class(std::size_t branch) { return fmt::format("c{}", branch % kColours); }

/// Opens a drawing `width` x `height` units large that CSS stretches.
std::string open_svg(std::string_view style, double width, double height, std::string_view title) {
  return fmt::format(
      R"(<svg class="{}" viewBox="0 0 {:g} {:g}" preserveAspectRatio="none" role="img"><title>{}</title>)", style,
      width, height, escape_html(title));
}

std::string rectangle(std::string_view style, double x, double y, double width, double height) {
  return fmt::format(R"(<rect class="{}" x="{:g}" y="{:g}" width="{:g}" height="{:g}"/>)", style, x, y, width, height);
}

/// A row of the branch to look at, near the middle of the sequence, and the strand it lies in.
struct Example {
  std::int64_t head = 0;
  std::int64_t position = 0;
  Strand strand;
  std::int64_t segment_begin = 0;
  std::int64_t segment_end = 0;
  std::int64_t keys = 0;
};

std::optional<Example> example_of(const Plan& plan, const BranchPlan& branch) {
  const std::int64_t tokens = plan.problem().tokens;
  if (tokens == 0 || branch.head_count == 0 || !branch.active(tokens)) return std::nullopt;
  const std::int64_t segments = branch.segments(tokens);
  for (const std::int64_t index : {segments / 2, std::int64_t{0}}) {
    Example example;
    example.head = branch.head_begin;
    example.strand = branch.strand(example.head, index, tokens);
    if (example.strand.count == 0) continue;
    const std::int64_t row = example.strand.count / 2;
    example.position = example.strand.start + row * example.strand.stride;
    example.segment_begin = index * branch.segment;
    example.segment_end = example.segment_begin + std::min(branch.segment, tokens - example.segment_begin);
    example.keys = plan.options().causal ? row + 1 : example.strand.count;
    return example;
  }
  return std::nullopt;
}

/// Whether the branch gives key `position` to the example's row.
bool sees(const Plan& plan, const BranchPlan& branch, const Example& example, std::int64_t position) {
  if (position < example.segment_begin || position >= example.segment_end) return false;
  if (plan.options().causal && position > example.position) return false;
  if (!branch.covers(example.head, position)) return false;
  if (!branch.mask) return true;
  const std::int64_t size = branch.mask->block_size();
  const auto block = [&](std::int64_t row) { return (row - example.strand.start) / example.strand.stride / size; };
  return branch.mask->active(example.head, block(example.position), block(position));
}

/// 2 -> "2nd", 4 -> "4th".
std::string ordinal(std::int64_t number) {
  const std::int64_t ten = number % 100 / 10, one = number % 10;
  const char* ending = ten == 1 ? "th" : one == 1 ? "st" : one == 2 ? "nd" : one == 3 ? "rd" : "th";
  return with_commas(number) + ending;
}

std::string overview_strip(const Plan& plan, const BranchPlan& branch, const Example& example, std::size_t index) {
  const auto tokens = static_cast<double>(plan.problem().tokens);
  const double unit = 1000 / tokens;
  std::string svg =
      open_svg("strip", 1000, 10, fmt::format("Segments of branch {}; the highlighted one holds the row", index));
  svg += rectangle("track", 0, 0, 1000, 10);
  const auto begin = static_cast<double>(example.segment_begin);
  const auto end = static_cast<double>(plan.options().causal ? example.position + 1 : example.segment_end);
  svg += rectangle(colour_class(index) + " soft", begin * unit, 0,
                   static_cast<double>(example.segment_end - example.segment_begin) * unit, 10);
  svg += rectangle(colour_class(index), begin * unit, 0, std::max(1.0, (end - begin) * unit), 10);
  const std::int64_t segments = branch.segments(plan.problem().tokens);
  if (segments <= kMostMarks) {
    for (std::int64_t mark = 1; mark < segments; ++mark) {
      svg += rectangle("mark", static_cast<double>(mark * branch.segment) * unit - 0.5, 0, 1, 10);
    }
  }
  svg += rectangle("row", static_cast<double>(example.position) * unit - 1.5, 0, 3, 10);
  return svg + "</svg>";
}

std::string close_up(const Plan& plan, const BranchPlan& branch, const Example& example, std::size_t index) {
  const std::int64_t tokens = plan.problem().tokens;
  const std::int64_t width = std::min(kWindow, tokens);
  const std::int64_t begin = std::clamp<std::int64_t>(example.position - width / 2, 0, tokens - width);
  std::string svg =
      open_svg("strip tall", static_cast<double>(width), 1,
               fmt::format("Positions {} to {}: filled cells are keys the row sees", begin, begin + width - 1));
  for (std::int64_t i = 0; i < width; ++i) {
    const std::int64_t position = begin + i;
    const bool seen = sees(plan, branch, example, position);
    const std::string style = position == example.position ? "row" : seen ? colour_class(index) : "track";
    svg += rectangle(style, static_cast<double>(i) + 0.06, 0, 0.88, 1);
  }
  svg += "</svg>";
  return svg +
         fmt::format(R"(<div class="ends"><span>{}</span><span>positions around the row</span><span>{}</span></div>)",
                     with_commas(begin), with_commas(begin + width - 1));
}

}  // namespace

std::string escape_html(std::string_view text) {
  std::string safe;
  for (const char letter : text) {
    switch (letter) {
      case '&':
        safe += "&amp;";
        break;
      case '<':
        safe += "&lt;";
        break;
      case '>':
        safe += "&gt;";
        break;
      case '"':
        safe += "&quot;";
        break;
      default:
        safe += letter;
    }
  }
  return safe;
}

std::string keys_picture(const Plan& plan) {
  std::string html;
  for (std::size_t index = 0; index < plan.branches().size(); ++index) {
    const BranchPlan& branch = plan.branches()[index];
    const auto example = example_of(plan, branch);
    const std::string segment = branch.segment == kWholeSequence ? "the whole sequence" : with_commas(branch.segment);
    html += fmt::format(R"(<div class="branch"><h3><i class="key {}"></i>Branch {}: segment {}, dilation {}</h3>)",
                        colour_class(index), index, segment, with_commas(branch.dilation));
    if (!example) {
      html += "<p>Takes no part: it has no rows in a sequence of this length.</p></div>";
      continue;
    }
    html += fmt::format(
        "<p>Heads {} to {}. Row {} of head {} sees {} keys{}, every {} between {} and {}.</p>", branch.head_begin,
        branch.head_begin + branch.head_count - 1, with_commas(example->position), example->head,
        with_commas(example->keys), branch.mask ? " at most (block mask)" : "",
        branch.dilation == 1 ? std::string("position") : ordinal(branch.dilation) + " position",
        with_commas(example->segment_begin),
        with_commas(static_cast<double>(plan.options().causal ? example->position : example->segment_end - 1)));
    html += overview_strip(plan, branch, *example, index);
    html += fmt::format(R"(<div class="ends"><span>0</span><span>the whole sequence</span><span>{}</span></div>)",
                        with_commas(static_cast<double>(plan.problem().tokens - 1)));
    html += close_up(plan, branch, *example, index) + "</div>";
  }
  return html;
}

std::string coverage_picture(const Plan& plan) {
  const std::int64_t tokens = plan.problem().tokens;
  const std::int64_t heads = std::min<std::int64_t>(plan.problem().heads, 64);
  const std::int64_t width = std::min<std::int64_t>(32, tokens);
  if (width == 0) return "<p>An empty sequence has no rows to cover.</p>";
  std::string svg = open_svg("grid", static_cast<double>(width), static_cast<double>(heads), "Rows by heads");
  for (std::int64_t head = 0; head < heads; ++head) {
    for (std::int64_t position = 0; position < width; ++position) {
      std::vector<std::size_t> covering;
      for (std::size_t index = 0; index < plan.branches().size(); ++index) {
        const BranchPlan& branch = plan.branches()[index];
        if (branch.owns(head) && branch.active(tokens) && branch.covers(head, position)) covering.push_back(index);
      }
      const auto x = static_cast<double>(position) + 0.06, y = static_cast<double>(head) + 0.08;
      if (covering.empty()) svg += rectangle("track", x, y, 0.88, 0.84);
      for (std::size_t i = 0; i < covering.size(); ++i) {  // stacked stripes where several branches meet
        const double height = 0.84 / static_cast<double>(covering.size());
        svg += rectangle(colour_class(covering[i]), x, y + height * static_cast<double>(i), 0.88, height);
      }
    }
  }
  svg += "</svg>";
  std::string labels;
  for (std::int64_t head = 0; head < heads; ++head) labels += fmt::format("<span>head {}</span>", head);
  return fmt::format(R"(<div class="coverage" style="--heads:{}"><div class="heads">{}</div><div>{}<div class="ends">)"
                     R"(<span>0</span><span>position</span><span>{}</span></div></div></div>)",
                     heads, labels, svg, width - 1);
}

std::string memory_picture(double extra_bytes, double dense_bytes) {
  // From one byte up: each pixel is a factor, so that both bars can be seen at all.
  const double most = std::log2(std::max(dense_bytes, 2.0));
  const auto bar = [&](std::string_view label, double bytes, std::string_view style) {
    const double share = bytes < 1 ? 0 : std::clamp(std::log2(bytes) / most, 0.0, 1.0);
    std::string svg = open_svg("strip tall", 1000, 10, label);
    svg += rectangle("track", 0, 0, 1000, 10) + rectangle(style, 0, 0, 1000 * share, 10) + "</svg>";
    return fmt::format(R"(<div class="bar"><p><span>{}</span><b>{}</b></p>{}</div>)", escape_html(label),
                       short_bytes(bytes), svg);
  };
  return bar("Extra memory of this run, measured", extra_bytes, "c0") +
         bar("Score matrix of dense attention", dense_bytes, "c3") +
         (extra_bytes >= 1
              ? fmt::format(R"(<p class="bar-note">{} times as much.</p>)", with_commas(dense_bytes / extra_bytes))
              : "");
}

}  // namespace longspan::cli
