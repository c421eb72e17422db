// The cases that every communicator runs: patterns x causal x dtypes, with every option of a call somewhere among them.
#pragma once

#include <random>

#include "ring/ring_case.h"
#include "support/suite.h"

namespace longspan::testing {

inline constexpr std::int64_t kRingTokens = 331;

struct RingCase {
  std::string name;
  Case problem;
};

inline std::vector<NamedPattern> ring_patterns() {
  std::vector<NamedPattern> patterns = suite_patterns({{32, 128, 512}, {50, 77}, {40, 160, 400}, {32, 90, 300}, 48});
  std::mt19937 random(9);
  const std::int64_t blocks = (kRingTokens + 15) / 16;
  // One mask for all, and one for each of 4 heads of 2 entries.
  for (const auto& [name, masks] : {std::pair{"blocks", 1}, {"blocks_of_entries", 8}}) {
    std::vector<std::uint8_t> dense(static_cast<std::size_t>(masks * blocks * blocks));
    for (std::size_t i = 0; i < dense.size(); ++i) {
      const std::size_t place = i % static_cast<std::size_t>(blocks * blocks);
      dense[i] = place % static_cast<std::size_t>(blocks + 1) == 0 || random() % 3 == 0;
    }
    patterns.push_back({name, Pattern::block_sparse(BlockMask::from_dense(16, masks, blocks, dense))});
  }
  return patterns;
}

inline std::vector<RingCase> ring_cases(DType dtype) {
  std::vector<RingCase> cases;
  for (const bool causal : {false, true}) {
    for (const NamedPattern& pattern : ring_patterns()) {
      Options options;
      options.causal = causal;
      cases.push_back({fmt::format("{}_{}_{}", pattern.name, name_of(dtype), causal ? "causal" : "full"),
                       Case(pattern.pattern, options, {2, kRingTokens, 4, 2, 24}, dtype)});
    }
  }
  // Options and call data, one or two at a time.
  const Pattern longnet = Pattern::longnet({40, 160, 400}, {1, 3, 6});
  const auto add = [&](const std::string& name, const Options& options, const Pattern& pattern, auto&& change) {
    cases.push_back(
        {fmt::format("{}_{}", name, name_of(dtype)), Case(pattern, options, {2, kRingTokens, 6, 6, 16}, dtype)});
    change(cases.back().problem);
  };
  Options dropout;
  dropout.dropout = 0.25;
  add("dropout_lengths", dropout, longnet, [](Case& c) {
    c.seed = 77;
    c.lengths = {kRingTokens - 40, 101};
  });
  Options causal;
  causal.causal = true;
  add("mask_alibi_causal", causal, longnet, [](Case& c) {
    std::mt19937 random(4);
    for (std::int64_t i = 0; i < 2 * kRingTokens; ++i) c.key_mask.push_back(random() % 4 != 0);
    for (int head = 0; head < 6; ++head) c.alibi_slopes.push_back(0.01f * static_cast<float>(head + 1));
  });
  // Most rows find no key among their rank's own, and those of one entry none at all.
  add("only_far_keys", {}, Pattern::longnet({40, kRingTokens}, {1, 2}), [](Case& c) {
    for (std::int64_t i = 0; i < 2 * kRingTokens; ++i) c.key_mask.push_back(i >= 250 && i < kRingTokens);
  });
  Options detached;
  detached.detached_mix = true;
  add("detached_padded", detached, Pattern::longnet({32, 90, 300}, {1, 2, 4}, PhaseRule::torchscale).with_pad_keys(),
      [](Case&) {});
  Options scaled;
  scaled.scale = 0.3;
  scaled.output_scale = 0.5;
  add("dlse_scaled", scaled, Pattern::dilated({64, 400}, {1, 5}),
      [&](Case& c) { c.dlse = Tensor::lse(dtype, 2, kRingTokens, 6).fill_random(8); });
  return cases;
}

/// For rounds of one row of 2 heads each. Backward it is held four times: itself, the next one, gradients out and in.
inline constexpr std::int64_t kOneRowColumns = 16, kOneRowLimit = 4 * 2 * 2 * kOneRowColumns * 4;
inline RingCase one_row_case() {
  Options causal;
  causal.causal = true;
  return {"dense_rows", Case(Pattern::dense(), causal, {1, 60, 4, 2, kOneRowColumns})};
}

/// Uneven shards, one of them perhaps empty.
inline Shards uneven(std::int64_t tokens, int ranks) {
  std::vector<std::int64_t> offsets = {0};
  for (int rank = 1; rank < ranks; ++rank)
    offsets.push_back(std::min(tokens, tokens * rank / ranks + (rank % 2 == 0 ? 9 : -13)));
  if (ranks == 8) offsets[4] = offsets[3];
  offsets.push_back(tokens);
  return Shards::contiguous(offsets);
}

/// Gradients are summed in another order than on one device: sums of up to a thousand products in float32, whose
/// rounding errors add like a random walk (30 x 6e-8); 16-bit results may round to the next number (2^-7 and 2^-10 of
/// the value).
inline double ring_tolerance(DType dtype) {
  switch (dtype) {
    case DType::f64:
      return 1e-10;
    case DType::bf16:
      return 0x1p-7;
    case DType::f16:
      return 0x1p-10;
    default:
      return 2e-6 * 4;
  }
}

/// Bytes that a rank moved are those of the plan, in both passes.
inline void expect_planned_bytes(const RankResults& got, const Case& c, const Shards& shards, int rank,
                                 const RingRun& run) {
  const ExchangePlan exchange(Plan(c.pattern, c.options, Attention::problem(c.q.view(), c.k.view(), c.call())), shards,
                              rank);
  EXPECT_EQ(got.forward.bytes_received, exchange.bytes_received());
  EXPECT_EQ(got.forward.bytes_sent, exchange.bytes_sent());
  if (!run.gradients) return;
  const std::int64_t again = run.keep_halo ? 0 : 1;
  EXPECT_EQ(got.backward.bytes_sent,
            exchange.receive_pairs() * exchange.gradient_bytes_per_pair() + again * exchange.bytes_sent());
  EXPECT_EQ(got.backward.bytes_received,
            exchange.send_pairs() * exchange.gradient_bytes_per_pair() + again * exchange.bytes_received());
}

/// A case under a limit of remote rows at a time: results to rounding, memory within the limit, bytes as planned.
template <class Place = HostPlace>
void expect_rounds(const RingCase& one, const Results& want, int ranks, std::int64_t limit,
                   const std::string& kernel = {}) {
  const Case& c = one.problem;
  const Shards shards = uneven(c.shape.tokens, ranks);
  RingRun run;
  run.options.halo_limit_bytes = static_cast<std::size_t>(limit);
  run.kernel = kernel;
  const auto got = run_local<Place>(c, shards, run);
  for (int rank = 0; rank < ranks; ++rank) {
    const RankResults& r = got[static_cast<std::size_t>(rank)];
    expect_same(r, want, shards.ranges(rank), ring_tolerance(c.dtype), r.forward.rounds == 0, true,
                fmt::format("{} {} in rounds, rank {} of {}", kernel, one.name, rank, ranks));
    EXPECT_LE(r.forward.halo_bytes, limit);
    EXPECT_LE(r.backward.halo_bytes, limit);
    const ExchangePlan exchange(Plan(c.pattern, c.options, Attention::problem(c.q.view(), c.k.view(), c.call())),
                                shards, rank);
    EXPECT_EQ(r.forward.bytes_received, exchange.bytes_received()) << one.name;
    EXPECT_EQ(r.forward.bytes_sent, exchange.bytes_sent());
  }
  EXPECT_GT(got[0].forward.rounds, one.name.starts_with("dense") ? 2 : -1) << one.name;
}

}  // namespace longspan::testing
