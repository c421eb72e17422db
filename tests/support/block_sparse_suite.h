// Block-sparse attention on any engine: against the reference over all patterns, block sizes and types; masks that keep
// everything, adaptive masks, masks in strands; what earlier implementations got wrong; inspection. An engine says how
// to run a Case and how long its tiles are.
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <random>

#include "longspan/inspect.h"
#include "support/case.h"

namespace longspan::testing {

inline Options causal_if(bool causal) {
  Options options;
  options.causal = causal;
  return options;
}

inline std::vector<BlockPattern> block_patterns(int b) {
  return {BlockPattern::local_window(3 * b, b),
          BlockPattern::strided(3 * b, b),
          BlockPattern::dilated_sparse({1, 3}, b),
          BlockPattern::global_local(b + 1, 2 * b, b),
          BlockPattern::hierarchical({{b, 2 * b}, {3 * b, -1}}, b),
          BlockPattern::random(0.4, 11, b),
          BlockPattern::bigbird(b / 2, 2 * b, 0.3, 5, b)};
}

inline BlockMask random_mask(std::mt19937& engine, int block_size, std::int64_t heads, std::int64_t blocks,
                             unsigned one_in) {
  std::vector<std::uint8_t> dense(static_cast<std::size_t>(heads * blocks * blocks));
  for (auto& bit : dense) bit = engine() % one_in == 0;
  return BlockMask::from_dense(block_size, heads, blocks, dense);
}

inline bool same_bits(const Tensor& a, const Tensor& b) { return a == b; }

/// The definition of adaptive(density), row by row.
inline void expect_choice(const Case& c, const BlockMask& mask, double density, int b) {
  const std::int64_t group = c.shape.heads / c.shape.kv_heads;
  for (std::int64_t entry = 0; entry < c.shape.batch; ++entry) {
    const std::int64_t length = c.lengths.empty() ? c.shape.tokens : c.lengths[static_cast<std::size_t>(entry)];
    const std::int64_t blocks = (length + b - 1) / b;
    const auto mean = [&](const Tensor& tensor, std::int64_t head, std::int64_t block) {
      std::vector<double> sum(static_cast<std::size_t>(c.shape.head_dim), 0.0);
      double count = 0;
      for (std::int64_t row = block * b; row < std::min<std::int64_t>((block + 1) * b, length); ++row) {
        if (!c.key_mask.empty() && !c.key_mask[static_cast<std::size_t>(entry * c.shape.tokens + row)]) continue;
        ++count;
        for (std::size_t d = 0; d < sum.size(); ++d)
          sum[d] += tensor.at(entry, row, head, static_cast<std::int64_t>(d));
      }
      for (double& value : sum) value /= count;
      return sum;
    };
    for (std::int64_t head = 0; head < c.shape.heads; ++head) {
      for (std::int64_t row = 0; row < mask.blocks(); ++row) {
        const auto chosen = mask.row(entry * c.shape.heads + head, row);
        if (row >= blocks) {
          EXPECT_TRUE(chosen.empty());
          continue;
        }
        const std::int64_t candidates = c.options.causal ? row + 1 : blocks;
        EXPECT_EQ(chosen.size(),
                  static_cast<std::size_t>(std::max(1.0, std::floor(density * static_cast<double>(candidates) + 0.5))));
        EXPECT_EQ(std::count(chosen.begin(), chosen.end(), row), 1);
        const auto query = mean(c.q, head, row);
        double least_in = INFINITY, most_out = -INFINITY;
        for (std::int64_t column = 0; column < candidates; ++column) {
          const auto key = mean(c.k, head / group, column);
          double score = 0;
          for (std::size_t d = 0; d < key.size(); ++d) score += query[d] * key[d];
          if (std::isnan(score)) score = -1e30;  // ranks last
          const bool in = std::count(chosen.begin(), chosen.end(), column) > 0;
          if (in && column != row) least_in = std::min(least_in, score);
          if (!in) most_out = std::max(most_out, score);
        }
        EXPECT_GE(least_in, most_out - 1e-6) << "entry " << entry << " head " << head << " row " << row;
      }
    }
  }
}

inline std::vector<Pattern> inspected() {
  return {Pattern::block_sparse(BlockPattern::bigbird(16, 48, 0.2, 3, 16)),
          Pattern::block_sparse(BlockPattern::adaptive(0.4, 16)), Pattern::dense(), Pattern::dilated({40, 90}, {1, 3}),
          Pattern::longnet({40, 110}, {1, 2})};
}

template <class Engine>
class BlockSparse : public ::testing::Test {
 protected:
  void SetUp() override {
    if (const std::string why = Engine::missing(); !why.empty()) GTEST_SKIP() << why;
  }
  void expect_patterns_match(int b) {
    int turn = 0;
    for (const DType dtype : {DType::f32, DType::bf16, DType::f16}) {
      for (const bool causal : {false, true}) {
        for (const BlockPattern& blocks : block_patterns(b)) {
          // The last block is short; grouped queries and odd head dims take turns.
          const std::int64_t count = std::max<std::int64_t>(b < 64 ? 5 : b == 64 ? 4 : 3, Engine::kTokens / b);
          const Shape shape = turn++ % 2 ? Shape{1, count * b - b + 9, 2, 1, Engine::kHeadDims[0]}
                                         : Shape{1, count * b - 3, 2, 2, Engine::kHeadDims[1]};
          Engine::expect_matches(Case(Pattern::block_sparse(blocks), causal_if(causal), shape, dtype));
        }
      }
    }
  }
};
TYPED_TEST_SUITE_P(BlockSparse);

TYPED_TEST_P(BlockSparse, BlocksOf16MatchReference) { this->expect_patterns_match(16); }
TYPED_TEST_P(BlockSparse, BlocksOf32MatchReference) { this->expect_patterns_match(32); }
TYPED_TEST_P(BlockSparse, BlocksOf64MatchReference) { this->expect_patterns_match(64); }
TYPED_TEST_P(BlockSparse, BlocksOf128MatchReference) { this->expect_patterns_match(128); }

TYPED_TEST_P(BlockSparse, AllOptionsAtOnce) {
  std::mt19937 engine(3);
  for (const std::int64_t mask_heads : {1, 4}) {
    for (const DType dtype : {DType::f32, DType::bf16}) {
      Options options = causal_if(mask_heads == 4);
      options.dropout = 0.2;
      options.output_scale = 0.5;
      Case c(Pattern::block_sparse(random_mask(engine, 32, mask_heads, 6, 2)), options, {2, 170, 4, 2, 40}, dtype);
      c.seed = 77;
      c.lengths = {170, 101};
      c.alibi_slopes = {0.1f, 0.02f, 0.3f, 0.0f};
      c.key_mask.assign(340, 1);
      for (std::size_t i = 0; i < 340; i += 5) c.key_mask[i] = 0;
      c.dlse = Tensor::lse(dtype, 2, 170, 4);
      c.dlse->fill_random(9);
      TypeParam::expect_matches(c);
    }
  }
}

TYPED_TEST_P(BlockSparse, QueryRanges) {
  for (const bool causal : {false, true}) {
    for (const int b : {16, 128}) {
      const Pattern pattern = Pattern::block_sparse(BlockPattern::bigbird(b, 2 * b, 0.2, 1, b));
      TypeParam::expect_matches(
          Case(pattern, causal_if(causal), {1, 150, 4, 2, 16}, DType::f32, Layout::bnhd, {{149, 1}, {3, 60}, {70, 5}}));
      TypeParam::expect_matches(
          Case(pattern, causal_if(causal), {1, 400, 2, 2, 16}, DType::bf16, Layout::bnhd, {{200, 150}}));
    }
  }
}

// By the hundred: small, any heads, any density, rows without keys among them.
TYPED_TEST_P(BlockSparse, RandomMasks) {
  std::mt19937 engine(7);
  for (int trial = 0; trial < 120; ++trial) {
    const int b = 16 << (trial % 3);
    const std::int64_t blocks = 1 + static_cast<std::int64_t>(engine() % 6),
                       tokens = blocks * b - static_cast<std::int64_t>(engine() % 16);
    const std::int64_t heads = 1 + static_cast<std::int64_t>(engine() % 3);
    const BlockMask mask = random_mask(engine, b, trial % 2 ? heads : 1, blocks, 1 + engine() % 8);
    TypeParam::expect_matches(Case(Pattern::block_sparse(mask), causal_if(engine() % 2), {1, tokens, heads, heads, 8},
                                   trial % 5 ? DType::f32 : DType::bf16));
  }
}

// "softmax per block": rows then summed to the number of blocks. With values of one every covered row is one.
TYPED_TEST_P(BlockSparse, EarlierBugSoftmaxPerBlock) {
  for (const int b : {16, 64}) {
    for (const BlockPattern& blocks : block_patterns(b)) {
      for (const bool causal : {false, true}) {
        Case c(Pattern::block_sparse(blocks), causal_if(causal), {1, 7 * b + 3, 3, 3, 16});
        c.v.for_each([&](auto e, auto row, auto head, auto column) { c.v.set(e, row, head, column, 1.0); });
        const Results got = TypeParam::run(c, false);
        got.out.for_each([&](auto e, auto row, auto head, auto column) {
          EXPECT_NEAR(got.out.at(e, row, head, column), 1.0, 1e-5);
        });
      }
    }
  }
}

// "ignored causality": later keys may hold anything without changing a row, inside the diagonal block too.
TYPED_TEST_P(BlockSparse, EarlierBugIgnoredCausality) {
  for (const int b : {16, 64}) {
    for (const BlockPattern& blocks : block_patterns(b)) {
      const std::int64_t tokens = 5 * b + 7, cut = 3 * b + b / 2;
      Case c(Pattern::block_sparse(blocks), causal_if(true), {1, tokens, 2, 2, 16});
      const Results before = TypeParam::run(c, false);
      for (std::int64_t row = cut; row < tokens; ++row) {
        for (std::int64_t head = 0; head < 2; ++head) {
          for (std::int64_t column = 0; column < 16; ++column) {
            c.k.set(0, row, head, column, 50.0);
            c.v.set(0, row, head, column, 1e6);
          }
        }
      }
      const Results after = TypeParam::run(c, false);
      for (std::int64_t row = 0; row < cut; ++row) {
        for (std::int64_t head = 0; head < 2; ++head)
          EXPECT_EQ(before.out.at(0, row, head), after.out.at(0, row, head)) << blocks.to_string();
      }
    }
  }
}

// "a padded batch entry's result depends on its batch mates": random masks draw from as many blocks as the entry has.
TYPED_TEST_P(BlockSparse, EarlierBugEntriesDependOnBatchMates) {
  for (const bool causal : {false, true}) {
    for (const BlockPattern& blocks : block_patterns(16)) {
      for (const Pattern& pattern :
           {Pattern::block_sparse(blocks), Pattern::block_sparse(BlockPattern::adaptive(0.3, 16))}) {
        Case both(pattern, causal_if(causal), {2, 200, 2, 2, 16});
        both.lengths = {200, 93};
        const Results batch = TypeParam::run(both);
        Case alone(pattern, causal_if(causal), {1, 93, 2, 2, 16});
        for (Tensor* tensor : {&alone.q, &alone.k, &alone.v, &alone.dout}) {
          const Tensor& from = tensor == &alone.q   ? both.q
                               : tensor == &alone.k ? both.k
                               : tensor == &alone.v ? both.v
                                                    : both.dout;
          tensor->for_each([&](auto, auto row, auto head, auto column) {
            tensor->set(0, row, head, column, from.at(1, row, head, column));
          });
        }
        const Results one = TypeParam::run(alone);
        one.out.for_each([&](auto, auto row, auto head, auto column) {
          EXPECT_NEAR(one.out.at(0, row, head, column), batch.out.at(1, row, head, column), 1e-5)
              << pattern.to_string();
          EXPECT_NEAR(one.dk.at(0, row, head, column), batch.dk.at(1, row, head, column), 1e-5) << pattern.to_string();
        });
      }
    }
  }
}

// A mask in strand coordinates, head groups and all heads, more heads than groups.
TYPED_TEST_P(BlockSparse, MasksOfStrandsMatchReference) {
  std::mt19937 engine(13);
  for (const bool causal : {false, true}) {
    for (const std::int64_t heads : {4, 5}) {
      for (const DType dtype : {DType::f32, DType::bf16}) {
        const Shape shape{1, 330, heads, heads, 16};
        TypeParam::expect_matches(Case(Pattern::dilated({96, 300}, {1, 3})
                                           .with_mask(0, BlockPattern::local_window(32, 16))
                                           .with_mask(1, BlockPattern::random(0.4, 2, 32)),
                                       causal_if(causal), shape, dtype));
        TypeParam::expect_matches(Case(Pattern::longnet({100, 330}, {1, 4})
                                           .with_mask(0, random_mask(engine, 16, heads, 7, 2))
                                           .with_mask(1, BlockPattern::dilated_sparse({2}, 16)),
                                       causal_if(causal), shape, dtype));
        TypeParam::expect_matches(Case(Pattern::longnet({330}, {2}, PhaseRule::torchscale)
                                           .with_pad_keys()
                                           .with_mask(0, BlockPattern::strided(48, 16)),
                                       causal_if(causal), shape, dtype));
      }
    }
  }
}

TYPED_TEST_P(BlockSparse, AdaptiveChoosesWhatItsDefinitionSays) {
  for (const bool causal : {false, true}) {
    for (const DType dtype : {DType::f32, DType::bf16, DType::f16}) {
      for (const int b : {16, 64}) {
        const Pattern pattern = Pattern::block_sparse(BlockPattern::adaptive(0.3, b));
        Case c(pattern, causal_if(causal), {2, 13 * b + 5, 4, 2, 24}, dtype);
        c.lengths = {13 * b + 5, 7 * b + b / 2};
        c.key_mask.assign(static_cast<std::size_t>(2 * c.shape.tokens), 1);
        // Block 2 of the first entry has no rows, block 3 some; what is excluded may hold anything.
        for (std::int64_t row = 2 * b; row < 3 * b + 2; ++row) {
          c.key_mask[static_cast<std::size_t>(row)] = 0;
          c.k.set(0, row, 0, 0, std::nan(""));
        }
        const BlockMask mask = TypeParam::adaptive(c);
        EXPECT_EQ(mask.heads(), 8);
        expect_choice(c, mask, 0.3, b);
        // The kernels compute exactly attention over the returned mask.
        Case fixed = c;
        fixed.pattern = Pattern::block_sparse(mask);
        TypeParam::expect_matches(fixed);
        const reference::Expectation want = fixed.expected();
        const Results same = TypeParam::run(fixed), got = TypeParam::run(c);
        EXPECT_TRUE(same_bits(got.out, same.out) && same_bits(got.lse, same.lse));
        for (const auto& [tensor, expected] :
             {std::pair{&got.dq, &want.dq}, {&got.dk, &want.dk}, {&got.dv, &want.dv}}) {
          const auto comparison = reference::compare(tensor->view(), *expected);
          EXPECT_TRUE(comparison.ok()) << comparison.worst;
        }
      }
    }
  }
}

// Each branch chooses for its own heads, as it would alone.
TYPED_TEST_P(BlockSparse, AdaptiveBranchesChooseApart) {
  for (const bool causal : {false, true}) {
    const BlockPattern masks[] = {BlockPattern::adaptive(0.1, 16), BlockPattern::adaptive(0.3, 16)};
    const Pattern both = Pattern::dilated({kWholeSequence, kWholeSequence}, {1, 1});
    const Case c(both.with_mask(0, masks[0]).with_mask(1, masks[1]), causal_if(causal), {2, 400, 4, 2, 16},
                 DType::bf16);
    Case fixed = c;
    fixed.pattern = both;
    for (std::size_t branch = 0; branch < 2; ++branch) {
      Case alone = c;
      alone.pattern = Pattern::block_sparse(masks[branch]);
      fixed.pattern = fixed.pattern.with_mask(branch, TypeParam::adaptive(alone));
    }
    const reference::Expectation want = fixed.expected();
    const Results got = TypeParam::run(c);
    for (const auto& [tensor, expected] :
         {std::pair{&got.out, &want.out}, {&got.dq, &want.dq}, {&got.dk, &want.dk}, {&got.dv, &want.dv}}) {
      const auto comparison = reference::compare(tensor->view(), *expected);
      EXPECT_TRUE(comparison.ok()) << comparison.worst;
    }
  }
}

TYPED_TEST_P(BlockSparse, AdaptiveNanRanksLastAndTiesGoToLowerColumns) {
  Case c(Pattern::block_sparse(BlockPattern::adaptive(0.5, 16)), {}, {1, 64, 1, 1, 8});
  for (std::int64_t row = 0; row < 16; ++row) c.k.set(0, row, 0, 0, std::nan(""));
  const BlockMask mask = TypeParam::adaptive(c);
  for (std::int64_t row = 1; row < 4; ++row) EXPECT_FALSE(mask.active(0, row, 0));
  c = Case(Pattern::block_sparse(BlockPattern::adaptive(0.25, 16)), {}, {1, 16 * 40, 1, 1, 8});
  c.k.for_each([&](auto entry, auto row, auto head, auto column) { c.k.set(entry, row, head, column, 0.0); });
  const BlockMask ties = TypeParam::adaptive(c);
  for (std::int64_t row = 0; row < 40; ++row) {
    for (std::int64_t column = 0; column < 40; ++column)
      EXPECT_EQ(ties.active(0, row, column), column == row || column < (row < 9 ? 10 : 9)) << row << " " << column;
  }
}

TYPED_TEST_P(BlockSparse, KeepingEverythingIsDense) {
  for (const Pattern& pattern :
       {Pattern::block_sparse(BlockPattern::adaptive(1.0, 16)), Pattern::block_sparse(BlockPattern::strided(1, 32))}) {
    for (const bool causal : {false, true}) {
      const Case all(pattern, causal_if(causal), {1, 190, 2, 2, 16}),
          dense(Pattern::dense(), causal_if(causal), {1, 190, 2, 2, 16});
      const reference::Expectation want = dense.expected();
      const Results got = TypeParam::run(all);
      for (const auto& [tensor, expected] :
           {std::pair{&got.out, &want.out}, {&got.dq, &want.dq}, {&got.dk, &want.dk}, {&got.dv, &want.dv}}) {
        const auto comparison = reference::compare(tensor->view(), *expected);
        EXPECT_TRUE(comparison.ok()) << pattern.to_string() << comparison.worst;
      }
    }
  }
}

TYPED_TEST_P(BlockSparse, InspectedBlocksSumToOneAndGiveTheOutput) {
  for (const Pattern& pattern : inspected()) {
    for (const bool causal : {false, true}) {
      const Case c(pattern, causal_if(causal), {2, 110, 4, 2, 16});
      const Results got = TypeParam::run(c, false);
      const AttentionBlocks blocks = TypeParam::blocks(c, 16);
      ASSERT_EQ(blocks.offsets.size(), 9u);
      std::vector<double> sums(2 * 4 * 112, 0.0), out(2 * 4 * 112, 0.0);
      for (std::int64_t pair = 0; pair < 8; ++pair) {
        const std::int64_t entry = pair / 4, head = pair % 4;
        for (auto block = blocks.offsets[static_cast<std::size_t>(pair)];
             block < blocks.offsets[static_cast<std::size_t>(pair + 1)]; ++block) {
          for (std::int64_t i = 0; i < 16; ++i) {
            for (std::int64_t j = 0; j < 16; ++j) {
              const double p = blocks.values[static_cast<std::size_t>((block * 16 + i) * 16 + j)];
              const std::int64_t row = blocks.rows[static_cast<std::size_t>(block)] * 16 + i,
                                 key = blocks.columns[static_cast<std::size_t>(block)] * 16 + j;
              if (p == 0) continue;
              sums[static_cast<std::size_t>(pair * 112 + row)] += p;
              out[static_cast<std::size_t>(pair * 112 + row)] += p * c.v.at(entry, key, head / 2);
            }
          }
        }
        for (std::int64_t row = 0; row < 110; ++row) {
          const bool covered = std::isfinite(got.lse.at(entry, row, head));
          EXPECT_NEAR(sums[static_cast<std::size_t>(pair * 112 + row)], covered ? 1.0 : 0.0, 1e-5)
              << pattern.to_string();
          EXPECT_NEAR(out[static_cast<std::size_t>(pair * 112 + row)], got.out.at(entry, row, head), 1e-4)
              << pattern.to_string();
        }
      }
    }
  }
}

TYPED_TEST_P(BlockSparse, ReceivedIsTheSumOfColumns) {
  for (const Pattern& pattern : inspected()) {
    for (const DType dtype : {DType::f32, DType::bf16}) {
      const Case c(pattern, {}, {1, 110, 4, 2, 16}, dtype);
      const AttentionBlocks blocks = TypeParam::blocks(c, 16);
      std::vector<double> want(4 * 112, 0.0);
      for (std::size_t pair = 0; pair < 4; ++pair) {
        for (auto block = blocks.offsets[pair]; block < blocks.offsets[pair + 1]; ++block) {
          for (std::int64_t i = 0; i < 256; ++i) {
            want[pair * 112 +
                 static_cast<std::size_t>(blocks.columns[static_cast<std::size_t>(block)] * 16 + i % 16)] +=
                blocks.values[static_cast<std::size_t>(block * 256 + i)];
          }
        }
      }
      const Tensor received = TypeParam::received(c);
      for (std::int64_t head = 0; head < 4; ++head) {
        for (std::int64_t row = 0; row < 110; ++row) {
          EXPECT_NEAR(received.at(0, row, head), want[static_cast<std::size_t>(head * 112 + row)], 1e-3)
              << pattern.to_string() << " row " << row;
        }
      }
    }
  }
}

REGISTER_TYPED_TEST_SUITE_P(BlockSparse, BlocksOf16MatchReference, BlocksOf32MatchReference, BlocksOf64MatchReference,
                            BlocksOf128MatchReference, AllOptionsAtOnce, QueryRanges, RandomMasks,
                            EarlierBugSoftmaxPerBlock, EarlierBugIgnoredCausality, EarlierBugEntriesDependOnBatchMates,
                            MasksOfStrandsMatchReference, AdaptiveChoosesWhatItsDefinitionSays,
                            AdaptiveBranchesChooseApart, AdaptiveNanRanksLastAndTiesGoToLowerColumns,
                            KeepingEverythingIsDense, InspectedBlocksSumToOneAndGiveTheOutput,
                            ReceivedIsTheSumOfColumns);

}  // namespace longspan::testing
