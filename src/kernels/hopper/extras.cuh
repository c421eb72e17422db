// Options of a call that plain calls do not have, in the Hopper forward: key_mask, ALiBi, scales that are not positive,
// dropout. A shape with kExtras has all of them, as branches that a whole warp takes; others have none of this.
//   key_mask  a producer warp makes a word of bits for each thread's columns of a tile, and zeros of excluded values
//   ALiBi     scores become multiples of the slope, so that a distance is added to them by one fused multiply-add with
//             columns as constants: exact, since distances are whole numbers
//   dropout   one call of Philox gives the eight half-words of 32 keys that a thread has of a row
#pragma once

#include "kernels/hopper/shape.cuh"
#include "util/philox.h"

namespace longspan::hopper {

/// What key_mask says of an item's keys.
struct MaskedKeys {
  const std::uint8_t* first;  // of the strand
  std::int64_t step;
  int count;
  template <class Item>
  __device__ __forceinline__ MaskedKeys(const cuda::Launch& a, const Item& task)
      : first(a.rules.key_mask + task.entry * a.rules.key_mask_batch +
              (task.k_index * static_cast<std::int64_t>(task.stride) + task.k_phase) * a.rules.key_mask_row),
        step(task.stride * a.rules.key_mask_row),
        count(task.keys) {}
  __device__ __forceinline__ bool allowed(int key) const { return key >= 0 && key < count && first[key * step] != 0; }
  /// The first key that is allowed, or `count`; and one after the last, or 0. By a warp, which looks at 128 at a time.
  __device__ __forceinline__ int first_allowed(int lane) const {
    for (int begin = 0; begin < count; begin += 4 * cuda::kWarpThreads) {
      bool found[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) found[i] = allowed(begin + i * cuda::kWarpThreads + lane);
#pragma unroll
      for (int i = 0; i < 4; ++i)
        if (const unsigned lanes = __ballot_sync(~0u, found[i]))
          return begin + i * cuda::kWarpThreads + __ffs(lanes) - 1;
    }
    return count;
  }
  __device__ __forceinline__ int end_of_allowed(int lane) const {
    for (int end = count; end > 0; end -= 4 * cuda::kWarpThreads) {
      bool found[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) found[i] = allowed(end - 1 - i * cuda::kWarpThreads - lane);
#pragma unroll
      for (int i = 0; i < 4; ++i)
        if (const unsigned lanes = __ballot_sync(~0u, found[i])) return end - i * cuda::kWarpThreads - __ffs(lanes) + 1;
    }
    return 0;
  }
};

/// The bits of a tile of keys: bit b of word m is key 8 * (b / 2) + 2 * m + b % 2, so that a word is what one thread of
/// a group has columns of. Keys beyond the strand's are excluded.
template <class S>
struct TileBits {
  static constexpr unsigned kAll = ~0u >> (32 - S::kKeys / 4);
  unsigned word[4];
  /// Whether a lane's keys are allowed, one of each word.
  struct Bytes {
    bool allowed[4];
    __device__ __forceinline__ Bytes(const MaskedKeys& keys, int first_key, int lane) {
      const int key = first_key + lane / 2 * 8 + lane % 2;
      const std::uint8_t* const byte = keys.first + key * keys.step;
#pragma unroll
      for (int m = 0; m < 4; ++m)
        allowed[m] = lane < S::kKeys / 4 && key + 2 * m < keys.count && byte[2 * m * keys.step] != 0;
    }
  };
  __device__ __forceinline__ explicit TileBits(const Bytes& bytes) {
#pragma unroll
    for (int m = 0; m < 4; ++m) word[m] = __ballot_sync(~0u, bytes.allowed[m]);
  }
  __device__ __forceinline__ bool all() const { return (word[0] & word[1] & word[2] & word[3]) == kAll; }
  /// Excluded keys get weight 0, but 0 times NaN is NaN, so their values become zeros. A lane has every 32nd key, whose
  /// bits are in one word; where it begins in a row keeps lanes in different banks.
  __device__ __forceinline__ void clear_excluded(std::uint32_t values, int lane) const {
    const unsigned own = (lane & 4   ? lane & 2 ? word[3] : word[2]
                            : lane & 2 ? word[1]
                                     : word[0]) >>
                         (lane / 8 * 2 + lane % 2);
    const std::uint32_t first = values + lane * 128 + lane % 8 * 16;
#pragma unroll
    for (int key = 0; key < S::kKeys; key += cuda::kWarpThreads) {
      if (key + lane >= S::kKeys || own >> key / 4 & 1) continue;
#pragma unroll
      for (int chunk = 0; chunk < 8; ++chunk) {
#pragma unroll
        for (int block = 0; block < S::kBlocks; ++block)
          store_zeros((first ^ chunk * 16) + key * 128 + block * S::kKeyBlock);
      }
    }
  }
};

/// What a consumer thread knows of its item's options. Its scores are those of two rows, 8 apart; of each it has two
/// columns in every 8.
struct NoExtras {};
template <class S>
struct Extras {
  static constexpr int kKeys = S::kKeys;
  static constexpr float kLeastSlope = 0x1p-60f;  // no distance times less than this changes a score
  float factor = 1.0f;                            // takes scores to base 2: not negative
  float multiplier = 1.0f;                        // products times this, and less distances times `sign`, are scores
  float sign = 0.0f;                              // of the slope; 0: no ALiBi
  int own_row, group_row;                         // first row of the thread, of its group, in the strand
  // Dropout: keys of Philox, the threshold of the upper half of a word, and what its first rounds make of what is the
  // same for all keys of a row.
  std::uint32_t key0, key1, threshold, first_word;
  std::uint32_t row_words[2][4];

