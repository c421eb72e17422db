// Block masks: compressed row lists, checked when they are made; those of a plan, transposed lists and hash are made
// when first asked for.
#include "longspan/block_mask.h"

#include <fmt/format.h>

#include <algorithm>
#include <limits>
#include <mutex>
#include <numeric>
#include <optional>

#include "pattern/block_counts.h"
#include "pattern/block_recipe.h"
#include "pattern/kept_beside_mask.h"
#include "util/hash.h"
#include "util/reject.h"

namespace longspan {

struct BlockMask::Lists {
  Lists(int size, std::int64_t of_heads, std::int64_t of_blocks, BlockLists rows)
      : block_size(size), heads(of_heads), blocks(of_blocks), lists(std::move(rows)) {}
  explicit Lists(BlockRecipe of)
      : block_size(of.block_size), heads(of.mask_heads()), blocks(of.blocks()), recipe(std::move(of)), made(false) {}

  int block_size;
  std::int64_t heads, blocks;
  std::optional<BlockRecipe> recipe;  // where there is one, lists are made from it when they are first needed
  mutable BlockLists lists;
  mutable std::atomic<bool> made = true;
  mutable std::mutex making;
  mutable std::once_flag transposed, hashed;
  mutable BlockLists columns;  // transposed: block rows of each key block
  mutable std::uint64_t hash = 0;
  mutable std::mutex keeping;
  mutable std::vector<std::pair<std::uint64_t, std::shared_ptr<const void>>> kept;

