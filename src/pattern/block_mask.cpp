// Block masks: compressed row lists, checked when they are made.
#include "longspan/block_mask.h"

#include <fmt/format.h>

#include <algorithm>

#include "longspan/error.h"
#include "util/hash.h"

namespace longspan {

struct BlockMask::Lists {
  int block_size = 0;
  std::int64_t heads = 0;
  std::int64_t blocks = 0;
  std::vector<std::int64_t> offsets;  // heads * blocks + 1
  std::vector<std::int32_t> columns;
  std::uint64_t hash = 0;
};

namespace {

void check_header(int block_size, std::int64_t heads, std::int64_t blocks) {
  if (block_size != 16 && block_size != 32 && block_size != 64 && block_size != 128) {
    throw InvalidArgument("block_size", fmt::format("block_size {}: use 16, 32, 64 or 128", block_size));
  }
  if (heads < 1) throw InvalidArgument("heads", fmt::format("block mask has {} heads: give 1, or one per head", heads));
  // Columns are int32, and heads * blocks must count rows without overflow.
  constexpr std::int64_t kMostRows = std::int64_t{1} << 40;
  if (blocks < 0 || blocks > std::numeric_limits<std::int32_t>::max() || heads > kMostRows / std::max<std::int64_t>(1, blocks)) {
    throw InvalidArgument("blocks", fmt::format("block mask of {} heads and {} block rows is out of range", heads, blocks));
  }
}

}  // namespace

BlockMask::BlockMask(std::shared_ptr<const Lists> lists) : lists_(std::move(lists)) {}

BlockMask BlockMask::from_rows(int block_size, std::int64_t heads, std::int64_t blocks,
                               const std::vector<std::vector<std::int32_t>>& rows) {
  check_header(block_size, heads, blocks);
  if (static_cast<std::int64_t>(rows.size()) != heads * blocks) {
    throw InvalidArgument("rows", fmt::format("rows has {} lists: give heads * blocks = {}", rows.size(), heads * blocks));
  }
  auto lists = std::make_shared<Lists>();
  lists->block_size = block_size;
  lists->heads = heads;
  lists->blocks = blocks;
  lists->offsets.reserve(rows.size() + 1);
  lists->offsets.push_back(0);
  Hasher hasher;
  hasher.add(static_cast<std::uint64_t>(block_size));
  hasher.add(static_cast<std::uint64_t>(heads));
  for (std::size_t i = 0; i < rows.size(); ++i) {
    std::int64_t previous = -1;
    for (const std::int32_t column : rows[i]) {
      if (column < 0 || column >= blocks) {
        throw InvalidArgument("rows", fmt::format("rows[{}] names block {}: blocks are 0 to {}", i, column, blocks - 1));
      }
      if (column <= previous) {
        throw InvalidArgument("rows", fmt::format("rows[{}] has block {} after {}: list blocks in ascending order, once each",
                                                  i, column, previous));
      }
      previous = column;
      lists->columns.push_back(column);
      hasher.add(static_cast<std::uint64_t>(column));
    }
    hasher.add(static_cast<std::uint64_t>(rows[i].size()));
    lists->offsets.push_back(static_cast<std::int64_t>(lists->columns.size()));
  }
  lists->hash = hasher.value();
  return BlockMask(std::move(lists));
}

BlockMask BlockMask::from_dense(int block_size, std::int64_t heads, std::int64_t blocks,
                                std::span<const std::uint8_t> dense) {
  check_header(block_size, heads, blocks);
  if (static_cast<double>(dense.size()) != static_cast<double>(heads) * static_cast<double>(blocks) * static_cast<double>(blocks)) {
    throw InvalidArgument("dense", fmt::format("dense mask has {} entries: {} heads of {} x {} blocks need {}", dense.size(),
                                               heads, blocks, blocks, heads * blocks * blocks));
  }
  std::vector<std::vector<std::int32_t>> rows(static_cast<std::size_t>(heads * blocks));
  for (std::size_t i = 0; i < rows.size(); ++i) {
    for (std::int64_t column = 0; column < blocks; ++column) {
      if (dense[i * static_cast<std::size_t>(blocks) + static_cast<std::size_t>(column)]) {
        rows[i].push_back(static_cast<std::int32_t>(column));
      }
    }
  }
  return from_rows(block_size, heads, blocks, rows);
}

int BlockMask::block_size() const { return lists_->block_size; }
std::int64_t BlockMask::heads() const { return lists_->heads; }
std::int64_t BlockMask::blocks() const { return lists_->blocks; }

std::span<const std::int32_t> BlockMask::row(std::int64_t head, std::int64_t block_row) const {
  const std::size_t index = static_cast<std::size_t>((lists_->heads == 1 ? 0 : head) * lists_->blocks + block_row);
  const std::int64_t begin = lists_->offsets[index];
  return {lists_->columns.data() + begin, static_cast<std::size_t>(lists_->offsets[index + 1] - begin)};
}

bool BlockMask::active(std::int64_t head, std::int64_t block_row, std::int64_t block_column) const {
  const auto columns = row(head, block_row);
  return std::binary_search(columns.begin(), columns.end(), static_cast<std::int32_t>(block_column));
}

std::int64_t BlockMask::active_blocks() const { return static_cast<std::int64_t>(lists_->columns.size()); }

double BlockMask::density() const {
  const double all = static_cast<double>(lists_->heads) * static_cast<double>(lists_->blocks) * static_cast<double>(lists_->blocks);
  return all > 0 ? static_cast<double>(active_blocks()) / all : 0.0;
}

bool BlockMask::operator==(const BlockMask& other) const {
  if (lists_ == other.lists_) return true;
  return lists_->hash == other.lists_->hash && lists_->block_size == other.lists_->block_size &&
         lists_->heads == other.lists_->heads && lists_->blocks == other.lists_->blocks &&
         lists_->offsets == other.lists_->offsets && lists_->columns == other.lists_->columns;
}

std::uint64_t BlockMask::hash() const { return lists_->hash; }

std::size_t BlockMask::bytes() const {
  return sizeof(Lists) + lists_->offsets.size() * sizeof(std::int64_t) + lists_->columns.size() * sizeof(std::int32_t);
}

}  // namespace longspan
