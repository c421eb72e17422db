// The text of a block pattern, and reading it back.
//
//   [block=64] TERM+TERM ... [heads=1 blocks=4 rows=0;0-1;1,3;]     (blanks may stand for +)
//   TERM  local_window(512), strided(512), dilated_sparse(1,2,4), global_local(64,512), random(0.1,7), adaptive(0.1),
//         hierarchical(64:256,1024:-1), global_local(<=64,512) where a shorter sequence is all global; also
//         bigbird(128,192,0.05,7) and longformer(512,64), which are unions of those
//   rows  one list per head and block row, ranges inclusive
#include <algorithm>
#include <array>
#include <functional>

#include "longspan/block_pattern.h"
#include "pattern/text.h"
#include "util/nearest_word.h"

namespace longspan {
namespace {

using Kind = BlockTerm::Kind;

/// Names, and how many numbers each takes; those with a density are read on their own.
struct TermName {
  std::string_view name;
  Kind kind;
  std::size_t least, most;
};
constexpr std::size_t kAny = 1 << 16;
constexpr std::string_view kUpTo = "<=";
constexpr std::array kTerms = {TermName{"local_window", Kind::local_window, 1, 1},
                               TermName{"strided", Kind::strided, 1, 1},
                               TermName{"dilated_sparse", Kind::dilated_sparse, 1, kAny},
                               TermName{"global_local", Kind::global_local, 2, 2},
                               TermName{"hierarchical", Kind::hierarchical, 0, kAny},
                               TermName{"random", Kind::random, 1, 2},
                               TermName{"adaptive", Kind::adaptive, 1, 1}};
constexpr std::string_view kKnown =
    "is not a block pattern: use local_window(512), strided(512), dilated_sparse(1,2,4), global_local(64,512), "
    "hierarchical, random(0.1,0), adaptive(0.1), bigbird or longformer";

/// What may have been meant: patterns that are no terms are named here, too, since a whole pattern may stand here.
std::string unknown_term(std::string_view name) {
  std::vector<std::string_view> words{"dense", "dilated", "longnet", "block_sparse", "bigbird", "longformer"};
  for (const TermName& known : kTerms) words.push_back(known.name);
  const std::string meant = nearest_word(name, words);
  return meant.empty() ? std::string(kKnown) : fmt::format("{}; did you mean {}?", kKnown, meant);
}

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

/// Whether a number may be a limit, "<=128": stored negative.
bool is_limit(Kind kind, std::size_t index) { return kind == Kind::global_local && index == 0; }

std::string print_term(const BlockTerm& term) {
  const auto name =
      std::find_if(kTerms.begin(), kTerms.end(), [&](const TermName& known) { return known.kind == term.kind; })->name;
  if (term.kind == Kind::random) return fmt::format("{}({},{})", name, term.density, term.seed);
  if (term.kind == Kind::adaptive) return fmt::format("{}({})", name, term.density);
  std::string numbers;
  for (std::size_t i = 0; i < term.numbers.size(); ++i) {
    if (i > 0) numbers += term.kind == Kind::hierarchical && i % 2 == 1 ? ':' : ',';
    if (is_limit(term.kind, i) && term.numbers[i] < 0) numbers += fmt::format("{}{}", kUpTo, -term.numbers[i]);
    else numbers += fmt::format("{}", term.numbers[i]);
  }
  return fmt::format("{}({})", name, numbers);
}

/// Entries of a list, without what separates them.
std::vector<std::string_view> split(std::string_view text, std::string_view separators) {
  std::vector<std::string_view> entries;
  while (!text.empty()) {
    const std::size_t end = std::min(text.find_first_of(separators), text.size());
    entries.push_back(text.substr(0, end));
    text.remove_prefix(std::min(end + 1, text.size()));
  }
  return entries;
}

}  // namespace

/// Reads one text; errors show all of it.
class BlockText {
 public:
  explicit BlockText(std::string_view text) : reader_(text) {}

  BlockPattern read() {
    std::vector<std::string_view> terms;
    bool has_rows = false;
    for (std::string_view field = reader_.next(); !field.empty(); field = reader_.next()) {
      const std::size_t equals = field.find('=');
      if (equals == std::string_view::npos || field.find('(') < equals) {  // a term may have a limit, (<=128
        for (const std::string_view term : split(field, "+")) {
          if (!term.empty()) terms.push_back(term);
        }
        continue;
      }
      const std::string_view name = field.substr(0, equals), value = field.substr(equals + 1);
      if (name == "block") block_size_ = reader_.number<int>(field, value);
      else if (name == "heads") heads_ = reader_.number<std::int64_t>(field, value);
      else if (name == "blocks") blocks_ = reader_.number<std::int64_t>(field, value);
      else if (name == "rows") rows_ = value, has_rows = true;
      else
        reader_.fail(
            field,
            "is not part of a block pattern: use block=, heads=, blocks=, rows= and terms such as local_window(512)");
    }
    std::optional<BlockPattern> result;
    for (const std::string_view word : terms) {
      const BlockPattern next = term(word);
      result = result ? *result | next : next;
    }
    if (has_rows) {
      const BlockPattern own(custom());
      result = result ? *result | own : own;
    }
    if (!result) reader_.fail("", "has no block pattern: give a term such as local_window(512), or rows=");
    return *result;
  }

