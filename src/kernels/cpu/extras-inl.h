// Policies of the inner loops, and which blocks of keys rows see. NoExtras is empty: without ALiBi, dropout and
// key_mask nothing of them is compiled into the loops. Extras turns all of them into two rows of numbers per query row:
//   bias [keys]  added to base-2 exponents: -slope * distance, and kMasked for pairs that do not attend
//   keep [keys]  bit masks, all ones where dropout keeps the pair
#pragma once

#include "kernels/cpu/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace longspan::cpu {
namespace HWY_NAMESPACE {
namespace {

/// Finite, so that masked - largest never becomes NaN; anything below kMaskedLimit counts as masked.
constexpr float kMasked = -1e30f;
constexpr float kMaskedLimit = -1e29f;
constexpr int kChunk = 16;  // block sizes are multiples of it

/// The rows of a task: strand rows begin .. begin + count - 1, for each head of the set, heads fastest.
struct VirtualRows {
  HeadSet heads;
  std::int64_t begin = 0;
  std::int64_t count = 0;  // strand rows
  std::int64_t size() const { return count * heads.count; }
  // Rows are asked for one by one, so the usual set of one head is spared the divisions.
  std::int64_t index(std::int64_t row) const { return begin + (heads.count == 1 ? row : row / heads.count); }
  std::int64_t head(std::int64_t row) const { return heads.at(heads.count == 1 ? 0 : row % heads.count); }
};

/// Where the virtual rows of a tensor are, from the first on: rows are asked for one by one, and a view would multiply
/// three numbers for each.
template <class Element>
class RowPlaces {
 public:
  template <class View>
  RowPlaces(const View& view, std::int64_t entry, const VirtualRows& rows, std::int64_t first_row, std::int64_t stride)
      : row_step_(stride * view.strides[1] * size_of(view.dtype)),
        head_step_(rows.heads.step * view.strides[2] * size_of(view.dtype)),
        heads_(rows.heads.count) {
    if (view.data)
      first_ = static_cast<Byte*>(view.data) + view.offset(entry, first_row, rows.heads.first) * size_of(view.dtype);
  }
  RowPlaces(const FloatRows& view, std::int64_t entry, const VirtualRows& rows, std::int64_t first_row,
            std::int64_t stride)
      : row_step_(stride * view.row_stride * 4),
        head_step_(rows.heads.step * view.head_stride * 4),
        heads_(rows.heads.count) {
    if (view.data) first_ = reinterpret_cast<Byte*>(view.at(entry, first_row, rows.heads.first));
  }
  explicit operator bool() const { return first_ != nullptr; }
  Element* operator()(std::int64_t row) const {
    Byte* const place =
        heads_ == 1 ? first_ + row * row_step_ : first_ + row / heads_ * row_step_ + row % heads_ * head_step_;
    return reinterpret_cast<Element*>(place);
  }

 private:
  using Byte = std::conditional_t<std::is_const_v<Element>, const std::byte, std::byte>;
  Byte* first_ = nullptr;
  std::int64_t row_step_, head_step_, heads_;
};

/// Keys begin .. end that rows see, counted from some first key.
struct KeyRun {
  std::int64_t begin, end;
};

/// The block mask of a task's branch. Rows of one block row see the same blocks, so loops take them together.
class BlockRows {
 public:
  BlockRows(const CallShared& shared, const StrandTask& task)
      : branch_(shared.plan.branches()[static_cast<std::size_t>(task.branch)]),
        entry_(task.entry),
        heads_(task.heads),
        size_(branch_.mask ? branch_.mask->block_size() : std::int64_t{1} << 62) {}

  bool masked() const { return branch_.mask.has_value(); }
  bool heads_differ() const { return masked() && branch_.mask->heads() > 1; }
  /// First row behind `row`, at most `end`, that sees other blocks.
  std::int64_t next_row(std::int64_t row, std::int64_t end) const {
    std::int64_t next = (row / size_ + 1) * size_;
    if (heads_differ() && heads_.count > 1) return std::min(next, end);
    while (next < end && std::ranges::equal(of(heads_.first, next - 1), of(heads_.first, next))) next += size_;
    return std::min(next, end);
  }
  /// First key from `key` on that strand row `row` of a head sees, or a very large number.
  std::int64_t next_key(std::int64_t head, std::int64_t row, std::int64_t key) const {
    if (!masked()) return key;
    const auto blocks = of(head, row);
    const auto found = std::lower_bound(blocks.begin(), blocks.end(), key / size_);
    return found == blocks.end() ? std::int64_t{1} << 62 : std::max(key, *found * size_);
  }
  /// Keys of the run that begins at `key`, which the row sees, rounded out to `multiple` and cut at `most`.
  std::int64_t run_length(std::int64_t head, std::int64_t row, std::int64_t key, std::int64_t most,
                          std::int64_t multiple) const {
    if (!masked()) return most;
    const auto blocks = of(head, row);
    std::int64_t length = 0;
    for (auto block = std::lower_bound(blocks.begin(), blocks.end(), key / size_);
         block != blocks.end() && length < most; ++block) {
      if (*block * size_ - key >= length + multiple) break;
      length = round_up((*block + 1) * size_ - key, multiple);
    }
    return std::min(length, most);
  }
  /// Whether runs rounded to `multiple` may hold keys that are not seen, which seen() tells apart.
  bool rounded(std::int64_t multiple) const { return masked() && size_ < multiple; }
  bool seen(std::int64_t head, std::int64_t row, std::int64_t key) const {
    return branch_.mask->active(branch_.mask_head(entry_, head), row / size_, key / size_);
  }

