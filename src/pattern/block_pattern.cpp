// Making block patterns, and checking that what they say makes sense.
#include "longspan/block_pattern.h"

#include <fmt/format.h>

#include <algorithm>

#include "longspan/limits.h"
#include "pattern/block_recipe.h"
#include "util/hash.h"
#include "util/reject.h"

namespace longspan {
namespace {

using Kind = BlockTerm::Kind;

void check_density(double density) {
  if (!(density > 0 && density <= 1))
    reject("density", "density is {}: give the fraction of blocks to keep, in (0, 1]", density);
}

void check_at_least(std::string_view name, std::int64_t value, std::int64_t least) {
  if (value < least) reject(name, "{} is {}: give {} or more tokens", name, value, least);
}

void check_term(const BlockTerm& term) {
  const auto number = [&](std::size_t index) { return term.numbers[index]; };
  switch (term.kind) {
    case Kind::local_window:
      return check_at_least("window", number(0), 0);
    case Kind::strided:
      return check_at_least("stride", number(0), 1);
    case Kind::global_local:
      return check_at_least("window", number(1), 0);
    case Kind::dilated_sparse:
      if (term.numbers.empty()) reject("rates", "rates is empty: give distances in blocks, such as 1, 2, 4");
      for (const std::int64_t rate : term.numbers) {
        if (rate < 1) reject("rates", "rates has {}: distances are at least 1 block", rate);
      }
      return;
    case Kind::hierarchical:
      if (term.numbers.empty()) reject("levels", "levels is empty: give pairs of stride and window, such as 64:256");
      for (std::size_t i = 0; i < term.numbers.size(); i += 2) {
        if (number(i) < 1) reject("levels", "level {} has stride {}: give 1 or more tokens", i / 2, number(i));
        if (number(i + 1) < -1)
          reject("levels", "level {} has window {}: give tokens, or -1 for all", i / 2, number(i + 1));
      }
      return;
    case Kind::random:
    case Kind::adaptive:
      return check_density(term.density);
  }
}

}  // namespace

BlockPattern::BlockPattern(int block_size, std::vector<BlockTerm> terms)
    : block_size_(block_size), terms_(std::move(terms)) {
  check();
}
BlockPattern::BlockPattern(BlockMask mask) : block_size_(mask.block_size()), custom_(std::move(mask)) {}

BlockPattern BlockPattern::local_window(std::int64_t window, int block_size) {
  return {block_size, {{Kind::local_window, {window}}}};
}
BlockPattern BlockPattern::strided(std::int64_t stride, int block_size) {
  return {block_size, {{Kind::strided, {stride}}}};
}
BlockPattern BlockPattern::dilated_sparse(const std::vector<std::int64_t>& rates, int block_size) {
  return {block_size, {{Kind::dilated_sparse, rates}}};
}
BlockPattern BlockPattern::global_local(std::int64_t global_tokens, std::int64_t window, int block_size) {
  check_at_least("global_tokens", global_tokens, 0);
  return {block_size, {{Kind::global_local, {global_tokens, window}}}};
}
BlockPattern BlockPattern::hierarchical(const std::vector<std::pair<std::int64_t, std::int64_t>>& levels,
                                        int block_size) {
  std::vector<std::int64_t> numbers;
  for (const auto& [stride, window] : levels) numbers.insert(numbers.end(), {stride, window});
  return {block_size, {{Kind::hierarchical, std::move(numbers)}}};
}
BlockPattern BlockPattern::random(double density, std::uint64_t seed, int block_size) {
  return {block_size, {{Kind::random, {}, density, seed}}};
}
BlockPattern BlockPattern::adaptive(double density, int block_size) {
  return {block_size, {{Kind::adaptive, {}, density}}};
}
BlockPattern BlockPattern::bigbird(std::int64_t global_tokens, std::int64_t window, double density, std::uint64_t seed,
                                   int block_size) {
  check_block_size(block_size);
  if (global_tokens != -1) check_at_least("global_tokens", global_tokens, 0);
  if (window != -1) check_at_least("window", window, 0);
  if (window < 0) window = 3 * block_size;
  const BlockPattern first =
      global_tokens < 0 ? parse(fmt::format("block={} global_local(<={},{})", block_size, 2 * block_size, window))
                        : global_local(global_tokens, window, block_size);
  return first | random(density, seed, block_size);
}
BlockPattern BlockPattern::longformer(std::int64_t window, std::int64_t global_tokens, int block_size) {
  return global_local(global_tokens, window, block_size);
}

BlockPattern BlockPattern::operator|(const BlockPattern& other) const {
  if (block_size_ != other.block_size_)
    reject("block_size", "block sizes {} and {}: patterns unite where they agree", block_size_, other.block_size_);
  BlockPattern both = *this;
  for (const BlockTerm& term : other.terms_) {
    if (std::find(both.terms_.begin(), both.terms_.end(), term) == both.terms_.end()) both.terms_.push_back(term);
  }
  if (other.custom_) both.custom_ = both.custom_ ? *both.custom_ | *other.custom_ : *other.custom_;
  both.check();
  return both;
}

void BlockPattern::check() const {
  check_block_size(block_size_);
  if (terms_.empty() && !custom_) reject("pattern", "the block pattern is empty: give at least one term or a mask");
  for (const BlockTerm& term : terms_) {
    check_term(term);
    if (term.kind == Kind::adaptive && (terms_.size() > 1 || custom_))
      reject("pattern", "adaptive stands alone: it cannot be united with other block patterns");
  }
}

double BlockPattern::adaptive_density() const {
  return !terms_.empty() && terms_.front().kind == Kind::adaptive ? terms_.front().density : 0.0;
}

bool BlockPattern::depends_on_length(bool causal) const {
  return !causal &&
         std::any_of(terms_.begin(), terms_.end(), [](const BlockTerm& term) { return term.kind == Kind::random; });
}

BlockMask BlockPattern::planned_mask(std::int64_t rows, std::int64_t heads, bool causal) const {
  if (rows < 0 || rows > kMostTokens) reject("rows", "{} rows: give 0 to {}", rows, kMostTokens);
  if (heads < 1 || heads > kMostHeads) reject("heads", "{} heads: give 1 to {}", heads, kMostHeads);
  const std::int64_t blocks = blocks_of(rows, block_size_);
  if (custom_ && custom_->blocks() != blocks)
    reject("mask", "the block mask has {} block rows: strands of up to {} rows in blocks of {} need {}",
           custom_->blocks(), rows, block_size_, blocks);
  for (const BlockTerm& term : terms_) {
    if (rows > 0 && term.kind == Kind::global_local && term.numbers[0] > rows) {
      reject("global_tokens", "global_tokens is {}: the sequence has {}; give at most so many", term.numbers[0], rows);
    }
  }
  if (terms_.empty()) return *custom_;
  return BlockMask::planned({block_size_, terms_, custom_, rows, heads, causal});
}

BlockMask BlockPattern::mask(std::int64_t rows, std::int64_t heads, bool causal) const {
  const BlockMask mask = planned_mask(rows, heads, causal);
  mask.make_lists();
  return mask;
}

BlockMask BlockPattern::entry_mask(std::int64_t rows, std::int64_t heads, bool causal) const {
  return BlockMask::planned({block_size_, terms_, {}, rows, heads, causal});
}

std::uint64_t BlockPattern::hash() const {
  Hasher hasher;
  hasher.add(block_size_);
  for (const BlockTerm& term : terms_) {
    hasher.add(static_cast<std::uint64_t>(term.kind) << 32 | term.numbers.size());
    for (const std::int64_t number : term.numbers) hasher.add(number);
    hasher.add(term.density);
    hasher.add(term.seed);
  }
  if (custom_) hasher.add(custom_->hash());
  return hasher.value();
}

}  // namespace longspan
