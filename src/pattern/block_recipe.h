// How the mask of a block pattern is made: the lists of its rows, and what they hold in all without making them.
#pragma once

#include <atomic>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "longspan/block_pattern.h"

namespace longspan {

/// Blocks that hold so many rows.
constexpr std::int64_t blocks_of(std::int64_t rows, std::int64_t block_size) {
  return rows / block_size + (rows % block_size != 0);
}

/// Throws InvalidArgument unless it is a size that kernels know: 16, 32, 64 or 128.
void check_block_size(int block_size);

struct BlockRecipe {
  int block_size = kDefaultBlockSize;
  std::vector<BlockTerm> terms = {};
  std::optional<BlockMask> custom = {};
  std::int64_t rows = 0;
  std::int64_t heads = 1;  ///< of the problem; a custom mask may have as many for each batch entry
  bool causal = false;

  std::int64_t blocks() const { return blocks_of(rows, block_size); }
  std::int64_t mask_heads() const;
  /// An adaptive term keeps nothing until a call chooses.
  bool adaptive() const { return !terms.empty() && terms[0].kind == BlockTerm::Kind::adaptive; }
};

/// The union of all terms that are neither random nor adaptive, in blocks. Block row I sees key block J if I or J is
/// global, or if |I - J| is at most reach_of(I), divisible by a step, or equal to a rate.
struct RegularTerms {
  explicit RegularTerms(const BlockRecipe& recipe);
  std::int64_t reach_of(std::int64_t row) const;

  std::int64_t blocks, global = 0, reach = 0;
  // Without those that others make superfluous: steps and rates ascend, levels (step, reach) have the farthest first.
  std::vector<std::int64_t> steps, rates;
  std::vector<std::pair<std::int64_t, std::int64_t>> levels;
};

struct BlockLists {
  std::vector<std::int64_t> offsets;  ///< mask heads * blocks + 1
  std::vector<std::int32_t> columns;

  std::span<const std::int32_t> of(std::int64_t index) const {
    const std::int64_t* const begin = offsets.data() + index;
    return {columns.data() + begin[0], static_cast<std::size_t>(begin[1] - begin[0])};
  }
  bool operator==(const BlockLists&) const = default;
};

/// Why the lists would be too long to be made; empty where they can be.
std::string why_no_lists(const BlockRecipe& recipe);
/// One row of the lists. Throws InvalidArgument where there are more blocks than lists can number.
std::vector<std::int32_t> make_row(const BlockRecipe& recipe, std::int64_t head, std::int64_t block_row);
/// Throws InvalidArgument where there would be too many entries, Cancelled when told to stop.
BlockLists make_lists(const BlockRecipe& recipe, const std::atomic<bool>* cancel = nullptr);

}  // namespace longspan
