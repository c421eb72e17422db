// Pictures: shares of cells against pairs looked at one by one, what text and drawings say, and bounds.
#include "longspan/picture.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <string>
#include <vector>

#include "longspan/error.h"

namespace longspan {
namespace {

Plan plan_of(const char* pattern, std::int64_t tokens, std::int64_t heads = 3, bool causal = false) {
  Problem problem;
  problem.tokens = problem.query_rows = tokens;
  problem.heads = problem.kv_heads = heads;
  Options options;
  options.causal = causal;
  return Plan(Pattern::parse(pattern), options, problem);
}

/// How often the branches give a pair: the definition, position by position.
int times_given(const Plan& plan, std::int64_t head, std::int64_t query, std::int64_t key) {
  int times = 0;
  for (const BranchPlan& branch : plan.branches()) {
    if (!branch.owns(head) || !branch.active(plan.problem().tokens) || query / branch.segment != key / branch.segment ||
        !branch.covers(head, query) || !branch.covers(head, key) || (plan.options().causal && key > query))
      continue;
    const auto block = [&](std::int64_t position) {
      return (position % branch.segment - branch.phase(head)) / branch.dilation / branch.mask->block_size();
    };
    times += !branch.mask || branch.mask->active(head, block(query), block(key));
  }
  return times;
}

constexpr const char* kPatterns[] = {"dense",
                                     "dilated 16/1 32/2 64/4",
                                     "dilated 7/3 50/7 200/2",
                                     "longnet 16/1 64/4",
                                     "longnet long=skip 16/1 640/4 50/60",
                                     "longnet phase=torchscale 33/2",
                                     "block=16 local_window(32)",
                                     "block=16 bigbird",
                                     "longnet 16/1 64/2{block=16 strided(32)}"};

TEST(Picture, OfSinglePositionsIsWhatAttends) {
  for (const char* pattern : kPatterns) {
    if (std::string(pattern).find("block") != std::string::npos) continue;  // those show whole blocks
    for (const bool causal : {false, true}) {
      const Plan plan = plan_of(pattern, 70, 3, causal);
      for (std::int64_t head = 0; head < 3; ++head) {
        const PatternPicture drawn = picture(plan, head, 70);
        ASSERT_EQ(drawn.cells, 70);
        for (std::int64_t query = 0; query < 70; ++query) {
          for (std::int64_t key = 0; key < 70; ++key) {
            ASSERT_EQ(drawn.at(query, key), times_given(plan, head, query, key) > 0 ? 1.0f : 0.0f)
                << pattern << " head " << head << " (" << query << ", " << key << ")";
          }
        }
      }
    }
  }
}

// Every row of cells of 16 is looked at, so shares are exact; a pair given twice counts twice, up to the whole cell.
TEST(Picture, SharesAreOfAllPairsOfACell) {
  for (const char* pattern : kPatterns) {
    for (const bool causal : {false, true}) {
      const Plan plan = plan_of(pattern, 200, 3, causal);
      for (std::int64_t head = 0; head < 3; ++head) {
        const PatternPicture drawn = picture(plan, head, 13);
        ASSERT_LE(drawn.cell_tokens, 32);
        for (std::int64_t row = 0; row < drawn.cells; ++row) {
          for (std::int64_t column = 0; column < drawn.cells; ++column) {
            double given = 0, pairs = 0;
            for (std::int64_t i = row * drawn.cell_tokens;
                 i < std::min((row + 1) * drawn.cell_tokens, plan.problem().tokens); ++i) {
              for (std::int64_t j = column * drawn.cell_tokens;
                   j < std::min((column + 1) * drawn.cell_tokens, plan.problem().tokens); ++j) {
                given += times_given(plan, head, i, j);
                ++pairs;
              }
            }
            ASSERT_NEAR(drawn.at(row, column), std::min(given / pairs, 1.0), drawn.cell_tokens <= 16 ? 1e-5 : 0.02)
                << pattern << " head " << head << " causal " << causal << " (" << row << ", " << column << ")";
          }
        }
      }
    }
  }
}

TEST(Picture, DilationIsSeen) {
  for (const std::int64_t dilation : {1, 2, 4, 16, 512}) {
    const Plan plan = plan_of(("longnet 65536/" + std::to_string(dilation)).c_str(), 1 << 20);
    const PatternPicture drawn = picture(plan, 1, 16);
    const double share = 1.0 / static_cast<double>(dilation * dilation);
    EXPECT_NEAR(drawn.at(3, 3), share, share / 100) << dilation;
    EXPECT_EQ(drawn.at(3, 4), 0);
  }
  // Each factor of two has a shade of its own.
  const auto first = [](const char* pattern) { return picture(plan_of(pattern, 1 << 16), 0, 1).to_text(); };
  EXPECT_NE(first("longnet whole/1"), first("longnet whole/2"));
  EXPECT_NE(first("longnet whole/2"), first("longnet whole/4"));
  EXPECT_NE(first("longnet whole/4"), first("longnet whole/8"));
}

TEST(Picture, SharesAddUpToThePairsOfThePlan) {
  for (const char* pattern :
       {"dense", "longnet 4096/4", "dilated 4096/1 16384/8", "block=64 local_window(512)", "block=16 strided(256)"}) {
    for (const bool causal : {false, true}) {
      const Plan plan = plan_of(pattern, 65536, 2, causal);
      double pairs = 0;
      for (std::int64_t head = 0; head < 2; ++head) {
        const PatternPicture drawn = picture(plan, head, 64);
        const double cell = static_cast<double>(drawn.cell_tokens) * static_cast<double>(drawn.cell_tokens);
        pairs += cell * std::accumulate(drawn.share.begin(), drawn.share.end(), 0.0);
      }
      EXPECT_NEAR(pairs / plan.totals().pairs, 1, 0.02) << pattern << " causal " << causal;
    }
  }
}

TEST(Picture, LongSequencesNeedNoLists) {
  const PatternPicture window = picture(plan_of("local_window(512)", std::int64_t{1} << 30), 0, 20);
  for (std::int64_t row = 0; row < 20; ++row) {
    for (std::int64_t column = 0; column < 20; ++column) {
      EXPECT_TRUE(row == column ? window.at(row, column) > 0 : window.at(row, column) < 1e-3f);
    }
  }
  EXPECT_THROW(picture(plan_of("bigbird", std::int64_t{1} << 40)), InvalidArgument);
}

TEST(Picture, TextAndLegendUseTheSameShades) {
  for (const bool ascii : {false, true}) {
    const std::string legend = shade_legend(ascii);
    const std::string text = picture(plan_of("longnet 64/1 128/2 256/8 1024/32", 2048), 0, 32).to_text(ascii);
    using Shades = std::vector<std::string>;
    for (const std::string& shade :
         ascii ? Shades{"##", "xx", "++", "::", ".."} : Shades{"██", "▓▓", "▒▒", "░░", "··"}) {
      EXPECT_NE(legend.find(shade), std::string::npos) << shade;
    }
    EXPECT_EQ(text.find(legend.substr(legend.find(": ") + 2, ascii ? 2 : 6)), 0u) << text;  // the near branch is full
  }
  const std::string window = picture(plan_of("block=16 local_window(32)", 256)).to_text(true);
  EXPECT_EQ(window.substr(0, 8), "####....");
}

TEST(Picture, DrawingsHaveTitleAxesAndLegend) {
  const Plan plan = plan_of("dilated 16/1 32/2 64/4", 131072);
  const PatternPicture pictures[] = {picture(plan, 0, 32), picture(plan, 2, 32)};
  const std::string svg = to_svg(pictures, "a < b & c");
  for (const char* part : {"<title>a &lt; b &amp; c</title>", "key position", "query position", "head 0,", "head 2,",
                           ">32K<", ">128K<", "share of pairs that attend", ">1/16<", ">none<"}) {
    EXPECT_NE(svg.find(part), std::string::npos) << part;
  }
  EXPECT_EQ(std::count(svg.begin(), svg.end(), '<'), std::count(svg.begin(), svg.end(), '>'));
  // A title of any length fits its drawing, and is cut between characters.
  std::string accents;
  for (int i = 0; i < 3000; ++i) accents += "\xc3\xa9";
  for (const std::string& title : {accents, "x" + accents}) {
    const std::string shortened = pictures[0].to_svg(title);
    EXPECT_LT(shortened.size(), svg.size() + 1000);
    EXPECT_EQ(shortened.find("\xc3."), std::string::npos);
    EXPECT_NE(shortened.find("\xa9..."), std::string::npos);
  }
  EXPECT_NE(picture(plan_of("dense", 0)).to_svg("nothing").find("</svg>"), std::string::npos);
}

}  // namespace
}  // namespace longspan