 private:
  BlockPattern term(std::string_view word) const {
    const std::size_t open = word.find('(');
    const std::string_view name = word.substr(0, open);
    std::vector<std::string_view> arguments;
    if (open != std::string_view::npos) {
      if (word.back() != ')') reader_.fail(word, "has no closing parenthesis at its end");
      arguments = split(word.substr(open + 1, word.size() - open - 2), ",:");
    }
    const auto argument = [&]<class Number>(std::size_t index, Number otherwise) {
      return index < arguments.size() ? reader_.number<Number>(word, arguments[index]) : otherwise;
    };
    const auto integer = [&](std::size_t index, std::int64_t otherwise) { return argument(index, otherwise); };
    const auto expect = [&](std::size_t least, std::size_t most) {
      if (arguments.size() >= least && arguments.size() <= most) return;
      reader_.fail(word, least == most ? fmt::format("needs {} number{}", least, least == 1 ? "" : "s")
                                       : fmt::format("has {} numbers: give {} to {}", arguments.size(), least, most));
    };
    if (name == "bigbird") {
      expect(0, 4);
      return BlockPattern::bigbird(integer(0, -1), integer(1, -1), argument(2, 0.05), argument(3, std::uint64_t{0}),
                                   block_size_);
    }
    if (name == "longformer") {
      expect(0, 2);
      if (arguments.size() < 2) return term(fmt::format("global_local({}64,{})", kUpTo, integer(0, 512)));
      return BlockPattern::longformer(integer(0, 512), integer(1, 0), block_size_);
    }
    for (const TermName& known : kTerms) {
      if (known.name != name) continue;
      expect(known.least, known.most);
      if (known.kind == Kind::random)
        return BlockPattern::random(argument(0, 0.0), argument(1, std::uint64_t{0}), block_size_);
      if (known.kind == Kind::adaptive) return BlockPattern::adaptive(argument(0, 0.0), block_size_);
      if (known.kind == Kind::hierarchical && arguments.empty())
        return BlockPattern::hierarchical({{64, 256}, {256, 1024}, {1024, -1}}, block_size_);
      BlockTerm result{known.kind};
      for (std::size_t i = 0; i < arguments.size(); ++i) {
        const bool limit = is_limit(known.kind, i), up_to = limit && arguments[i].starts_with(kUpTo);
        if (up_to) arguments[i].remove_prefix(kUpTo.size());
        const std::int64_t number = integer(i, 0);
        if (limit && number < 0) reader_.fail(word, "has negative global tokens: give 0 or more");
        result.numbers.push_back(up_to ? -number : number);
      }
      if (known.kind == Kind::hierarchical && result.numbers.size() % 2 != 0)
        reader_.fail(word, "needs pairs of stride and window");
      return {block_size_, {std::move(result)}};
    }
    reader_.fail(word, unknown_term(name));
  }

  BlockMask custom() const {
    // Counted before anything is expanded, so that a lying text cannot exhaust memory.
    if (static_cast<double>(std::count(rows_.begin(), rows_.end(), ';')) !=
        static_cast<double>(heads_) * static_cast<double>(blocks_)) {
      reader_.fail("rows=",
                   fmt::format("needs one row list, closed by ';', for each of {} heads x {} blocks", heads_, blocks_));
    }
    std::vector<std::vector<std::int32_t>> lists;
    for (std::string_view rest = rows_; !rest.empty();) {
      const std::size_t end = rest.find(';');
      if (end == std::string_view::npos) reader_.fail("rows=", "has a row without a closing ';'");
      auto& list = lists.emplace_back();
      for (const std::string_view entry : split(rest.substr(0, end), ",")) {
        const std::size_t dash = entry.find('-');
        const auto first = reader_.number<std::int32_t>(entry, entry.substr(0, dash));
        const auto last =
            dash == std::string_view::npos ? first : reader_.number<std::int32_t>(entry, entry.substr(dash + 1));
        if (last < first || last >= blocks_) reader_.fail(entry, "is not a range of blocks of the mask");
        for (std::int32_t column = first; column <= last; ++column) list.push_back(column);
      }
      rest.remove_prefix(end + 1);
    }
    return BlockMask::from_rows(block_size_, heads_, blocks_, lists);
  }

  TextReader reader_;
  int block_size_ = kDefaultBlockSize;
  std::int64_t heads_ = 1, blocks_ = 0;
  std::string_view rows_;
};

BlockPattern BlockPattern::parse(std::string_view text) { return BlockText(text).read(); }

std::string BlockPattern::to_string() const {
  std::string text = fmt::format("block={}", block_size_);
  for (std::size_t i = 0; i < terms_.size(); ++i) {
    text += i > 0 ? '+' : ' ';
    text += print_term(terms_[i]);
  }
  if (custom_)
    text += fmt::format(" heads={} blocks={} rows={}", custom_->heads(), custom_->blocks(), print_rows(*custom_));
  return text;
}

}  // namespace longspan
