// The shared problem options, sizes, tables and random inputs.
#include <gtest/gtest.h>

#include <CLI/CLI.hpp>
#include <cmath>

#include "check/cases.h"
#include "console.h"
#include "longspan/error.h"
#include "longspan/threads.h"
#include "problem_options.h"
#include "random.h"
#include "text.h"
#include "units.h"

namespace longspan::cli {
namespace {

ProblemChoice parse(std::vector<std::string> arguments) {
  CLI::App app;
  ProblemOptions options;
  options.add_to(app);
  std::reverse(arguments.begin(), arguments.end());  // as CLI11 wants them
  app.parse(arguments);
  return options.resolve();
}

TEST(ParseSize, ReadsPowersOf1024) {
  EXPECT_EQ(parse_size("tokens", "131072"), 131072);
  EXPECT_EQ(parse_size("tokens", "128K"), 131072);
  EXPECT_EQ(parse_size("tokens", "128k"), 131072);
  EXPECT_EQ(parse_size("tokens", "1M"), 1 << 20);
  EXPECT_EQ(parse_size("tokens", "1T"), std::int64_t{1} << 40);
  EXPECT_EQ(parse_size("tokens", "9223372036854775807"), INT64_MAX);
  for (const char* text :
       {"", "K", "1.5K", "1KK", " 1", "1 ", "0x10", "9223372036854775808", "8388608T", "+1", "1e3"}) {
    EXPECT_THROW(parse_size("tokens", text), InvalidArgument) << text;
  }
  EXPECT_EQ(parse_sizes("segments", "1,2K,3"), (std::vector<std::int64_t>{1, 2048, 3}));
  EXPECT_THROW(parse_sizes("segments", "1,,3"), InvalidArgument);
  EXPECT_THROW(parse_sizes("segments", "1,"), InvalidArgument);
}

TEST(Units, ReadRatesInBytesAndBits) {
  EXPECT_DOUBLE_EQ(parse_rate("link", "50GB/s"), 50e9);
  EXPECT_DOUBLE_EQ(parse_rate("link", "1.5MB/s"), 1.5e6);
  EXPECT_DOUBLE_EQ(parse_rate("link", "2GiB/s"), 2.0 * (1 << 30));
  EXPECT_DOUBLE_EQ(parse_rate("link", "400Gb/s"), 50e9);
  EXPECT_DOUBLE_EQ(parse_rate("link", "400Gbit/s"), 50e9);
  EXPECT_DOUBLE_EQ(parse_flops("rate", "2.5TFLOP/s"), 2.5e12);
  for (const char* text : {"", "50", "GB/s", "50GB", "50gb/s", "0GB/s", "-1GB/s", "nanGB/s", "infGB/s", "1e400GB/s",
                           "50 GB/s", "1e30GB/s", "50GFLOP/s"}) {
    EXPECT_THROW(parse_rate("link", text), InvalidArgument) << text;
  }
}

TEST(Units, ReadTimes) {
  EXPECT_DOUBLE_EQ(parse_duration("latency", "5us"), 5e-6);
  EXPECT_DOUBLE_EQ(parse_duration("latency", "5\u00b5s"), 5e-6);
  EXPECT_DOUBLE_EQ(parse_duration("latency", "200ns"), 200e-9);
  EXPECT_DOUBLE_EQ(parse_duration("latency", "0"), 0);
  EXPECT_DOUBLE_EQ(parse_duration("latency", "0s"), 0);
  for (const char* text : {"", "5", "us", "-5us", "2h", "nan s", "1e9s", "5 us"})
    EXPECT_THROW(parse_duration("latency", text), InvalidArgument) << text;
}

TEST(ProblemOptions, HaveTheDocumentedDefaults) {
  const ProblemChoice choice = parse({});
  EXPECT_FALSE(choice.tokens.has_value());
  EXPECT_EQ(choice.batch, 1);
  EXPECT_EQ(choice.heads, 8);
  EXPECT_EQ(choice.kv_heads, 8);
  EXPECT_EQ(choice.head_dim, 64);
  EXPECT_EQ(choice.dtype, DType::f32);
  EXPECT_EQ(choice.layout, Layout::bnhd);
  EXPECT_EQ(choice.pattern, Pattern::dilated({2048, 4096, 8192}, {1, 2, 4}));
  EXPECT_EQ(choice.options, Options{});
}

TEST(ProblemOptions, AreDenseWhereACommandSaysSo) {
  const auto pattern_of = [](std::vector<std::string> arguments) {
    CLI::App app;
    ProblemOptions options;
    options.add_to(app, DefaultPattern::dense);
    std::reverse(arguments.begin(), arguments.end());
    app.parse(arguments);
    return options.resolve().pattern;
  };
  EXPECT_EQ(pattern_of({}), Pattern::dense());
  EXPECT_EQ(pattern_of({"--causal", "--heads", "4"}), Pattern::dense());
  EXPECT_EQ(pattern_of({"--segments", "64,128", "--dilations", "1,2"}), Pattern::dilated({64, 128}, {1, 2}));
  EXPECT_EQ(pattern_of({"--pattern", "bigbird"}), Pattern::parse("bigbird"));
  for (const char* alone : {"--segments=64", "--dilations=2", "--assign=all", "--pad-keys"})
    EXPECT_THROW(pattern_of({alone}), InvalidArgument) << alone;
}

TEST(Text, ThatATerminalWouldObeyIsEscaped) {
  EXPECT_EQ(printable("plain \u00e9 \u6f22 \U0001f600"), "plain \u00e9 \u6f22 \U0001f600");
  EXPECT_EQ(printable("\x1b[2J\x07\n\t\r\x7f"), "\\x1b[2J\\x07\\n\\t\\x0d\\x7f");
  EXPECT_EQ(printable("\xc2\x9b"), "\\x9b");                                              // one character: CSI
  EXPECT_EQ(printable("\xe2\x80\xae\xe2\x80\xa8\xe2\x81\xa6"), "\\u202e\\u2028\\u2066");  // reorder or break lines
  // Bytes that are no UTF-8: a lone continuation, an overlong form, a surrogate, too large, cut off.
  EXPECT_EQ(printable("\x9b"), "\\x9b");
  EXPECT_EQ(printable("\xc0\x80"), "\\xc0\\x80");
  EXPECT_EQ(printable("\xed\xa0\x80"), "\\xed\\xa0\\x80");
  EXPECT_EQ(printable("\xf5\x80\x80\x80"), "\\xf5\\x80\\x80\\x80");
  EXPECT_EQ(printable("a\xe2\x80"), "a\\xe2\\x80");
  for (const char* good : {"", "abc", "\u00e9", "\U0010ffff"}) EXPECT_TRUE(is_utf8(good)) << good;
  for (const char* wrong : {"\x80", "\xc0\x80", "\xe0\x80\x80", "\xed\xa0\x80", "\xf4\x90\x80\x80", "\xff", "\xe2\x80"})
    EXPECT_FALSE(is_utf8(wrong)) << printable(wrong);
}

TEST(Text, FitsTheColumnsThereAre) {
  EXPECT_EQ(wrapped("one two three", 7), "one two\nthree");
  EXPECT_EQ(wrapped("a \x1b[1mbold\x1b[0m word", 6), "a \x1b[1mbold\x1b[0m\nword");
  EXPECT_EQ(wrapped("unbreakable", 4), "unbreakable");
  EXPECT_EQ(elided("0123456789", 10), "0123456789");
  EXPECT_EQ(elided("0123456789", 7), "01...89");
  EXPECT_TRUE(is_utf8(elided("\u6f22\u6f22\u6f22\u6f22", 8)));
}

TEST(ProblemOptions, ReachThePattern) {
  EXPECT_EQ(
      parse({"--assign", "all", "--phase", "torchscale", "--pad-keys", "--segments", "1K,32", "--dilations", "1,2"})
          .pattern,
      Pattern::longnet({1024, 32}, {1, 2}, PhaseRule::torchscale).with_pad_keys());
  EXPECT_EQ(parse({"--pattern", "dense"}).pattern, Pattern::dense());
  const ProblemChoice choice =
      parse({"--tokens", "2K", "--heads", "6", "--kv-heads", "2", "--dtype", "bf16", "--causal", "--dropout", "0.25",
             "--scale", "0.5", "--layout", "bhnd", "--seed", "18446744073709551615", "--kernel", "plain"});
  EXPECT_EQ(choice.problem(1).tokens, 2048);
  EXPECT_EQ(choice.problem(1).kv_heads, 2);
  EXPECT_EQ(choice.dtype, DType::bf16);
  EXPECT_TRUE(choice.options.causal);
  EXPECT_EQ(choice.options.dropout, 0.25);
  EXPECT_EQ(choice.options.scale, 0.5);
  EXPECT_EQ(choice.options.kernel, "plain");
  EXPECT_EQ(choice.seed, UINT64_MAX);
}

TEST(RandomInputs, AreNormalAndFreeOfThreads) {
  std::vector<float> once(300'001), again(once.size());
  fill_normal(once.data(), DType::f32, static_cast<std::int64_t>(once.size()), 7, 0);
  set_num_threads(1);
  fill_normal(again.data(), DType::f32, static_cast<std::int64_t>(again.size()), 7, 0);
  set_num_threads(0);
  EXPECT_EQ(once, again);
  double sum = 0, squares = 0;
  for (const float value : once) {
    ASSERT_TRUE(std::isfinite(value));
    sum += value;
    squares += double{value} * value;
  }
  const double count = static_cast<double>(once.size());
  EXPECT_NEAR(sum / count, 0, 5 / std::sqrt(count));
  EXPECT_NEAR(squares / count, 1, 5 * std::sqrt(2 / count));
  fill_normal(again.data(), DType::f32, static_cast<std::int64_t>(again.size()), 7, 1);
  EXPECT_NE(once, again);
}

TEST(RandomCases, RepeatAndReachEveryOption) {
  EXPECT_EQ(random_case(3, 17).to_string(), random_case(3, 17).to_string());
  int masks = 0, pieces = 0, lengths = 0, ranges = 0, detached = 0, dlse = 0, alibi = 0, key_mask = 0, pad = 0,
      skip = 0, bhnd = 0;
  for (std::uint64_t index = 0; index < 200; ++index) {
    const CheckCase one = random_case(3, index);
    for (const Branch& branch : one.pattern.branches()) masks += branch.mask.has_value();
    pieces += !one.cuts.empty();
    lengths += !one.lengths.empty();
    ranges += !one.query_ranges.empty();
    detached += one.options.detached_mix;
    dlse += one.dlse;
    alibi += one.alibi;
    key_mask += one.key_mask;
    pad += one.pattern.pad_keys();
    skip += one.pattern.long_segments() == LongSegments::skip;
    bhnd += one.layout == Layout::bhnd;
  }
  for (const int count : {masks, pieces, lengths, ranges, detached, dlse, alibi, key_mask, pad, skip, bhnd})
    EXPECT_GT(count, 5);
}

TEST(Numbers, ReadWell) {
  EXPECT_EQ(with_commas(0), "0");
  EXPECT_EQ(with_commas(131072), "131,072");
  EXPECT_EQ(with_commas(-1000), "-1,000");
  EXPECT_EQ(with_commas(-100.4), "-100");
  EXPECT_EQ(with_commas(std::numeric_limits<std::int64_t>::max()), "9,223,372,036,854,775,807");
  EXPECT_EQ(short_bytes(512), "512 B");
  EXPECT_EQ(short_bytes(8.0 * 1024 * 1024 * 1024), "8.00 GiB");
  EXPECT_EQ(short_count(1.34e9), "1.34 G");
  EXPECT_EQ(short_count(12), "12");
  EXPECT_EQ(short_duration(0.0123), "12.3 ms");
  EXPECT_EQ(short_duration(125), "2 min 05 s");
}

TEST(Tables, AlignColumns) {
  Table table({{"name", Align::left}, {"count"}});
  table.add({"a", "1"});
  table.add({"long \u00e9", "1,000"});
  EXPECT_EQ(table.to_string(), "name    count\na           1\nlong \u00e9  1,000\n");
}

}  // namespace
}  // namespace longspan::cli