  void transpose() const {
    const auto for_each_block = [&](auto&& body) {
      for (std::int64_t index = 0; index < heads * blocks; ++index) {
        const std::int64_t first = index / blocks * blocks;  // of the head
        for (const std::int32_t column : lists.of(index)) body(static_cast<std::size_t>(first + column), index - first);
      }
    };
    columns.offsets.assign(lists.offsets.size(), 0);
    columns.columns.resize(lists.columns.size());
    for_each_block([&](std::size_t column, std::int64_t) { ++columns.offsets[column + 1]; });
    std::partial_sum(columns.offsets.begin(), columns.offsets.end(), columns.offsets.begin());
    std::vector<std::int64_t> next = columns.offsets;
    for_each_block([&](std::size_t column, std::int64_t row) {
      columns.columns[static_cast<std::size_t>(next[column]++)] = static_cast<std::int32_t>(row);
    });
  }
  void check_block(const char* name, std::int64_t block) const {
    if (block < 0 || block >= blocks) reject(name, "{} {}: the mask has {} blocks", name, block, blocks);
  }
  /// Where the list of a block row (or column) begins; a mask of one head serves all.
  std::int64_t index_of(const char* name, std::int64_t head, std::int64_t block) const {
    check_block(name, block);
    if (heads == 1) return block;
    if (head < 0 || head >= heads) reject("head", "head {}: the mask has {} heads", head, heads);
    return head * blocks + block;
  }
};

void check_block_size(int block_size) {
  if (block_size != 16 && block_size != 32 && block_size != 64 && block_size != 128)
    reject("block_size", "block_size {}: use 16, 32, 64 or 128", block_size);
}

namespace {

void check_header(int block_size, std::int64_t heads, std::int64_t blocks) {
  check_block_size(block_size);
  if (heads < 1) reject("heads", "block mask has {} heads: give 1, or one per head", heads);
  // Columns are int32, and heads * blocks must count rows without overflow.
  constexpr std::int64_t kMostRows = std::int64_t{1} << 40;
  if (blocks < 0 || blocks > std::numeric_limits<std::int32_t>::max() ||
      heads > kMostRows / std::max<std::int64_t>(1, blocks)) {
    reject("blocks",
           "block mask of {} heads and {} block rows: give 0 to 2^31 - 1 block rows, and at most 2^40 over all heads",
           heads, blocks);
  }
}

}  // namespace

BlockMask::BlockMask(std::shared_ptr<const Lists> lists) : lists_(std::move(lists)) {}

BlockMask BlockMask::trusted(int block_size, std::int64_t heads, std::int64_t blocks, std::vector<std::int64_t> offsets,
                             std::vector<std::int32_t> columns) {
  return BlockMask(
      std::make_shared<const Lists>(block_size, heads, blocks, BlockLists{std::move(offsets), std::move(columns)}));
}

BlockMask BlockMask::planned(BlockRecipe recipe) { return BlockMask(std::make_shared<const Lists>(std::move(recipe))); }

void BlockMask::make_lists(const std::atomic<bool>* cancel) const {
  const Lists& lists = *lists_;
  if (lists.made.load(std::memory_order_acquire)) return;
  const std::lock_guard lock(lists.making);
  if (lists.made.load(std::memory_order_relaxed)) return;
  lists.lists = longspan::make_lists(*lists.recipe, cancel);
  lists.made.store(true, std::memory_order_release);
}

std::string BlockMask::why_no_lists() const {
  return lists_->recipe ? longspan::why_no_lists(*lists_->recipe) : std::string();
}

const BlockMask::Lists& BlockMask::made() const {
  make_lists();
  return *lists_;
}

BlockMask BlockMask::from_lists(int block_size, std::int64_t heads, std::int64_t blocks,
                                std::vector<std::int64_t> offsets, std::vector<std::int32_t> columns) {
  check_header(block_size, heads, blocks);
  if (static_cast<std::int64_t>(offsets.size()) != heads * blocks + 1)
    reject("offsets", "offsets has {} entries: give heads * blocks + 1 = {}", offsets.size(), heads * blocks + 1);
  if (offsets.front() != 0 || offsets.back() != static_cast<std::int64_t>(columns.size()))
    reject("offsets", "offsets run from {} to {}: they must run from 0 to the number of columns, {}", offsets.front(),
           offsets.back(), columns.size());
  for (std::size_t i = 0; i + 1 < offsets.size(); ++i) {
    if (offsets[i] > offsets[i + 1] || offsets[i + 1] > offsets.back())
      reject("offsets", "offsets[{}] is {} after {}: offsets ascend", i + 1, offsets[i + 1], offsets[i]);
    std::int64_t previous = -1;
    for (std::int64_t entry = offsets[i]; entry < offsets[i + 1]; ++entry) {
      const std::int32_t column = columns[static_cast<std::size_t>(entry)];
      if (column < 0 || column >= blocks)
        reject("rows", "rows[{}] names block {}: blocks are 0 to {}", i, column, blocks - 1);
      if (column <= previous)
        reject("rows", "rows[{}] has block {} after {}: list blocks in ascending order, once each", i, column,
               previous);
      previous = column;
    }
  }
  return trusted(block_size, heads, blocks, std::move(offsets), std::move(columns));
}

BlockMask BlockMask::from_rows(int block_size, std::int64_t heads, std::int64_t blocks,
                               const std::vector<std::vector<std::int32_t>>& rows) {
  check_header(block_size, heads, blocks);
  if (static_cast<std::int64_t>(rows.size()) != heads * blocks)
    reject("rows", "rows has {} lists: give heads * blocks = {}", rows.size(), heads * blocks);
  std::vector<std::int64_t> offsets = {0};
  std::vector<std::int32_t> columns;
  for (const auto& row : rows) {
    columns.insert(columns.end(), row.begin(), row.end());
    offsets.push_back(static_cast<std::int64_t>(columns.size()));
  }
  return from_lists(block_size, heads, blocks, std::move(offsets), std::move(columns));
}

BlockMask BlockMask::from_dense(int block_size, std::int64_t heads, std::int64_t blocks,
                                std::span<const std::uint8_t> dense) {
  check_header(block_size, heads, blocks);
  if (static_cast<double>(dense.size()) !=
      static_cast<double>(heads) * static_cast<double>(blocks) * static_cast<double>(blocks))
    reject("dense", "dense has {} entries: {} heads of {} x {} blocks need {}", dense.size(), heads, blocks, blocks,
           heads * blocks * blocks);
  std::vector<std::int64_t> offsets = {0};
  std::vector<std::int32_t> columns;
  for (std::size_t i = 0; i < dense.size(); ++i) {
    const std::int64_t column = static_cast<std::int64_t>(i) % blocks;
    if (dense[i]) columns.push_back(static_cast<std::int32_t>(column));
    if (column == blocks - 1) offsets.push_back(static_cast<std::int64_t>(columns.size()));
  }
  return trusted(block_size, heads, blocks, std::move(offsets), std::move(columns));
}

std::vector<std::uint8_t> BlockMask::to_dense() const {
  constexpr double kMostDense = 1e12;
  if (static_cast<double>(heads()) * static_cast<double>(blocks()) * static_cast<double>(blocks()) > kMostDense)
    reject("mask", "{} heads of {} x {} blocks are too many for booleans: use lists", heads(), blocks(), blocks());
  std::vector<std::uint8_t> dense(static_cast<std::size_t>(heads() * blocks() * blocks()));
  for (std::int64_t head = 0; head < heads(); ++head) {
    for (std::int64_t block_row = 0; block_row < blocks(); ++block_row) {
      std::uint8_t* const bits = dense.data() + (head * blocks() + block_row) * blocks();
      for (const std::int32_t column : row(head, block_row)) bits[column] = 1;
    }
  }
  return dense;
}

int BlockMask::block_size() const { return lists_->block_size; }
std::int64_t BlockMask::heads() const { return lists_->heads; }
std::int64_t BlockMask::blocks() const { return lists_->blocks; }

std::span<const std::int32_t> BlockMask::row(std::int64_t head, std::int64_t block_row) const {
  const Lists& lists = made();
  return lists.lists.of(lists.index_of("block_row", head, block_row));
}

std::vector<std::int32_t> BlockMask::make_row(std::int64_t head, std::int64_t block_row) const {
  lists_->index_of("block_row", head, block_row);
  if (lists_->recipe && !lists_->made.load(std::memory_order_acquire))
    return longspan::make_row(*lists_->recipe, heads() == 1 ? 0 : head, block_row);
  const auto columns = row(head, block_row);
  return {columns.begin(), columns.end()};
}

std::span<const std::int32_t> BlockMask::column(std::int64_t head, std::int64_t block_column) const {
  const Lists& lists = made();
  std::call_once(lists.transposed, [&] { lists.transpose(); });
  return lists.columns.of(lists.index_of("block_column", head, block_column));
}

bool BlockMask::active(std::int64_t head, std::int64_t block_row, std::int64_t block_column) const {
  const auto columns = row(head, block_row);
  lists_->check_block("block_column", block_column);
  return std::binary_search(columns.begin(), columns.end(), static_cast<std::int32_t>(block_column));
}

BlockList BlockMask::visible_row(std::int64_t head, std::int64_t block_row, std::int64_t rows, bool causal) const {
  const auto all = row(head, block_row);
  const std::int64_t last = causal ? block_row : (rows - 1) / block_size();
  const auto seen =
      static_cast<std::size_t>(std::upper_bound(all.begin(), all.end(), static_cast<std::int32_t>(last)) - all.begin());
  // Only the last block that a row may see can be short, or on the diagonal.
  const bool masked_inside = causal || rows % block_size() != 0;
  const std::size_t partial = seen > 0 && all[seen - 1] == last && masked_inside ? 1 : 0;
  return {all.subspan(0, seen - partial), all.subspan(seen - partial, partial)};
}

BlockList BlockMask::visible_column(std::int64_t head, std::int64_t block_column, std::int64_t rows,
                                    bool causal) const {
  const auto all = column(head, block_column);
  const std::int64_t last = (rows - 1) / block_size();
  const auto begin =
      causal ? std::lower_bound(all.begin(), all.end(), static_cast<std::int32_t>(block_column)) : all.begin();
  const auto end = std::upper_bound(begin, all.end(), static_cast<std::int32_t>(last));
  const std::span<const std::int32_t> seen(begin, end);
  if (block_column == last && rows % block_size() != 0) return {{}, seen};
  const std::size_t partial = causal && !seen.empty() && seen.front() == block_column ? 1 : 0;
  return {seen.subspan(partial), seen.subspan(0, partial)};
}

std::int64_t BlockMask::active_blocks() const { return static_cast<std::int64_t>(made().lists.columns.size()); }

BlockCount BlockMask::count_blocks() const {
  if (const auto counts = lists_->recipe ? BlockCounts::of(*lists_->recipe) : std::nullopt) {
    const auto [value, exact] = counts->blocks();
    return {value * static_cast<double>(heads()), exact};
  }
  return {static_cast<double>(active_blocks()), true};
}

double BlockMask::density() const {
  const double all =
      static_cast<double>(lists_->heads) * static_cast<double>(lists_->blocks) * static_cast<double>(lists_->blocks);
  return all > 0 ? count_blocks().value / all : 0.0;
}

bool BlockMask::heads_count_alike() const {
  return heads() == 1 || (lists_->recipe && BlockCounts::of(*lists_->recipe));
}

BlockCount BlockMask::count_pairs(std::int64_t head, std::int64_t rows, bool causal) const {
  if (const auto counts = lists_->recipe ? BlockCounts::of(*lists_->recipe) : std::nullopt)
    return counts->pairs(rows, causal);
  double pairs = 0;
  const std::int64_t size = block_size();
  for (std::int64_t block_row = 0; block_row * size < rows; ++block_row) {
    const double own = static_cast<double>(std::min(size, rows - block_row * size));
    const BlockList seen = visible_row(head, block_row, rows, causal);
    pairs += static_cast<double>(seen.full.size()) * own * static_cast<double>(size);
    if (seen.partial.empty()) continue;
    pairs += causal ? own * (own + 1) / 2 : own * static_cast<double>(rows - seen.partial[0] * size);
  }
  return {pairs, true};
}

template <class Combine>
BlockMask BlockMask::combined(const BlockMask& other, Combine&& combine) const {
  if (block_size() != other.block_size() || blocks() != other.blocks())
    reject("mask", "{} blocks of {} and {} blocks of {}: masks combine where both numbers agree", blocks(),
           block_size(), other.blocks(), other.block_size());
  if (heads() != other.heads() && heads() != 1 && other.heads() != 1)
    reject("mask", "masks of {} and of {} heads: give equal numbers, or 1", heads(), other.heads());
  const std::int64_t all_heads = std::max(heads(), other.heads());
  std::vector<std::int64_t> offsets = {0};
  offsets.reserve(static_cast<std::size_t>(all_heads * blocks() + 1));
  std::vector<std::int32_t> columns;
  for (std::int64_t head = 0; head < all_heads; ++head) {
    for (std::int64_t block_row = 0; block_row < blocks(); ++block_row) {
      combine(row(head, block_row), other.row(head, block_row), std::back_inserter(columns));
      offsets.push_back(static_cast<std::int64_t>(columns.size()));
    }
  }
  return trusted(block_size(), all_heads, blocks(), std::move(offsets), std::move(columns));
}

BlockMask BlockMask::operator|(const BlockMask& other) const {
  return combined(other, [](auto a, auto b, auto out) { std::set_union(a.begin(), a.end(), b.begin(), b.end(), out); });
}
BlockMask BlockMask::operator&(const BlockMask& other) const {
  return combined(other,
                  [](auto a, auto b, auto out) { std::set_intersection(a.begin(), a.end(), b.begin(), b.end(), out); });
}
BlockMask BlockMask::operator-(const BlockMask& other) const {
  return combined(other,
                  [](auto a, auto b, auto out) { std::set_difference(a.begin(), a.end(), b.begin(), b.end(), out); });
}

bool BlockMask::operator==(const BlockMask& other) const {
  if (lists_ == other.lists_) return true;
  if (block_size() != other.block_size() || heads() != other.heads() || blocks() != other.blocks()) return false;
  return made().lists == other.made().lists;
}

std::uint64_t BlockMask::hash() const {
  const Lists& lists = made();
  std::call_once(lists.hashed, [&] {
    Hasher hasher;
    hasher.add(lists.block_size);
    hasher.add(lists.heads);
    for (const std::int64_t offset : lists.lists.offsets) hasher.add(offset);
    for (const std::int32_t column : lists.lists.columns) hasher.add(column);
    lists.hash = hasher.value();
  });
  return lists.hash;
}

KeptBesideMask::Thing KeptBesideMask::get(const BlockMask& mask, std::uint64_t key,
                                          const std::function<Thing(const BlockMask&)>& make) {
  const BlockMask::Lists& lists = *mask.lists_;
  const std::lock_guard lock(lists.keeping);
  for (const auto& [found, thing] : lists.kept) {
    if (found == key) return thing;
  }
  return lists.kept.emplace_back(key, make(mask)).second;
}

std::size_t BlockMask::bytes() const {
  if (lists_->recipe && !why_no_lists().empty()) return sizeof(Lists);
  const double rows = static_cast<double>(heads()) * static_cast<double>(blocks());
  const double lists = (rows + 1) * sizeof(std::int64_t) + count_blocks().value * sizeof(std::int32_t);
  return sizeof(Lists) + 2 * static_cast<std::size_t>(lists);
}

std::string BlockMask::to_string() const {
  return fmt::format("block mask of {} x {} blocks of {}, {} head{}, density {:.4g}", blocks(), blocks(), block_size(),
                     heads(), heads() == 1 ? "" : "s", density());
}

}  // namespace longspan
