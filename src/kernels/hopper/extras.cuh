// Options of a call that plain calls do not have, in the Hopper forward: key_mask, ALiBi, scales that are not positive,
// dropout. A shape with kExtras has all of them, as branches that a whole warp takes; others have none of this.
//   key_mask  a producer warp makes a word of bits for each thread's columns of a tile, and zeros of excluded values
//   ALiBi     scores become multiples of the slope, so that a distance is added to them by one fused multiply-add with
//             columns as constants: exact, since distances are whole numbers
//   dropout   one call of Philox gives the eight half-words of 32 keys that a thread has of a row
#pragma once

#include "kernels/hopper/shape.cuh"
#include "kernels/hopper/softmax.cuh"
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
              (task.position - static_cast<std::int64_t>(task.first_query) * task.stride) * a.rules.key_mask_row),
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
  /// Whether all from `begin` to `end` are allowed, by a warp. Only bytes in a row are looked at.
  __device__ __forceinline__ bool all_allowed(int begin, int end, int lane) const {
    constexpr int kBytes = sizeof(uint4);
    const auto skew = static_cast<int>(reinterpret_cast<std::uintptr_t>(first + begin) % kBytes);
    const int middle = min(begin + (kBytes - skew) % kBytes, end), last = middle + (end - middle) / kBytes * kBytes;
    bool all = step == 1;
    if (all && lane < middle - begin) all = allowed(begin + lane);
    if (all && lane < end - last) all = allowed(last + lane);
    all = __all_sync(~0u, all);
    for (int at = middle; all && at < last; at += kBytes * cuda::kWarpThreads) {
      const int own = at + lane * kBytes;
      uint4 bytes = make_uint4(~0u, ~0u, ~0u, ~0u);
      if (own < last) bytes = *reinterpret_cast<const uint4*>(first + own);
      all = __all_sync(
          ~0u, (__vcmpeq4(bytes.x, 0) | __vcmpeq4(bytes.y, 0) | __vcmpeq4(bytes.z, 0) | __vcmpeq4(bytes.w, 0)) == 0);
    }
    return all;
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
  /// Whether a lane's keys are allowed, one of each word: `key`, and every second after it.
  struct Bytes {
    bool allowed[4];
    __device__ __forceinline__ Bytes(const MaskedKeys& keys, int key, int lane) {
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
  /// Excluded rows of K or V become zeros: 0 times NaN is NaN, and scores of 0 are known. A lane has every 32nd key,
  /// whose bits are in one word; where it begins in a row keeps lanes in different banks.
  __device__ __forceinline__ void clear_excluded(std::uint32_t rows, int lane) const {
    const unsigned own = (lane & 4   ? lane & 2 ? word[3] : word[2]
                            : lane & 2 ? word[1]
                                     : word[0]) >>
                         (lane / 8 * 2 + lane % 2);
    const std::uint32_t first = rows + lane * 128 + lane % 8 * 16;
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
/// What a loop over tiles knows of its item's options: only what it has to do is in its code. kAny looks each time.
enum class Loop { kPlain, kMasked, kLinear, kGeneral, kAny };
template <class S>
struct Extras {
  static constexpr int kKeys = S::kKeys, kPart = 32;
  static constexpr float kLeastSlope = 0x1p-60f;  // no distance times less than this changes a score
  // By how much the bound of a part of a tile may be above its largest score: weights must remain normal numbers.
  static constexpr float kMostAbove = std::is_same_v<typename S::Element, __half> ? 2.0f : 80.0f;
  using Scores = float[kKeys / 2];
  float factor = 1.0f;  // takes scores to base 2: not negative
  // Dropout leaves no registers for more than one way.
  static constexpr bool kHasWays = !S::kDrops && !S::kParts;
  // kMasked: key_mask excludes keys of the item; kOnlyMasked: that is all. kLinear: ALiBi is
  // added when exponentials are taken; kExact: distances are part of scores, in units of the slope; kFalling: which is
  // negative. kScales: products have another sign.
  static constexpr int kMasked = 1, kOnlyMasked = 2, kLinear = 4, kExact = 8, kFalling = 16, kScales = 32;
  int modes = 0;
  float slope = 0.0f;      // in base 2; kExact: what makes scores of products
  int own_row, group_row;  // first row of the thread, of its group, in the strand
  // Keys of the tile whose values and scores are 0 because key_mask excludes them; they have to leave the sums.
  float excluded[2];
  // Dropout: keys of Philox, the threshold of the upper half of a word, and what its first rounds make of what is the
  // same for all keys of a row.
  std::uint32_t key0, key1, threshold, first_word;
  std::uint32_t row_words[2][3];

  template <class Item>
  __device__ __forceinline__ void begin(const cuda::Launch& a, const Item& task, int thread_row, int first_row) {
    own_row = thread_row;
    group_row = first_row;
    if constexpr (S::kDrops) begin_rows(a, task);
    const float scale = a.rules.scale * cuda::kLog2E, found = __shfl_sync(~0u, task.slope, 0);
    const float size = fabsf(found) < kLeastSlope ? 0.0f : fabsf(found);
    const bool plain = size == 0.0f && scale > 0.0f;
    const bool linear = kHasWays && size * kPart <= kMostAbove && scale > 0.0f && !task.masked;
    const bool exact = size != 0.0f && !linear;
    factor = exact ? size : scale == 0.0f ? 1.0f : fabsf(scale);
    slope = exact ? scale / factor : found;
    const int own_modes = (size == 0.0f ? 0
                           : linear     ? kLinear
                                        : kExact) |
                          (found < 0.0f ? kFalling : 0) | (plain || linear || exact ? 0 : kScales) |
                          (task.masked && plain && kHasWays ? kOnlyMasked : 0);
    modes = __shfl_sync(~0u, own_modes | (task.masked ? kMasked : 0), 0);
  }
  __device__ __forceinline__ bool is(int mode) const { return modes & mode; }
  __device__ __forceinline__ Loop loop() const {
    if (is(kLinear)) return Loop::kLinear;
    if (is(kOnlyMasked)) return Loop::kMasked;
    return is(kMasked | kExact | kScales) ? Loop::kGeneral : Loop::kPlain;
  }
  /// Whether a loop may have items of a mode.
  template <Loop kLoop>
  __device__ __forceinline__ bool may(int mode) const {
    if constexpr (kLoop == Loop::kPlain) return false;
    if constexpr (kLoop == Loop::kMasked) return mode & (kMasked | kOnlyMasked);
    if constexpr (kLoop == Loop::kLinear) return mode & kLinear;
    if constexpr (kLoop == Loop::kGeneral || !kHasWays) return mode & ~(kOnlyMasked | kLinear) & modes;
    return is(mode);
  }
  /// Whether it subtracts what excluded keys add to sums.
  template <Loop kLoop>
  __device__ __forceinline__ bool subtracts() const {
    return S::kClearsKeys && may<kLoop>(kOnlyMasked);
  }

  /// What is the same in a whole warp, in a form that shows it.
  __device__ __forceinline__ static bool together(bool condition) { return __any_sync(~0u, condition); }
  /// From the thread's row to its first key.
  __device__ __forceinline__ float first_distance(int first_key) const {
    return static_cast<float>(first_key - own_row + static_cast<int>(threadIdx.x) % 4 * 2);
  }
  /// Whether keys of a tile lie on both sides of a row of the group, and are seen from it.
  __device__ __forceinline__ bool is_across(int first_key, bool causal) const {
    return !causal && first_key + kKeys > group_row + 1 && first_key < group_row + kGroupRows;
  }
  /// Makes scores of products: all but what grows linearly along the tile with `slope`.
  __device__ __forceinline__ void score(Scores& scores, int first_key, bool causal, float scale) const {
    const float first = first_distance(first_key);
    // Of rows and keys of a tile either is the larger one, but where a mask that is not causal has the diagonal.
    const bool below = causal || first_key + kKeys <= group_row + 1;
    if (is(kExact) && together(!is_across(first_key, causal))) add_distances(scores, below != is(kFalling), first);
    else score_columns(scores, first, scale);
  }
  /// Adds distances from a key `first` after the thread's row on, with the sign that they have in that direction.
  __device__ __forceinline__ void add_distances(Scores& scores, bool upwards, float first) const {
    const float turn = upwards ? 1.0f : -1.0f, start = turn * first;
    // A row 8 further down is as far from a column as this row is from the column 8 before.
    float before[2] = {fmaf(turn, -8.0f, start), fmaf(turn, -7.0f, start)};
#pragma unroll
    for (int j = 0; j < kKeys / 2; j += 4) {
#pragma unroll
      for (int column = 0; column < 2; ++column) {
        const float distance = fmaf(turn, static_cast<float>(2 * j + column), start);
        scores[j + column] = fmaf(scores[j + column], slope, distance);
        scores[j + 2 + column] = fmaf(scores[j + 2 + column], slope, before[column]);
        before[column] = distance;
      }
    }
  }
  /// The same for a tile in parts (lists.cuh), each with a first key of its own.
  template <class Note, int kBegin = 0>
  __device__ __forceinline__ void score_parts(Scores& scores, const Note& note, float scale) const {
    constexpr int kEnd = kBegin + kPartRows;
    score_columns<kBegin, kEnd>(scores, first_distance(note.first_key(kBegin / kPartRows)), scale);
    if constexpr (kEnd < kKeys) score_parts<Note, kEnd>(scores, note, scale);
  }
  /// Columns [kBegin, kEnd), of which the first is `first` after the thread's row.
  template <int kBegin = 0, int kEnd = kKeys>
  __device__ __forceinline__ void score_columns(Scores& scores, float first, float scale) const {
    if (is(kExact)) {
      const float sign = is(kFalling) ? 1.0f : -1.0f;
#pragma unroll
      for (int j = kBegin / 2; j < kEnd / 2; ++j) {
        const float distance = fabsf(first + static_cast<float>(j / 4 * 8 - kBegin + j % 2 - j / 2 % 2 * 8));
        scores[j] = fmaf(scores[j], slope, sign * distance);
      }
    } else if (is(kScales)) {
#pragma unroll
      for (int j = kBegin / 2; j < kEnd / 2; ++j) scores[j] *= scale < 0.0f ? -1.0f : 0.0f;
    }
  }
  /// Where the line of `turn_of` goes on beyond a row, the other way from there on.
  __device__ __forceinline__ void turn_back(Scores& scores, int first_key) const {
    const float first = first_distance(first_key);
    float twice[2];
#pragma unroll
    for (int half = 0; half < 2; ++half)
      twice[half] = turn_of(first_key, half) == slope ? -2.0f * slope / factor : 0.0f;
#pragma unroll
    for (int j = 0; j < kKeys / 2; ++j) {
      const float beyond = fmaxf(0.0f, first + static_cast<float>(j / 4 * 8 + j % 2 - j / 2 % 2 * 8));
      scores[j] = fmaf(twice[j / 2 % 2], beyond, scores[j]);
    }
  }
  /// Leaves out keys without a bit, of rows for which they count.
  __device__ __forceinline__ static void exclude(Scores& scores, unsigned allowed, bool upper, bool lower) {
#pragma unroll
    for (int j = 0; j < kKeys / 2; j += 4) {
#pragma unroll
      for (int column = 0; column < 2; ++column) {
        if (allowed >> (j / 2 + column) & 1) continue;
        if (upper) scores[j + column] = -LONGSPAN_INFINITY;
        if (lower) scores[j + 2 + column] = -LONGSPAN_INFINITY;
      }
    }
  }
  /// Leaves out keys without a bit: by what their scores of 0 add to sums, or at once in rows of which the tile has
  /// other keys than theirs (`upper`, `lower`), and where few keys are left.
  __device__ __forceinline__ void subtract(Scores& scores, unsigned allowed, bool upper, bool lower) {
    constexpr int kColumns = kKeys / 4;
    const bool few = together(2 * __popc(allowed) < kColumns);
    const auto count = static_cast<float>(kColumns - __popc(allowed));
    upper |= few, lower |= few;
    excluded[0] = upper ? 0.0f : count;
    excluded[1] = lower ? 0.0f : count;
    if (together(upper || lower)) exclude(scores, allowed, upper, lower);
  }
  /// Scores of 0 of excluded keys must not be what raises a maximum, nor meet a large one.
  template <class Softmax>
  __device__ __forceinline__ void prepare(const Softmax& softmax, Scores& scores, unsigned allowed, float (&top)[2]) {
    if (!together(excluded[0] > 0.0f || excluded[1] > 0.0f)) return;
    bool own[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      own[half] =
          softmax.is_large(half) || top[half] > kLarge || (top[half] <= 0.0f && top[half] > softmax.limit[half]);
      if (own[half]) excluded[half] = 0.0f;
    }
    if (!together(own[0] || own[1])) return;
    exclude(scores, allowed, own[0], own[1]);
    float exact[2];
    Softmax::find_top(scores, exact);
    Softmax::share_top(exact);
#pragma unroll
    for (int half = 0; half < 2; ++half)
      if (own[half]) top[half] = exact[half] * factor;
  }

  // ALiBi by `slope`: distances are linear in the key, so that they are added with the maximum, to a shift of which
  // every column has its own. Maxima then are bounds: the largest score of 32 keys and their least distance.
  /// What a key adds to the one before it, in the eyes of a row.
  __device__ __forceinline__ float turn_of(int first_key, int half) const {
    return first_key < own_row + 8 * half ? slope : -slope;
  }
  template <class Softmax, int kBegin = 0>
  __device__ __forceinline__ void bound_tops(const Scores& scores, const float (&turn)[2], const float (&start)[2],
                                             float (&top)[2]) const {
    constexpr int kEnd = kBegin + kPart < kKeys ? kBegin + kPart : kKeys;
    float part[2];
    Softmax::template find_top<kBegin, kEnd>(scores, part);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float bias = fmaf(turn[half], static_cast<float>(turn[half] > 0.0f ? kEnd - 1 : kBegin), start[half]);
      const float bound = fmaf(part[half], factor, bias);
      top[half] = kBegin == 0 ? bound : fmaxf(top[half], bound);
    }
    if constexpr (kEnd < kKeys) bound_tops<Softmax, kEnd>(scores, turn, start, top);
  }
  /// The largest scores in base 2.
  template <Loop kLoop, class Softmax>
  __device__ __forceinline__ void find_tops(const Scores& scores, int first_key, float (&top)[2]) const {
    if (may<kLoop>(kLinear)) {
      const float turn[2] = {turn_of(first_key, 0), turn_of(first_key, 1)};
      const float first = static_cast<float>(first_key - own_row);
      const float start[2] = {turn[0] * first, turn[1] * (first - 8.0f)};
      bound_tops<Softmax>(scores, turn, start, top);
      Softmax::share_top(top);
    } else {
      Softmax::find_top(scores, top);
      Softmax::share_top(top);
      top[0] *= factor, top[1] *= factor;
    }
  }
  /// scores become weights.
  template <Loop kLoop, class Softmax>
  __device__ __forceinline__ void exponentiate(Softmax& softmax, Scores& scores, int first_key) {
    if (may<kLoop>(kLinear)) {
      const float turn[2] = {turn_of(first_key, 0), turn_of(first_key, 1)}, first = first_distance(first_key);
      const float start[2] = {fmaf(turn[0], first, softmax.shift[0]), fmaf(turn[1], first - 8.0f, softmax.shift[1])};
      softmax.exponentiate(scores, factor, [&](int j) {
        return fmaf(turn[j / 2 % 2], static_cast<float>(j / 4 * 8 + j % 2), start[j / 2 % 2]);
      });
      return;
    }
    softmax.exponentiate(scores, factor);
    if (!subtracts<kLoop>()) return;
#pragma unroll
    for (int half = 0; half < 2; ++half)
      if (excluded[half] > 0.0f) softmax.sum[half] -= excluded[half] * fast_exp2(softmax.shift[half]);
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
      row_words[half][0] = low(row) ^ round_key1(1);
      row_words[half][1] = low(second) ^ round_key0(2);
      row_words[half][2] = high(second) ^ low(head) ^ round_key0(1);
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
    const std::uint64_t third = std::uint64_t{kPhiloxFactor0} * row_words[half][2];
    PhiloxBlock c = {high(second) ^ row_words[half][1], low(second), low(first) ^ high(third) ^ round_key1(2),
                     low(third)};
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
  template <class Note>
  __device__ __forceinline__ void drop_parts(std::uint32_t (&weights)[kKeys / 4], const Note& note) const {
    if (threshold == 0) return;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int part = 0; part < kKeys / kPartRows; ++part) {
        const int key = note.first_key(part);
        const PhiloxBlock random = words(half, key / 32);
#pragma unroll
        for (int block = 0; block < 2; ++block)
          weights[(part * 2 + block) * 2 + half] &= kept(key / kPartRows % 2 ? random[2 + block] : random[block]);
      }
    }
  }
  /// The bits of a pair of weights that a word of Philox keeps.
  __device__ __forceinline__ std::uint32_t kept(std::uint32_t word) const {
    return (word << 16 >= threshold ? 0xFFFFu : 0) | (word >= threshold ? 0xFFFF0000u : 0);
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
          weights[(part * 2 + block) * 2 + half] &= kept(random[place % 2 * 2 + block]);
        }
      }
    }
  }
};

}  // namespace longspan::hopper
