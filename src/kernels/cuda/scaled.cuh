// float32 on float16 matrix units, for forwards. A row becomes float16 numbers times a power of two of its own: one
// number for each of its own, which has the 11 bits of TF32, or two, which have float32's: what the first one leaves is
// the second. Three of their four products together are as exact as float32 products.
//   A row's largest number becomes 2^14 to 2^15, so that numbers 2^-29 (the second ones: 2^-18) of it and less lose
//   bits, the last one at 2^-40 of it. Powers of two are a row's own, so what becomes of it depends on no other row.
//   In a tile the rows of second numbers follow all of the first.
#pragma once

#include "kernels/cuda/tile.cuh"

namespace longspan::cuda {

template <class Math>
inline constexpr bool kSplits = std::is_same_v<Math, SplitFloat>;

/// Powers of two as a float's bits, where 2^-127 is 0; of a row: of its largest number, within what the kernel can
/// multiply with.
inline constexpr std::uint32_t kPowerUnit = 1u << 23, kLeastPower = 30 * kPowerUnit, kInfinitePower = 255 * kPowerUnit;
/// Rows become so much larger than numbers between 1 and 2.
inline constexpr int kScaledPower = 14;

__device__ __forceinline__ float power_of_two(std::uint32_t bits) { return __uint_as_float(bits); }
/// 2^14 times the quotient of two of them, where that is not too small.
__device__ __forceinline__ float scaled_quotient(std::uint32_t power, std::uint32_t by) {
  return power_of_two(max(static_cast<int>(power - by) + static_cast<int>((127 + kScaledPower) * kPowerUnit), 0));
}

/// Two numbers as first and, of exact ones, second numbers.
template <class Math>
__device__ __forceinline__ void split_pair(std::uint32_t& first, std::uint32_t& second, float x, float y) {
  const __half2 rounded = __floats2half2_rn(x, y);
  first = *reinterpret_cast<const std::uint32_t*>(&rounded);
  if constexpr (kSplits<Math>) {
    const float2 of_first = __half22float2(rounded);
    second = pack<__half>(x - of_first.x, y - of_first.y);
  }
}

/// Some rows of float32 in the registers of a block, on their way to scaled ones in shared memory: kLanes threads have
/// a row, and every row in kStep.
template <class Math, int kColumns, int kRows, int kThreads>
struct ScaledRows {
  static constexpr int kPitch = kColumns * 2, kSecond = kRows * kPitch;
  static constexpr int kLanes = kColumns / 4 < kWarpThreads ? kColumns / 4 : kWarpThreads;
  static constexpr int kParts = kColumns / 4 / kLanes, kStep = kThreads / kLanes, kTimes = kRows / kStep;
  static_assert(kRows % kStep == 0);

  float4 numbers[kTimes][kParts];

  __device__ __forceinline__ static int row_of(int i) { return static_cast<int>(threadIdx.x) / kLanes + i * kStep; }
  __device__ __forceinline__ static int chunk_of(int part) {
    return static_cast<int>(threadIdx.x) % kLanes + part * kLanes;
  }

  /// From memory, rows as load_rows() has them.
  __device__ __forceinline__ void fetch(const char* base, std::int64_t step, int first, int count, int columns) {
    const char* const own = base + (first + row_of(0)) * step + chunk_of(0) * 16;
    if (first + kRows <= count && columns == kColumns) fetch_each(own, step, [](int, int) { return true; });
    else
      fetch_each(own, step, [&](int i, int part) { return first + row_of(i) < count && chunk_of(part) * 4 < columns; });
  }
  /// From a tile of float32 in shared memory, whose place scaled rows then take.
  __device__ __forceinline__ void fetch(std::uint32_t tile) {
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kTimes; ++i)
#pragma unroll
      for (int part = 0; part < kParts; ++part)
        numbers[i][part] = load_shared_four(tile + chunk_offset<pitch_of<Math>(kColumns)>(row_of(i), chunk_of(part)));
    __syncthreads();
  }

