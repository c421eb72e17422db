// A row of N blocks takes N Philox words, so they are computed a vector at a time: this is what planning random masks costs.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "pattern/random_columns.cpp"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"

#include "pattern/random_columns.h"

#include <algorithm>
#include <cmath>

HWY_BEFORE_NAMESPACE();
namespace longspan {
namespace HWY_NAMESPACE {
namespace {

namespace hn = hwy::HWY_NAMESPACE;
using Tag = hn::ScalableTag<std::uint64_t>;
using V = hn::Vec<Tag>;
constexpr Tag kTag;

/// Products of the lower halves of 64-bit lanes.
HWY_INLINE V multiply(V a, V b) {
#if HWY_TARGET == HWY_SCALAR  // one lane has no halves
  return V((a.raw & 0xFFFFFFFFu) * (b.raw & 0xFFFFFFFFu));
#else
  const hn::RepartitionToNarrow<Tag> narrow;
  return hn::MulEven(hn::BitCast(narrow, a), hn::BitCast(narrow, b));
#endif
}

/// Writes word << 32 | column of every column whose word is at most `limit`, in the order of columns; `found` has room
/// for all columns and a vector more. Returns how many.
std::size_t words_up_to(std::uint64_t seed, std::uint32_t row, std::uint32_t head, std::int64_t columns, std::uint32_t limit,
                        std::uint64_t* found) {
  constexpr int kRounds = 10;
  const V factor0 = hn::Set(kTag, 0xD2511F53u), factor1 = hn::Set(kTag, 0xCD9E8D57u), high = hn::Set(kTag, 0xFFFFFFFF00000000u);
  const V step = hn::Set(kTag, hn::Lanes(kTag)), end = hn::Set(kTag, static_cast<std::uint64_t>(columns));
  const V highest = hn::Set(kTag, static_cast<std::uint64_t>(limit) << 32 | 0xFFFFFFFFu);
  // Round keys as whole vectors in memory: broadcasting them in the loop would take the units that multiply.
  HWY_ALIGN std::uint64_t keys[2][kRounds][hn::MaxLanes(kTag)];
  for (std::uint32_t round = 0; round < kRounds; ++round) {
    hn::Store(hn::Set(kTag, static_cast<std::uint32_t>(seed) + round * 0x9E3779B9u), kTag, keys[0][round]);
    hn::Store(hn::Set(kTag, static_cast<std::uint32_t>(seed >> 32) + round * 0xBB67AE85u), kTag, keys[1][round]);
  }
  hn::Store(hn::ShiftLeft<32>(hn::Load(kTag, keys[0][kRounds - 1])), kTag, keys[0][kRounds - 1]);
  std::size_t count = 0;
  V column = hn::Iota(kTag, 0);
  for (std::int64_t first = 0; first < columns; first += static_cast<std::int64_t>(hn::Lanes(kTag)), column = hn::Add(column, step)) {
    // Only the lower half of a lane counts; what is above it is never cleared.
    V c0 = hn::Set(kTag, row), c1 = column, c2 = hn::Set(kTag, head), c3 = hn::Zero(kTag);
    HWY_UNROLL(9)
    for (int round = 0; round < kRounds - 1; ++round) {
      const V product0 = multiply(c0, factor0), product1 = multiply(c2, factor1);
      c0 = hn::Xor(hn::Xor(hn::ShiftRight<32>(product1), c1), hn::Load(kTag, keys[0][round]));
      c2 = hn::Xor(hn::Xor(hn::ShiftRight<32>(product0), c3), hn::Load(kTag, keys[1][round]));
      c1 = product1;
      c3 = product0;
    }
    // Of the last round only the first word is wanted, and in the upper half.
    const V word = hn::Xor(hn::Xor(multiply(c2, factor1), hn::ShiftLeft<32>(c1)), hn::Load(kTag, keys[0][kRounds - 1]));
    const auto above = hn::Gt(word, highest);
    if (hn::AllTrue(kTag, above)) continue;
    const auto wanted = hn::AndNot(above, hn::Lt(column, end));
    count += hn::CompressStore(hn::Or(hn::And(word, high), column), wanted, kTag, found + count);
  }
  return count;
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace longspan
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace longspan {
HWY_EXPORT(words_up_to);

void draw_columns(std::uint64_t seed, std::int64_t row, std::int64_t head, std::int64_t columns, std::int64_t count,
                  std::vector<std::uint64_t>& scratch, std::vector<std::int32_t>& drawn) {
  drawn.clear();
  if (count > 1) {
    constexpr std::size_t kMostLanes = 256;
    scratch.resize(2 * static_cast<std::size_t>(columns) + kMostLanes);
    std::uint64_t* const found = scratch.data();
    // A few more than needed are below this limit; seldom it has to be raised.
    double wanted = static_cast<double>(count) + 4 * std::sqrt(static_cast<double>(count)) + 8;
    std::size_t hits = 0;
    for (;; wanted *= 2) {
      const double limit = std::min(wanted / static_cast<double>(columns), 1.0) * 4294967295.0;
      hits = HWY_DYNAMIC_DISPATCH(words_up_to)(seed, static_cast<std::uint32_t>(row), static_cast<std::uint32_t>(head), columns,
                                               static_cast<std::uint32_t>(limit), found);
      const auto diagonal = std::find_if(found, found + hits, [&](std::uint64_t key) { return static_cast<std::int64_t>(key & 0xFFFFFFFFu) == row; });
      if (diagonal != found + hits) hits = static_cast<std::size_t>(std::copy(diagonal + 1, found + hits, diagonal) - found);
      if (static_cast<std::int64_t>(hits) >= count - 1) break;
    }
    // The last that stays decides; the others keep their ascending order.
    std::uint64_t* const ranked = found + hits;
    std::copy(found, found + hits, ranked);
    std::nth_element(ranked, ranked + (count - 2), ranked + hits);
    const std::uint64_t last = ranked[count - 2];
    for (std::size_t i = 0; i < hits; ++i) {
      if (found[i] <= last) drawn.push_back(static_cast<std::int32_t>(found[i] & 0xFFFFFFFFu));
    }
  }
  const auto own = static_cast<std::int32_t>(row);
  drawn.insert(std::lower_bound(drawn.begin(), drawn.end(), own), own);
}

}  // namespace longspan
#endif
