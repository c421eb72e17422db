// The canonical text of a pattern, and reading it back.
//
//   longspan/1 KIND [phase=torchscale] [pad_keys] [long=skip] [output_scale=X] SEGMENT/DILATION[{MASK}] ...
//   KIND     dense (no branches follow), dilated (head groups), longnet (all heads)
//   SEGMENT  a length, or `whole`
//   MASK     block=64 heads=1 blocks=4 rows=0;0-1;1,3;   (one list per head and block row, ranges inclusive)
#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <cmath>

#include "longspan/error.h"
#include "longspan/pattern.h"

namespace longspan {
namespace {

constexpr std::string_view kVersion = "longspan/1";

std::string print_rows(const BlockMask& mask) {
  std::string text;
  for (std::int64_t head = 0; head < mask.heads(); ++head) {
    for (std::int64_t block_row = 0; block_row < mask.blocks(); ++block_row) {
      const auto columns = mask.row(head, block_row);
      for (std::size_t i = 0; i < columns.size();) {
        std::size_t last = i;
        while (last + 1 < columns.size() && columns[last + 1] == columns[last] + 1) ++last;
        if (i > 0) text += ',';
        text += last > i ? fmt::format("{}-{}", columns[i], columns[last]) : fmt::format("{}", columns[i]);
        i = last + 1;
      }
      text += ';';
    }
  }
  return text;
}

/// Reads one text; every error shows where it is.
class Parser {
 public:
  explicit Parser(std::string_view text) : text_(text) {}

  [[noreturn]] void fail(std::string_view word, std::string_view message) const {
    throw InvalidArgument("pattern", fmt::format("pattern '{}': '{}' {}", shorten(text_), shorten(word), message));
  }

  /// Next word; a mask in braces belongs to the word it follows.
  std::string_view next() {
    while (position_ < text_.size() && text_[position_] == ' ') ++position_;
    const std::size_t begin = position_;
    bool braces = false;
    while (position_ < text_.size() && (braces || text_[position_] != ' ')) {
      if (text_[position_] == '{') braces = true;
      if (text_[position_] == '}') braces = false;
      ++position_;
    }
    const std::string_view word = text_.substr(begin, position_ - begin);
    if (braces) fail(word, "has a brace that is never closed");
    return word;
  }

  template <class Number>
  Number number(std::string_view word, std::string_view digits) const {
    Number value{};
    const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), value);
    if (error != std::errc{} || end != digits.data() + digits.size() || digits.empty()) fail(word, "needs a number");
    return value;
  }

  BlockMask mask(std::string_view word, std::string_view body) const {
    int block_size = 0;
    std::int64_t heads = 1, blocks = 0;
    std::string_view rows;
    Parser fields(body);
    for (std::string_view field = fields.next(); !field.empty(); field = fields.next()) {
      const std::size_t equals = field.find('=');
      const std::string_view name = field.substr(0, equals);
      const std::string_view value = equals == std::string_view::npos ? std::string_view{} : field.substr(equals + 1);
      if (name == "block") block_size = number<int>(word, value);
      else if (name == "heads") heads = number<std::int64_t>(word, value);
      else if (name == "blocks") blocks = number<std::int64_t>(word, value);
      else if (name == "rows") rows = value;
      else fail(field, "is not part of a mask: use block=, heads=, blocks= and rows=");
    }
    // Counted before anything is expanded, so that a lying text cannot exhaust memory.
    if (static_cast<double>(std::count(rows.begin(), rows.end(), ';')) != static_cast<double>(heads) * static_cast<double>(blocks)) {
      fail(word, fmt::format("needs one row list, closed by ';', for each of {} heads x {} blocks", heads, blocks));
    }
    return BlockMask::from_rows(block_size, heads, blocks, lists(word, rows, blocks));
  }

 private:
  static std::string shorten(std::string_view text) {
    return text.size() <= 120 ? std::string(text) : std::string(text.substr(0, 117)) + "...";
  }

