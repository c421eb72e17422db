// Online softmax of the two rows that a thread of a consumer warp group has, 8 apart: of each it holds two columns in
// every 8. Everything is decided row by row, so that a row's bits are its own.
#pragma once

#include "kernels/cuda/fill.cuh"
#include "kernels/hopper/launch.h"
#include "kernels/ptx/hopper.cuh"

namespace longspan::hopper {

using cuda::fast_exp2;

/// Rows whose maximum grew by less than kSlack, in base 2, keep the old one. No more than that, since the weight of a
/// key that has nearly all of it is rounded then, where it would be 1 (docs/hopper_backward.md, "Errors").
inline constexpr float kSlack = 2.0f;
/// Beyond this, rounding a product and its difference from the maximum at once gives other bits than rounding the
/// maximum did: weights could overflow. Products are then rounded first, as the maximum was.
inline constexpr float kLarge = 16384.0f;

__device__ __forceinline__ float finite(float largest) { return largest == -LONGSPAN_INFINITY ? 0.0f : largest; }

template <int kKeys>
struct Softmax {
  // Of weights, a thread's own until finish; what is added to scores in base 2, the maximum's negative; beyond which
  // score the maximum is raised.
  float sum[2], shift[2], limit[2];
  float found[2];  // the maxima, from finish on

  __device__ __forceinline__ void begin() {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      sum[half] = 0.0f;
      set_largest(half, -LONGSPAN_INFINITY);
    }
  }
  /// The maximum of scores in base 2.
  __device__ __forceinline__ float largest(int half) const {
    const float grow = limit[half] != -LONGSPAN_INFINITY ? 1.0f : kGrow;
    return grow != 1.0f && shift[half] == 0.0f ? -LONGSPAN_INFINITY : -shift[half] * grow * grow;
  }
  /// The largest scores of a thread's rows in columns [kBegin, kEnd) of the tile.
  template <int kBegin = 0, int kEnd = kKeys>
  __device__ __forceinline__ static void find_top(const float (&scores)[kKeys / 2], float (&top)[2]) {
    constexpr int kFirst = kBegin / 2;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float even = fmaxf(scores[kFirst + 2 * half], scores[kFirst + 2 * half + 1]);
      float odd = fmaxf(scores[kFirst + 2 * half + 4], scores[kFirst + 2 * half + 5]);
#pragma unroll
      for (int j = kFirst + 8 + 2 * half; j < kEnd / 2; j += 8) {
        even = fmaxf(even, fmaxf(scores[j], scores[j + 1]));
        odd = fmaxf(odd, fmaxf(scores[j + 4], scores[j + 5]));
      }
      top[half] = fmaxf(even, odd);
    }
  }
  /// The same of whole rows, which four threads have together.
  __device__ __forceinline__ static void share_top(float (&top)[2]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      top[half] = fmaxf(top[half], __shfl_xor_sync(~0u, top[half], 1));
      top[half] = fmaxf(top[half], __shfl_xor_sync(~0u, top[half], 2));
    }
  }
  /// Raises the maxima of rows that grew too far. Returns whether any of the warp's did; `correction` is 1 for others.
  __device__ __forceinline__ bool raise(float (&scores)[kKeys / 2], float factor, float (&correction)[2]) {
    float top[2];
    find_top(scores, top);
    share_top(top);
    top[0] *= factor, top[1] *= factor;
    return raise(scores, factor, top, correction, [] {});
  }
  /// The same for rows of which the largest score in base 2 is known. `prepare` may change both where one grew.
  template <class Prepare>
  __device__ __forceinline__ bool raise(float (&scores)[kKeys / 2], float factor, const float (&top)[2],
                                        float (&correction)[2], const Prepare& prepare) {
    const bool any = __any_sync(~0u, top[0] > limit[0] || top[1] > limit[1]);
    if (any) {
      prepare();
      bool large = false;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float before = largest(half), next = top[half] > before + kSlack ? top[half] : before;
        correction[half] = fast_exp2(before - finite(next));
        set_largest(half, next);
        sum[half] *= correction[half];
        large |= is_large(half);
      }
      if (__builtin_expect(__any_sync(~0u, large), 0)) subtract_large(scores, factor);
    }
    return any;
  }
  /// Whether scores of a row had its maximum subtracted from them before exponentiate.
  __device__ __forceinline__ bool is_large(int half) const { return fabsf(finite(largest(half))) > kLarge; }
  /// scores become weights, exp2(score * factor - maximum), and are summed.
  __device__ __forceinline__ void exponentiate(float (&scores)[kKeys / 2], float factor) {
    exponentiate(scores, factor, [&](int j) { return shift[j / 2 % 2]; });
  }
  /// The same with something else to be added to each score in base 2.
  template <class Shift>
  __device__ __forceinline__ void exponentiate(float (&scores)[kKeys / 2], float factor, const Shift& shift_of) {
    float part[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
    for (int j = 0; j < kKeys / 2; ++j) {
      scores[j] = fast_exp2(fmaf(scores[j], factor, shift_of(j)));
      part[j % 4] += scores[j];
    }
    sum[0] += part[0] + part[1];
    sum[1] += part[2] + part[3];
  }
  /// The whole sum of each row, of which threads had parts, and of `padding` keys of score 0.
  __device__ __forceinline__ void finish(int padding, float (&correction)[2]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      found[half] = largest(half);
      sum[half] += __shfl_xor_sync(~0u, sum[half], 1);
      sum[half] += __shfl_xor_sync(~0u, sum[half], 2);
      correction[half] = 1.0f;
      if (padding > 0) {
        const float next = fmaxf(found[half], 0.0f);
        correction[half] = fast_exp2(found[half] - next);
        found[half] = next;
        sum[half] = fmaf(static_cast<float>(padding), fast_exp2(-next), sum[half] * correction[half]);
      }
    }
  }
  __device__ __forceinline__ float lse(int half) const {
    return sum[half] == 0.0f ? -LONGSPAN_INFINITY : (finite(found[half]) + __log2f(sum[half])) * cuda::kLn2;
  }

 private:
  // Rows with large maxima never have a limit, so that `raise` sees their scores and takes the maximum off. What
  // exponentiate then still adds is the maximum times 2^-140: too little to count, and where the maximum is kept.
  static constexpr float kGrow = 0x1p70f, kShrink = 0x1p-70f;
  __device__ __forceinline__ void set_largest(int half, float value) {
    const bool large = fabsf(finite(value)) > kLarge;
    const float shrink = large ? kShrink : 1.0f;
    shift[half] = -finite(value) * shrink * shrink;
    limit[half] = large ? -LONGSPAN_INFINITY : value + kSlack;
  }
  __device__ __forceinline__ void subtract_large(float (&scores)[kKeys / 2], float factor) const {
    const float unit = 1.0f / factor, most[2] = {largest(0), largest(1)};
    const bool large[2] = {is_large(0), is_large(1)};
#pragma unroll
    for (int j = 0; j < kKeys / 2; ++j)
      if (large[j / 2 % 2]) scores[j] = (__fmul_rn(scores[j], factor) - most[j / 2 % 2]) * unit;
  }
};

