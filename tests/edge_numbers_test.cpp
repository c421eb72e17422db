// Numbers at the edges of int64 in pattern texts, problems, options and pieces: refused by name, or meaning the same as
// smaller numbers that are just as far beyond the sequence. With sanitizers this also finds every overflow on the way.
#include <gtest/gtest.h>

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>

#include "longspan/longspan.h"
#include "support/case.h"

namespace longspan::testing {
namespace {

constexpr std::int64_t kMost = std::numeric_limits<std::int64_t>::max();
constexpr std::int64_t kLeast = std::numeric_limits<std::int64_t>::min();

/// The argument that an InvalidArgument names, "" where nothing was thrown.
template <class Function>
std::string refused(Function&& function) {
  try {
    function();
  } catch (const InvalidArgument& error) {
    EXPECT_FALSE(std::string(error.what()).empty());
    return error.argument();
  }
  return "";
}

Problem problem_of(std::int64_t tokens, std::int64_t heads = 2) {
  Problem problem;
  problem.tokens = problem.query_rows = tokens;
  problem.heads = problem.kv_heads = heads;
  problem.head_dim = 8;
  return problem;
}

/// A text with its holes, "#", filled.
std::string filled(std::string_view form, const std::vector<std::int64_t>& numbers) {
  std::string text;
  std::size_t next = 0;
  for (const char letter : form) {
    if (letter == '#') text += std::to_string(numbers[next++]);
    else text += letter;
  }
  return text;
}

constexpr const char* kForms[] = {"longnet #/#",
                                  "dilated #/# #/#",
                                  "longnet phase=torchscale pad_keys #/# 8/#",
                                  "longnet long=skip #/1 7/#",
                                  "longnet #/1{block=16 local_window(#)}",
                                  "block=16 local_window(#)",
                                  "block=16 strided(#)",
                                  "block=16 dilated_sparse(#,1,#)",
                                  "block=16 global_local(<=#,#)",
                                  "block=16 hierarchical(#:#,16:#)",
                                  "block=16 bigbird(16,#,0.5,3)",
                                  "block=16 longformer(#)"};

TEST(EdgeNumbers, InPatternsMeanWhatOtherNumbersBeyondTheSequenceMean) {
  constexpr std::int64_t kFar = 100'000'000;  // beyond every sequence here, and far from every limit
  const std::int64_t edges[] = {1, 3, kFar, 1LL << 31, 1LL << 32, 1LL << 40, 1LL << 62, kMost - 65, kMost - 1, kMost};
  std::mt19937 engine(1);
  for (const char* form : kForms) {
    const auto holes = static_cast<std::size_t>(std::count(form, form + std::strlen(form), '#'));
    for (int trial = 0; trial < 12; ++trial) {
      std::vector<std::int64_t> numbers, tame;
      for (std::size_t i = 0; i < holes; ++i) {
        numbers.push_back(edges[trial < 10 && i == 0 ? static_cast<std::size_t>(trial) : engine() % std::size(edges)]);
        tame.push_back(std::min(numbers.back(), kFar));
      }
      const std::string text = filled(form, numbers);
      if (text.find("skip") != text.npos && numbers[0] == kWholeSequence) continue;  // the whole is never too long
      const Pattern pattern = Pattern::parse(text), same = Pattern::parse(filled(form, tame));
      EXPECT_EQ(Pattern::parse(pattern.to_string()), pattern) << text;
      for (const bool causal : {false, true}) {
        Options options;
        options.causal = causal;
        const Case edge(pattern, options, {1, 70, 2, 1, 8}), usual(same, options, {1, 70, 2, 1, 8});
        const Plan plan(pattern, options, problem_of(70)), expected(same, options, problem_of(70));
        ASSERT_EQ(plan.totals().pairs, expected.totals().pairs) << text;
        ASSERT_EQ(plan.items(64), expected.items(64)) << text;
        ASSERT_EQ(picture(plan, 1, 20).share, picture(expected, 1, 20).share) << text;
        for (const std::string& kernel : kernels_here()) {
          const Results a = edge.run(kernel), b = usual.run(kernel);
          const std::pair<const Tensor*, const Tensor*> outputs[] = {
              {&a.out, &b.out}, {&a.lse, &b.lse}, {&a.dq, &b.dq}, {&a.dk, &b.dk}, {&a.dv, &b.dv}};
          for (const auto& [x, y] : outputs) {
            x->for_each([&](std::int64_t entry, std::int64_t row, std::int64_t head, std::int64_t column) {
              ASSERT_EQ(x->at(entry, row, head, column), y->at(entry, row, head, column)) << text << " on " << kernel;
            });
          }
        }
        const Shards shards = Shards::even(70, 3);
        EXPECT_EQ(ExchangePlan(plan, shards, 1).bytes_received(), ExchangePlan(expected, shards, 1).bytes_received())
            << text;
      }
    }
  }
}

TEST(EdgeNumbers, ThatNoPatternCanMeanAreRefused) {
  for (const char* form : kForms) {
    const auto holes = static_cast<std::size_t>(std::count(form, form + std::strlen(form), '#'));
    for (const std::int64_t bad : {std::int64_t{-1}, std::int64_t{-2}, kLeast + 1, kLeast}) {
      for (std::size_t hole = 0; hole < holes; ++hole) {
        std::vector<std::int64_t> numbers(holes, 16);
        numbers[hole] = bad;
        const std::string text = filled(form, numbers);
        // A hierarchical window of -1 is everything, bigbird's is its default.
        if (bad == -1 && (text.find("hierarchical") != text.npos || text.find("bigbird") != text.npos)) continue;
        EXPECT_NE(refused([&] { Pattern::parse(text); }), "") << text;
      }
    }
  }
  for (const int size : {std::numeric_limits<int>::max(), std::numeric_limits<int>::min(), 0, -64}) {
    EXPECT_EQ(refused([&] { BlockPattern::bigbird(-1, -1, 0.5, 0, size); }), "block_size");
    EXPECT_EQ(refused([&] { BlockPattern::local_window(64, size); }), "block_size");
  }
}

// Whatever the text, it is read or refused by name, and what is read prints and reads back.
TEST(EdgeNumbers, MutatedTextsAreReadOrRefused) {
  const std::string_view words[] = {"longnet",
                                    "dilated",
                                    "dense",
                                    "whole/",
                                    "/",
                                    "{",
                                    "}",
                                    "block=",
                                    "bigbird(",
                                    "strided(",
                                    "random(",
                                    "adaptive(",
                                    "<=",
                                    "-",
                                    ",",
                                    ":",
                                    ")",
                                    "+",
                                    " ",
                                    "pad_keys",
                                    "long=skip",
                                    "0.5",
                                    "1",
                                    "16",
                                    "heads=",
                                    "blocks=",
                                    "rows=0;",
                                    "9223372036854775807",
                                    "-9223372036854775808",
                                    "output_scale=",
                                    "1e308",
                                    "hierarchical(",
                                    "global_local(",
                                    "\x80\xff",
                                    "nan"};
  std::mt19937 engine(7);
  for (int trial = 0; trial < 30000; ++trial) {
    std::string text = trial % 2 == 0 ? std::string(kForms[engine() % std::size(kForms)]) : "";
    for (int edits = static_cast<int>(engine() % 6); edits >= 0; --edits) {
      const std::size_t position = engine() % (text.size() + 1);
      if (engine() % 3 == 0) text.erase(position, engine() % 4);
      text.insert(std::min(position, text.size()), words[engine() % std::size(words)]);
    }
    try {
      const Pattern pattern = Pattern::parse(text);
      ASSERT_EQ(Pattern::parse(pattern.to_string()), pattern) << text;
      const Plan plan(pattern, {}, problem_of(90, 4));
      ASSERT_GE(plan.totals().pairs, 0) << text;
    } catch (const InvalidArgument&) {}
  }
}

TEST(EdgeNumbers, ProblemsAreCheckedWhereTheyEnter) {
  const Attention attention(Pattern::dilated({16, 64}, {1, 4}));
  const auto argument = [&](auto&& change) {
    Problem problem = problem_of(100);
    change(problem);
    const std::string by_plan = refused([&] { Plan(attention.pattern(), {}, problem); });
    EXPECT_EQ(refused([&] { attention.plan(problem); }), by_plan);
    return by_plan;
  };
  for (const std::int64_t bad : {std::int64_t{-1}, kLeast, (std::int64_t{1} << 40) + 1, kMost}) {
    EXPECT_EQ(argument([&](Problem& p) { p.tokens = bad; }), "tokens") << bad;
    EXPECT_EQ(argument([&](Problem& p) { p.query_rows = bad; }), "query_rows") << bad;
    EXPECT_EQ(argument([&](Problem& p) { p.batch = bad; }), "batch") << bad;
    EXPECT_EQ(argument([&](Problem& p) { p.heads = p.kv_heads = bad; }), "heads") << bad;
    EXPECT_EQ(argument([&](Problem& p) { p.kv_heads = bad; }), "kv_heads") << bad;
    EXPECT_EQ(argument([&](Problem& p) { p.head_dim = bad; }), "head_dim") << bad;
  }
  EXPECT_EQ(argument([](Problem& p) { p.heads = 0; }), "heads");
  EXPECT_EQ(argument([](Problem& p) { p.heads = p.kv_heads = std::int64_t{1} << 62; }), "heads");
  EXPECT_EQ(argument([](Problem& p) { p.kv_heads = 0; }), "kv_heads");
  EXPECT_EQ(argument([](Problem& p) { p.heads = 6, p.kv_heads = 4; }), "kv_heads");
  EXPECT_EQ(argument([](Problem& p) { p.head_dim = 0; }), "head_dim");
  // Each alone is fine; together they are more than offsets of 64 bits can address.
  EXPECT_EQ(argument([](Problem& p) { p.batch = p.tokens = std::int64_t{1} << 40; }), "tokens");
  EXPECT_EQ(argument([](Problem& p) { p.tokens = 0, p.batch = 0; }), "");
  EXPECT_EQ(argument([](Problem& p) { p.tokens = std::int64_t{1} << 40; }), "");
}

TEST(EdgeNumbers, MasksAreMadeForSizesThatExist) {
  for (const BlockPattern& pattern : {BlockPattern::local_window(64, 16), BlockPattern::random(0.5, 1, 16)}) {
    for (const std::int64_t bad : {std::int64_t{-1}, kLeast, (std::int64_t{1} << 40) + 1, kMost})
      EXPECT_EQ(refused([&] { pattern.mask(bad, 2, false); }), "rows") << bad;
    for (const std::int64_t bad : {std::int64_t{0}, std::int64_t{-1}, kLeast, std::int64_t{1} << 62, kMost})
      EXPECT_EQ(refused([&] { pattern.mask(64, bad, false); }), "heads") << bad;
    EXPECT_EQ(pattern.mask(0, 1, false).blocks(), 0);
  }
}

Options scaled_by(double scale) {
  Options options;
  options.scale = scale;
  return options;
}

Options output_scaled_by(double output_scale) {
  Options options;
  options.output_scale = output_scale;
  return options;
}

TEST(EdgeNumbers, FactorsAreFiniteInFloat32) {
  for (const double bad : {1e300, -1e300, 4e38, static_cast<double>(FLT_MAX), std::numeric_limits<double>::infinity(),
                           std::numeric_limits<double>::quiet_NaN()}) {
    EXPECT_EQ(refused([&] { Attention(Pattern::dense(), scaled_by(bad)); }), "scale") << bad;
    EXPECT_EQ(refused([&] { Plan(Pattern::dense(), scaled_by(bad), problem_of(8)); }), "scale") << bad;
    if (std::abs(bad) == static_cast<double>(FLT_MAX)) continue;
    EXPECT_EQ(refused([&] { Attention(Pattern::dense(), output_scaled_by(bad)); }), "output_scale") << bad;
    EXPECT_EQ(refused([&] { Pattern::dense().with_output_scale(bad); }), "output_scale") << bad;
  }
  EXPECT_EQ(refused([] { Pattern::parse("longnet output_scale=1e300 4/1"); }), "output_scale");
  // The largest factor that is allowed gives numbers, on every kernel.
  for (const std::string& kernel : kernels_here()) {
    Case c(Pattern::dense(), scaled_by(1e38), {1, 20, 1, 1, 8}, DType::f32, Layout::bnhd, {}, 1e-38);
    const Results r = c.run(kernel);
    r.out.for_each([&](std::int64_t b, std::int64_t row, std::int64_t head, std::int64_t d) {
      EXPECT_TRUE(std::isfinite(r.out.at(b, row, head, d))) << kernel;
    });
  }
}

TEST(EdgeNumbers, PiecesStayInsideTheSequenceAndItsHeads) {
  Case c(Pattern::dense(), {}, {1, 16, 2, 2, 8});
  const auto argument = [&](std::int64_t first, std::int64_t step, std::int64_t kv_head) {
    c.pieces = {{first, step, c.k.view(), c.v.view(), kv_head}};
    return refused([&] { c.run("", false); });
  };
  EXPECT_EQ(argument(0, 1, 0), "");
  for (const std::int64_t bad : {std::int64_t{-1}, std::int64_t{1}, kMost - 1, kMost, kLeast}) {
    EXPECT_EQ(argument(bad, 1, 0), "pieces[0]") << bad;
    EXPECT_EQ(argument(0, 1, bad), "pieces[0]") << bad;
    if (bad != 1) {
      EXPECT_EQ(argument(0, bad, 0), "pieces[0]") << bad;
    }
  }
}

TEST(EdgeNumbers, RanksAreThreadsOrProcessesThatCanExist) {
  for (const int bad : {0, -1, std::numeric_limits<int>::min(), 1'000'000'000, std::numeric_limits<int>::max()}) {
    EXPECT_EQ(refused([&] { local_ring(bad); }), "ranks") << bad;
    EXPECT_EQ(refused([&] { Shards::even(100, bad); }), "ranks") << bad;
    EXPECT_EQ(refused([&] { Shards::zigzag(100, bad); }), "ranks") << bad;
  }
  for (const std::int64_t bad : {std::int64_t{-1}, kLeast, (std::int64_t{1} << 40) + 1, kMost}) {
    EXPECT_EQ(refused([&] { Shards::even(bad, 3); }), "tokens") << bad;
    EXPECT_EQ(refused([&] { Shards::zigzag(bad, 3); }), "tokens") << bad;
    const std::int64_t offsets[] = {0, bad};
    EXPECT_EQ(refused([&] { Shards::contiguous(offsets); }), "offsets") << bad;
  }
}

TEST(EdgeNumbers, PicturesFitWhatTheyDraw) {
  const Plan plan(Pattern::longnet({64, kWholeSequence}, {1, 4}), {}, problem_of(100));
  for (const std::int64_t bad : {std::int64_t{-1}, std::int64_t{2}, kMost, kLeast})
    EXPECT_EQ(refused([&] { picture(plan, bad); }), "head") << bad;
  for (const std::int64_t bad : {std::int64_t{-1}, std::int64_t{0}, std::int64_t{4097}, kMost, kLeast})
    EXPECT_EQ(refused([&] { picture(plan, 0, bad); }), "cells") << bad;
  const Plan longest(Pattern::longnet({64, kWholeSequence}, {1, 4}), {}, problem_of(std::int64_t{1} << 40));
  EXPECT_EQ(picture(longest, 1).cells, 48);
}

}  // namespace
}  // namespace longspan::testing
