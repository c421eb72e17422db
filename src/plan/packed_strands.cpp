// Which strands of a rank are packed, and the tables by which rows get there and gradients leave.
#include "plan/packed_strands.h"

#include <algorithm>
#include <limits>
#include <map>
#include <numeric>
#include <tuple>

#include "longspan/error.h"
#include "plan/branch.h"
#include "plan/row_ranges.h"

namespace longspan {
namespace {

constexpr std::int64_t kMostRows = std::numeric_limits<std::int32_t>::max() - 2;

std::int32_t narrow(std::int64_t row) {
  if (row > kMostRows) throw Unsupported("more rows than 32 bits number");
  return static_cast<std::int32_t>(row);
}

class Packer {
 public:
  Packer(PackedPlan& packed, const Plan& plan, const ExchangePlan& exchange)
      : packed_(packed),
        plan_(plan),
        problem_(plan.problem()),
        exchange_(exchange),
        ranges_(exchange.shards().ranges(exchange.rank())) {}

  void run() {
    narrow(exchange_.shards().rows(exchange_.rank()) * problem_.kv_heads);
    narrow(std::max(exchange_.receive_pairs(), exchange_.send_pairs()));
    packed_.range_places = plan_.branches().size() * 2 * static_cast<std::size_t>(1 + problem_.heads);
    packed_.places.assign(ranges_.size() * packed_.range_places, -1);
    for (std::size_t b = 0; b < plan_.branches().size(); ++b) pack(b);
    packed_.rows = narrow(static_cast<std::int64_t>(packed_.sources.size()));
    list_sends();
    list_sums();
  }

 private:
  /// Whether strands of a segment that has queries in a range are no run of the rank's rows.
  bool crosses(std::int64_t segment, const BranchPlan& branch, std::size_t r) const {
    const std::int64_t begin = segment * branch.segment,
                       end = begin + std::min(branch.segment, problem_.tokens - begin);
    const bool follows = r + 1 < ranges_.size();  // rows of other positions come next
    return begin < ranges_[r].start || (end > end_of(ranges_[r]) && (follows || !plan_.options().causal));
  }

  void pack(std::size_t b) {
    const BranchPlan& branch = plan_.branches()[b];
    if (!branch.active(problem_.tokens)) return;
    std::map<std::tuple<std::int64_t, std::int64_t, std::int64_t>, std::int32_t> known;  // segment, kv head, phase
    for (std::size_t r = 0; r < ranges_.size(); ++r) {
      if (ranges_[r].count == 0) continue;
      const std::int64_t segments[] = {ranges_[r].start / branch.segment, (end_of(ranges_[r]) - 1) / branch.segment};
      for (std::size_t i = 0; i < 2; ++i) {
        if ((i == 1 && segments[1] == segments[0]) || !crosses(segments[i], branch, r)) continue;
        std::int32_t* const place = packed_.places.data() + r * packed_.range_places +
                                    (2 * b + i) * static_cast<std::size_t>(1 + problem_.heads);
        place[0] = narrow(segments[i]);
        for (std::int64_t head = branch.head_begin; head < branch.head_begin + branch.head_count; ++head) {
          const Strand strand = branch.strand(head, segments[i], problem_.tokens);
          const std::int64_t kv_head = head / (problem_.heads / problem_.kv_heads), count = needed(strand);
          if (count == 0) continue;
          const auto [found, is_new] = known.try_emplace({segments[i], kv_head, strand.start}, -1);
          if (is_new) found->second = add(strand, kv_head, count);
          place[1 + head] = found->second;
        }
      }
    }
  }

  /// Rows of a strand that the rank's queries may see.
  std::int64_t needed(const Strand& strand) const {
    std::int64_t end = 0;
    for (const RowRange& range : ranges_) {
      const QueryRun queries = query_run(strand, range);
      if (queries.count > 0) end = plan_.options().causal ? queries.begin + queries.count : strand.count;
    }
    return end;
  }

