// Data on stdout, progress and notes on stderr. Colours and progress bars only on a terminal, and never with NO_COLOR.
#pragma once

#include <fmt/format.h>

#include <chrono>
#include <concepts>
#include <string>
#include <string_view>
#include <vector>

#include "longspan/plan.h"

namespace longspan::cli {

/// Writes to stdout; throws IoError (a full disk, a closed pipe).
void print_text(std::string_view text);
template <class... Args>
void print(fmt::format_string<Args...> format, Args&&... args) {
  print_text(fmt::format(format, std::forward<Args>(args)...));
}
/// From now on text goes to stderr: stdout is where an array or a drawing goes.
void send_text_to_stderr();
/// Writes what print_text still holds; throws IoError.
void finish_output();

/// One line on stderr. Messages quote files and arguments, so everything that is not printable is escaped.
void note_text(std::string_view text);
template <class... Args>
void note(fmt::format_string<Args...> format, Args&&... args) {
  note_text(fmt::format(format, std::forward<Args>(args)...));
}

/// Columns of the terminal that stdout is, or what COLUMNS says; 0 where stdout is no terminal and nobody says.
int text_columns();

/// Text in a colour, or unchanged where stdout is no terminal or NO_COLOR is set.
std::string bold(std::string_view text);
std::string dim(std::string_view text);
std::string good(std::string_view text);
std::string bad(std::string_view text);

/// A bar on stderr that vanishes when done. Silent where stderr is no terminal.
class Progress {
 public:
  explicit Progress(std::string label);
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;
  ~Progress();
  void update(double fraction);

 private:
  std::string label_;
  bool enabled_;
  bool drawn_ = false;
  std::chrono::steady_clock::time_point last_;
};

enum class Align { left, right };

/// Rows of text with aligned columns.
class Table {
 public:
  struct Column {
    std::string title;
    Align align = Align::right;
  };
  explicit Table(std::vector<Column> columns) : columns_(std::move(columns)) {}
  void add(std::vector<std::string> cells);
  std::string to_string() const;
  const std::vector<Column>& columns() const { return columns_; }
  const std::vector<std::vector<std::string>>& rows() const { return rows_; }

 private:
  std::vector<Column> columns_;
  std::vector<std::vector<std::string>> rows_;
};

/// A pattern's text, no longer than a line of the terminal.
std::string heading(const Pattern& pattern);
/// "2.10 M pairs, 12.5% of causal dense attention": the one place that says what a plan keeps.
std::string share_of_dense(const PlanTotals& totals, bool causal);
/// "131072" -> "131,072"; numbers are rounded to whole ones, and integers keep all digits.
std::string with_commas(std::string_view digits);
inline std::string with_commas(double value) { return with_commas(std::string_view(fmt::format("{:.0f}", value))); }
template <std::integral T>
std::string with_commas(T value) {
  return with_commas(std::string_view(fmt::format("{}", value)));
}
/// 1.5e9 -> "1.50 G"; powers of 1000.
std::string short_count(double value);
/// 1536 -> "1.50 KiB"; powers of 1024.
std::string short_bytes(double bytes);
/// 0.0123 -> "12.3 ms".
std::string short_duration(double seconds);

}  // namespace longspan::cli
