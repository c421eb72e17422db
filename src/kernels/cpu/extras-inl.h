// Policies of the inner loops, and which blocks of keys rows see. NoExtras is empty: without ALiBi, dropout and
// key_mask nothing of them is compiled into the loops.
#pragma once

#include "kernels/cpu/pack-inl.h"

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

/// Where Extras keeps what it knows of a window of keys, packed in order.
struct ExtrasMemory {
  std::int32_t *index, *packed;  // packed key -> key of the window, and how many are packed of the first so many
  float *places, *excluded;      // of packed keys: place in the window; kMasked where key_mask excludes one
  std::uint8_t* bits;            // one for each key of the window: whether it is packed
  std::uint16_t *keep, *drawn;   // keep bits: of several query rows; of one, before excluded keys are left out

  ExtrasMemory(Arena& arena, std::int64_t keys, std::int64_t keeps) {
    index = arena.take<std::int32_t>(keys);
    packed = arena.take<std::int32_t>(keys + 1);
    places = arena.take<float>(keys);
    excluded = arena.take<float>(keys);
    keep = arena.take<std::uint16_t>(keeps + DropoutRow::kStep);
    bits = arena.take<std::uint8_t>(keys / 8 + 4);
    drawn = arena.take<std::uint16_t>(keys + 2 * DropoutRow::kStep);
  }
};

struct NoExtras {
  static constexpr bool kActive = false;
  NoExtras(const CallShared&, const StrandTask&, const BlockRows&, const ExtrasMemory&) {}
  static bool biased() { return false; }
  static bool drops() { return false; }
  static std::int64_t begin_keys(std::int64_t, std::int64_t count, const std::byte**, const std::byte**) {
    return count;
  }
  static std::int64_t packed(std::int64_t keys) { return keys; }
  static bool is_packed(std::int64_t) { return true; }
  struct Slope {};
};

/// ALiBi, dropout and key_mask. Keys that key_mask excludes are left out when keys are packed; under a mask of blocks,
/// which names keys by their place, they stay and get a bias of kMasked.
class Extras {
 public:
  static constexpr bool kActive = true;

  Extras(const CallShared& shared, const StrandTask& task, const BlockRows& blocks, const ExtrasMemory& memory)
      : shared_(shared),
        task_(task),
        m_(memory),
        sloped_(shared.call.alibi_slopes.given()),
        leaves_out_(shared.call.key_mask.given() && !blocks.masked()),
        excludes_(shared.call.key_mask.given() && blocks.masked()),
        drops_(shared.dropout.drops()) {}

  bool biased() const { return sloped_ || excludes_; }
  bool drops() const { return drops_; }

  /// Takes up strand rows [begin, begin + count) as the window of keys: removes excluded ones from the pointers to
  /// rows. Returns how many are packed, 0 if the window is excluded altogether.
  std::int64_t begin_keys(std::int64_t begin, std::int64_t count, const std::byte** k_rows, const std::byte** v_rows) {
    begin_ = begin;
    std::memset(m_.bits, 0, static_cast<std::size_t>(count / 8 + 4));
    std::int32_t left = 0, some = 0;
    for (std::int32_t key = 0; key < static_cast<std::int32_t>(count); ++key) {
      const bool open =
          key_allowed(shared_.call.key_mask, task_.entry, task_.strand.start + (begin + key) * task_.strand.stride);
      some |= open;
      m_.excluded[key] = open ? 0.0f : kMasked;
      m_.packed[key] = left;
      if (!open && excludes_) k_rows[key] = v_rows[key] = zero_row();
      if (!open && leaves_out_) continue;
      m_.bits[key / 8] = static_cast<std::uint8_t>(m_.bits[key / 8] | 1u << key % 8);
      m_.index[left] = key;
      m_.places[left] = static_cast<float>(key);
      k_rows[left] = k_rows[key];
      v_rows[left] = v_rows[key];
      ++left;
    }
    m_.packed[count] = left;
    for (std::int64_t key = left; key < count; ++key) k_rows[key] = v_rows[key] = zero_row();
    return some ? left : 0;
  }
  /// How many of the window's first so many keys are packed.
  std::int64_t packed(std::int64_t keys) const { return m_.packed[keys]; }
  bool is_packed(std::int64_t key) const { return m_.packed[key] < m_.packed[key + 1]; }

  /// ALiBi of a query row in base 2: slope * |place of the key - own|.
  struct Slope {
    float own, slope;
  };
  Slope slope(std::int64_t head, std::int64_t row) const {
    if (!sloped_) return {0, 0};
    return {static_cast<float>(row - begin_),
            -*shared_.call.alibi_slopes.at<float>(0, 0, head) * kLog2e * static_cast<float>(task_.strand.stride)};
  }
  /// What is added to base-2 exponents of the packed keys at `key`.
  HWY_INLINE V bias(const Slope& of, std::int64_t key) const {
    V bias = hn::Mul(hn::Abs(hn::Sub(load(m_.places + key), broadcast(of.own))), broadcast(of.slope));
    if (excludes_) bias = hn::Add(bias, load(m_.excluded + key));
    return bias;
  }
  /// Keep bits of a query row and the packed keys [key, key + count).
  void draw(std::int64_t head, std::int64_t row, std::int64_t key, std::int64_t count, std::uint16_t* keep) const {
    const DropoutRow bits(shared_.dropout, task_.strand.start + row * task_.strand.stride,
                          task_.branch * shared_.plan.problem().heads + head, task_.entry);
    const std::int64_t first = m_.index[key] / 32 * 32, end = m_.index[key + count - 1] + 1;
    if (!leaves_out_ && first == key) return bits.draw(begin_ + key, count, keep);
    bits.draw(begin_ + first, end - first, m_.drawn);
    if constexpr (kLanes == 16) {
      const hn::Repartition<std::uint16_t, FloatTag> tag;
      std::uint16_t* left = m_.drawn;
      for (std::int64_t i = first; i < end; i += 32)
        left +=
            hn::CompressStore(hn::LoadU(tag, m_.drawn + i - first), hn::LoadMaskBits(tag, m_.bits + i / 8), tag, left);
      std::memcpy(keep, m_.drawn + (key - packed(first)), static_cast<std::size_t>(count) * sizeof(std::uint16_t));
    } else {
      for (std::int64_t i = 0; i < count; ++i) keep[i] = m_.drawn[m_.index[key + i] - first];
    }
  }

 private:
  const CallShared& shared_;
  const StrandTask& task_;
  const ExtrasMemory& m_;
  const bool sloped_, leaves_out_, excludes_, drops_;
  std::int64_t begin_ = 0;
};

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace longspan::cpu
HWY_AFTER_NAMESPACE();
