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
  void begin_keys(std::int64_t, std::int64_t, float*) {}
  static std::int64_t first_open(std::int64_t begin, std::int64_t) { return begin; }
  static std::int64_t open_end(std::int64_t, std::int64_t end) { return end; }
  void fill(std::int64_t, std::int64_t, std::int64_t, std::int64_t, float*, float*) const {}
};

class Extras {
 public:
  static constexpr bool kActive = true;

  Extras(const CallShared& shared, const StrandTask& task) : shared_(shared), task_(task) {}

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
    fill_keep(head, row, key, count, keep);
  }

 private:
  bool is_excluded(std::int64_t key) const {
    return shared_.call.key_mask.given() && excluded_[key - excluded_begin_] != 0.0f;
  }
  void fill_keep(std::int64_t head, std::int64_t row, std::int64_t key, std::int64_t count, float* keep) const {
    std::uint32_t* const words = reinterpret_cast<std::uint32_t*>(keep);
    if (shared_.plan.options().dropout == 0) {
      std::memset(words, 0xFF, static_cast<std::size_t>(count) * sizeof(std::uint32_t));
      return;
    }
    const std::int64_t position = task_.strand.start + row * task_.strand.stride;
    const std::int64_t branch_head = task_.branch * shared_.plan.problem().heads + head;
    for (std::int64_t i = 0; i < count; i += 4) {
      const PhiloxBlock block = shared_.dropout.words(position, (key + i) / 4, branch_head, task_.entry);
      for (std::size_t lane = 0; lane < 4; ++lane)
        words[i + static_cast<std::int64_t>(lane)] = block[lane] >= shared_.dropout.threshold ? ~0u : 0u;
    }
  }

  const CallShared& shared_;
  const StrandTask& task_;
  const float* excluded_ = nullptr;
  std::int64_t excluded_begin_ = 0;
};

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace longspan::cpu
HWY_AFTER_NAMESPACE();
