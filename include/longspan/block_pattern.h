// Block-sparse patterns for any length: a union of structured terms, which becomes a BlockMask when the length is
// known.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "longspan/block_mask.h"
#include "longspan/export.h"

namespace longspan {

inline constexpr int kDefaultBlockSize = 64;

/// One rule. I is the block row, J the key block, b the block size; divisions are of integers.
struct BlockTerm {
  enum class Kind : std::uint8_t {
    local_window,    ///< {window}: |I - J| <= (window / b) / 2
    strided,         ///< {stride}: (I - J) mod max(1, stride / b) == 0
    dilated_sparse,  ///< {rates...}: I == J, or |I - J| is one of the rates
    global_local,    ///< {global, window}: the local window, or J or I below ceil(global / b)
    hierarchical,    ///< {stride, window, ...}: the diagonal, and block rows 0, s, 2 s ... (s = max(1, stride / b)) see
                     ///< |I - J| <= (window / b) / 2, or everything if window is -1
    random,          ///< density, seed: per head and row the diagonal and columns drawn by Philox
    adaptive,  ///< density: per entry, head and row the diagonal and the columns whose mean key fits the mean query
  };
  Kind kind = Kind::local_window;
  std::vector<std::int64_t> numbers{};
  double density = 0;
  std::uint64_t seed = 0;
  bool operator==(const BlockTerm&) const = default;
};

/// An immutable union of terms and, if given, a mask of the caller's own.
class LONGSPAN_API BlockPattern {
 public:
  static BlockPattern local_window(std::int64_t window, int block_size = kDefaultBlockSize);
  static BlockPattern strided(std::int64_t stride, int block_size = kDefaultBlockSize);
  static BlockPattern dilated_sparse(const std::vector<std::int64_t>& rates, int block_size = kDefaultBlockSize);
  static BlockPattern global_local(std::int64_t global_tokens, std::int64_t window, int block_size = kDefaultBlockSize);
  /// levels: (stride, window) in tokens, window -1 for all columns.
  static BlockPattern hierarchical(const std::vector<std::pair<std::int64_t, std::int64_t>>& levels = {{64, 256},
                                                                                                       {256, 1024},
                                                                                                       {1024, -1}},
                                   int block_size = kDefaultBlockSize);
  /// density: fraction of each row's blocks that is kept, in (0, 1].
  static BlockPattern random(double density, std::uint64_t seed = 0, int block_size = kDefaultBlockSize);
  /// Chosen from the data of each call; stands alone, on a branch over the whole sequence.
  static BlockPattern adaptive(double density, int block_size = kDefaultBlockSize);
  /// global_local and random together; -1 means two blocks of global tokens, a window of three blocks.
  static BlockPattern bigbird(std::int64_t global_tokens = -1, std::int64_t window = -1, double density = 0.05,
                              std::uint64_t seed = 0, int block_size = kDefaultBlockSize);
  /// A local window and some global tokens.
  static BlockPattern longformer(std::int64_t window = 512, std::int64_t global_tokens = 64,
                                 int block_size = kDefaultBlockSize);
  /// A mask of the caller's own, which fits one length.
  BlockPattern(BlockMask mask);  // NOLINT(google-explicit-constructor): a mask is a pattern
  /// The union; block sizes must agree.
  BlockPattern operator|(const BlockPattern& other) const;

  /// Terms as text, `bigbird`, or `block=32 local_window(512)+random(0.1,7)`; what to_string() prints. Throws
  /// InvalidArgument.
  static BlockPattern parse(std::string_view text);
  std::string to_string() const;

  int block_size() const { return block_size_; }
  const std::vector<BlockTerm>& terms() const { return terms_; }
  const std::optional<BlockMask>& custom() const { return custom_; }
  /// Density of an adaptive pattern, 0 for all others.
  double adaptive_density() const;
  /// Whether the mask of a shorter sequence is not simply the corner of a longer one's.
  bool depends_on_length(bool causal) const;
  /// The mask for strands of `rows` rows. Heads differ only where a random term draws for each. Throws InvalidArgument.
  BlockMask mask(std::int64_t rows, std::int64_t heads, bool causal) const;
  /// The same mask, whose lists are made when they are first needed. Its counts are known at once.
  BlockMask planned_mask(std::int64_t rows, std::int64_t heads, bool causal) const;
  /// What the terms alone make for a batch entry of its own length, which may be shorter than the global tokens.
  BlockMask entry_mask(std::int64_t rows, std::int64_t heads, bool causal) const;

  bool operator==(const BlockPattern&) const = default;
  std::uint64_t hash() const;

 private:
  friend class BlockText;
  BlockPattern(int block_size, std::vector<BlockTerm> terms);
  void check() const;

  int block_size_ = kDefaultBlockSize;
  std::vector<BlockTerm> terms_;
  std::optional<BlockMask> custom_;
};

}  // namespace longspan
