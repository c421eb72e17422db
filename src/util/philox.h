// Philox4x32: the counter-based generator behind dropout (7 rounds) and random block masks (10). Same bits on every
// engine.
#pragma once

#include <array>
#include <cstdint>

namespace longspan {

inline constexpr std::uint32_t kPhiloxFactor0 = 0xD2511F53u, kPhiloxFactor1 = 0xCD9E8D57u;
inline constexpr std::uint32_t kPhiloxStep0 = 0x9E3779B9u, kPhiloxStep1 = 0xBB67AE85u;  // of the key, per round
inline constexpr int kPhiloxRounds = 10, kDropoutRounds = 7;

using PhiloxBlock = std::array<std::uint32_t, 4>;

template <int kRounds = kPhiloxRounds>
constexpr PhiloxBlock philox4x32(std::uint64_t key, PhiloxBlock counter) {
  std::uint32_t key0 = static_cast<std::uint32_t>(key);
  std::uint32_t key1 = static_cast<std::uint32_t>(key >> 32);
  for (int round = 0; round < kRounds; ++round) {
    const std::uint64_t product0 = std::uint64_t{kPhiloxFactor0} * counter[0];
    const std::uint64_t product1 = std::uint64_t{kPhiloxFactor1} * counter[2];
    counter = {static_cast<std::uint32_t>(product1 >> 32) ^ counter[1] ^ key0, static_cast<std::uint32_t>(product1),
               static_cast<std::uint32_t>(product0 >> 32) ^ counter[3] ^ key1, static_cast<std::uint32_t>(product0)};
    key0 += kPhiloxStep0;
    key1 += kPhiloxStep1;
  }
  return counter;
}

/// Decides which (query, key) pairs dropout keeps; free of tiles, threads and ranks. One Philox call decides eight
/// keys, 16 bits each, in the order in which the columns of a matrix-multiply fragment lie in a thread: the call of
/// counter 4 * group + pair has keys 32 * group + 8 * word + 2 * pair + half.
struct DropoutRule {
  std::uint64_t seed = 0;
  std::uint32_t threshold = 0;  // floor(p * 2^16)

  constexpr DropoutRule(double probability, std::uint64_t seed_value)
      : seed(seed_value), threshold(static_cast<std::uint32_t>(probability * 65536.0)) {}

  constexpr bool drops() const { return threshold > 0; }
  /// What kept probabilities are multiplied by.
  constexpr double keep_factor() const { return 65536.0 / (65536.0 - threshold); }

  constexpr PhiloxBlock words(std::int64_t position, std::int64_t counter, std::int64_t branch_head,
                              std::int64_t entry) const {
    const std::uint64_t key = seed ^ (static_cast<std::uint64_t>(position) >> 32 << 32);
    return philox4x32<kDropoutRounds>(key,
                                      {static_cast<std::uint32_t>(position), static_cast<std::uint32_t>(counter),
                                       static_cast<std::uint32_t>(branch_head), static_cast<std::uint32_t>(entry)});
  }
  /// The word whose halves decide key_index (even) and the key after it, the lower half first.
  constexpr std::uint32_t word(std::int64_t position, std::int64_t key_index, std::int64_t branch_head,
                               std::int64_t entry) const {
    const PhiloxBlock block = words(position, key_index / 32 * 4 + key_index / 2 % 4, branch_head, entry);
    const std::uint32_t low = key_index & 8 ? block[1] : block[0], high = key_index & 8 ? block[3] : block[2];
    return key_index & 16 ? high : low;
  }
  constexpr bool keeps(std::int64_t position, std::int64_t key_index, std::int64_t branch_head,
                       std::int64_t entry) const {
    return (word(position, key_index, branch_head, entry) >> key_index % 2 * 16 & 0xFFFF) >= threshold;
  }
};

}  // namespace longspan
