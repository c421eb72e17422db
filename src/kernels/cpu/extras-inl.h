// Policies of the inner loops. NoExtras is empty: without ALiBi, dropout, key_mask and block masks nothing of them is
// compiled into the loops. Extras turns all of them into two rows of numbers per query row:
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
  std::int64_t index(std::int64_t row) const { return begin + row / heads.count; }
  std::int64_t head(std::int64_t row) const { return heads.at(row % heads.count); }
};

struct NoExtras {
  static constexpr bool kActive = false;
  NoExtras(const CallShared&, const StrandTask&) {}
  void begin_keys(std::int64_t, std::int64_t, float*) {}
  std::uint32_t active_chunks(std::int64_t, std::int64_t, std::int64_t) const { return ~0u; }
  void fill(std::int64_t, std::int64_t, std::int64_t, std::int64_t, std::uint32_t, float*, float*) const {}
};

class Extras {
 public:
  static constexpr bool kActive = true;

  Extras(const CallShared& shared, const StrandTask& task)
      : shared_(shared), task_(task), branch_(shared.plan.branches()[static_cast<std::size_t>(task.branch)]) {}

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

  /// Bit j: whether strand row `row` of a head sees the block that holds keys key + 16 j ...
  std::uint32_t active_chunks(std::int64_t head, std::int64_t row, std::int64_t key) const {
    if (!branch_.mask) return ~0u;
    const std::int64_t size = branch_.mask->block_size();
    const auto blocks = branch_.mask->row(branch_.mask_head(task_.entry, head), row / size);
    std::uint32_t bits = 0;
    auto next = std::lower_bound(blocks.begin(), blocks.end(), key / size);
    for (int chunk = 0; chunk < 32 && next != blocks.end(); ++chunk) {
      const std::int64_t block = (key + chunk * kChunk) / size;
      while (next != blocks.end() && *next < block) ++next;
      if (next != blocks.end() && *next == block) bits |= 1u << chunk;
    }
    return bits;
  }

  /// bias and keep of the pairs (strand row `row` of `head`, keys key .. key + count). key is a multiple of 16, `chunks`
  /// are the active ones from there.
  void fill(std::int64_t head, std::int64_t row, std::int64_t key, std::int64_t count, std::uint32_t chunks, float* bias,
            float* keep) const {
    float slope = 0;
    if (shared_.call.alibi_slopes.given()) {
      slope = -*shared_.call.alibi_slopes.at<float>(0, 0, head) * kLog2e * static_cast<float>(task_.strand.stride);
    }
    const V step = broadcast(slope);
    for (std::int64_t i = 0; i < count; i += kLanes) {
      V value = broadcast(kMasked);
      if (chunks >> (i / kChunk) & 1u) {
        value = hn::Zero(kFloat);
        if (slope != 0) {
          const V distance = hn::Abs(hn::Iota(kFloat, static_cast<float>(key + i - row)));
          value = hn::Mul(distance, step);
        }
        if (shared_.call.key_mask.given()) value = hn::Add(value, load(excluded_ + (key - excluded_begin_) + i));
      }
      store(value, bias + i);
    }
    fill_keep(head, row, key, count, keep);
  }

 private:
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
      for (std::size_t lane = 0; lane < 4; ++lane) words[i + static_cast<std::int64_t>(lane)] = block[lane] >= shared_.dropout.threshold ? ~0u : 0u;
    }
  }

  const CallShared& shared_;
  const StrandTask& task_;
  const BranchPlan& branch_;
  const float* excluded_ = nullptr;
  std::int64_t excluded_begin_ = 0;
};

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace longspan::cpu
HWY_AFTER_NAMESPACE();
