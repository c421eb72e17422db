// Who owns which rows of a sequence.
#include <algorithm>
#include <utility>

#include "longspan/exchange.h"
#include "util/reject.h"

namespace longspan {
namespace {

constexpr int kMostRanks = 1 << 20;

void check_counts(std::int64_t tokens, int ranks) {
  if (tokens < 0 || tokens > kMostTokens) reject("tokens", "{} tokens: give 0 to {}", tokens, kMostTokens);
  if (ranks < 1 || ranks > kMostRanks) reject("ranks", "{} ranks: give 1 to {}", ranks, kMostRanks);
}

/// Where range `index` of `ranges` begins, lengths differing by at most one.
std::int64_t boundary(std::int64_t tokens, std::int64_t ranges, std::int64_t index) {
  return tokens / ranges * index + std::min(index, tokens % ranges);
}

}  // namespace

void Shards::add_rank(std::span<const RowRange> ranges) {
  for (const RowRange& range : ranges) {
    if (range.count > 0) ranges_.push_back(range);
    tokens_ += range.count;
  }
  first_range_.push_back(ranges_.size());
}

Shards Shards::contiguous(std::span<const std::int64_t> offsets) {
  if (offsets.size() < 2 || offsets.front() != 0)
    reject("offsets", "offsets are [{}]: give 0, the first row of each further rank, and the number of tokens",
           fmt::join(offsets, ", "));
  if (offsets.back() > kMostTokens)
    reject("offsets", "offsets end at {}: give at most {} tokens", offsets.back(), kMostTokens);
  Shards shards;
  for (std::size_t rank = 0; rank + 1 < offsets.size(); ++rank) {
    if (offsets[rank + 1] < offsets[rank])
      reject("offsets", "offsets[{}] is {} and offsets[{}] is {}: offsets ascend", rank, offsets[rank], rank + 1,
             offsets[rank + 1]);
    const RowRange range{offsets[rank], offsets[rank + 1] - offsets[rank]};
    shards.add_rank({&range, 1});
  }
  return shards;
}

Shards Shards::even(std::int64_t tokens, int ranks) {
  check_counts(tokens, ranks);
  std::vector<std::int64_t> offsets;
  for (int rank = 0; rank <= ranks; ++rank) offsets.push_back(boundary(tokens, ranks, rank));
  return contiguous(offsets);
}

Shards Shards::zigzag(std::int64_t tokens, int ranks) {
  check_counts(tokens, ranks);
  const std::int64_t chunks = 2 * std::int64_t{ranks};
  const auto chunk = [&](std::int64_t index) {
    const std::int64_t begin = boundary(tokens, chunks, index);
    return RowRange{begin, boundary(tokens, chunks, index + 1) - begin};
  };
  Shards shards;
  for (int rank = 0; rank < ranks; ++rank) {
    RowRange ranges[] = {chunk(rank), chunk(chunks - 1 - rank)};
    // The middle two chunks touch: one range, so that segments across them count as whole.
    if (ranges[0].start + ranges[0].count == ranges[1].start)
      ranges[0] = {ranges[0].start, ranges[0].count + std::exchange(ranges[1].count, 0)};
    shards.add_rank(ranges);
  }
  return shards;
}

std::span<const RowRange> Shards::ranges(int rank) const {
  if (rank < 0 || rank >= ranks()) reject("rank", "rank {} of {}: ranks are 0 to {}", rank, ranks(), ranks() - 1);
  const std::size_t index = static_cast<std::size_t>(rank);
  return std::span(ranges_).subspan(first_range_[index], first_range_[index + 1] - first_range_[index]);
}

std::int64_t Shards::rows(int rank) const {
  std::int64_t rows = 0;
  for (const RowRange& range : ranges(rank)) rows += range.count;
  return rows;
}

}  // namespace longspan