  template <class Item>
  __device__ __forceinline__ void begin(const cuda::Launch& a, const Item& task, int thread_row, int first_row) {
    own_row = thread_row;
    group_row = first_row;
    begin_rows(a, task);
    const float scale = a.rules.scale * cuda::kLog2E, slope = __shfl_sync(~0u, task.slope, 0);
    sign = fabsf(slope) < kLeastSlope ? 0.0f : copysignf(1.0f, slope);
    factor = sign != 0.0f ? fabsf(slope) : scale == 0.0f ? 1.0f : fabsf(scale);
    multiplier = scale / factor;  // without ALiBi 1, 0 or -1
  }

  /// What is the same in a whole warp, in a form that shows it.
  __device__ __forceinline__ static bool together(bool condition) { return __any_sync(~0u, condition); }
  /// Makes scores of products.
  __device__ __forceinline__ void score(float (&scores)[kKeys / 2], int first_key, bool causal) const {
    if (together(sign != 0.0f)) {
      // Of rows and keys of a tile either is the larger one, but where a mask that is not causal has the diagonal.
      const bool below = causal || first_key + kKeys <= group_row + 1;
      const float first = static_cast<float>(first_key - own_row + static_cast<int>(threadIdx.x) % 4 * 2);
      if (together(below || first_key >= group_row + kGroupRows)) add_distances(scores, below ? sign : -sign, first);
      else add_absolute_distances(scores, first);
    } else if (together(multiplier != 1.0f)) {
#pragma unroll
      for (int j = 0; j < kKeys / 2; ++j) scores[j] *= multiplier;
    }
  }
  /// Less distances from a key `first` after the thread's row on, if `turn` is `sign`; `first` before it, if it is not.
  __device__ __forceinline__ void add_distances(float (&scores)[kKeys / 2], float turn, float first) const {
    const float start = turn * first;
    // A row 8 further down is as far from a column as this row is from the column 8 before.
    float before[2] = {fmaf(turn, -8.0f, start), fmaf(turn, -7.0f, start)};
#pragma unroll
    for (int j = 0; j < kKeys / 2; j += 4) {
#pragma unroll
      for (int column = 0; column < 2; ++column) {
        const float distance = fmaf(turn, static_cast<float>(2 * j + column), start);
        scores[j + column] = fmaf(scores[j + column], multiplier, distance);
        scores[j + 2 + column] = fmaf(scores[j + 2 + column], multiplier, before[column]);
        before[column] = distance;
      }
    }
  }
  __device__ __forceinline__ void add_absolute_distances(float (&scores)[kKeys / 2], float first) const {
#pragma unroll
    for (int j = 0; j < kKeys / 2; ++j) {
      const float distance = fabsf(first + static_cast<float>(j / 4 * 8 + j % 2 - j / 2 % 2 * 8));
      scores[j] = fmaf(scores[j], multiplier, -sign * distance);
    }
  }
  /// Leaves out keys without a bit.
  __device__ __forceinline__ static void exclude(float (&scores)[kKeys / 2], unsigned allowed) {
#pragma unroll
    for (int j = 0; j < kKeys / 2; j += 4) {
#pragma unroll
      for (int column = 0; column < 2; ++column) {
        if (!(allowed >> (j / 2 + column) & 1)) scores[j + column] = scores[j + 2 + column] = -LONGSPAN_INFINITY;
      }
    }
  }

