// Random numbers of dropout, a vector of Philox counters at a time.
#pragma once

#include "kernels/cpu/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace longspan::cpu {
namespace HWY_NAMESPACE {
namespace {

/// DropoutRule for one query row. A counter is the lower half of a 64-bit lane: products leave both of their halves
/// where they are needed, and what stands above a lower half never counts.
class DropoutRow {
 public:
  /// Keys are drawn in multiples of it.
  static constexpr std::int64_t kStep = kLanes == 4 ? 32 : 4 * kLanes;

  DropoutRow(const DropoutRule& rule, std::int64_t position, std::int64_t branch_head, std::int64_t entry)
      : threshold_(rule.threshold) {
    // The first round: of the counter only the second word differs between lanes.
    const std::uint64_t product0 = std::uint64_t{kPhiloxFactor0} * static_cast<std::uint32_t>(position);
    const std::uint64_t product1 = std::uint64_t{kPhiloxFactor1} * static_cast<std::uint32_t>(branch_head);
    key0_ = static_cast<std::uint32_t>(rule.seed);
    key1_ = static_cast<std::uint32_t>((rule.seed >> 32) ^ (static_cast<std::uint64_t>(position) >> 32));
    flip_ = static_cast<std::uint32_t>(product1 >> 32) ^ key0_;
    // The second round, as far as it is the same in all lanes.
    const std::uint64_t word2 = (product0 >> 32) ^ static_cast<std::uint32_t>(entry) ^ key1_;
    const std::uint64_t second = std::uint64_t{kPhiloxFactor1} * (word2 & 0xFFFFFFFFu);
    word0_ = (second >> 32) ^ (product1 & 0xFFFFFFFFu) ^ (key0_ + kPhiloxStep0);
    word1_ = second & 0xFFFFFFFFu;
    flip2_ = (product0 & 0xFFFFFFFFu) ^ (key1_ + kPhiloxStep1);
  }

  /// keep[i]: all ones where key + i is kept, else 0, for i below `count` rounded up to kStep. key: a multiple of 32.
  HWY_INLINE void draw(std::int64_t key, std::int64_t count, std::uint16_t* keep) const {
    for (std::int64_t i = 0; i < count; i += kStep) {
      Words word0, word1, word2, word3;
      draw_counters((key + i) / 8, word0, word1, word2, word3);
      // In order of keys: word 0 of a group's four counters, word 1, ...
      if constexpr (kLanes == 4) {
        Words more0, more1, more2, more3;
        draw_counters((key + i) / 8 + 2, more0, more1, more2, more3);
        put(concat_low(more0, word0), keep + i);
        put(concat_low(more1, word1), keep + i + 8);
        put(concat_low(more2, word2), keep + i + 16);
        put(concat_low(more3, word3), keep + i + 24);
      } else {  // blocks of 128 bits: words 0 and 2, and words 1 and 3, of one group or two
        const auto even = concat_low(word2, word0), odd = concat_low(word3, word1);
        put(hn::OddEvenBlocks(hn::SwapAdjacentBlocks(odd), even), keep + i);
        put(hn::OddEvenBlocks(odd, hn::SwapAdjacentBlocks(even)), keep + i + 2 * kLanes);
      }
    }
  }

 private:
  using WordTag = hn::Repartition<std::uint64_t, FloatTag>;
  using Words = hn::Vec<WordTag>;
  static constexpr WordTag kWord{};
  static constexpr hn::RebindToUnsigned<FloatTag> kHalf{};

  static HWY_INLINE Words multiply(Words word, std::uint32_t factor) {
    return hn::MulEven(hn::BitCast(kHalf, word), hn::BitCast(kHalf, hn::Set(kWord, std::uint64_t{factor})));
  }
  /// The lower halves of all lanes of `low`, then those of `high`.
  static HWY_INLINE hn::Vec<hn::RebindToUnsigned<FloatTag>> concat_low(Words high, Words low) {
    return hn::ConcatEven(kHalf, hn::BitCast(kHalf, high), hn::BitCast(kHalf, low));
  }
  static HWY_INLINE Words upper(Words product) { return hn::ShiftRight<32>(product); }

  /// Of the counters first, first + 1, ...
  HWY_INLINE void draw_counters(std::int64_t first, Words& word0, Words& word1, Words& word2, Words& word3) const {
    const auto same = [](std::uint64_t value) HWY_ATTR { return hn::Set(kWord, value); };
    const Words counter = hn::Xor(hn::Add(hn::Iota(kWord, 0), same(static_cast<std::uint64_t>(first))), same(flip_));
    const Words second = multiply(counter, kPhiloxFactor0);
    const Words third = multiply(hn::Xor(upper(second), same(flip2_)), kPhiloxFactor1);
    const std::uint64_t product = word0_ * kPhiloxFactor0;
    std::uint32_t key0 = key0_ + 2 * kPhiloxStep0, key1 = key1_ + 2 * kPhiloxStep1;
    word0 = hn::Xor(upper(third), same(word1_ ^ key0));
    word1 = third;
    word2 = hn::Xor(second, same((product >> 32) ^ key1));
    word3 = same(product);
    HWY_UNROLL(4)
    for (int round = 3; round < kDropoutRounds; ++round) {
      key0 += kPhiloxStep0;
      key1 += kPhiloxStep1;
      const Words product0 = multiply(word0, kPhiloxFactor0), product1 = multiply(word2, kPhiloxFactor1);
      word0 = hn::Xor3(upper(product1), word1, same(key0));
      word1 = product1;
      word2 = hn::Xor3(upper(product0), word3, same(key1));
      word3 = product0;
    }
  }

  template <class Halves>
  HWY_INLINE void put(Halves halves, std::uint16_t* keep) const {
    const hn::Repartition<std::uint16_t, FloatTag> tag;
    const auto dropped = hn::Lt(hn::BitCast(tag, halves), hn::Set(tag, static_cast<std::uint16_t>(threshold_)));
    hn::StoreU(hn::VecFromMask(tag, hn::Not(dropped)), tag, keep);
  }

  std::uint32_t threshold_, key0_, key1_, flip_;
  std::uint64_t word0_, word1_, flip2_;
};

/// The bits of kLanes neighbours, widened to the weights that they belong to.
HWY_INLINE V load_keep(const std::uint16_t* keep) {
  const hn::Rebind<std::int16_t, FloatTag> tag;
  return hn::BitCast(kFloat, hn::PromoteTo(kInt, hn::LoadU(tag, reinterpret_cast<const std::int16_t*>(keep))));
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace longspan::cpu
HWY_AFTER_NAMESPACE();