  std::int32_t add(const Strand& strand, std::int64_t kv_head, std::int64_t count) {
    const std::size_t first = packed_.sources.size();
    narrow(static_cast<std::int64_t>(first) + count + PackedPlan::kZeroRows);
    packed_.sources.resize(first + static_cast<std::size_t>(count + PackedPlan::kZeroRows), PackedPlan::kZeros);
    std::int32_t* const rows = packed_.sources.data() + first;
    std::int64_t before = 0;
    for (const RowRange& range : ranges_) {
      const QueryRun own = query_run(strand, range, before);
      for (std::int64_t i = 0; i < own.count && own.begin + i < count; ++i)
        rows[own.begin + i] = narrow((own.q_row + i * strand.stride) * problem_.kv_heads + kv_head);
      before += range.count;
    }
    std::int64_t first_pair = 0;
    for (const ExchangePeer& peer : exchange_.peers()) {
      for (const ExchangeRun& run : peer.receive) {
        const std::int64_t head = kv_head - run.kv_head;
        if (head < 0 || head >= run.kv_heads) continue;
        // Runs are few times longer or shorter steps than strands: walk over the longer of both.
        const std::int64_t step = std::lcm(run.step, strand.stride);
        std::int64_t at = run.first;
        for (std::int64_t i = 0; i < step / run.step && (at - strand.start) % strand.stride != 0; ++i) at += run.step;
        if ((at - strand.start) % strand.stride != 0) continue;
        for (; at <= run.first + (run.count - 1) * run.step; at += step) {
          const std::int64_t t = (at - strand.start) / strand.stride;
          if (at >= strand.start && t < count)
            rows[t] = PackedPlan::received(first_pair + run.offset + (at - run.first) / run.step * run.kv_heads + head);
        }
      }
      first_pair += peer.receive_pairs;
    }
    return static_cast<std::int32_t>(first);
  }

  void list_sends() {
    packed_.sends.reserve(static_cast<std::size_t>(exchange_.send_pairs()));
    for (const ExchangePeer& peer : exchange_.peers()) {
      for (const ExchangeRun& run : peer.send) {
        for (std::int64_t i = 0; i < run.count; ++i) {
          const std::int64_t row = row_of(ranges_, run.first + i * run.step);
          for (std::int64_t head = run.kv_head; head < run.kv_head + run.kv_heads; ++head)
            packed_.sends.push_back(narrow(row * problem_.kv_heads + head));
        }
      }
    }
  }

  void list_sums() {
    using Term = std::pair<std::int32_t, std::int32_t>;  // target, source
    std::vector<Term> returned, own;
    for (std::size_t row = 0; row < packed_.sources.size(); ++row) {
      const std::int32_t from = packed_.sources[row];
      if (from >= 0) own.emplace_back(from, row);
      else if (from != PackedPlan::kZeros) returned.emplace_back(-2 - from, row);
    }
    for (std::size_t pair = 0; pair < packed_.sends.size(); ++pair)
      own.emplace_back(packed_.sends[pair], PackedPlan::received(static_cast<std::int64_t>(pair)));
    const auto list = [](std::vector<Term>& terms, RowSums& sums) {
      std::stable_sort(terms.begin(), terms.end(), [](const Term& a, const Term& b) { return a.first < b.first; });
      for (const auto& [target, source] : terms) {
        if (sums.targets.empty() || sums.targets.back() != target) {
          sums.targets.push_back(target);
          sums.first.push_back(static_cast<std::int32_t>(sums.sources.size()));
        }
        sums.sources.push_back(source);
      }
      sums.first.push_back(narrow(static_cast<std::int64_t>(sums.sources.size())));
    };
    list(returned, packed_.returned);
    list(own, packed_.own);
  }

  PackedPlan& packed_;
  const Plan& plan_;
  const Problem& problem_;
  const ExchangePlan& exchange_;
  const std::span<const RowRange> ranges_;
};

}  // namespace

PackedPlan::PackedPlan(const Plan& plan, const ExchangePlan& exchange) {
  for (const BranchPlan& branch : plan.branches())
    if (branch.mask) throw Unsupported("block masks");
  Packer(*this, plan, exchange).run();
}

}  // namespace longspan
