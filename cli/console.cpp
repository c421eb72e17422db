// Terminal output: checked writes, a progress bar, tables and numbers for people.
#include "console.h"

#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <charconv>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "interrupt.h"
#include "longspan/error.h"
#include "text.h"

namespace longspan::cli {
namespace {

constexpr std::size_t kBufferBytes = 1 << 16;

int text_descriptor = STDOUT_FILENO;
std::string unwritten;

[[noreturn]] void throw_output_error(int error) {
  throw IoError(fmt::format("cannot write to standard output: {}", std::strerror(error)));
}

bool colours_wanted(int descriptor) {
  const char* no_color = std::getenv("NO_COLOR");
  if (no_color != nullptr && *no_color != '\0') return false;
  const char* terminal = std::getenv("TERM");
  if (terminal != nullptr && std::string_view(terminal) == "dumb") return false;
  return isatty(descriptor) == 1;
}

std::string colour(std::string_view code, std::string_view text) {
  static const bool wanted = colours_wanted(STDOUT_FILENO);
  return wanted ? fmt::format("\x1b[{}m{}\x1b[0m", code, text) : std::string(text);
}

std::string scaled(double value, double base, const std::array<const char*, 7>& units) {
  std::size_t unit = 0;
  while (std::abs(value) >= base && unit + 1 < units.size()) {
    value /= base;
    ++unit;
  }
  if (unit == 0 && value == std::floor(value)) return fmt::format("{:.0f} {}", value, units[0]);
  const int decimals = std::abs(value) >= 100 ? 0 : std::abs(value) >= 10 ? 1 : 2;
  return fmt::format("{:.{}f} {}", value, decimals, units[unit]);
}

}  // namespace

void print_text(std::string_view text) {
  unwritten += text;
  if (unwritten.size() >= kBufferBytes || isatty(text_descriptor) == 1) finish_output();
}

void send_text_to_stderr() { text_descriptor = STDERR_FILENO; }

// Not stdio: it begins a write again that a signal broke off, and Ctrl-C would wait for whoever does not read.
void finish_output() {
  std::size_t written = 0;
  while (written < unwritten.size()) {
    stop_if_interrupted();
    const ssize_t bytes = write(text_descriptor, unwritten.data() + written, unwritten.size() - written);
    if (bytes < 0 && errno == EINTR) continue;
    if (bytes < 0) {
      unwritten.clear();
      throw_output_error(errno);
    }
    written += static_cast<std::size_t>(bytes);
  }
  unwritten.clear();
}

void note_text(std::string_view text) {
  const std::string line = printable(text) + '\n';
  std::fwrite(line.data(), 1, line.size(), stderr);  // nobody is left to tell if stderr is closed
}

int text_columns() {
  const char* said = std::getenv("COLUMNS");
  int columns = 0;
  if (said != nullptr && std::from_chars(said, said + std::strlen(said), columns).ec == std::errc{} && columns > 0)
    return columns;
  winsize size = {};
  return isatty(text_descriptor) == 1 && ioctl(text_descriptor, TIOCGWINSZ, &size) == 0 ? size.ws_col : 0;
}

std::string bold(std::string_view text) { return colour("1", text); }
std::string dim(std::string_view text) { return colour("2", text); }
std::string good(std::string_view text) { return colour("32", text); }
std::string bad(std::string_view text) { return colour("1;31", text); }

Progress::Progress(std::string label) : label_(std::move(label)), enabled_(isatty(STDERR_FILENO) == 1) {}

Progress::~Progress() {
  if (drawn_) std::fputs("\r\x1b[K", stderr);
}

void Progress::update(double fraction) {
  if (!enabled_) return;
  const auto now = std::chrono::steady_clock::now();
  if (drawn_ && now - last_ < std::chrono::milliseconds(80)) return;
  last_ = now;
  drawn_ = true;
  winsize size = {};
  const int columns = ioctl(STDERR_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_col > 0 ? size.ws_col : 80;
  const int room = std::clamp(columns - static_cast<int>(label_.size()) - 10, 0, 40);
  const double share = std::clamp(fraction, 0.0, 1.0);
  const int filled = static_cast<int>(share * room);
  std::string bar;
  for (int i = 0; i < room; ++i) bar += i < filled ? "\u2501" : "\u2500";
  const std::string line = fmt::format("\r{} {} {:3.0f}%\x1b[K", label_, bar, share * 100);
  std::fwrite(line.data(), 1, line.size(), stderr);
}

void Table::add(std::vector<std::string> cells) {
  cells.resize(columns_.size());
  rows_.push_back(std::move(cells));
}

std::string Table::to_string() const {
  std::vector<std::size_t> widths;
  for (std::size_t column = 0; column < columns_.size(); ++column) {
    std::size_t width = visible_width(columns_[column].title);
    for (const auto& row : rows_) width = std::max(width, visible_width(row[column]));
    widths.push_back(width);
  }
  std::string text;
  const auto append_row = [&](auto&& cell_of) {
    std::string line;
    for (std::size_t column = 0; column < columns_.size(); ++column) {
      const std::string cell = cell_of(column);
      const std::string padding(widths[column] - visible_width(cell), ' ');
      if (column > 0) line += "  ";
      line += columns_[column].align == Align::left ? cell + padding : padding + cell;
    }
    while (!line.empty() && line.back() == ' ') line.pop_back();
    text += line + '\n';
  };
  append_row([&](std::size_t column) { return bold(columns_[column].title); });
  for (const auto& row : rows_) append_row([&](std::size_t column) { return row[column]; });
  return text;
}

std::string heading(const Pattern& pattern) {
  const int columns = text_columns();
  const std::string text = pattern.to_string();
  return columns > 0 ? elided(text, static_cast<std::size_t>(std::max(columns - 8, 20))) : text;
}

std::string share_of_dense(const PlanTotals& totals, bool causal) {
  return fmt::format("{}{} pairs, {:.3g}% of {}dense attention", totals.exact ? "" : "about ",
                     short_count(totals.pairs), totals.dense_pairs > 0 ? 100 * totals.pairs / totals.dense_pairs : 0.0,
                     causal ? "causal " : "");
}

std::string with_commas(std::string_view digits) {
  std::string text = digits.starts_with('-') ? "-" : "";
  digits.remove_prefix(text.size());
  for (std::size_t i = 0; i < digits.size(); ++i) {
    if (i > 0 && (digits.size() - i) % 3 == 0) text += ',';
    text += digits[i];
  }
  return text;
}

std::string short_count(double value) {
  std::string text = scaled(value, 1000, {"", "K", "M", "G", "T", "P", "E"});
  while (!text.empty() && text.back() == ' ') text.pop_back();
  return text;
}

std::string short_bytes(double bytes) { return scaled(bytes, 1024, {"B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"}); }

std::string short_duration(double seconds) {
  if (seconds >= 120) return fmt::format("{:.0f} min {:02.0f} s", std::floor(seconds / 60), std::fmod(seconds, 60));
  if (seconds >= 1) return fmt::format("{:.2f} s", seconds);
  if (seconds >= 1e-3) return fmt::format("{:.3g} ms", seconds * 1e3);
  return fmt::format("{:.3g} \u00b5s", seconds * 1e6);
}

}  // namespace longspan::cli