/// Sums that were closed: maxima, row sums and values, in memory, thread by thread. Tensor cores truncate what they
/// add, so a running sum loses half a unit of its last place with every product; sums of many tiles, counted from the
/// strand's start (with lists: from the list's end), are therefore closed and added up in float32. Row sums close a
/// tile later than values, whose last product comes with the next tile's scores.
template <int kColumns>
struct Totals {
  float* own;
  __device__ __forceinline__ float& at(int index) const { return own[index * kGroupThreads]; }
  template <class Sums>
  __device__ __forceinline__ void close(Sums& sums, float (&out)[kColumns / 2], bool first) const {
    if (!first) {
      add_sums(sums);
      add_values(out);
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      at(half) = sums.largest(half);
      at(2 + half) = sums.sum[half];
      sums.sum[half] = 0.0f;
    }
#pragma unroll
    for (int j = 0; j < kColumns / 2; ++j) at(4 + j) = out[j];
  }
  /// Adds to row sums; what takes values to the same maximum is left in the place of the maxima.
  template <class Sums>
  __device__ __forceinline__ void add_sums(Sums& sums) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float factor = fast_exp2(at(half) - finite(sums.largest(half)));
      at(half) = factor;
      sums.sum[half] = fmaf(at(2 + half), factor, sums.sum[half]);
    }
  }
  __device__ __forceinline__ void add_values(float (&out)[kColumns / 2]) const {
    const float factor[2] = {at(0), at(1)};
#pragma unroll
    for (int j = 0; j < kColumns / 2; ++j) out[j] = fmaf(at(4 + j), factor[j / 2 % 2], out[j]);
  }
};

}  // namespace longspan::hopper