  /// Scales rows and stores them; tell(row, power) by one thread of each.
  template <class Tell>
  __device__ __forceinline__ void store(std::uint32_t tile, Tell&& tell) const {
    std::uint32_t power[kTimes];
    const std::uint32_t most = find_powers(power, [](float x) { return fabsf(x); });
    if (__any_sync(~0u, most == kInfinitePower))
      find_powers(power, [](float x) { return fabsf(x) < LONGSPAN_INFINITY ? fabsf(x) : 0.0f; });
    if (threadIdx.x % kLanes == 0) {
#pragma unroll
      for (int i = 0; i < kTimes; ++i) tell(row_of(i), power[i]);
    }
#pragma unroll
    for (int i = 0; i < kTimes; ++i) {
      const float factor = power_of_two((2 * 127 + kScaledPower) * kPowerUnit - power[i]);
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
        const float4& x = numbers[i][part];
        std::uint32_t first[2], second[2];
        split_pair<Math>(first[0], second[0], x.x * factor, x.y * factor);
        split_pair<Math>(first[1], second[1], x.z * factor, x.w * factor);
        const int chunk = chunk_of(part);
        const std::uint32_t target = tile + chunk_offset<kPitch>(row_of(i), chunk / 2) + chunk % 2 * 8;
        store_shared(target, first);
        if constexpr (kSplits<Math>) store_shared(target + kSecond, second);
      }
    }
  }

 private:
  template <class Exists>
  __device__ __forceinline__ void fetch_each(const char* row, std::int64_t step, Exists&& exists) {
#pragma unroll
    for (int i = 0; i < kTimes; ++i, row += kStep * step)
#pragma unroll
      for (int part = 0; part < kParts; ++part)
        numbers[i][part] = exists(i, part) ? *reinterpret_cast<const float4*>(row + part * kLanes * 16) : float4{};
  }
  /// Of the largest number of each row, which a NaN is not; and the largest of these.
  template <class Size>
  __device__ __forceinline__ std::uint32_t find_powers(std::uint32_t (&power)[kTimes], Size&& size) const {
#pragma unroll
    for (int i = 0; i < kTimes; ++i) {
      float largest = 0.0f;
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
        const float4& x = numbers[i][part];
        largest = fmaxf(fmaxf(fmaxf(largest, size(x.x)), fmaxf(size(x.y), size(x.z))), size(x.w));
      }
      power[i] = __float_as_uint(largest);
    }
    if constexpr (kLanes == kWarpThreads) {
#pragma unroll
      for (int i = 0; i < kTimes; ++i) power[i] = __reduce_max_sync(~0u, power[i]);
    } else {
#pragma unroll
      for (int distance = 1; distance < kLanes; distance *= 2)
#pragma unroll
        for (int i = 0; i < kTimes; ++i) power[i] = max(power[i], __shfl_xor_sync(~0u, power[i], distance));
    }
    std::uint32_t most = 0;
#pragma unroll
    for (int i = 0; i < kTimes; ++i) most = max(most, power[i] = max(power[i] & kInfinitePower, kLeastPower));
    return most;
  }
};

/// First and second numbers of an operand.
template <class Math>
using ScaledFragment = Fragment[kSplits<Math> ? 2 : 1];

/// sums of two blocks of columns += a b: products of first numbers, or the small ones with second numbers.
template <class Math, bool kSmall, int kRowTiles, int kBlocks>
__device__ __forceinline__ void multiply_add_scaled(float (&sums)[kRowTiles][kBlocks][4], int block,
                                                    const ScaledFragment<Math> (&a)[kRowTiles],
                                                    const ScaledFragment<Math>& b) {
#pragma unroll
  for (int product = 0; product < (kSmall ? 2 : 1); ++product) {
    const int of_a = kSmall && product == 0 ? 1 : 0, of_b = kSmall && product == 1 ? 1 : 0;
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m)
#pragma unroll
      for (int i = 0; i < 2; ++i) multiply_add_f16(sums[m][block + i], a[m][of_a], b[of_b][2 * i], b[of_b][2 * i + 1]);
  }
}
/// Calls body<kSmall> for small products, where there are any, and then for those of first numbers: matrix units
/// truncate what they add, in the place of the larger one's last bits.
template <class Math, class Body>
__device__ __forceinline__ void for_small_and_large(Body&& body) {
  if constexpr (kSplits<Math>) body.template operator()<true>();
  body.template operator()<false>();
}

