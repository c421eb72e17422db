// key_mask and dropout in the Hopper backward, for kernels that have options (BackwardExtras).
//   key_mask  the warp that looks up items turns it into a bit for each key of the tile; the warp that loads writes
//             zeros over excluded rows of K and V, and consumers mask their scores.
//   dropout   One Philox call decides pairs of one query and eight keys, and a thread of S^T has keys of two rows: the
//             threads of a group share the calls of its tile and pass each other the bits through shared memory, as
//             words of 32 keys for each query. They draw them while products of the tile before are under way.
#pragma once

#include "kernels/hopper/backward_shape.cuh"
#include "util/philox.h"

namespace longspan::hopper {

/// Scores to base 2 with ALiBi's bias, which off the diagonal of a strand is linear. `first`: rows of the strand from
/// the group's first key to the tile's first query; `away`: from a thread's first key to its first query.
template <int kScores>
__device__ __forceinline__ void rescale(float (&scores)[kScores], float factor, float bias, int first, int away) {
  const float start = static_cast<float>(away);
  const bool after = first >= kGroupRows - 1;
  if (after || first + 2 * kScores - 1 <= 0) {
    const float step = after ? -bias : bias, upper = step * start, lower = step * (start - 8);
#pragma unroll
    for (int i = 0; i < kScores; ++i) {
      const float column = static_cast<float>(i / 4 * 8 + i % 2);
      scores[i] = fmaf(scores[i], factor, fmaf(step, column, i % 4 < 2 ? upper : lower));
    }
  } else {
#pragma unroll
    for (int i = 0; i < kScores; ++i) {
      const float column = static_cast<float>(i / 4 * 8 + i % 2 - i % 4 / 2 * 8);
      scores[i] = fmaf(scores[i], factor, -bias * fabsf(start + column));
    }
  }
}

/// The bits of a tile for one group: of 32 keys and one query in byte `pair` bit 2 * word + half, as DropoutRule has
/// them.
template <class S>
__device__ __forceinline__ void draw_bits(const cuda::Rules& rules, std::uint32_t bits, std::uint32_t position,
                                          std::uint32_t stride, PhiloxBlock counter) {
  std::uint64_t seed = rules.seed_pointer ? *rules.seed_pointer : rules.seed;
  asm volatile("" : "+l"(seed));  // what follows from it would be kept in registers from tile to tile
  const std::uint32_t carries = (0x10000u - rules.drop_threshold) << 16;  // added to a half at the top: if it is kept
  const int thread = threadIdx.x % kGroupThreads, keys = thread / kWarpThreads % 2, pair = thread % 4;
  counter[1] += static_cast<std::uint32_t>(4 * keys + pair);
#pragma unroll
  for (int i = 0; i < S::kOwnQueries / 16; ++i) {
    const int query = i * 16 + thread / (2 * kWarpThreads) * 8 + thread % kWarpThreads / 4;
    counter[0] = position + static_cast<std::uint32_t>(query) * stride;
    const PhiloxBlock words = philox4x32<kDropoutRounds>(seed, counter);
    std::uint32_t kept = 0;
#pragma unroll
    for (int word = 3; word >= 0; --word) {
      kept = add_carry(words[word], carries, kept);
      kept = add_carry(words[word] << 16, carries, kept);
    }
    store_byte(bits + (keys * S::kOwnQueries + query) * 4 + pair, kept);
  }
}

/// P of pairs that are dropped gets a minus: dV leaves them out, and dP, but delta's share of dS has their P.
template <class S>
__device__ __forceinline__ void mark_dropped(float (&weights)[S::kOwnQueries / 2], std::uint32_t bits) {
  const int lane = threadIdx.x % kWarpThreads, warp = threadIdx.x / kWarpThreads % 4;
  const std::uint32_t words = bits + (warp / 2 * S::kOwnQueries + lane % 4 * 2) * 4;
  const int upper = 31 - (lane / 8 * 8 + warp % 2 * 4 + lane / 4 % 2), lower = upper - 2;  // brings bits to the top
#pragma unroll
  for (int j = 0; j < S::kOwnQueries / 2; j += 4) {
    const uint2 two = load_two(words + j * 8);
    const auto mark = [](float& weight, std::uint32_t kept) {
      weight = __uint_as_float(__float_as_uint(weight) | (~kept & 0x80000000u));
    };
    mark(weights[j], two.x << upper);
    mark(weights[j + 1], two.y << upper);
    mark(weights[j + 2], two.x << lower);
    mark(weights[j + 3], two.y << lower);
  }
}
/// Two floats rounded to nearest, 0 where they have a minus.
template <class T>
__device__ __forceinline__ std::uint32_t pack_kept(float low, float high) {
  std::uint32_t both;
  if constexpr (std::is_same_v<T, __half>)
    asm("cvt.rn.relu.f16x2.f32 %0, %1, %2;\n" : "=r"(both) : "f"(high), "f"(low));
  else asm("cvt.rn.relu.bf16x2.f32 %0, %1, %2;\n" : "=r"(both) : "f"(high), "f"(low));
  return both;
}

/// Overwrites a thread's numbers of excluded keys: of every four, two are of its first key and two of the one 8 after.
template <class Item, int kCount>
__device__ __forceinline__ void overwrite_excluded(const Item& task, int key, float (&numbers)[kCount], float with) {
  const bool upper = task.allows(key), lower = task.allows(key + 8);
#pragma unroll
  for (int i = 0; i < kCount; ++i)
    if (!(i % 4 < 2 ? upper : lower)) numbers[i] = with;
}

/// How many keys of an item's tile come before the first that key_mask excludes, if it excludes all after that; else
/// -1.
template <class Item>
__device__ __forceinline__ int leading_keys(const cuda::Launch& base, const Item& task, int lane) {
  int leading = 0;
  bool ended = false, leads = true;
#pragma unroll 1
  for (int first = 0; first < task.keys; first += kWarpThreads) {
    const int key = first + lane;
    const std::uint32_t bits =
        __ballot_sync(~0u, key < task.keys && base.rules.allowed(task.entry, task.position + key * task.stride));
    leads = leads && (bits & (bits + 1)) == 0 && !(ended && bits != 0);
    leading += __popc(bits);
    ended = ended || bits != ~0u;
  }
  return leads ? leading : -1;
}

/// Which keys of an item's tile may be attended to, by a whole warp; false if none.
template <class S>
__device__ __forceinline__ bool find_allowed(const cuda::Launch& base, typename S::Item& task, int lane) {
  std::uint32_t any = 0;
  bool hides = false;
#pragma unroll
  for (int word = 0; word < S::kKeys / 32; ++word) {
    const int key = word * 32 + lane;
    const bool there = key < task.keys;
    const bool allowed = there && base.rules.allowed(task.entry, task.position + key * task.stride);
    const std::uint32_t bits = __ballot_sync(~0u, allowed);
    hides = hides || __any_sync(~0u, there && !allowed);
    if (lane == 0) task.allowed[word] = bits;
    any |= bits;
  }
  if (lane == 0) task.hides = hides;
  return any != 0;
}

}  // namespace longspan::hopper
