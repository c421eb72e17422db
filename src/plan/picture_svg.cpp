// Pictures as SVG: panels of cells with axes, one legend, colours between those of light and dark pages.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <map>

#include "longspan/picture.h"
#include "pattern/text.h"

namespace longspan {
namespace {

constexpr const char* kInk = "#6e7781";  // 4.5 : 1 on white, 4.2 : 1 on black: text and ticks
constexpr const char* kCell = "#4878e8";
constexpr const char* kEmpty = "#8a94a6";
constexpr int kLeft = 74, kTop = 62, kBottom = 104, kGap = 34, kRight = 24;
constexpr std::size_t kMostTitle = 300;

std::string escaped(std::string_view text) {
  std::string safe;
  for (const char letter : text) {
    if (letter == '&') safe += "&amp;";
    else if (letter == '<') safe += "&lt;";
    else if (letter == '>') safe += "&gt;";
    else safe += letter;
  }
  return safe;
}

/// 4096 -> "4096", 131072 -> "128K": powers of 1024 as the command writes sizes.
std::string short_position(std::int64_t position) {
  std::size_t unit = 0;
  while (position >= 8192 && position % 1024 == 0 && unit < 4) position /= 1024, ++unit;
  return fmt::format("{}{}", position, std::string_view("KMGT").substr(unit == 0 ? 4 : unit - 1, unit == 0 ? 0 : 1));
}

/// A share's opacity: a quarter of it for each factor of four.
double opacity(double share) { return std::clamp(1 + std::log2(share) / 8, 0.12, 1.0); }

std::string text_at(double x, double y, std::string_view anchor, std::string_view text, std::string_view more = "") {
  return fmt::format("<text x=\"{:g}\" y=\"{:g}\" text-anchor=\"{}\"{}>{}</text>\n", x, y, anchor, more, escaped(text));
}

std::string tick(double x, double y, std::string_view stroke) {
  return fmt::format("<path d=\"M{:g} {:g}{}\" stroke=\"{}\"/>\n", x, y, stroke, kInk);
}

/// Cells of one picture: one path for each opacity, neighbours in a row as one rectangle.
std::string panel(const PatternPicture& drawn, double left, double size) {
  std::map<std::string, std::string> paths;
  for (std::int64_t row = 0; row < drawn.cells; ++row) {
    for (std::int64_t column = 0; column < drawn.cells;) {
      std::int64_t end = column + 1;
      while (end < drawn.cells && drawn.at(row, end) == drawn.at(row, column)) ++end;
      if (drawn.at(row, column) > 0) {
        paths[fmt::format("{:.2g}", opacity(drawn.at(row, column)))] +=
            fmt::format("M{} {}h{}v1h-{}z", column, row, end - column, end - column);
      }
      column = end;
    }
  }
  std::string svg = fmt::format(
      "<rect x=\"{0:g}\" y=\"{1}\" width=\"{2:g}\" height=\"{2:g}\" fill=\"{5}\" fill-opacity=\"0.15\"/>\n"
      "<svg x=\"{0:g}\" y=\"{1}\" width=\"{2:g}\" height=\"{2:g}\" viewBox=\"0 0 {3} {3}\" "
      "preserveAspectRatio=\"none\" shape-rendering=\"crispEdges\" fill=\"{4}\">\n",
      left, kTop, size, std::max<std::int64_t>(drawn.cells, 1), kCell, kEmpty);
  for (const auto& [share, path] : paths) svg += fmt::format("<path fill-opacity=\"{}\" d=\"{}\"/>\n", share, path);
  return svg + "</svg>\n";
}

/// Ticks at quarters of the sequence, below the panel and, for the first one, beside it.
std::string axes(const PatternPicture& drawn, double left, double size, bool first) {
  std::string svg;
  const double unit = size / static_cast<double>(std::max<std::int64_t>(drawn.cells * drawn.cell_tokens, 1));
  const double bottom = kTop + size;
  for (int quarter = 0; quarter <= 4; ++quarter) {
    const std::int64_t position = drawn.tokens / 4 * quarter + drawn.tokens % 4 * quarter / 4;
    if (quarter > 0 && drawn.tokens < 4 && quarter < 4) continue;
    const double at = static_cast<double>(position) * unit;
    const std::string number = short_position(position);
    svg += tick(left + at, bottom, "v5");
    svg += text_at(left + at, bottom + 18, "middle", number);
    if (!first) continue;
    svg += tick(left, kTop + at, "h-5");
    svg += text_at(left - 8, kTop + at + 4, "end", number);
  }
  svg += text_at(left + size / 2, bottom + 36, "middle", "key position");
  if (first) {
    svg += text_at(18, kTop + size / 2, "middle", "query position",
                   fmt::format(" transform=\"rotate(-90 18 {:g})\"", kTop + size / 2));
  }
  return svg;
}

/// What the shades mean, from left to right.
std::string legend(double left, double y) {
  std::string svg = text_at(left, y, "start", "share of pairs that attend:");
  double x = left + 170;
  const auto swatch = [&](const char* colour, double strength) {
    svg += fmt::format("<rect x=\"{:g}\" y=\"{:g}\" width=\"14\" height=\"14\" fill=\"{}\" fill-opacity=\"{:.2g}\"/>\n",
                       x, y - 11, colour, strength);
  };
  for (const auto& [share, name] :
       {std::pair{1.0, "all"}, {1.0 / 4, "1/4"}, {1.0 / 16, "1/16"}, {1.0 / 64, "1/64"}, {0.0, "none"}}) {
    swatch(kEmpty, 0.15);
    if (share > 0) swatch(kCell, opacity(share));
    svg += text_at(x + 19, y, "start", name);
    x += 62;
  }
  return svg;
}

}  // namespace

std::string to_svg(std::span<const PatternPicture> pictures, std::string_view title) {
  const double size = pictures.size() > 1 ? 300 : 480;
  const double panels = static_cast<double>(std::max<std::size_t>(pictures.size(), 1));
  const double width = kLeft + panels * size + (panels - 1) * kGap + kRight, height = kTop + size + kBottom;
  std::string svg = fmt::format(
      "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {0:g} {1:g}\" width=\"{0:g}\" height=\"{1:g}\" "
      "role=\"img\" font-family=\"Helvetica, Arial, sans-serif\" font-size=\"12\" fill=\"{2}\" stroke-width=\"1\">\n"
      "<title>{3}</title>\n<g>\n",
      width, height, kInk, escaped(shortened(title, kMostTitle)));
  svg += text_at(kLeft, 24, "start", shortened(title, static_cast<std::size_t>((width - kLeft) / 7.6)),
                 " font-size=\"15\" font-weight=\"bold\"");
  for (std::size_t i = 0; i < pictures.size(); ++i) {
    const PatternPicture& drawn = pictures[i];
    const double left = kLeft + static_cast<double>(i) * (size + kGap);
    svg += text_at(left, kTop - 10, "start",
                   fmt::format("head {}, {} tokens, {} a cell", drawn.head, drawn.tokens, drawn.cell_tokens));
    svg += panel(drawn, left, size);
    svg += axes(drawn, left, size, i == 0);
  }
  svg += legend(kLeft, height - 20);
  return svg + "</g>\n</svg>\n";
}

std::string PatternPicture::to_svg(std::string_view title) const { return longspan::to_svg({this, 1}, title); }

}  // namespace longspan