 private:
  std::span<const std::int32_t> of(std::int64_t head, std::int64_t row) const {
    return branch_.mask->row(branch_.mask_head(entry_, head), row / size_);
  }
  const BranchPlan& branch_;
  const std::int64_t entry_;
  const HeadSet heads_;
  const std::int64_t size_;
};

struct NoExtras {
  static constexpr bool kActive = false;
  NoExtras(const CallShared&, const StrandTask&) {}
  void prepare(float*, std::int64_t, float*, std::int64_t) const {}
  void begin_keys(std::int64_t, std::int64_t, float*) {}
  static bool biased() { return false; }
  static bool drops() { return false; }
  static std::int64_t first_open(std::int64_t begin, std::int64_t) { return begin; }
  static std::int64_t open_end(std::int64_t, std::int64_t end) { return end; }
  void fill(std::int64_t, std::int64_t, std::int64_t, std::int64_t, float*, float*) const {}
};

/// DropoutRule for one query row: each lane decides the eight keys of one counter.
class PhiloxLanes {
 public:
  static constexpr std::int64_t kKeys = 8 * kLanes;

  PhiloxLanes(const DropoutRule& rule, std::int64_t position, std::int64_t branch_head, std::int64_t entry)
      : threshold_(rule.threshold) {
    // The first round: of the counter only the second word differs between lanes.
    const std::uint64_t key = rule.seed ^ (static_cast<std::uint64_t>(position) >> 32 << 32);
    const std::uint64_t product0 = std::uint64_t{kPhiloxFactor0} * static_cast<std::uint32_t>(position);
    const std::uint64_t product1 = std::uint64_t{kPhiloxFactor1} * static_cast<std::uint32_t>(branch_head);
    key0_ = static_cast<std::uint32_t>(key);
    key1_ = static_cast<std::uint32_t>(key >> 32);
    flip_ = static_cast<std::uint32_t>(product1 >> 32) ^ key0_;
    word1_ = static_cast<std::uint32_t>(product1);
    word2_ = static_cast<std::uint32_t>(product0 >> 32) ^ static_cast<std::uint32_t>(entry) ^ key1_;
    word3_ = static_cast<std::uint32_t>(product0);
  }

  /// All ones for the keys that are kept of kKeys keys from `key` on, a multiple of 32, else 0.
  HWY_INLINE void keep(std::int64_t key, std::uint32_t* kept) const {
    Words word0 = hn::Xor(hn::Iota(kTag, static_cast<std::uint32_t>(key / 8)), hn::Set(kTag, flip_));
    Words word1 = hn::Set(kTag, word1_), word2 = hn::Set(kTag, word2_), word3 = hn::Set(kTag, word3_);
    std::uint32_t key0 = key0_, key1 = key1_;
    for (int round = 1; round < kDropoutRounds; ++round) {
      key0 += kPhiloxStep0;
      key1 += kPhiloxStep1;
      Words high0, low0, high1, low1;
      multiply(word0, kPhiloxFactor0, high0, low0);
      multiply(word2, kPhiloxFactor1, high1, low1);
      word0 = hn::Xor(hn::Xor(high1, word1), hn::Set(kTag, key0));
      word1 = low1;
      word2 = hn::Xor(hn::Xor(high0, word3), hn::Set(kTag, key1));
      word3 = low0;
    }
    HWY_ALIGN std::uint32_t words[4][kLanes];
    hn::StoreU(word0, kTag, words[0]);
    hn::StoreU(word1, kTag, words[1]);
    hn::StoreU(word2, kTag, words[2]);
    hn::StoreU(word3, kTag, words[3]);
    for (int i = 0; i < kKeys; ++i) {
      const std::uint32_t half = words[i % 32 / 8][i / 32 * 4 + i / 2 % 4] >> i % 2 * 16 & 0xFFFF;
      kept[i] = half >= threshold_ ? ~0u : 0u;
    }
  }

 private:
  static constexpr hn::RebindToUnsigned<FloatTag> kTag{};
  using Words = hn::Vec<hn::RebindToUnsigned<FloatTag>>;

