// Vectors of floats for the instruction set this file is compiled for: exp2, loads of any storage, row helpers.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>

#include "hwy/cache_control.h"
#include "hwy/contrib/math/math-inl.h"
#include "hwy/highway.h"
#include "kernels/cpu/engine.h"
#include "memory/arena.h"
#include "util/half.h"

HWY_BEFORE_NAMESPACE();
namespace longspan::cpu {
namespace HWY_NAMESPACE {
namespace {

namespace hn = hwy::HWY_NAMESPACE;
using FloatTag = hn::ScalableTag<float>;
using V = hn::Vec<FloatTag>;
#if HWY_TARGET == HWY_SVE_256
typedef V Held __attribute__((arm_sve_vector_bits(256)));  // a vector that arrays can hold
#else
using Held = V;
#endif
constexpr FloatTag kFloat;
constexpr hn::RebindToSigned<FloatTag> kInt;
constexpr int kLanes = static_cast<int>(hn::MaxLanes(FloatTag()));

constexpr float kLog2e = 1.44269504088896341f;
constexpr float kLn2 = 0.69314718055994531f;
constexpr float kInfinity = std::numeric_limits<float>::infinity();

constexpr std::int64_t round_up(std::int64_t value, std::int64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

HWY_INLINE V load(const float* source) { return hn::LoadU(kFloat, source); }
HWY_INLINE void store(V value, float* target) { hn::StoreU(value, kFloat, target); }
HWY_INLINE V broadcast(float value) { return hn::Set(kFloat, value); }
HWY_INLINE float sum_lanes(V value) { return hn::GetLane(hn::SumOfLanes(kFloat, value)); }
HWY_INLINE float max_lanes(V value) { return hn::GetLane(hn::MaxOfLanes(kFloat, value)); }

/// Whether a multiply-add rounds once. Without, products of queries and keys are only exact for 16-bit inputs, so
/// queries are left as they are and scores are scaled after the maximum was subtracted.
constexpr bool kFused = HWY_NATIVE_FMA;

/// (score - base) * factor.
HWY_INLINE V exponent(V score, V base, V shift, V factor) {
  if constexpr (kFused) return hn::MulAdd(score, factor, shift);  // shift is -base * factor
  else return hn::Mul(hn::Sub(score, base), factor);
}

// 2^fraction. Degree 5: relative error 1.5e-7. Degree 4: 2.7e-6, for weights that are rounded to bfloat16 (4e-3) while
// their sum must stay good to 1e-5.
#if HWY_TARGET <= HWY_AVX3 && HWY_ARCH_X86
// Fraction from 0 to 1: one instruction splits x, and scalef rounds its exponent down by itself.
constexpr float kExp2Degree4[] = {0.0135341678f, 0.0520114601f, 0.241442755f, 0.693003833f, 1.00000262f};
constexpr float kExp2Degree5[] = {0.00187778415f, 0.00898912735f, 0.0558261722f,
                                  0.240153819f,   0.693153024f,   0.99999994f};
#else
// Fraction from -1/2 to 1/2.
constexpr float kExp2Degree4[] = {0.00957010221f, 0.0559178591f, 0.240247443f, 0.693121791f, 0.999999285f};
constexpr float kExp2Degree5[] = {0.00132764181f, 0.0096755409f, 0.0555071344f,
                                  0.240221197f,   0.693146967f,  1.00000007f};
#endif
template <int kDegree>
HWY_INLINE V exp2_fraction(V fraction) {
  const float* const terms = kDegree == 5 ? kExp2Degree5 : kExp2Degree4;
  V sum = broadcast(terms[0]);
  HWY_UNROLL(8)
  for (int term = 1; term <= kDegree; ++term) sum = hn::MulAdd(sum, fraction, broadcast(terms[term]));
  return sum;
}

/// 2^x for x up to about 127. 0 below -126: no denormal number arises, and masked scores of -1e30 are exact no-ops. NaN
/// stays NaN.
template <int kDegree>
HWY_INLINE V exp2(V x) {
#if HWY_TARGET <= HWY_AVX3 && HWY_ARCH_X86
  const V p = exp2_fraction<kDegree>(V{_mm512_reduce_ps(x.raw, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC)});
  const __mmask16 normal = _mm512_cmp_ps_mask(x.raw, _mm512_set1_ps(-126.0f), _CMP_NLE_UQ);
  return V{_mm512_maskz_scalef_ps(normal, p.raw, x.raw)};
#else
  // The compare keeps NaN, which a maximum would drop on some machines.
  const V lowest = broadcast(-126.0f);
  const auto below = hn::Lt(x, lowest);
  x = hn::IfThenElse(below, lowest, x);
  // Adding 1.5 * 2^23 + 127 rounds to an integer and leaves it, biased as an exponent, in the lowest bits.
  const V magic = broadcast(12583039.0f);
  const V rounded = hn::Add(x, magic);
  const V p = exp2_fraction<kDegree>(hn::Sub(x, hn::Sub(rounded, magic)));
  const V power = hn::BitCast(kFloat, hn::ShiftLeft<23>(hn::BitCast(kInt, rounded)));
  return hn::IfThenZeroElse(below, hn::Mul(p, power));
#endif
}

/// min(x, 0), and NaN where x is.
HWY_INLINE V at_most_zero(V x) {
#if HWY_ARCH_X86
  return hn::Min(hn::Zero(kFloat), x);  // which gives the second where either is NaN
#else
  return hn::IfThenElse(hn::Gt(x, hn::Zero(kFloat)), hn::Zero(kFloat), x);
#endif
}

/// While it lives, results too small for a normal number become 0 instead of denormal numbers, which cost processors up
/// to a hundred cycles each. Inputs are read as they are. (AArch64 computes denormal numbers at full speed.)
class NoDenormals {
 public:
#if HWY_ARCH_X86
  NoDenormals() : before_(_mm_getcsr()) { _mm_setcsr(before_ | 0x8000u); }
  ~NoDenormals() { _mm_setcsr(before_); }
  NoDenormals(const NoDenormals&) = delete;
  NoDenormals& operator=(const NoDenormals&) = delete;

 private:
  const unsigned before_;
#else
  NoDenormals() {}
#endif
};

/// A scalar with the very bits that a lane of exp2 would have: corrections are the same whoever computes them.
HWY_INLINE float exp2_scalar(float x) { return x <= -126.0f ? 0.0f : hn::GetLane(exp2<5>(broadcast(x))); }

/// Natural logarithm; what is not finite stays as it is.
HWY_INLINE V natural_log(V x) { return hn::IfThenElse(hn::IsFinite(x), hn::Log(kFloat, x), x); }

// ---- storage: rows of float32, bfloat16 or float16, in and out

HWY_INLINE V load_storage(const float* source) { return load(source); }
HWY_INLINE V load_storage(const BFloat16* source) {
  const hn::Rebind<hwy::bfloat16_t, FloatTag> tag;
  return hn::PromoteTo(kFloat, hn::LoadU(tag, reinterpret_cast<const hwy::bfloat16_t*>(source)));
}
HWY_INLINE V load_storage(const Float16* source) {
#if HWY_TARGET == HWY_SSE4
  // No conversion instruction, and Highway's substitute makes numbers of NaN.
  float values[kLanes];
  for (int lane = 0; lane < kLanes; ++lane) values[lane] = to_float(source[lane]);
  return load(values);
#else
  const hn::Rebind<hwy::float16_t, FloatTag> tag;
  return hn::PromoteTo(kFloat, hn::LoadU(tag, reinterpret_cast<const hwy::float16_t*>(source)));
#endif
}
HWY_INLINE void store_storage(V value, float* target) { store(value, target); }
HWY_INLINE void store_storage(V value, BFloat16* target) {
#if defined(LONGSPAN_CONVERTS_BF16)
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(target), reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(value.raw)));
#else
  // Round to nearest even by integers: Highway's own conversion truncates on some targets. NaN keeps its top bits.
  const hn::RebindToUnsigned<FloatTag> bits_tag;
  const auto bits = hn::BitCast(bits_tag, value);
  const auto odd = hn::And(hn::ShiftRight<16>(bits), hn::Set(bits_tag, 1));
  const auto rounded = hn::Add(bits, hn::Add(odd, hn::Set(bits_tag, 0x7FFF)));
  const auto quiet = hn::Or(bits, hn::Set(bits_tag, 0x400000));
  const auto is_nan = hn::RebindMask(bits_tag, hn::IsNaN(value));
  const auto result = hn::ShiftRight<16>(hn::IfThenElse(is_nan, quiet, rounded));
  const hn::Rebind<std::uint16_t, FloatTag> half_tag;
  hn::StoreU(hn::DemoteTo(half_tag, hn::BitCast(kInt, result)), half_tag, reinterpret_cast<std::uint16_t*>(target));
#endif
}
HWY_INLINE void store_storage(V value, Float16* target) {
#if HWY_TARGET == HWY_SSE4
  // No conversion instruction, and Highway's substitute truncates.
  float values[kLanes];
  store(value, values);
  for (int lane = 0; lane < kLanes; ++lane) target[lane] = from_float<Float16>(values[lane]);
#else
  const hn::Rebind<hwy::float16_t, FloatTag> half_tag;
  hn::StoreU(hn::DemoteTo(half_tag, value), half_tag, reinterpret_cast<hwy::float16_t*>(target));
#endif
}

/// target[0 .. padded) = factor * row, zero beyond its columns.
template <class Storage>
HWY_INLINE void widen_row(float* target, const Storage* source, float factor, std::int64_t columns,
                          std::int64_t padded) {
  const V scale = broadcast(factor);
  std::int64_t column = 0;
  for (; column + kLanes <= columns; column += kLanes) {
    store(hn::Mul(load_storage(source + column), scale), target + column);
  }
  for (; column < columns; ++column) target[column] = to_float(source[column]) * factor;
  for (; column < padded; ++column) target[column] = 0.0f;
}

/// target = factor * source, or old_factor * target + factor * source.
template <class Storage>
HWY_INLINE void write_row(Storage* target, const float* source, float factor, std::int64_t columns) {
  const V scale = broadcast(factor);
  std::int64_t column = 0;
  for (; column + kLanes <= columns; column += kLanes) {
    store_storage(hn::Mul(load(source + column), scale), target + column);
  }
  for (; column < columns; ++column) target[column] = from_float<Storage>(source[column] * factor);
}
/// The same by non-temporal stores, which leave the cache to others; hwy::FlushStream() comes before anyone may read
/// it.
HWY_INLINE void write_row_non_temporal(float* target, const float* source, float factor, std::int64_t columns) {
  if (reinterpret_cast<std::uintptr_t>(target) % (kLanes * sizeof(float)) != 0 || columns % kLanes != 0)
    return write_row(target, source, factor, columns);
  const V scale = broadcast(factor);
  for (std::int64_t column = 0; column < columns; column += kLanes)
    hn::Stream(hn::Mul(load(source + column), scale), kFloat, target + column);
}
HWY_INLINE void mix_row(float* target, float old_factor, const float* source, float factor, std::int64_t columns) {
  const V scale = broadcast(factor), old_scale = broadcast(old_factor);
  std::int64_t column = 0;
  for (; column + kLanes <= columns; column += kLanes) {
    store(hn::MulAdd(load(source + column), scale, hn::Mul(load(target + column), old_scale)), target + column);
  }
  for (; column < columns; ++column) {
    target[column] = std::fma(source[column], factor, target[column] * old_factor);
  }
}

template <class Storage>
HWY_INLINE float dot_rows(const Storage* a, const Storage* b, std::int64_t columns) {
  V sums = hn::Zero(kFloat);
  std::int64_t column = 0;
  for (; column + kLanes <= columns; column += kLanes) {
    sums = hn::MulAdd(load_storage(a + column), load_storage(b + column), sums);
  }
  float sum = sum_lanes(sums);
  for (; column < columns; ++column) sum += to_float(a[column]) * to_float(b[column]);
  return sum;
}

void store_row(DType dtype, void* target, const float* source, float factor, std::int64_t columns) {
  if (dtype == DType::f32) write_row(static_cast<float*>(target), source, factor, columns);
  else if (dtype == DType::bf16) write_row(static_cast<BFloat16*>(target), source, factor, columns);
  else write_row(static_cast<Float16*>(target), source, factor, columns);
}

/// Parts of a task's memory, with a cache line to spare behind each for whole-vector tails.
inline Arena task_memory(std::byte* memory) { return Arena(memory, 64, 64); }

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace longspan::cpu
HWY_AFTER_NAMESPACE();
