// Looking at attention: which blocks attend, with which probabilities, and what every key receives. Tensors of any
// device; blocks and masks are returned on the host, what keys receive where the tensors are.
#pragma once

#include <cstdint>
#include <vector>

#include "longspan/attention.h"
#include "longspan/export.h"

namespace longspan {

/// Probabilities of the blocks that attend, in positions of the sequence. Every covered query row sums to 1 over its
/// blocks (less where pad_keys takes a share).
struct AttentionBlocks {
  int block_size = 0;
  std::vector<std::int64_t>
      offsets;  ///< blocks of (entry, head) pair p are offsets[p] .. offsets[p + 1]; B * H + 1 entries
  std::vector<std::int32_t> rows;  ///< block row of each block, ascending within a pair
  std::vector<std::int32_t> columns;
  std::vector<float> values;  ///< [blocks][block_size][block_size], 0 where nothing attends
};

/// Memory grows with the pairs that attend: for patterns that keep few blocks, or short sequences. block_size 0 takes
/// the mask's own, or 64 where there is none. Dropout takes no part.
LONGSPAN_API AttentionBlocks attention_blocks(const Attention& attention, const ConstTensorView& q,
                                              const ConstTensorView& k, const Call& call = {}, int block_size = 0);

/// received [B, H, N] float32 (a view made by TensorView::lse): the sum over all queries of the probability that they
/// give a key. O(N) memory; costs a forward and a backward.
LONGSPAN_API void attention_received(const Attention& attention, const ConstTensorView& q, const ConstTensorView& k,
                                     const TensorView& received, const Call& call = {});

/// The blocks that an adaptive pattern chooses for these tensors: a mask of B * H heads, entry by entry. Throws
/// InvalidArgument if the pattern is not adaptive.
LONGSPAN_API BlockMask adaptive_mask(const Attention& attention, const ConstTensorView& q, const ConstTensorView& k,
                                     const Call& call = {});

}  // namespace longspan
