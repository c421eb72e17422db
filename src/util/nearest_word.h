// Edit distance between what was typed and what exists.
#pragma once

#include <algorithm>
#include <numeric>
#include <string>
#include <string_view>
#include <vector>

namespace longspan {

inline std::size_t edit_distance(std::string_view left, std::string_view right) {
  std::vector<std::size_t> row(right.size() + 1);
  std::iota(row.begin(), row.end(), std::size_t{0});
  for (std::size_t i = 0; i < left.size(); ++i) {
    std::size_t diagonal = row[0];
    row[0] = i + 1;
    for (std::size_t j = 0; j < right.size(); ++j) {
      const std::size_t substituted = diagonal + (left[i] != right[j] ? 1 : 0);
      diagonal = row[j + 1];
      row[j + 1] = std::min({substituted, row[j] + 1, diagonal + 1});
    }
  }
  return row[right.size()];
}

/// The known word that is nearest to what was typed; empty where none is near, or where the word itself is known.
template <class Words>
std::string nearest_word(std::string_view typed, const Words& known) {
  constexpr std::size_t kLongest = 64;  // of a word that was meant to be one of ours
  std::string best;
  std::size_t least = typed.size() / 2 + 1;
  if (typed.size() > kLongest) return best;
  for (const std::string_view word : known) {
    const std::size_t distance = edit_distance(typed, word);
    if (distance == 0) return {};
    if (distance < least) {
      least = distance;
      best = word;
    }
  }
  return best;
}

}  // namespace longspan
