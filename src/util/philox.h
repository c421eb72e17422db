// Philox4x32-10: the counter-based generator behind dropout and random block masks. Same bits on every engine.
#pragma once

#include <array>
#include <cstdint>

namespace longspan {

inline constexpr std::uint32_t kPhiloxFactor0 = 0xD2511F53u, kPhiloxFactor1 = 0xCD9E8D57u;
inline constexpr std::uint32_t kPhiloxStep0 = 0x9E3779B9u, kPhiloxStep1 = 0xBB67AE85u;  // of the key, per round
inline constexpr int kPhiloxRounds = 10;

using PhiloxBlock = std::array<std::uint32_t, 4>;

constexpr PhiloxBlock philox4x32(std::uint64_t key, PhiloxBlock counter) {
  std::uint32_t key0 = static_cast<std::uint32_t>(key);
  std::uint32_t key1 = static_cast<std::uint32_t>(key >> 32);
  for (int round = 0; round < kPhiloxRounds; ++round) {
    const std::uint64_t product0 = std::uint64_t{kPhiloxFactor0} * counter[0];
    const std::uint64_t product1 = std::uint64_t{kPhiloxFactor1} * counter[2];
    counter = {static_cast<std::uint32_t>(product1 >> 32) ^ counter[1] ^ key0, static_cast<std::uint32_t>(product1),
               static_cast<std::uint32_t>(product0 >> 32) ^ counter[3] ^ key1, static_cast<std::uint32_t>(product0)};
    key0 += kPhiloxStep0;
    key1 += kPhiloxStep1;
  }
  return counter;
}

/// Decides which (query, key) pairs dropout keeps; free of tiles, threads and ranks.
struct DropoutRule {
  std::uint64_t seed = 0;
  std::uint32_t threshold = 0;  // floor(p * 2^32)

  constexpr DropoutRule(double probability, std::uint64_t seed_value)
      : seed(seed_value), threshold(static_cast<std::uint32_t>(probability * 4294967296.0)) {}

  /// The four words that decide keys 4 * group .. 4 * group + 3 of the query's strand.
  constexpr PhiloxBlock words(std::int64_t position, std::int64_t group, std::int64_t branch_head,
                              std::int64_t entry) const {
    const std::uint64_t key = seed ^ (static_cast<std::uint64_t>(position) >> 32 << 32);
    return philox4x32(key, {static_cast<std::uint32_t>(position), static_cast<std::uint32_t>(group),
                            static_cast<std::uint32_t>(branch_head), static_cast<std::uint32_t>(entry)});
  }
  constexpr bool keeps(std::int64_t position, std::int64_t key_index, std::int64_t branch_head,
                       std::int64_t entry) const {
    return words(position, key_index / 4, branch_head, entry)[key_index % 4] >= threshold;
  }
};

}  // namespace longspan
