// Block masks that the tests of the Hopper kernels share.
#pragma once

#include <random>
#include <string>

#include "gpu/hopper_case.h"

namespace longspan::testing {

struct BlockSetting {
  const char* name;
  Pattern (*pattern)(int block);
  Shape shape;
  std::vector<std::int64_t> lengths;
  std::vector<RowRange> ranges;
};

inline Pattern global(int block) { return Pattern::block_sparse(BlockPattern::global_local(block, 2 * block, block)); }
inline Pattern random(int block) { return Pattern::block_sparse(BlockPattern::random(0.3, 7, block)); }
inline Pattern adaptive(int block) { return Pattern::block_sparse(BlockPattern::adaptive(0.25, block)); }
inline Pattern everything(int block) { return Pattern::block_sparse(BlockPattern::random(1.0, 7, block)); }
/// The strands of the second branch lie apart; the third has no mask.
inline Pattern strands(int block) {
  const std::string size = std::to_string(block);
  return Pattern::parse("dilated 1000/1{block=" + size + " local_window(256)} 2100/3{block=" + size +
                        " random(0.4,3)} 700/2");
}

/// Random blocks of `heads` heads, of which some rows see nothing: they have no keys at all.
inline BlockMask gaps(int block, std::int64_t heads, std::int64_t tokens) {
  std::mt19937 engine(5);
  const std::int64_t blocks = (tokens + block - 1) / block;
  std::vector<std::vector<std::int32_t>> rows;
  for (std::int64_t row = 0; row < heads * blocks; ++row) {
    rows.emplace_back();
    if (engine() % 4 == 0) continue;
    for (std::int32_t column = 0; column < blocks; ++column) {
      if (engine() % 3 == 0) rows.back().push_back(column);
    }
  }
  return BlockMask::from_rows(block, heads, blocks, rows);
}
inline Pattern gaps_of_heads(int block) { return Pattern::block_sparse(gaps(block, 4, 1200)); }
inline Pattern gaps_of_entries(int block) { return Pattern::block_sparse(gaps(block, 6, 900)); }

inline std::vector<BlockSetting> block_settings() {
  return {{"local", local_blocks, {1, 1536, 2, 2, 64}, {}, {}},
          {"local_ragged", local_blocks, {2, 1401, 2, 1, 64}, {}, {}},
          {"local_wide", local_blocks, {1, 1401, 2, 2, 128}, {}, {}},
          {"local_d40", local_blocks, {1, 1300, 2, 2, 40}, {}, {}},
          {"local_lengths", local_blocks, {3, 1299, 2, 2, 64}, {1299, 650, 0}, {}},
          {"local_lengths_wide", local_blocks, {2, 1299, 2, 2, 96}, {1100, 1299}, {}},
          {"local_ranges", local_blocks, {1, 1401, 2, 2, 64}, {}, {{100, 333}, {900, 64}, {1390, 11}}},
          {"local_ranges_wide", local_blocks, {1, 1401, 2, 2, 128}, {}, {{100, 333}, {900, 500}}},
          {"global", global, {1, 1300, 4, 2, 64}, {}, {}},
          {"global_wide", global, {1, 1300, 2, 2, 128}, {}, {}},
          // So many block rows see the first block that its list is cut in the backward.
          {"global_long", global, {1, 5000, 2, 2, 64}, {}, {}},
          {"global_long_wide", global, {1, 5000, 2, 2, 128}, {}, {}},
          {"global_long_grouped", global, {2, 4700, 2, 1, 64}, {4700, 4600}, {}},
          {"random", random, {2, 1100, 3, 3, 64}, {}, {}},
          {"random_wide", random, {1, 1100, 4, 2, 128}, {}, {}},
          {"adaptive", adaptive, {2, 1300, 4, 2, 64}, {}, {}},
          {"adaptive_lengths", adaptive, {3, 1299, 4, 2, 64}, {1299, 0, 650}, {}},
          {"adaptive_lengths_wide", adaptive, {2, 1299, 2, 1, 128}, {0, 1100}, {}},
          {"everything", everything, {1, 1000, 2, 2, 64}, {}, {}},
          {"short", everything, {2, 37, 2, 2, 64}, {}, {}},
          {"strands", strands, {1, 2600, 3, 3, 64}, {}, {}},
          {"strands_wide", strands, {2, 1999, 3, 3, 128}, {}, {}},
          {"strands_ranges", strands, {1, 2600, 3, 3, 64}, {}, {{777, 900}, {2000, 500}}},
          {"gaps", gaps_of_heads, {2, 1200, 4, 4, 64}, {}, {}},
          {"gaps_wide", gaps_of_heads, {1, 1200, 4, 2, 128}, {}, {}},
          {"gaps_of_entries", gaps_of_entries, {3, 900, 2, 2, 64}, {}, {}},
          {"gaps_of_entries_wide", gaps_of_entries, {3, 900, 2, 2, 128}, {}, {}}};
}

}  // namespace longspan::testing
