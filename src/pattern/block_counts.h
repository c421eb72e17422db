// How many blocks and pairs a block pattern keeps, in closed form: time does not depend on the number of rows.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <utility>
#include <vector>

#include "pattern/block_recipe.h"

namespace longspan {

__extension__ typedef __int128 WideInteger;  // (2^36 blocks)^2 pairs of blocks

/// How many blocks regular terms keep.
class RegularBlocks {
 public:
  explicit RegularBlocks(const BlockRecipe& recipe);

  /// Whether the counts below hold every term. Some sets of strides have very many common multiples: where there are
  /// too many blocks to go through them one by one, too, some strides are left out, and the counts are too low.
  bool complete() const { return complete_; }
  /// Active blocks among the first `n` block rows and key blocks.
  WideInteger square(std::int64_t n) const;
  /// Those with J <= I.
  WideInteger lower(std::int64_t n) const;
  /// Those of one row.
  std::int64_t lower_row(std::int64_t row) const;

 private:
  /// `coefficient` times: rows 0, modulus, 2 * modulus, ... see the distances up to `reach`.
  struct Rows {
    std::int64_t modulus, reach, coefficient;
  };
  bool unite_steps();
  bool unite_levels();
  void list_distances();
  std::int64_t far_seen(std::int64_t distance) const;
  std::int64_t unseen(std::int64_t farthest, std::int64_t reach) const;
  WideInteger unseen(std::int64_t first, std::int64_t step, std::int64_t count, std::int64_t reach) const;

  RegularTerms terms_;
  std::vector<Rows> rows_;
  std::map<std::int64_t, std::int64_t> multiples_;  // distances seen far away: sum of coefficient * [divisible by]
  std::vector<std::uint32_t> seen_;                 // instead of multiples and rates: of the distances 1 to d, so many
  bool complete_ = true;
};

/// The counts of one recipe.
class BlockCounts {
 public:
  /// nullopt where the lists have to tell: custom masks, random blocks that are few enough to be drawn, and strides
  /// that no short sum unites.
  static std::optional<BlockCounts> of(const BlockRecipe& recipe);
  /// Active blocks of one head that every list of this recipe holds, and perhaps more: known at once in every case.
  static double at_least(const BlockRecipe& recipe);
  /// What is expected of a pattern's random terms, however few. Adaptive ones count as random, since they keep as many.
  static BlockCounts expected(BlockRecipe recipe);

  /// Active blocks of one head.
  BlockCount blocks() const;
  /// Pairs of a strand of `rows` rows of one head.
  BlockCount pairs(std::int64_t rows, bool causal) const;

 private:
  explicit BlockCounts(const BlockRecipe& recipe);
  double chance(std::int64_t candidates) const;
  double drawn(std::int64_t n, bool causal) const;

  RegularBlocks regular_;
  int block_size_;
  std::int64_t blocks_;
  bool causal_, empty_;
  std::map<std::uint64_t, double> densities_;  // of random terms, by seed: of two with one seed, one holds the other
};

}  // namespace longspan
