// Which key blocks each block row of a strand sees. An immutable value; copies share their lists.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "longspan/export.h"

namespace longspan {

/// A block mask in strand coordinates: row t of a strand lies in block t / block_size. Heads is 1 (all heads alike) or H.
class LONGSPAN_API BlockMask {
 public:
  /// rows[head * blocks + I] lists the active key blocks of block row I: ascending, no doubles, each below `blocks`.
  static BlockMask from_rows(int block_size, std::int64_t heads, std::int64_t blocks,
                             const std::vector<std::vector<std::int32_t>>& rows);
  /// dense[(head * blocks + I) * blocks + J] says whether block row I sees key block J.
  static BlockMask from_dense(int block_size, std::int64_t heads, std::int64_t blocks, std::span<const std::uint8_t> dense);

  int block_size() const;
  std::int64_t heads() const;
  std::int64_t blocks() const;
  /// Active key blocks of a block row, ascending. `head` is a query head; a mask of one head serves all.
  std::span<const std::int32_t> row(std::int64_t head, std::int64_t block_row) const;
  bool active(std::int64_t head, std::int64_t block_row, std::int64_t block_column) const;
  /// Number of active blocks over all heads of the mask.
  std::int64_t active_blocks() const;
  /// Fraction of blocks kept.
  double density() const;

  bool operator==(const BlockMask& other) const;
  std::uint64_t hash() const;
  std::size_t bytes() const;

 private:
  struct Lists;
  explicit BlockMask(std::shared_ptr<const Lists> lists);
  std::shared_ptr<const Lists> lists_;
};

}  // namespace longspan