  std::vector<std::vector<std::int32_t>> lists(std::string_view word, std::string_view rows, std::int64_t blocks) const {
    std::vector<std::vector<std::int32_t>> result;
    while (!rows.empty()) {
      const std::size_t end = rows.find(';');
      if (end == std::string_view::npos) fail(word, "has a row without a closing ';'");
      std::string_view row = rows.substr(0, end);
      rows.remove_prefix(end + 1);
      auto& list = result.emplace_back();
      while (!row.empty()) {
        const std::size_t comma = row.find(',');
        const std::string_view entry = row.substr(0, comma);
        row.remove_prefix(comma == std::string_view::npos ? row.size() : comma + 1);
        const std::size_t dash = entry.find('-');
        const auto first = number<std::int32_t>(word, entry.substr(0, dash));
        const auto last = dash == std::string_view::npos ? first : number<std::int32_t>(word, entry.substr(dash + 1));
        if (last < first || last >= blocks) fail(entry, "is not a range of blocks of the mask");
        for (std::int32_t column = first; column <= last; ++column) list.push_back(column);
      }
    }
    return result;
  }

  std::string_view text_;
  std::size_t position_ = 0;
};

}  // namespace

std::string Pattern::to_string() const {
  const bool is_dense = assignment_ == HeadAssignment::all && phase_rule_ == PhaseRule::paper && branches_.size() == 1 &&
                        branches_[0] == Branch{};
  std::string text = fmt::format("{} {}", kVersion, is_dense                                  ? "dense"
                                                    : assignment_ == HeadAssignment::groups ? "dilated"
                                                                                            : "longnet");
  if (phase_rule_ == PhaseRule::torchscale) text += " phase=torchscale";
  if (pad_keys_) text += " pad_keys";
  if (long_segments_ == LongSegments::skip) text += " long=skip";
  if (output_scale_ != 1.0) text += fmt::format(" output_scale={}", output_scale_);
  if (is_dense) return text;
  for (const Branch& branch : branches_) {
    text += branch.segment == kWholeSequence ? " whole" : fmt::format(" {}", branch.segment);
    text += fmt::format("/{}", branch.dilation);
    if (branch.mask) {
      text += fmt::format("{{block={} heads={} blocks={} rows={}}}", branch.mask->block_size(), branch.mask->heads(),
                          branch.mask->blocks(), print_rows(*branch.mask));
    }
  }
  return text;
}

Pattern Pattern::parse(std::string_view text) {
  Parser parser(text);
  std::string_view word = parser.next();
  if (word.starts_with("longspan/")) {
    if (word != kVersion) parser.fail(word, fmt::format("is another version: this library reads {}", kVersion));
    word = parser.next();
  }
  Pattern pattern;
  bool branches_follow = true;
  if (word == "dense") branches_follow = false;
  else if (word == "dilated") pattern.assignment_ = HeadAssignment::groups;
  else if (word != "longnet") parser.fail(word, "is not a pattern: use dense, dilated 2048/1 4096/2 or longnet 2048/1 4096/2");

  for (word = parser.next(); !word.empty(); word = parser.next()) {
    if (word == "pad_keys") {
      pattern.pad_keys_ = true;
    } else if (word == "phase=torchscale" || word == "phase=paper") {
      if (pattern.assignment_ == HeadAssignment::groups) parser.fail(word, "goes with longnet: head groups have their own phase");
      pattern.phase_rule_ = word == "phase=paper" ? PhaseRule::paper : PhaseRule::torchscale;
    } else if (word == "long=skip" || word == "long=clip") {
      pattern.long_segments_ = word == "long=skip" ? LongSegments::skip : LongSegments::clip;
    } else if (word.starts_with("output_scale=")) {
      pattern.output_scale_ = parser.number<double>(word, word.substr(13));
    } else {
      const std::size_t slash = word.find('/');
      if (slash == std::string_view::npos) parser.fail(word, "is neither an option nor a branch like 2048/1");
      if (!branches_follow) parser.fail(word, "is a branch: dense has none; use longnet or dilated");
      const std::size_t brace = word.find('{');
      Branch branch;
      if (word.substr(0, slash) != "whole") branch.segment = parser.number<std::int64_t>(word, word.substr(0, slash));
      branch.dilation = parser.number<std::int64_t>(
          word, word.substr(slash + 1, brace == std::string_view::npos ? brace : brace - slash - 1));
      if (brace != std::string_view::npos) {
        if (word.back() != '}') parser.fail(word, "has text after its mask");
        branch.mask = parser.mask(word, word.substr(brace + 1, word.size() - brace - 2));
      }
      pattern.branches_.push_back(std::move(branch));
    }
  }
  if (!branches_follow) pattern.branches_.push_back({});
  pattern.check();
  return pattern;
}

}  // namespace longspan
