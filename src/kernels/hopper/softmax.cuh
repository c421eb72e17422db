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
  float largest[2], sum[2];  // of scores in base 2; of weights, a thread's own until finish

  __device__ __forceinline__ void begin() {
    largest[0] = largest[1] = -LONGSPAN_INFINITY;
    sum[0] = sum[1] = 0.0f;
  }
  /// Raises the maxima of rows that grew too far. Returns whether any of the warp's did; `correction` is 1 for others.
  __device__ __forceinline__ bool raise(const float (&scores)[kKeys / 2], float factor, float (&correction)[2]) {
    float even[2] = {fmaxf(scores[0], scores[1]), fmaxf(scores[2], scores[3])};
    float odd[2] = {fmaxf(scores[4], scores[5]), fmaxf(scores[6], scores[7])};
#pragma unroll
    for (int j = 8; j < kKeys / 2; j += 8) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        even[half] = fmaxf(even[half], fmaxf(scores[j + 2 * half], scores[j + 2 * half + 1]));
        odd[half] = fmaxf(odd[half], fmaxf(scores[j + 2 * half + 4], scores[j + 2 * half + 5]));
      }
    }
    float top[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      top[half] = fmaxf(even[half], odd[half]);
      top[half] = fmaxf(top[half], __shfl_xor_sync(~0u, top[half], 1));
      top[half] = fmaxf(top[half], __shfl_xor_sync(~0u, top[half], 2)) * factor;
    }
    const bool grew[2] = {top[0] > largest[0] + kSlack, top[1] > largest[1] + kSlack};
    const bool any = __any_sync(~0u, grew[0] || grew[1]);
    if (any) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float next = grew[half] ? top[half] : largest[half];
        correction[half] = fast_exp2(largest[half] - finite(next));
        largest[half] = next;
        sum[half] *= correction[half];
      }
    }
    return any;
  }
  /// scores become weights, exp2(score * factor - maximum), and are summed.
  __device__ __forceinline__ void exponentiate(float (&scores)[kKeys / 2], float factor) {
    float shift[2] = {-finite(largest[0]), -finite(largest[1])};
    if (__any_sync(~0u, fmaxf(fabsf(shift[0]), fabsf(shift[1])) > kLarge)) subtract_large(scores, factor, shift);
    float part[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
    for (int j = 0; j < kKeys / 2; ++j) {
      scores[j] = fast_exp2(fmaf(scores[j], factor, shift[j / 2 % 2]));
      part[j % 4] += scores[j];
    }
    sum[0] += part[0] + part[1];
    sum[1] += part[2] + part[3];
  }
  /// The whole sum of each row, of which threads had parts, and of `padding` keys of score 0.
  __device__ __forceinline__ void finish(int padding, float (&correction)[2]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      sum[half] += __shfl_xor_sync(~0u, sum[half], 1);
      sum[half] += __shfl_xor_sync(~0u, sum[half], 2);
      correction[half] = 1.0f;
      if (padding > 0) {
        const float next = fmaxf(largest[half], 0.0f);
        correction[half] = fast_exp2(largest[half] - next);
        largest[half] = next;
        sum[half] = fmaf(static_cast<float>(padding), fast_exp2(-next), sum[half] * correction[half]);
      }
    }
  }
  __device__ __forceinline__ float lse(int half) const {
    return sum[half] == 0.0f ? -LONGSPAN_INFINITY : (finite(largest[half]) + __log2f(sum[half])) * cuda::kLn2;
  }

 private:
  /// Subtracts the maxima that are large; exponentiate has none to subtract from those rows then.
  __device__ __forceinline__ void subtract_large(float (&scores)[kKeys / 2], float factor, float (&shift)[2]) const {
    const float unit = 1.0f / factor;
    const bool large[2] = {fabsf(shift[0]) > kLarge, fabsf(shift[1]) > kLarge};
#pragma unroll
    for (int j = 0; j < kKeys / 2; ++j)
      if (large[j / 2 % 2]) scores[j] = (__fmul_rn(scores[j], factor) + shift[j / 2 % 2]) * unit;
#pragma unroll
    for (int half = 0; half < 2; ++half)
      if (large[half]) shift[half] = 0.0f;
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
      at(half) = sums.largest[half];
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
      const float factor = fast_exp2(at(half) - finite(sums.largest[half]));
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
