// Progressions of one stride are merged first; of a wider one, what finer ones leave of it is kept, by arithmetic on
// strides: nothing is listed row by row.
#include "plan/row_set.h"

#include <algorithm>
#include <numeric>

namespace longspan {
namespace {

bool covers(const Progression& outer, const Progression& inner) {
  return inner.first >= outer.first && inner.last() <= outer.last() && (inner.first - outer.first) % outer.step == 0 &&
         (inner.count == 1 || inner.step % outer.step == 0);
}

Progression part(const Progression& rows, std::int64_t begin, std::int64_t end, std::int64_t every = 1) {
  const std::int64_t count = begin < end ? (end - begin - 1) / every + 1 : 0;
  return {rows.first + begin * rows.step, count == 1 ? 1 : rows.step * every, count};
}

/// Adds what is left of `rows` without those of `other` to a list. Between the ends of `other`, every q-th row of
/// `rows` may be one of its: one of the q progressions of rows that far apart goes, the others stay.
void subtract(const Progression& rows, const Progression& other, std::vector<Progression>& left) {
  const auto keep = [&](const Progression& some) {
    if (some.count > 0) left.push_back(some);
  };
  const std::int64_t every = other.step / std::gcd(rows.step, other.step);
  const auto index_at = [&](std::int64_t position) {  // of the first row at or behind a position
    return std::clamp<std::int64_t>((position - rows.first + rows.step - 1) / rows.step, 0, rows.count);
  };
  const std::int64_t begin = other.first <= rows.first ? 0 : index_at(other.first),
                     end = other.last() < rows.first ? 0 : index_at(other.last() + 1);
  std::int64_t hit = begin;
  while (hit < std::min(begin + every, end) && !other.contains(rows.first + hit * rows.step)) ++hit;
  if (begin >= end || hit == std::min(begin + every, end)) return keep(rows);
  keep(part(rows, 0, begin));
  for (std::int64_t i = begin; i < std::min(begin + every, end); ++i) {
    if (i != hit) keep(part(rows, i, end, every));
  }
  keep(part(rows, end, rows.count));
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
    std::vector<Progression> left = {run};
    for (std::size_t i = 0, before = result.size(); i < before && !left.empty(); ++i) {
      if (result[i].first > run.last() || result[i].last() < run.first) continue;
      std::vector<Progression> next;
      for (const Progression& some : left) {
        if (!covers(result[i], some)) subtract(some, result[i], next);
      }
      left = std::move(next);
    }
    result.insert(result.end(), left.begin(), left.end());
  }
  std::sort(result.begin(), result.end(), [](const Progression& a, const Progression& b) { return a.first < b.first; });
  return result;
}

}  // namespace longspan
