// Progressions of one stride are merged first; a wider one is then listed row by row only where a finer one meets it.
#include "plan/row_set.h"

#include <algorithm>
#include <numeric>

namespace longspan {
namespace {

bool meet(const Progression& a, const Progression& b) {
  if (a.first > b.last() || b.first > a.last()) return false;
  return (a.first - b.first) % std::gcd(a.step, b.step) == 0;  // may still miss each other at the ends: harmless
}

bool covers(const Progression& outer, const Progression& inner) {
  return inner.first >= outer.first && inner.last() <= outer.last() && (inner.first - outer.first) % outer.step == 0 &&
         (inner.count == 1 || inner.step % outer.step == 0);
}

/// Ascending rows as progressions, longest first come.
void compress(const std::vector<std::int64_t>& rows, std::vector<Progression>& target) {
  for (std::size_t i = 0; i < rows.size();) {
    Progression run{rows[i], 1, 1};
    if (i + 1 < rows.size()) {
      run.step = rows[i + 1] - rows[i];
      while (i + static_cast<std::size_t>(run.count) < rows.size() &&
             rows[i + static_cast<std::size_t>(run.count)] == run.first + run.count * run.step) {
        ++run.count;
      }
      // Two rows are no stride worth keeping: the second may begin a longer run.
      if (run.count == 2 && i + 2 < rows.size()) run = {rows[i], 1, 1};
    }
    if (run.count == 1) run.step = 1;
    target.push_back(run);
    i += static_cast<std::size_t>(run.count);
  }
}

}  // namespace

Progression clip(const Progression& rows, std::int64_t begin, std::int64_t end) {
  if (rows.count == 0 || rows.first >= end || rows.last() < begin) return {};
  const std::int64_t skipped = begin > rows.first ? (begin - rows.first + rows.step - 1) / rows.step : 0;
  const std::int64_t first = rows.first + skipped * rows.step;
  if (first >= end) return {};
  const std::int64_t fitting = (end - 1 - first) / rows.step + 1;
  const std::int64_t count = std::min(rows.count - skipped, fitting);
  return {first, count == 1 ? 1 : rows.step, count};
}

std::vector<Progression> disjoint_union(std::vector<Progression> rows) {
  std::erase_if(rows, [](const Progression& run) { return run.count == 0; });
  for (Progression& run : rows) {
    if (run.count == 1) run.step = 1;
  }
  // Same stride and phase: overlapping and adjacent ones become one.
  std::sort(rows.begin(), rows.end(), [](const Progression& a, const Progression& b) {
    if (a.step != b.step) return a.step < b.step;
    if (a.first % a.step != b.first % b.step) return a.first % a.step < b.first % b.step;
    return a.first < b.first;
  });
  std::vector<Progression> merged;
  for (const Progression& run : rows) {
    if (!merged.empty() && merged.back().step == run.step && merged.back().first % run.step == run.first % run.step &&
        run.first <= merged.back().last() + run.step) {
      merged.back().count = std::max(merged.back().count, (run.last() - merged.back().first) / run.step + 1);
    } else {
      merged.push_back(run);
    }
  }
  std::vector<Progression> result;
  for (const Progression& run : merged) {
    std::vector<Progression> met;
    bool covered = false;
    for (const Progression& other : result) {
      covered = covered || covers(other, run);
      if (meet(other, run)) met.push_back(other);
    }
    if (covered) continue;
    if (met.empty()) {
      result.push_back(run);
      continue;
    }
    std::vector<std::int64_t> left;
    for (std::int64_t i = 0, row = run.first; i < run.count; ++i, row += run.step) {
      if (std::none_of(met.begin(), met.end(), [&](const Progression& other) { return other.contains(row); }))
        left.push_back(row);
    }
    compress(left, result);
  }
  std::sort(result.begin(), result.end(), [](const Progression& a, const Progression& b) { return a.first < b.first; });
  return result;
}

}  // namespace longspan
