// bfloat16 in pairs: a unit is two neighbouring bfloat16 of the inner dimension, multiplied without being widened.
//   panels  [keys / kPanel][depth][kPanel]   a unit holds columns 2 d, 2 d + 1 of a key
//   values  [keys / 2][columns]              a unit holds one column of keys 2 k, 2 k + 1
// Needs AVX-512 BW and BF16: the including file adds avx512bf16 to HWY_TARGET_STR. Weights are rounded to bfloat16,
// sums are not; the dot product flushes denormals, as the instruction does.
#pragma once

#include "kernels/cpu/engine-inl.h"

HWY_BEFORE_NAMESPACE();
namespace longspan::cpu {
namespace HWY_NAMESPACE {
namespace {

struct PairProducts {
  static constexpr int kPerUnit = 2;
  static HWY_INLINE V mad(V sum, V a, V b) {
    return V{_mm512_dpbf16_ps(sum.raw, reinterpret_cast<__m512bh>(a.raw), reinterpret_cast<__m512bh>(b.raw))};
  }
};

/// 32 bfloat16: those of `low`, then those of `high`.
HWY_INLINE __m512i to_bf16(V low, V high) { return reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(high.raw, low.raw)); }

/// Element i of the first half beside element i of the second half.
HWY_INLINE __m512i interleave_halves(__m512i halves) {
  const __m512i order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6, 21,
                                         5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
  return _mm512_permutexvar_epi16(order, halves);
}

/// kDepthMultiple: units that a product takes at a time.
template <int kDepthMultiple>
struct PairLayout {
  using Products = PairProducts;
  static constexpr int kExpDegree = 4;
  static constexpr float kLargeExponent = 8192;
  static constexpr int kKeyMultiple = 2 * kDepthMultiple;
  DType dtype;
  std::int64_t head_dim, depth, columns;
  float score_factor, query_factor;

  PairLayout(DType type, std::int64_t dim, float scale)
      : dtype(type),
        head_dim(dim),
        depth(round_up((dim + 1) / 2, std::max(4, kDepthMultiple))),
        columns(round_up(dim, kLanes)),
        score_factor(std::abs(scale) * kLog2e),
        query_factor(scale < 0 ? -1.0f : 1.0f) {}

  std::int64_t row_bytes() const { return head_dim * 2; }
  std::int64_t query_stride() const { return depth; }
  std::int64_t query_stride_backward() const { return depth; }
  std::int64_t product_depth() const { return kDepthMultiple > 1 ? depth : (head_dim + 1) / 2; }
  static std::int64_t value_floats(std::int64_t keys, std::int64_t columns) {
    return round_up(keys, kKeyMultiple) / 2 * columns;
  }
  std::int64_t value_offset(std::int64_t key) const { return key / 2 * columns; }
  static float key_gradient_factor(float scale) { return std::abs(scale); }

  /// A row as it is, with the sign of a negative scale, zero beyond its columns.
  HWY_INLINE void copy_row(float* target, const std::byte* row, std::uint32_t sign) const {
    std::uint32_t* const units = reinterpret_cast<std::uint32_t*>(target);
    if (head_dim == 2 * depth && depth % kLanes == 0) {
      const __m512i flip = _mm512_set1_epi32(static_cast<int>(sign));
      for (std::int64_t unit = 0; unit < depth; unit += kLanes)
        _mm512_storeu_si512(units + unit, _mm512_xor_si512(_mm512_loadu_si512(row + unit * 4), flip));
      return;
    }
    const std::int64_t whole = head_dim / 2;
    std::memcpy(units, row, static_cast<std::size_t>(whole) * 4);
    std::int64_t unit = whole;
    if (head_dim % 2 != 0) {
      std::uint16_t last;
      std::memcpy(&last, row + whole * 4, 2);
      units[unit++] = last;
    }
    for (; unit < depth; ++unit) units[unit] = 0;
    if (sign != 0) {
      for (std::int64_t i = 0; i < depth; ++i) units[i] ^= sign;
    }
  }
  struct CopyRow {
    const PairLayout& layout;
    HWY_INLINE void operator()(float* target, const std::byte* row) const { layout.copy_row(target, row, 0); }
  };

