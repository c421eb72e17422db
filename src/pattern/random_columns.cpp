// A row of N blocks takes N Philox words, so they are computed a vector at a time: this is what planning random masks
// costs.
#if !defined(__x86_64__)
#define HWY_COMPILE_ONLY_STATIC
#endif
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "pattern/random_columns.cpp"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"

#include "pattern/random_columns.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <span>

HWY_BEFORE_NAMESPACE();
namespace longspan {
namespace HWY_NAMESPACE {
namespace {

namespace hn = hwy::HWY_NAMESPACE;
using Tag = hn::CappedTag<std::uint64_t, 8>;  // a mask of up to 8 lanes is a byte
using V = hn::Vec<Tag>;
constexpr Tag kTag;
constexpr int kRounds = 10;
constexpr std::uint64_t kFactor0 = 0xD2511F53u, kFactor1 = 0xCD9E8D57u;

/// Products of the lower halves of 64-bit lanes.
HWY_INLINE V multiply(V a, V b) {
#if HWY_TARGET == HWY_SCALAR  // one lane has no halves
  return V((a.raw & 0xFFFFFFFFu) * (b.raw & 0xFFFFFFFFu));
#else
  const hn::RepartitionToNarrow<Tag> narrow;
  return hn::MulEven(hn::BitCast(narrow, a), hn::BitCast(narrow, b));
#endif
}

/// What the second round multiplies out of a column's number alone, the same for all rows of a head.
void multiply_columns(std::uint64_t seed, std::uint32_t head, std::int64_t columns, std::uint64_t* products) {
  const V factor = hn::Set(kTag, kFactor0), step = hn::Set(kTag, hn::Lanes(kTag));
  const V other = hn::Set(kTag, (std::uint64_t{head} * kFactor1 >> 32) ^ static_cast<std::uint32_t>(seed));
  V column = hn::Iota(kTag, 0);
  for (std::int64_t first = 0; first < columns;
       first += static_cast<std::int64_t>(hn::Lanes(kTag)), column = hn::Add(column, step)) {
    hn::StoreU(multiply(hn::Xor(column, other), factor), kTag, products + first);
  }
}

/// Writes word << 32 | column of every column whose word is at most `limit` to `found`, in the order of columns, and
/// returns how many. Both arrays have room for the columns and two vectors more, and for what is written beyond the
/// last.
std::size_t words_up_to(std::uint64_t seed, std::uint32_t row, std::uint32_t head, std::int64_t columns,
                        const std::uint64_t* products, std::uint32_t limit, std::uint64_t* found) {
  const auto set = [](std::uint64_t value) { return hn::Set(kTag, value); };
  const auto key0 = [&](std::uint32_t round) { return static_cast<std::uint32_t>(seed) + round * 0x9E3779B9u; };
  const auto key1 = [&](std::uint32_t round) { return static_cast<std::uint32_t>(seed >> 32) + round * 0xBB67AE85u; };
  // What the first three rounds make of row and head alone.
  const std::uint64_t of_row = std::uint64_t{row} * kFactor0, of_head = std::uint64_t{head} * kFactor1;
  const std::uint64_t second = ((of_row >> 32) ^ key1(0)) * kFactor1;
  const std::uint64_t third = ((second >> 32) ^ static_cast<std::uint32_t>(of_head) ^ key0(1)) * kFactor0;
  const V start2 = set(of_row ^ key1(1)), start0 = set(second ^ key0(2)), start2_next = set((third >> 32) ^ key1(2));
  const V factor0 = set(kFactor0), factor1 = set(kFactor1);
  const V highest = set(std::uint64_t{limit} << 32 | 0xFFFFFFFFu);
  const V last_key = set(std::uint64_t{key0(kRounds - 1)} << 32);
  // Whole vectors in memory: broadcasting keys in the loop would take the units that multiply.
  HWY_ALIGN std::uint64_t keys[2][kRounds][hn::MaxLanes(kTag)];
  for (std::uint32_t round = 3; round < kRounds - 1; ++round) {
    hn::Store(set(key0(round)), kTag, keys[0][round]);
    hn::Store(set(round == 3 ? third ^ key1(3) : key1(round)), kTag,
              keys[1][round]);  // the fourth counter is the row's still
  }

  const auto lanes = static_cast<std::int64_t>(hn::Lanes(kTag));
  // Words of a few vectors and which of them count; looked through in a second pass, since whether a vector has any is
  // as good as random and would be mispredicted.
  constexpr std::int64_t kVectors = 64;
  HWY_ALIGN std::uint64_t words[kVectors * hn::MaxLanes(kTag)];
  std::uint8_t bits[kVectors + 8];

  // Only the lower half of a lane counts; what is above it is never cleared.
  const auto begin = [&](const std::uint64_t* from, V& c0, V& c1, V& c2, V& c3) HWY_ATTR {
    const V product = hn::LoadU(kTag, from);
    c1 = multiply(hn::Xor(hn::ShiftRight<32>(product), start2), factor1);
    c2 = hn::Xor(product, start2_next);
    c0 = hn::Xor(hn::ShiftRight<32>(c1), start0);
    c3 = hn::Zero(kTag);
  };
  const auto mix = [&](int round, V& c0, V& c1, V& c2, V& c3) HWY_ATTR {
    const V product0 = multiply(c0, factor0), product1 = multiply(c2, factor1);
    c0 = hn::Xor3(hn::ShiftRight<32>(product1), c1, hn::Load(kTag, keys[0][round]));
    c2 = hn::Xor3(hn::ShiftRight<32>(product0), c3, hn::Load(kTag, keys[1][round]));
    c1 = product1;
    c3 = product0;
  };
  // Of the last round only the first word is wanted, and in the upper half.
  const auto finish = [&](V c1, V c2, std::int64_t vector) HWY_ATTR {
    const V word = hn::Xor3(multiply(c2, factor1), hn::ShiftLeft<32>(c1), last_key);
    hn::Store(word, kTag, words + vector * lanes);
    hn::StoreMaskBits(kTag, hn::Not(hn::Gt(word, highest)), bits + vector);
  };
  std::size_t count = 0;
  for (std::int64_t first = 0; first < columns; first += kVectors * lanes) {
    const std::int64_t vectors = std::min(kVectors, (columns - first + lanes - 1) / lanes);
    // Two at a time: one alone is a chain of products that the processor cannot look beyond.
    for (std::int64_t vector = 0; vector < vectors; vector += 2) {
      V a0, a1, a2, a3, b0, b1, b2, b3;
      begin(products + first + vector * lanes, a0, a1, a2, a3);
      begin(products + first + (vector + 1) * lanes, b0, b1, b2, b3);
      HWY_UNROLL(6)
      for (int round = 3; round < kRounds - 1; ++round) {
        mix(round, a0, a1, a2, a3);
        mix(round, b0, b1, b2, b3);
      }
      finish(a1, a2, vector);
      finish(b1, b2, vector + 1);
    }
    std::memset(bits + vectors, 0, 8);
    for (std::int64_t group = 0; group < vectors; group += 8) {
      std::uint64_t left = 0;
      std::memcpy(&left, bits + group, 8);
      if (left == 0) continue;
      // Four at a time, whether there are as many or not: how many there are cannot be predicted.
      for (std::size_t next = count, end = count += static_cast<std::size_t>(std::popcount(left)); next < end;) {
        for (int i = 0; i < 4; ++i, ++next, left &= left - 1) {
          const int bit = std::countr_zero(left | std::uint64_t{1} << 63);
          const std::int64_t index = (group + bit / 8) * lanes + bit % 8;
          found[next] = (words[index] & 0xFFFFFFFF00000000u) | static_cast<std::uint64_t>(first + index);
        }
      }
    }
  }
  while (count > 0 && static_cast<std::int64_t>(found[count - 1] & 0xFFFFFFFFu) >= columns) --count;
  return count;
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace longspan
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
#if HWY_ARCH_X86
#include "util/x86.h"
#endif

namespace longspan {
namespace {

// HWY_DYNAMIC_DISPATCH would be the only use of Highway's compiled library: without it the headers are enough.
#if HWY_ARCH_X86
template <class F>
F* fastest_here(F* fallback, F* sse4, F* avx2, F* avx512) {
  if (avx512 && has_avx512()) return avx512;
  if (avx2 && has_avx2()) return avx2;
  return sse4 && has_sse4() ? sse4 : fallback;
}
#define LONGSPAN_FASTEST(f)                                                                                       \
  fastest_here<decltype(HWY_STATIC_DISPATCH(f))>(&HWY_STATIC_DISPATCH(f), HWY_CHOOSE_SSE4(f), HWY_CHOOSE_AVX2(f), \
                                                 HWY_CHOOSE_AVX3(f))
#else
#define LONGSPAN_FASTEST(f) &HWY_STATIC_DISPATCH(f)
#endif
const auto multiply_columns_here = LONGSPAN_FASTEST(multiply_columns);
const auto words_up_to_here = LONGSPAN_FASTEST(words_up_to);

/// A key that `rank` + 1 of the keys do not exceed, whose upper halves are spread evenly up to `limit`: counted in
/// buckets, since comparisons of random numbers cannot be predicted.
std::uint64_t key_of_rank(std::span<const std::uint64_t> keys, std::size_t rank, std::uint32_t limit,
                          std::vector<std::uint32_t>& counts, std::vector<std::uint64_t>& inside) {
  const int shift =
      32 + std::max(0, static_cast<int>(std::bit_width(limit)) - static_cast<int>(std::bit_width(keys.size())));
  counts.assign((static_cast<std::uint64_t>(limit) << 32 >> shift) + 1, 0);
  for (const std::uint64_t key : keys) ++counts[key >> shift];
  // From the top, where fewer lie beyond the rank.
  std::size_t bucket = counts.size() - 1, before = keys.size() - counts[bucket];
  while (before > rank) before -= counts[--bucket];
  rank -= before;
  if (rank + 1 == counts[bucket]) return ((std::uint64_t{bucket} + 1) << shift) - 1;
  inside.clear();
  for (const std::uint64_t key : keys) {
    if (key >> shift == bucket) inside.push_back(key);
  }
  std::nth_element(inside.begin(), inside.begin() + static_cast<std::ptrdiff_t>(rank), inside.end());
  return inside[rank];
}

std::int64_t column_of(std::uint64_t key) { return static_cast<std::int64_t>(key & 0xFFFFFFFFu); }

}  // namespace

void ColumnDrawer::draw(std::uint64_t seed, std::int64_t row, std::int64_t head, std::int64_t columns,
                        std::int64_t count, std::vector<std::int32_t>& drawn) {
  drawn.clear();
  if (count > 1) {
    constexpr std::size_t kMostLanes = 16;  // two vectors
    if (seed_ != seed || head_ != head || products_.size() < static_cast<std::size_t>(columns) + kMostLanes) {
      seed_ = seed, head_ = head;
      // A causal row asks for one column more than the one before.
      products_.resize(std::bit_ceil(static_cast<std::size_t>(columns)) + kMostLanes);
      multiply_columns_here(seed, static_cast<std::uint32_t>(head),
                            static_cast<std::int64_t>(products_.size() - kMostLanes), products_.data());
      found_.resize(products_.size());
    }
    // A few more than needed are below this limit: one row in two hundred has to raise it.
    double wanted = static_cast<double>(count) + 2.6 * std::sqrt(static_cast<double>(count)) + 4;
    std::size_t hits = 0;
    std::uint32_t limit = 0;
    for (;; wanted *= 2) {
      limit = static_cast<std::uint32_t>(std::min(wanted / static_cast<double>(columns), 1.0) * 4294967295.0);
      hits = words_up_to_here(seed, static_cast<std::uint32_t>(row), static_cast<std::uint32_t>(head), columns,
                              products_.data(), limit, found_.data());
      const auto end = found_.begin() + static_cast<std::ptrdiff_t>(hits);
      const auto diagonal =
          std::partition_point(found_.begin(), end, [&](std::uint64_t key) { return column_of(key) < row; });
      if (diagonal != end && column_of(*diagonal) == row)
        hits = static_cast<std::size_t>(std::copy(diagonal + 1, end, diagonal) - found_.begin());
      if (static_cast<std::int64_t>(hits) >= count - 1) break;
    }
    // The last that stays decides; all keep their ascending order.
    const std::uint64_t last =
        key_of_rank({found_.data(), hits}, static_cast<std::size_t>(count - 2), limit, counts_, inside_);
    drawn.resize(hits + 1);
    std::size_t kept = 0;
    for (std::size_t i = 0; i < hits; ++i) {
      drawn[kept] = static_cast<std::int32_t>(column_of(found_[i]));
      kept += found_[i] <= last;
    }
    drawn.resize(kept);
  }
  const auto own = static_cast<std::int32_t>(row);
  drawn.insert(std::lower_bound(drawn.begin(), drawn.end(), own), own);
}

}  // namespace longspan
#endif
