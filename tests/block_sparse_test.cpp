// Block-sparse attention on every kernel of this machine's CPU, and what is exact there: bits, plans, pictures.
#include "support/block_sparse_suite.h"

namespace longspan::testing {
namespace {

struct CpuEngine {
  static constexpr std::int64_t kTokens = 0, kHeadDims[2] = {24, 16};
  static std::string missing() { return {}; }
  static void expect_matches(const Case& c) { c.expect_matches(); }
  static Results run(const Case& c, bool gradients = true) { return c.run("", gradients); }
  static BlockMask adaptive(const Case& c) {
    return adaptive_mask(Attention(c.pattern, c.options), c.q.view(), c.k.view(), c.call());
  }
  static AttentionBlocks blocks(const Case& c, int size) {
    return attention_blocks(Attention(c.pattern, c.options), c.q.view(), c.k.view(), c.call(), size);
  }
  static Tensor received(const Case& c) {
    Tensor received = Tensor::lse(DType::f32, c.shape.batch, c.shape.tokens, c.shape.heads);
    attention_received(Attention(c.pattern, c.options), c.q.view(), c.k.view(), received.view(), c.call());
    return received;
  }
};
INSTANTIATE_TYPED_TEST_SUITE_P(Cpu, BlockSparse, CpuEngine);

TEST(BlockSparseBits, KeepingEverythingIsDenseBitForBit) {
  for (const DType dtype : {DType::f32, DType::bf16, DType::f16}) {
    for (const int b : {16, 32, 64, 128}) {
      for (const bool causal : {false, true}) {
        for (const std::int64_t kv_heads : {4, 2}) {
          const Case dense(Pattern::dense(), causal_if(causal), {1, 700, 4, kv_heads, 64}, dtype);
          Case masked = dense;
          masked.pattern = Pattern::block_sparse(BlockPattern::strided(1, b));
          const Results want = dense.run(), got = masked.run();
          EXPECT_TRUE(same_bits(got.out, want.out)) << b << causal << name_of(dtype);
          EXPECT_TRUE(same_bits(got.lse, want.lse));
          EXPECT_TRUE(same_bits(got.dq, want.dq)) << b << causal << name_of(dtype);
          EXPECT_TRUE(same_bits(got.dk, want.dk)) << b << causal << name_of(dtype);
          EXPECT_TRUE(same_bits(got.dv, want.dv)) << b << causal << name_of(dtype);
        }
      }
    }
  }
}

TEST(BlockSparseBits, BitsDoNotDependOnThreads) {
  const Case c(Pattern::block_sparse(BlockPattern::bigbird(64, 96, 0.2, 1, 32)), {}, {1, 1500, 3, 3, 64}, DType::f32);
  const int before = num_threads();
  set_num_threads(1);
  const Results one = c.run();
  set_num_threads(5);
  const Results five = c.run();
  set_num_threads(before);
  EXPECT_TRUE(same_bits(one.out, five.out) && same_bits(one.dq, five.dq) && same_bits(one.dk, five.dk) &&
              same_bits(one.dv, five.dv));
}

// "ignored density": what runs keeps what was asked for; a tenth of the blocks is a tenth of the pairs.
TEST(EarlierBugs, IgnoredDensity) {
  Problem problem;
  problem.tokens = problem.query_rows = 128 * 64;
  problem.heads = problem.kv_heads = 2;
  const Plan plan(Pattern::block_sparse(BlockPattern::random(0.1, 3)), {}, problem);
  const double all = 2.0 * static_cast<double>(problem.tokens) * static_cast<double>(problem.tokens);
  EXPECT_NEAR(plan.totals().pairs / all, 0.1, 0.005);
}

TEST(Adaptive, FullDensityHasTheBitsOfDense) {
  const Case all(Pattern::block_sparse(BlockPattern::adaptive(1.0, 16)), {}, {1, 90, 2, 2, 8}),
      dense(Pattern::dense(), {}, {1, 90, 2, 2, 8});
  EXPECT_TRUE(same_bits(all.run().out, dense.run().out));
}

TEST(Inspection, RefusesWhatDoesNotFit) {
  const Case c(Pattern::dense(), {}, {1, 110, 4, 2, 16});
  EXPECT_THROW(adaptive_mask(Attention(Pattern::dense()), c.q.view(), c.k.view()), InvalidArgument);
  Tensor wrong = Tensor::lse(DType::f32, 1, 109, 4);
  EXPECT_THROW(attention_received(Attention(Pattern::dense()), c.q.view(), c.k.view(), wrong.view()), InvalidArgument);
}

TEST(Adaptive, MaskOfNoEntriesKeepsNothing) {
  const Case c(Pattern::block_sparse(BlockPattern::adaptive(0.5, 16)), {}, {0, 64, 2, 2, 16});
  EXPECT_EQ(adaptive_mask(Attention(c.pattern), c.q.view(), c.k.view(), c.call()).active_blocks(), 0);
}

// 100 steps over 3 shapes: nothing is planned twice.
TEST(PlanCache, HoldsMasks) {
  plan_cache::clear();
  const auto before = plan_cache::statistics();
  const Pattern pattern = Pattern::block_sparse(BlockPattern::bigbird(64, 64, 0.1, 1, 32));
  for (int step = 0; step < 100; ++step) {
    Problem problem;
    problem.tokens = problem.query_rows = 1024 + 512 * (step % 3);
    Attention(pattern).plan(problem);
  }
  const auto after = plan_cache::statistics();
  EXPECT_EQ(after.misses - before.misses, 3u);
  EXPECT_EQ(after.hits - before.hits, 97u);
  EXPECT_LE(after.bytes, after.limit_bytes);
}

}  // namespace
}  // namespace longspan::testing
