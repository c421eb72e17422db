// The forward's shapes, and what a block has of its rows in registers: scores, sums and the softmax between them.
#pragma once

#include "kernels/cuda/tile.cuh"

namespace longspan::cuda {

/// Pairs: what options make of pairs of rows (pairs.cuh). kLists: block masks. Head dims between those instantiated run
/// with columns of zeros.
/// kCrowded: three blocks on a multiprocessor, not two; for items of one length, of which small problems have a few.
/// kCloses: strands may be so long that sums are closed; a loop without has registers to spare for other things.
template <class MathValue, int kColumnsValue, class PairsValue, bool kListsValue, bool kCrowdedValue, bool kClosesValue>
struct ForwardShape {
  using Math = MathValue;
  using Pairs = PairsValue;
  static constexpr int kColumns = kColumnsValue;
  static constexpr bool kLists = kListsValue, kCloses = kClosesValue;
  static constexpr int kWarps = 4;
  // float32 as scaled numbers (scaled.cuh): at head dims over 64 conversion takes more than TF32 products do.
  static constexpr bool kScaled = kWide<Math> && kColumns <= (std::is_same_v<Math, SplitFloat> ? 128 : 64);
  static constexpr int kRowTiles = kColumns > (kWide<Math> ? 64 : 128) || (kWide<Math> && !kScaled) ? 1 : 2;
  static constexpr bool kSmall = !kWide<Math> && !Pairs::kRuled && (kColumns <= 48 || kCrowdedValue);
  static constexpr int kKeys = kWide<Math> && kColumns > 128                                            ? 32
                               : !kWide<Math> && kColumns == 64 && !Pairs::kRuled && !kLists && !kSmall ? 128
                                                                                                        : 64;
  static constexpr int kStages = kSmall ? 2 : 1;  // of K and of V; with two there is one barrier in a tile
  static constexpr int kBlocksPerSm = kSmall ? 3 : kWide<Math> && kColumns > 64 && !kScaled ? 1 : 2;
  static constexpr bool kHalves = kCrowdedValue;  // items may be half tiles: see Schedule::decode_halves
};

template <class Shape, int kRowTilesValue = Shape::kRowTiles>
struct ForwardTile {
  using Math = typename Shape::Math;
  static constexpr int kColumns = Shape::kColumns, kKeys = Shape::kKeys, kRowTiles = kRowTilesValue;
  static constexpr int kThreads = Shape::kWarps * kWarpThreads, kRows = 16 * kRowTiles * Shape::kWarps;
  static constexpr int kPitch = pitch_of<Math>(kColumns), kKeyBytes = kKeys * kPitch;
  static constexpr int kSharedBytes = kRows * kPitch + 2 * Shape::kStages * kKeyBytes;
  static constexpr float kLargeBase = 1 << 20;
  float scores[kRowTiles][kKeys / 8][4];
  float out[kRowTiles][kColumns / 8][4];
  float largest[kRowTiles][2];
  float sum[kRowTiles][2];

  __device__ __forceinline__ static float base_of(float value) { return value == -LONGSPAN_INFINITY ? 0.0f : value; }

  /// Raises a row's maximum; what is summed so far is scaled to it.
  __device__ __forceinline__ void raise(int m, int half, float to) {
    const float correction = fast_exp2(largest[m][half] - base_of(to));
    largest[m][half] = to;
    sum[m][half] *= correction;
#pragma unroll
    for (int n = 0; n < kColumns / 8; ++n) {
      out[m][n][2 * half] *= correction;
      out[m][n][2 * half + 1] *= correction;
    }
  }

  /// scores become probabilities relative to the row's maximum. factor(m, half) takes scores to base-2 exponents. Rows
  /// side by side in every step: each alone is one long chain of dependent instructions.
  template <class Factor>
  __device__ __forceinline__ void softmax(const Factor& factor) {
    float highest[kRowTiles][2], total[kRowTiles][2];
    for_each_row([&](int m, int half) { highest[m][half] = scores[m][0][2 * half]; });
#pragma unroll
    for (int n = 0; n < kKeys / 8; ++n) {
      for_each_row([&](int m, int half) {
        highest[m][half] = fmaxf(highest[m][half], fmaxf(scores[m][n][2 * half], scores[m][n][2 * half + 1]));
      });
    }
#pragma unroll
    for (int distance = 1; distance <= 2; distance *= 2) {
      for_each_row([&](int m, int half) {
        highest[m][half] = fmaxf(highest[m][half], __shfl_xor_sync(~0u, highest[m][half], distance));
      });
    }
    float most = 0.0f;
    for_each_row([&](int m, int half) {
      raise(m, half, fmaxf(largest[m][half], __fmul_rn(highest[m][half], factor(m, half))));
      highest[m][half] = base_of(largest[m][half]);
      total[m][half] = 0.0f;
      most = fmaxf(most, fabsf(highest[m][half]));
    });
    if (most > kLargeBase) subtract_large(factor, highest);
#pragma unroll
    for (int n = 0; n < kKeys / 8; ++n) {
      for_each_row([&](int m, int half) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          float& score = scores[m][n][2 * half + i];
          score = fast_exp2(fmaf(score, factor(m, half), -highest[m][half]));
          total[m][half] += score;
        }
      });
    }
    for_each_row([&](int m, int half) { sum[m][half] += total[m][half]; });
  }

  /// Of maxima so large that their rounding would be a factor of weights: scores are rounded as the maximum was, so
  /// that none lies above it, and become what they lie below it.
  template <class Factor>
  __device__ __forceinline__ void subtract_large(const Factor& factor, float (&base)[kRowTiles][2]) {
    for_each_row([&](int m, int half) {
      const float back = 1.0f / factor(m, half);
      if (!(fabsf(base[m][half]) > kLargeBase)) return;
#pragma unroll
      for (int n = 0; n < kKeys / 8; ++n)
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          float& score = scores[m][n][2 * half + i];
          score = __fadd_rn(__fmul_rn(score, factor(m, half)), -base[m][half]) * back;
        }
      base[m][half] = 0.0f;
    });
  }

  /// Adds totals of closed sums (closed_sums.cuh), which were summed up relative to maxima of their time.
  __device__ __forceinline__ void add_totals(const float* totals) {
    for_each_row([&](int m, int half) {
      const float* const of_row = totals + (m * 2 + half) * (2 + kColumns / 4) * kThreads;
      const float factor = fast_exp2(of_row[0] - base_of(largest[m][half]));
      sum[m][half] = fmaf(of_row[kThreads], factor, sum[m][half]);
#pragma unroll
      for (int i = 0; i < kColumns / 4; ++i) {
        float& value = out[m][i / 2][2 * half + i % 2];
        value = fmaf(of_row[(2 + i) * kThreads], factor, value);
      }
    });
  }
  /// Puts sums down as totals and begins new ones.
  __device__ __forceinline__ void close_sums(float* totals, bool first) {
    if (!first) add_totals(totals);
    for_each_row([&](int m, int half) {
      float* const of_row = totals + (m * 2 + half) * (2 + kColumns / 4) * kThreads;
      of_row[0] = largest[m][half];
      of_row[kThreads] = sum[m][half];
      sum[m][half] = 0.0f;
#pragma unroll
      for (int i = 0; i < kColumns / 4; ++i) {
        float& value = out[m][i / 2][2 * half + i % 2];
        of_row[(2 + i) * kThreads] = value;
        value = 0.0f;
      }
    });
  }

  template <class Body>
  __device__ __forceinline__ static void for_each_row(Body&& body) {
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) body(m, half);
  }
};

}  // namespace longspan::cuda
