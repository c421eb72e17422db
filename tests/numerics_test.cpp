// Half-precision conversions, Philox, dtype and device names.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>

#include "longspan/error.h"
#include "longspan/plan.h"
#include "util/half.h"
#include "util/philox.h"

namespace longspan {
namespace {

/// Every 16-bit value reads back as itself, and every float rounds to the nearest value, ties to even.
template <class Half>
void check_type() {
  for (std::uint32_t bits = 0; bits < 0x10000u; ++bits) {
    const Half half{static_cast<std::uint16_t>(bits)};
    const float value = to_float(half);
    if (std::isnan(value)) {
      EXPECT_TRUE(std::isnan(to_float(from_float<Half>(value))));
      continue;
    }
    ASSERT_EQ(from_float<Half>(value).bits, bits);
    if (std::isinf(value) || value < 0) continue;
    const float next = to_float(Half{static_cast<std::uint16_t>(bits + 1)});
    if (!std::isfinite(next)) continue;
    const double middle = (static_cast<double>(value) + next) / 2;
    const float tie = static_cast<float>(middle);
    if (tie == middle && tie != value) {
      ASSERT_EQ(from_float<Half>(tie).bits, bits % 2 == 0 ? bits : bits + 1) << value;
      ASSERT_EQ(from_float<Half>(std::nextafter(tie, value)).bits, bits);
      ASSERT_EQ(from_float<Half>(std::nextafter(tie, next)).bits, bits + 1);
    }
  }
}

TEST(Half, BFloat16RoundsToNearestEven) { check_type<BFloat16>(); }
TEST(Half, Float16RoundsToNearestEven) { check_type<Float16>(); }

TEST(Half, OverflowBecomesInfinity) {
  EXPECT_EQ(from_float<Float16>(65519.0f).bits, 0x7BFF);
  EXPECT_EQ(from_float<Float16>(65520.0f).bits, 0x7C00);
  EXPECT_EQ(from_float<Float16>(-1e30f).bits, 0xFC00);
  EXPECT_EQ(from_float<BFloat16>(std::numeric_limits<float>::max()).bits, 0x7F80);
}

/// Known answers published with the generator.
TEST(Philox, KnownAnswers) {
  EXPECT_EQ(philox4x32<7>(0, {0, 0, 0, 0}), (PhiloxBlock{0x5f6fb709u, 0x0d893f64u, 0x4f121f81u, 0x4f730a48u}));
  EXPECT_EQ(philox4x32<7>(0xffffffffffffffffu, {0xffffffffu, 0xffffffffu, 0xffffffffu, 0xffffffffu}),
            (PhiloxBlock{0x5207ddc2u, 0x45165e59u, 0x4d8ee751u, 0x8c52f662u}));
  EXPECT_EQ(philox4x32<7>(0x299f31d0a4093822u, {0x243f6a88u, 0x85a308d3u, 0x13198a2eu, 0x03707344u}),
            (PhiloxBlock{0x4dfccabau, 0x190a87f0u, 0xc47362bau, 0xb6b5242au}));
  EXPECT_EQ(philox4x32(0, {0, 0, 0, 0}), (PhiloxBlock{0x6627e8d5u, 0xe169c58du, 0xbc57ac4cu, 0x9b00dbd8u}));
  EXPECT_EQ(philox4x32(0xffffffffffffffffu, {0xffffffffu, 0xffffffffu, 0xffffffffu, 0xffffffffu}),
            (PhiloxBlock{0x408f276du, 0x41c83b0eu, 0xa20bc7c6u, 0x6d5451fdu}));
  EXPECT_EQ(philox4x32(0x299f31d0a4093822u, {0x243f6a88u, 0x85a308d3u, 0x13198a2eu, 0x03707344u}),
            (PhiloxBlock{0xd16cfe09u, 0x94fdccebu, 0x5001e420u, 0x24126ea1u}));
}

TEST(Dropout, KeepsTheRightFraction) {
  for (const double p : {0.1, 0.3, 0.9}) {
    const DropoutRule rule(p, 42);
    EXPECT_EQ(rule.threshold, static_cast<std::uint32_t>(std::floor(p * 65536)));
    int kept = 0;
    for (std::int64_t i = 0; i < 100; ++i)
      for (std::int64_t t = 0; t < 1000; ++t) kept += rule.keeps(i, t, 3, 1);
    const double fraction = 1 - rule.threshold / 65536.0;
    EXPECT_NEAR(kept, 100000 * fraction, 5 * std::sqrt(100000 * fraction * (1 - fraction)));
    EXPECT_DOUBLE_EQ(rule.keep_factor() * fraction, 1);
  }
}

/// The definition, section 5.4, written out from its formula.
TEST(Dropout, EveryKeyReadsItsHalfWord) {
  const std::uint64_t seed = 0x0123456789abcdefu;
  const DropoutRule rule(0.4, seed);
  for (const std::int64_t i : {std::int64_t{0}, std::int64_t{77}, (std::int64_t{5} << 32) + 3}) {
    for (const std::int64_t first : {std::int64_t{0}, std::int64_t{1} << 20, (std::int64_t{1} << 35) - 64}) {
      for (std::int64_t t = first; t < first + 64; ++t) {
        const auto counter = static_cast<std::uint32_t>(4 * (t / 32) + t / 2 % 4);
        const PhiloxBlock block = philox4x32<7>(seed ^ (static_cast<std::uint64_t>(i) >> 32 << 32),
                                                {static_cast<std::uint32_t>(i), counter, 9, 2});
        const auto half_word = static_cast<std::size_t>(2 * (t % 32 / 8) + t % 2);
        const std::uint32_t half = block[half_word / 2] >> (half_word % 2 * 16) & 0xFFFF;
        ASSERT_EQ(rule.keeps(i, t, 9, 2), half >= static_cast<std::uint32_t>(0.4 * 65536)) << i << " " << t;
      }
    }
  }
}

TEST(Dropout, ProbabilitiesBelowOneIn65536DropNothing) {
  EXPECT_FALSE(DropoutRule(kLeastDropout * 0.999, 1).drops());
  EXPECT_EQ(DropoutRule(kLeastDropout * 0.999, 1).keep_factor(), 1);
  EXPECT_TRUE(DropoutRule(kLeastDropout, 1).drops());
  EXPECT_EQ(DropoutRule(0.99999999, 1).threshold, 65535u);
}

TEST(Dropout, StrandsTooLongForItsCounterAreRefused) {
  const std::int64_t most = std::int64_t{1} << 35;
  const Problem problem{.tokens = most, .query_rows = 1, .heads = 2};
  const auto refused = [&](const Pattern& pattern, double p) {
    try {
      Plan(pattern, {.dropout = p}, problem);
      return std::string();
    } catch (const InvalidArgument& error) {
      return error.argument();
    }
  };
  EXPECT_EQ(refused(Pattern::dense(), 0.1), "dropout");
  EXPECT_EQ(refused(Pattern::dense(), 0), "");
  EXPECT_EQ(refused(Pattern::dilated({most}, {2}), 0.1), "");
  EXPECT_EQ(refused(Pattern::dilated({most - 1}, {1}), 0.1), "");
}

TEST(Dropout, HighBitsOfThePositionMatter) {
  const DropoutRule rule(0.5, 42);
  const std::int64_t far = std::int64_t{1} << 32;
  EXPECT_NE(rule.words(1, 0, 0, 0), rule.words(1 + far, 0, 0, 0));
  EXPECT_EQ(rule.words(1 + far, 7, 2, 3), philox4x32<7>(42 ^ (std::uint64_t{1} << 32), {1, 7, 2, 3}));
}

TEST(Names, DTypesAndDevices) {
  for (const DType dtype : {DType::f32, DType::bf16, DType::f16, DType::f64, DType::i32, DType::i64, DType::boolean}) {
    EXPECT_EQ(parse_dtype(name_of(dtype)), dtype);
  }
  EXPECT_THROW(parse_dtype("f8"), InvalidArgument);
  EXPECT_EQ(parse_device("cuda:3"), (Device{DeviceType::cuda, 3}));
  EXPECT_EQ(to_string(parse_device("cuda")), "cuda:0");
  EXPECT_EQ(to_string(parse_device("cpu")), "cpu");
  for (const char* name : {"gpu", "cuda:", "cuda:x", "cuda:-1", ""})
    EXPECT_THROW(parse_device(name), InvalidArgument) << name;
}

}  // namespace
}  // namespace longspan