  // Words of Philox (util/philox.h) are those of a row's position, 32 keys, a head of a branch and an entry. Only the
  // keys change along a row, and their part of the counter reaches few words in the first three rounds.
  template <class Item>
  __device__ __forceinline__ void begin_rows(const cuda::Launch& a, const Item& task) {
    threshold = a.rules.dropout ? a.rules.drop_threshold << 16 : 0;
    if (threshold == 0) return;
    const std::uint64_t seed = a.rules.seed_pointer ? *a.rules.seed_pointer : a.rules.seed;
    key0 = static_cast<std::uint32_t>(seed), key1 = static_cast<std::uint32_t>(seed >> 32);
    const std::uint64_t head =
        std::uint64_t{kPhiloxFactor1} * static_cast<std::uint32_t>(task.branch * a.tensors.heads + task.head);
    first_word = high(head) ^ key0;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const std::uint32_t position = task.position + (own_row + 8 * half - task.first_query) * task.stride;
      const std::uint64_t row = std::uint64_t{kPhiloxFactor0} * position;
      const std::uint64_t second = std::uint64_t{kPhiloxFactor1} * (high(row) ^ task.entry ^ key1);
      const std::uint64_t third = std::uint64_t{kPhiloxFactor0} * (high(second) ^ low(head) ^ round_key0(1));
      row_words[half][0] = low(row) ^ round_key1(1);
      row_words[half][1] = low(second) ^ round_key0(2);
      row_words[half][2] = high(third) ^ round_key1(2);
      row_words[half][3] = low(third);
    }
  }
  __device__ __forceinline__ static std::uint32_t high(std::uint64_t x) { return static_cast<std::uint32_t>(x >> 32); }
  __device__ __forceinline__ static std::uint32_t low(std::uint64_t x) { return static_cast<std::uint32_t>(x); }
  __device__ __forceinline__ std::uint32_t round_key0(int round) const { return key0 + round * kPhiloxStep0; }
  __device__ __forceinline__ std::uint32_t round_key1(int round) const { return key1 + round * kPhiloxStep1; }
  /// The eight half-words of this thread's keys among the 32 keys from 32 * group on.
  __device__ __forceinline__ PhiloxBlock words(int half, int group) const {
    const std::uint32_t counter = 4 * group + threadIdx.x % 4;
    const std::uint64_t first = std::uint64_t{kPhiloxFactor0} * (first_word ^ counter);
    const std::uint64_t second = std::uint64_t{kPhiloxFactor1} * (high(first) ^ row_words[half][0]);
    PhiloxBlock c = {high(second) ^ row_words[half][1], low(second), low(first) ^ row_words[half][2],
                     row_words[half][3]};
#pragma unroll
    for (int round = 3; round < kDropoutRounds; ++round) {
      const std::uint64_t product0 = std::uint64_t{kPhiloxFactor0} * c[0],
                          product1 = std::uint64_t{kPhiloxFactor1} * c[2];
      c = {high(product1) ^ c[1] ^ round_key0(round), low(product1), high(product0) ^ c[3] ^ round_key1(round),
           low(product0)};
    }
    return c;
  }
  /// Drops weights: sums of rows have been taken before.
  __device__ __forceinline__ void drop(std::uint32_t (&weights)[kKeys / 4], int first_key) const {
    if (threshold == 0) return;
    if (kKeys % 32 != 0 && first_key % 32 != 0) drop_from<1>(weights, first_key / 32);
    else drop_from<0>(weights, first_key / 32);
  }
  /// kFirst: 1 if the tile begins in the middle of a group of 32 keys.
  template <int kFirst>
  __device__ __forceinline__ void drop_from(std::uint32_t (&weights)[kKeys / 4], int group) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      PhiloxBlock random;
#pragma unroll
      for (int part = 0; part < kKeys / 16; ++part) {
        const int place = kFirst + part;
        if (part == 0 || place % 2 == 0) random = words(half, group + place / 2);
#pragma unroll
        for (int block = 0; block < 2; ++block) {
          const std::uint32_t word = random[place % 2 * 2 + block];
          weights[(part * 2 + block) * 2 + half] &=
              (word << 16 >= threshold ? 0xFFFFu : 0) | (word >= threshold ? 0xFFFF0000u : 0);
        }
      }
    }
  }
};

}  // namespace longspan::hopper
