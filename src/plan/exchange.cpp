// Which rows of k and v a rank's queries attend to and who owns them: strands cut by shard boundaries, nothing else.
#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <set>

#include "longspan/exchange.h"
#include "plan/branch.h"
#include "plan/exchange_runs.h"
#include "plan/row_ranges.h"
#include "util/reject.h"

namespace longspan {
namespace {

/// Calls body(segment, begin, end) for the segments of a branch in which queries of `range` may need a row outside the
/// range: the first or the last one, since those between lie within it.
template <class Body>
void for_each_shared_segment(const Plan& plan, const BranchPlan& branch, const RowRange& range, Body&& body) {
  const std::int64_t tokens = plan.problem().tokens;
  if (!branch.active(tokens)) return;
  for (const std::int64_t segment :
       std::set<std::int64_t>{range.start / branch.segment, (end_of(range) - 1) / branch.segment}) {
    const std::int64_t begin = segment * branch.segment, end = std::min(branch.segment, tokens - begin) + begin;
    if (begin < range.start || (!plan.options().causal && end > end_of(range))) body(segment, begin, end);
  }
}

/// For each key/value head, the rows that `owner` owns and queries of `rank` attend to.
std::vector<std::vector<Progression>> needed(const Plan& plan, const Shards& shards, int rank, int owner) {
  const Problem& problem = plan.problem();
  const std::int64_t group = problem.heads / problem.kv_heads;
  std::vector<std::vector<Progression>> sets(static_cast<std::size_t>(problem.kv_heads));
  for (const BranchPlan& branch : plan.branches()) {
    for (const RowRange& range : shards.ranges(rank)) {
      for_each_shared_segment(plan, branch, range, [&](std::int64_t segment, std::int64_t begin, std::int64_t end) {
        const RowRange whole{begin, end - begin};
        if (common_rows({&whole, 1}, shards.ranges(owner)).empty()) return;
        for (std::int64_t head = branch.head_begin; head < branch.head_begin + branch.head_count; ++head) {
          const Strand strand = branch.strand(head, segment, problem.tokens);
          const QueryRun queries = query_run(strand, range);
          if (queries.count == 0) continue;
          const auto add = [&](std::int64_t first, std::int64_t last) {
            const Progression keys{strand.start + first * strand.stride, strand.stride, last - first};
            for (const RowRange& theirs : shards.ranges(owner)) {
              const Progression rows = clip(keys, theirs.start, end_of(theirs));
              if (rows.count > 0) sets[static_cast<std::size_t>(head / group)].push_back(rows);
            }
          };
          for_each_attended(branch, 0, problem.batch, head, strand, queries, plan.options().causal, add);
        }
      });
    }
  }
  return sets;
}

/// One message: heads that need the same rows share runs.
std::vector<ExchangeRun> message(std::vector<std::vector<Progression>> sets) {
  std::vector<ExchangeRun> runs;
  std::int64_t offset = 0;
  for (std::vector<Progression>& set : sets) set = disjoint_union(std::move(set));
  for (std::size_t head = 0; head < sets.size();) {
    std::size_t next = head + 1;
    while (next < sets.size() && sets[next] == sets[head]) ++next;
    for (const Progression& rows : sets[head]) {
      runs.push_back({static_cast<std::int64_t>(head), static_cast<std::int64_t>(next - head), rows.first, rows.step,
                      rows.count, offset});
      offset += runs.back().pairs();
    }
    head = next;
  }
  return runs;
}

/// (row, key/value head) pairs of other ranks that a gather of whole branches would bring.
std::int64_t gathered_pairs(const Plan& plan, const Shards& shards, int rank) {
  const Problem& problem = plan.problem();
  const std::int64_t group = problem.heads / problem.kv_heads;
  std::int64_t pairs = 0;
  for (const BranchPlan& branch : plan.branches()) {
    if (!branch.active(problem.tokens) || std::min(branch.segment, problem.tokens) <= shards.rows(rank)) continue;
    std::map<std::pair<std::int64_t, std::int64_t>, std::int64_t> heads;  // of a key/value head and a phase, one
    for (std::int64_t head = branch.head_begin; head < branch.head_begin + branch.head_count; ++head)
      heads.try_emplace({head / group, branch.phase(head)}, head);
    for (const auto& [strands, head] : heads) {
      const CoveredRows rows(branch, head, problem.tokens);
      pairs += rows.below(problem.tokens);
      for (const RowRange& own : shards.ranges(rank)) pairs -= rows.below(end_of(own)) - rows.below(own.start);
    }
  }
  return pairs;
}

/// Positions [begin, end) whose queries may need remote rows under a branch's block mask: block rows of some head that
/// see a block which is not all the rank's.
void add_far_blocks(RowRanges& far, const Plan& plan, const BranchPlan& branch, std::span<const RowRange> owned,
                    const RowRange& range, std::int64_t segment) {
  const Problem& problem = plan.problem();
  const std::int64_t size = branch.mask->block_size(), entries = branch.mask_entry_stride > 0 ? problem.batch : 1;
  for (std::int64_t head = branch.head_begin; head < branch.head_begin + branch.head_count; ++head) {
    const Strand strand = branch.strand(head, segment, problem.tokens);
    const QueryRun queries = query_run(strand, range);
    const std::int64_t queries_end = queries.begin + queries.count;
    const auto is_own = [&](std::int64_t first, std::int64_t last) {  // rows of the strand
      const RowRange span{strand.start + first * strand.stride, (last - first) * strand.stride + 1};
      return rows_in(common_rows(owned, {&span, 1})) == span.count;
    };
    for (std::int64_t block_row = queries.begin / size; block_row * size < queries_end; ++block_row) {
      const std::int64_t first = std::max(block_row * size, queries.begin),
                         last = std::min((block_row + 1) * size, queries_end) - 1;
      bool local = true;
      for (std::int64_t entry = 0; entry < entries && local; ++entry) {
        for (const std::int64_t column : branch.mask->row(branch.mask_head(entry, head), block_row)) {
          if (column * size >= strand.count || (plan.options().causal && column > block_row)) break;
          std::int64_t end = std::min((column + 1) * size, strand.count);
          if (plan.options().causal) end = std::min(end, last + 1);
          local = local && is_own(column * size, end - 1);
        }
      }
      if (local) continue;
      const std::int64_t begin = strand.start + first * strand.stride, end = strand.start + last * strand.stride + 1;
      far.push_back({begin, end - begin});
    }
  }
}

/// Positions of a rank whose queries need no remote row in a branch.
RowRanges local_rows(const Plan& plan, const BranchPlan& branch, std::span<const RowRange> owned) {
  RowRanges far;
  for (const RowRange& range : owned) {
    for_each_shared_segment(plan, branch, range, [&](std::int64_t segment, std::int64_t begin, std::int64_t end) {
      const std::int64_t first = std::max(begin, range.start);
      if (branch.mask) add_far_blocks(far, plan, branch, owned, range, segment);
      else far.push_back({first, std::min(end, end_of(range)) - first});
    });
  }
  std::sort(far.begin(), far.end(), [](const RowRange& a, const RowRange& b) { return a.start < b.start; });
  return rows_without(owned, far);
}

std::int64_t total(const std::vector<ExchangePeer>& peers, std::int64_t ExchangePeer::*pairs) {
  std::int64_t sum = 0;
  for (const ExchangePeer& peer : peers) sum += peer.*pairs;
  return sum;
}

}  // namespace

ExchangePlan::ExchangePlan(const Plan& plan, Shards shards, int rank) : shards_(std::move(shards)), rank_(rank) {
  const Problem& problem = plan.problem();
  if (shards_.tokens() != problem.tokens)
    reject("shards", "shards of {} tokens for a sequence of {}: they must be equal", shards_.tokens(), problem.tokens);
  bytes_per_pair_ = 2 * problem.batch * problem.head_dim * size_of(problem.dtype);
  gradient_bytes_per_pair_ = 2 * problem.batch * problem.head_dim * (problem.dtype == DType::f64 ? 8 : 4);
  // Of all sums of this plan the largest is the gradients of the whole sequence.
  std::int64_t largest = 0;
  if (__builtin_mul_overflow(problem.tokens, problem.kv_heads, &largest) ||
      __builtin_mul_overflow(largest, std::max(bytes_per_pair_, gradient_bytes_per_pair_), &largest))
    reject("tokens", "{} tokens with {} key/value heads are more bytes than 64 bits can count: give smaller sizes",
           problem.tokens, problem.kv_heads);
  naive_ring_bytes_ = (problem.tokens - shards_.rows(rank)) * problem.kv_heads * bytes_per_pair_;
  all_gather_bytes_ = gathered_pairs(plan, shards_, rank) * bytes_per_pair_;
  for (int other = 0; other < shards_.ranks(); ++other) {
    if (other == rank) continue;
    ExchangePeer peer;
    peer.rank = other;
    peer.receive = message(needed(plan, shards_, rank, other));
    peer.send = message(needed(plan, shards_, other, rank));
    peer.receive_pairs = pairs_of(peer.receive);
    peer.send_pairs = pairs_of(peer.send);
    if (peer.receive_pairs > 0 || peer.send_pairs > 0) peers_.push_back(std::move(peer));
  }
  for (const BranchPlan& branch : plan.branches())
    local_ranges_.push_back(local_rows(plan, branch, shards_.ranges(rank)));
}

std::int64_t ExchangePlan::send_pairs() const { return total(peers_, &ExchangePeer::send_pairs); }
std::int64_t ExchangePlan::receive_pairs() const { return total(peers_, &ExchangePeer::receive_pairs); }

std::string ExchangePlan::to_string() const {
  std::string text =
      fmt::format("rank {} of {}, {} of {} rows: receives {} bytes, sends {} (naive ring {}, all-gather {})\n", rank_,
                  shards_.ranks(), shards_.rows(rank_), shards_.tokens(), bytes_received(), bytes_sent(),
                  naive_ring_bytes_, all_gather_bytes_);
  const auto list = [&](const char* direction, int peer, const std::vector<ExchangeRun>& runs) {
    for (const ExchangeRun& run : runs) {
      text += fmt::format("  {} {}: heads {}..{}, rows {} + i * {}, {} of them\n", direction, peer, run.kv_head,
                          run.kv_head + run.kv_heads - 1, run.first, run.step, run.count);
    }
  };
  for (const ExchangePeer& peer : peers_) {
    list("from", peer.rank, peer.receive);
    list("to", peer.rank, peer.send);
  }
  return text;
}

}  // namespace longspan