/// multiply_rows() of scaled tiles, whose second numbers are kSecondA and kSecondB bytes after the first. Exact sums of
/// wide heads are added up step by step.
template <class Math, int kColumns, int kSecondA, int kSecondB, int kRowTiles, int kBlocks>
__device__ __forceinline__ void multiply_scaled_rows(float (&sums)[kRowTiles][kBlocks][4], std::uint32_t a_tile,
                                                     int a_row, std::uint32_t b_tile) {
  constexpr int kPitch = kColumns * 2;
  constexpr bool kBySteps = kSplits<Math> && kColumns > 128;
  clear(sums);
  for_small_and_large<Math>([&]<bool kSmall>() {
#pragma unroll
    for (int step = 0; step < kColumns / 16; ++step) {
      ScaledFragment<Math> a[kRowTiles];
#pragma unroll
      for (int m = 0; m < kRowTiles; ++m) {
        load_a<kPitch>(a[m][0], a_tile, a_row + 16 * m, step);
        if constexpr (kSmall) load_a<kPitch>(a[m][1], a_tile + kSecondA, a_row + 16 * m, step);
      }
#pragma unroll
      for (int n = 0; n < kBlocks; n += 2) {
        ScaledFragment<Math> b;
        load_b_transposed<kPitch>(b[0], b_tile, n * 8, step);
        if constexpr (kSmall) load_b_transposed<kPitch>(b[1], b_tile + kSecondB, n * 8, step);
        if constexpr (kBySteps && !kSmall) {
          float part[kRowTiles][2][4];
          clear(part);
          multiply_add_scaled<Math, false>(part, 0, a, b);
#pragma unroll
          for (int m = 0; m < kRowTiles; ++m)
#pragma unroll
            for (int i = 0; i < 8; ++i) sums[m][n + i / 4][i % 4] += part[m][i / 4][i % 4];
        } else {
          multiply_add_scaled<Math, kSmall>(sums, n, a, b);
        }
      }
    }
  });
}

/// sums += factor of a row * weights * tile, whose rows are kSteps * 16; what matrix units add up is a tile's alone,
/// since they truncate.
template <class Math, int kColumns, int kSecond, int kRowTiles, int kKeyBlocks>
__device__ __forceinline__ void accumulate_scaled(
    float (&sums)[kRowTiles][kColumns / 8][4],
    const std::uint32_t (&words)[kRowTiles][kKeyBlocks][kSplits<Math> ? 4 : 2], const float (&factor)[kRowTiles][2],
    std::uint32_t tile) {
  constexpr int kGroup = 4;
#pragma unroll
  for (int group = 0; group < kColumns / 8; group += kGroup) {
    float part[kRowTiles][kGroup][4];
    clear(part);
    for_small_and_large<Math>([&]<bool kSmall>() {
#pragma unroll
      for (int step = 0; step < kKeyBlocks / 2; ++step) {
        ScaledFragment<Math> a[kRowTiles];
#pragma unroll
        for (int m = 0; m < kRowTiles; ++m)
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            a[m][0][i] = words[m][2 * step + i / 2][i % 2];
            if constexpr (kSmall) a[m][1][i] = words[m][2 * step + i / 2][2 + i % 2];
          }
#pragma unroll
        for (int n = 0; n < kGroup; n += 2) {
          ScaledFragment<Math> b;
          load_b<__half, kColumns * 2>(b[0], tile, step * 16, (group + n) / 2);
          if constexpr (kSmall) load_b<__half, kColumns * 2>(b[1], tile + kSecond, step * 16, (group + n) / 2);
          multiply_add_scaled<Math, kSmall>(part, n, a, b);
        }
      }
    });
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m)
#pragma unroll
      for (int n = 0; n < kGroup; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i)
          sums[m][group + n][i] = fmaf(part[m][n][i], factor[m][i / 2], sums[m][group + n][i]);
  }
}

}  // namespace longspan::cuda