  template <int kPanel>
  HWY_NOINLINE void pack_panels(float* target, const std::byte* const* rows, std::int64_t keys, float* scratch) const {
    pack_panels_with<kPanel>(target, rows, keys, depth, head_dim == 2 * depth, scratch, row_bytes(), CopyRow{*this});
  }
  void pack_query(float* target, const std::byte* row, float factor) const {
    copy_row(target, row, factor < 0 ? 0x80008000u : 0u);
  }
  /// Weights and dscores interleaved by query rows (for dv and dk), dscores also row by row (for dq).
  template <std::int64_t kKeyTile>
  static HWY_INLINE void put_pairs(float* weights, float* dscores, float* dscore_rows, std::int64_t row,
                                   std::int64_t key, V w0, V w1, V d0, V d1) {
    const __m512i d = to_bf16(d0, d1);
    _mm512_storeu_si512(weights + row / 2 * kKeyTile + key, interleave_halves(to_bf16(w0, w1)));
    _mm512_storeu_si512(dscores + row / 2 * kKeyTile + key, interleave_halves(d));
    float* const own = dscore_rows + row * (kKeyTile / 2) + key / 2;
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(own), _mm512_castsi512_si256(d));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(own + kKeyTile / 2), _mm512_extracti64x4_epi64(d, 1));
  }
  /// Rows two by two, column beside column.
  HWY_NOINLINE void pack_values(float* target, const std::byte* const* rows, std::int64_t keys) const {
    const __m512i low = _mm512_set_epi16(47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40, 8, 39, 7, 38, 6, 37,
                                         5, 36, 4, 35, 3, 34, 2, 33, 1, 32, 0);
    const __m512i high = _mm512_add_epi16(low, _mm512_set1_epi16(16));
    for (std::int64_t key = 0; key < keys; key += 2) {
      if (key + 9 < keys) {
        prefetch_row(rows[key + 8], row_bytes());
        prefetch_row(rows[key + 9], row_bytes());
      }
      float* const pair = target + key / 2 * columns;
      for (std::int64_t column = 0; column < columns; column += 32) {
        const std::int64_t left = std::min<std::int64_t>(32, head_dim - column);
        const __mmask32 valid = static_cast<__mmask32>(left == 32 ? ~0u : (1u << left) - 1);
        const __m512i even = _mm512_maskz_loadu_epi16(valid, rows[key] + column * 2);
        const __m512i odd = _mm512_maskz_loadu_epi16(valid, rows[key + 1] + column * 2);
        _mm512_storeu_si512(pair + column, _mm512_permutex2var_epi16(even, low, odd));
        if (column + 16 < columns) _mm512_storeu_si512(pair + column + 16, _mm512_permutex2var_epi16(even, high, odd));
      }
    }
  }
  HWY_NOINLINE void pack_queries(float* target, float* pairs, const std::byte* const* rows, std::int64_t count,
                                 float factor, float*) const {
    for (std::int64_t row = 0; row < count; ++row) pack_query(target + row * depth, rows[row], factor);
    pack_values(pairs, rows, count);
    if (factor < 0) {
      for (std::int64_t i = 0; i < count / 2 * columns; ++i) reinterpret_cast<std::uint32_t*>(pairs)[i] ^= 0x80008000u;
    }
  }

  static HWY_INLINE V weight(const float* scores, std::int64_t left, V scale, V shift, V& sums) {
    V value = exp2<kExpDegree>(hn::MulAdd(load(scores), scale, shift));
    if (left < kLanes)
      value = hn::IfThenElseZero(hn::FirstN(kFloat, static_cast<std::size_t>(std::max<std::int64_t>(left, 0))), value);
    sums = hn::Add(sums, value);
    return value;
  }
  template <bool kKeep>
  static HWY_INLINE void put_weights(float* target, __m512i weights, const std::uint16_t* keep) {
    if constexpr (kKeep) weights = _mm512_and_si512(weights, _mm512_loadu_si512(keep));
    _mm512_storeu_si512(target, weights);
  }
  /// As for floats; weights become bfloat16, 32 at a time, 0 up to a multiple of 32 beyond end.
  template <bool kKeep>
  static HWY_INLINE V weights(float* scores, float* weights, std::int64_t limit, std::int64_t end, float factor,
                              float base, const std::uint16_t* keep, V sums) {
    // Where rounding base * factor would change weights by more than bfloat16 does, base is subtracted before.
    if (HWY_UNLIKELY(std::abs(base * factor) > kLargeExponent)) {
      for (std::int64_t key = 0; key < limit; key += kLanes)
        store(hn::Sub(load(scores + key), broadcast(base)), scores + key);
      base = 0;
    }
    const V scale = broadcast(factor), shift = broadcast(-base * factor);
    std::int64_t key = 0;
    for (; key + 32 <= limit; key += 32) {
      const V first = weight(scores + key, kLanes, scale, shift, sums);
      const V second = weight(scores + key + 16, kLanes, scale, shift, sums);
      put_weights<kKeep>(weights + key / 2, to_bf16(first, second), keep + key);
    }
    if (key < limit) {
      const V first = weight(scores + key, limit - key, scale, shift, sums);
      const V second =
          key + 16 < limit ? weight(scores + key + 16, limit - key - 16, scale, shift, sums) : hn::Zero(kFloat);
      put_weights<kKeep>(weights + key / 2, to_bf16(first, second), keep + key);
      key += 32;
    }
    for (; key < end; key += 32) _mm512_storeu_si512(weights + key / 2, _mm512_setzero_si512());
    return sums;
  }
};

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace longspan::cpu
HWY_AFTER_NAMESPACE();