  static HWY_INLINE void multiply(Words a, std::uint32_t factor, Words& high, Words& low) {
    const hn::RepartitionToWide<hn::RebindToUnsigned<FloatTag>> wide;
    const Words b = hn::Set(kTag, factor);
    const auto even = hn::MulEven(a, b);
    const auto odd = hn::MulEven(hn::BitCast(kTag, hn::ShiftRight<32>(hn::BitCast(wide, a))), b);
    high = hn::OddEven(hn::BitCast(kTag, odd), hn::BitCast(kTag, hn::ShiftRight<32>(even)));
    low = hn::OddEven(hn::BitCast(kTag, hn::ShiftLeft<32>(odd)), hn::BitCast(kTag, even));
  }

  std::uint32_t threshold_, key0_, key1_, flip_, word1_, word2_, word3_;
};

class Extras {
 public:
  static constexpr bool kActive = true;

  Extras(const CallShared& shared, const StrandTask& task)
      : shared_(shared),
        task_(task),
        biased_(shared.call.alibi_slopes.given() || shared.call.key_mask.given()),
        drops_(shared.dropout.drops()) {}

  bool biased() const { return biased_; }
  bool drops() const { return drops_; }
  /// Writes what fill() leaves as it is: no bias, or no dropout.
  void prepare(float* bias, std::int64_t biases, float* keep, std::int64_t keeps) const {
    if (!biased_) std::memset(bias, 0, static_cast<std::size_t>(biases) * sizeof(float));
    if (!drops_) std::memset(keep, 0xFF, static_cast<std::size_t>(keeps) * sizeof(float));
  }

  /// Notes which of the strand's rows [begin, begin + count) key_mask excludes, in `excluded` (kMasked or 0).
  void begin_keys(std::int64_t begin, std::int64_t count, float* excluded) {
    excluded_ = excluded;
    excluded_begin_ = begin;
    if (!shared_.call.key_mask.given()) return;
    for (std::int64_t i = 0; i < count; ++i) {
      const std::int64_t position = task_.strand.start + (begin + i) * task_.strand.stride;
      excluded[i] = key_allowed(shared_.call.key_mask, task_.entry, position) ? 0.0f : kMasked;
    }
  }

  /// The first of the noted rows [begin, end) that key_mask leaves, or end; and what is behind the last.
  std::int64_t first_open(std::int64_t begin, std::int64_t end) const {
    while (begin < end && is_excluded(begin)) ++begin;
    return begin;
  }
  std::int64_t open_end(std::int64_t begin, std::int64_t end) const {
    while (begin < end && is_excluded(end - 1)) --end;
    return end;
  }

  /// bias and keep of the pairs (strand row `row` of `head`, keys key .. key + count). key is a multiple of 16.
  void fill(std::int64_t head, std::int64_t row, std::int64_t key, std::int64_t count, float* bias, float* keep) const {
    if (biased_) fill_bias(head, row, key, count, bias);
    if (drops_) fill_keep(head, row, key, count, keep);
  }

 private:
  bool is_excluded(std::int64_t key) const {
    return shared_.call.key_mask.given() && excluded_[key - excluded_begin_] != 0.0f;
  }
  void fill_bias(std::int64_t head, std::int64_t row, std::int64_t key, std::int64_t count, float* bias) const {
    float slope = 0;
    if (shared_.call.alibi_slopes.given()) {
      slope = -*shared_.call.alibi_slopes.at<float>(0, 0, head) * kLog2e * static_cast<float>(task_.strand.stride);
    }
    const V step = broadcast(slope);
    for (std::int64_t i = 0; i < count; i += kLanes) {
      V value = hn::Zero(kFloat);
      if (slope != 0) {
        const V distance = hn::Abs(hn::Iota(kFloat, static_cast<float>(key + i - row)));
        value = hn::Mul(distance, step);
      }
      if (shared_.call.key_mask.given()) value = hn::Add(value, load(excluded_ + (key - excluded_begin_) + i));
      store(value, bias + i);
    }
  }
  void fill_keep(std::int64_t head, std::int64_t row, std::int64_t key, std::int64_t count, float* keep) const {
    std::uint32_t* const words = reinterpret_cast<std::uint32_t*>(keep);
    const PhiloxLanes lanes(shared_.dropout, task_.strand.start + row * task_.strand.stride,
                            task_.branch * shared_.plan.problem().heads + head, task_.entry);
    constexpr std::int64_t kStep = PhiloxLanes::kKeys;
    for (std::int64_t i = -(key % 32); i < count; i += kStep) {
      const std::int64_t begin = std::max<std::int64_t>(i, 0), end = std::min(i + kStep, count);
      if (end - begin == kStep) {
        lanes.keep(key + i, words + i);
      } else {
        std::uint32_t some[kStep];
        lanes.keep(key + i, some);
        std::memcpy(words + begin, some + (begin - i), static_cast<std::size_t>(end - begin) * sizeof(std::uint32_t));
      }
    }
  }

  const CallShared& shared_;
  const StrandTask& task_;
  const bool biased_, drops_;
  const float* excluded_ = nullptr;
  std::int64_t excluded_begin_ = 0;
};

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace longspan::cpu
HWY_AFTER_NAMESPACE();
