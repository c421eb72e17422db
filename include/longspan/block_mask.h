// Which key blocks each block row of a strand sees. An immutable value; copies share their lists.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "longspan/export.h"

namespace longspan {

/// One row (or column) of a mask as a kernel meets it: blocks that it takes whole, and those it must mask inside (the
/// diagonal under causality, a short last block).
struct BlockList {
  std::span<const std::int32_t> full;
  std::span<const std::int32_t> partial;
};

/// A number of blocks or of (query, key) pairs.
struct BlockCount {
  double value = 0;
  bool exact =
      true;  ///< false: random blocks that are too many to be drawn for it are counted by their expected number
};

struct BlockRecipe;

/// A block mask in strand coordinates: row t of a strand lies in block t / block_size. Heads is 1 (all heads alike), H,
/// or B * H (every batch entry has its own, entry by entry).
class LONGSPAN_API BlockMask {
 public:
  /// rows[head * blocks + I] lists the active key blocks of block row I: ascending, no doubles, each below `blocks`.
  static BlockMask from_rows(int block_size, std::int64_t heads, std::int64_t blocks,
                             const std::vector<std::vector<std::int32_t>>& rows);
  /// The same, compressed: row i is columns[offsets[i]] .. columns[offsets[i + 1]].
  static BlockMask from_lists(int block_size, std::int64_t heads, std::int64_t blocks,
                              std::vector<std::int64_t> offsets, std::vector<std::int32_t> columns);
  /// dense[(head * blocks + I) * blocks + J] says whether block row I sees key block J.
  static BlockMask from_dense(int block_size, std::int64_t heads, std::int64_t blocks,
                              std::span<const std::uint8_t> dense);
  std::vector<std::uint8_t> to_dense() const;

  int block_size() const;
  std::int64_t heads() const;
  std::int64_t blocks() const;
  /// Active key blocks of a block row, ascending. `head` is a query head; a mask of one head serves all.
  std::span<const std::int32_t> row(std::int64_t head, std::int64_t block_row) const;
  /// A copy of one row that makes no lists: for looking at a few rows of a long sequence.
  std::vector<std::int32_t> make_row(std::int64_t head, std::int64_t block_row) const;
  /// Block rows that see a key block, ascending. The transposed lists are made when first asked for.
  std::span<const std::int32_t> column(std::int64_t head, std::int64_t block_column) const;
  bool active(std::int64_t head, std::int64_t block_row, std::int64_t block_column) const;
  /// What a strand of `rows` rows leaves of a row's key blocks, and of a column's block rows.
  BlockList visible_row(std::int64_t head, std::int64_t block_row, std::int64_t rows, bool causal) const;
  BlockList visible_column(std::int64_t head, std::int64_t block_column, std::int64_t rows, bool causal) const;
  /// Number of active blocks over all heads of the mask.
  std::int64_t active_blocks() const;
  /// The same in closed form, for any length. Lists are made only for custom masks, for random blocks that are few
  /// enough to be drawn at once, and for strides with very many common multiples.
  BlockCount count_blocks() const;
  /// Fraction of blocks kept: count_blocks() over all.
  double density() const;
  /// Pairs of a strand of `rows` rows, which may be fewer than the mask's; in closed form where
  /// count_blocks() is.
  BlockCount count_pairs(std::int64_t head, std::int64_t rows, bool causal) const;
  /// Whether count_pairs() is the same for all heads.
  bool heads_count_alike() const;
  /// The masks of a plan make their lists when a row is first asked for; this makes them now. Throws InvalidArgument if
  /// they would be too long, Cancelled when told to stop.
  void make_lists(const std::atomic<bool>* cancel = nullptr) const;
  /// Why lists would be too long to be made; empty where they can be.
  std::string why_no_lists() const;

  /// Block by block; block sizes and block counts must agree, a mask of one head serves all heads of the other.
  BlockMask operator|(const BlockMask& other) const;
  BlockMask operator&(const BlockMask& other) const;
  BlockMask operator-(const BlockMask& other) const;

  bool operator==(const BlockMask& other) const;
  std::uint64_t hash() const;
  /// Memory of all lists, the transposed ones included.
  std::size_t bytes() const;
  /// One line for people.
  std::string to_string() const;

 private:
  friend class BlockPattern;
  friend class KeptBesideMask;
  struct Lists;
  explicit BlockMask(std::shared_ptr<const Lists> lists);
  /// Lists that are right by construction: nothing is checked.
  static BlockMask trusted(int block_size, std::int64_t heads, std::int64_t blocks, std::vector<std::int64_t> offsets,
                           std::vector<std::int32_t> columns);
  static BlockMask planned(BlockRecipe recipe);
  const Lists& made() const;
  template <class Combine>
  BlockMask combined(const BlockMask& other, Combine&& combine) const;
  std::shared_ptr<const Lists> lists_;
};

}  // namespace longspan
