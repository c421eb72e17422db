// A plan cut over ranks: who owns which rows, and which rows of k and v move between them. Pure integers.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "longspan/export.h"
#include "longspan/plan.h"

namespace longspan {

/// Which positions each rank of a ring owns. Every position has one owner; a rank may own none.
class LONGSPAN_API Shards {
 public:
  /// Rank p owns offsets[p] .. offsets[p + 1] - 1. Offsets begin with 0, ascend, and end with the number of tokens.
  static Shards contiguous(std::span<const std::int64_t> offsets);
  /// Contiguous shards whose lengths differ by at most one row.
  static Shards even(std::int64_t tokens, int ranks);
  /// Rank p owns the p-th and the p-th last of 2 * ranks chunks: equal shares of causal work.
  static Shards zigzag(std::int64_t tokens, int ranks);

  int ranks() const { return static_cast<int>(first_range_.size()) - 1; }
  std::int64_t tokens() const { return tokens_; }
  /// The rank's positions, ascending, in the order of its rows.
  std::span<const RowRange> ranges(int rank) const;
  std::int64_t rows(int rank) const;
  bool operator==(const Shards&) const = default;

 private:
  Shards() = default;
  void add_rank(std::span<const RowRange> ranges);
  std::vector<RowRange> ranges_;
  std::vector<std::size_t> first_range_{0};
  std::int64_t tokens_ = 0;
};

/// Rows first, first + step, ... of key/value heads kv_head .. kv_head + kv_heads - 1.
struct ExchangeRun {
  std::int64_t kv_head = 0;
  std::int64_t kv_heads = 1;
  std::int64_t first = 0;
  std::int64_t step = 1;
  std::int64_t count = 0;
  std::int64_t offset = 0;  ///< (row, head) pairs of the message before this run

  std::int64_t pairs() const { return count * kv_heads; }
  bool operator==(const ExchangeRun&) const = default;
};

/// What one rank sends to a peer and receives from it, run after run. No (row, head) appears twice.
struct ExchangePeer {
  int rank = 0;
  std::vector<ExchangeRun> send, receive;
  std::int64_t send_pairs = 0;  ///< (row, key/value head) pairs
  std::int64_t receive_pairs = 0;
};

/// Which rows a rank exchanges with each peer for a forward. A backward returns the gradients of the received rows.
class LONGSPAN_API ExchangePlan {
 public:
  /// Throws InvalidArgument if the shards are not of the plan's sequence, or the rank is none of theirs.
  ExchangePlan(const Plan& plan, Shards shards, int rank);

  int rank() const { return rank_; }
  const Shards& shards() const { return shards_; }
  /// Peers that something moves to or from, in the order of their ranks.
  const std::vector<ExchangePeer>& peers() const { return peers_; }
  std::int64_t send_pairs() const;
  std::int64_t receive_pairs() const;
  /// Payload of a forward: K and V of the received (sent) pairs over the batch.
  std::int64_t bytes_received() const { return receive_pairs() * bytes_per_pair_; }
  std::int64_t bytes_sent() const { return send_pairs() * bytes_per_pair_; }
  /// K and V of one pair over the batch, as they travel forward, and their gradients on the way back.
  std::int64_t bytes_per_pair() const { return bytes_per_pair_; }
  std::int64_t gradient_bytes_per_pair() const { return gradient_bytes_per_pair_; }
  /// What this rank would receive if all of K and V went around a ring.
  std::int64_t naive_ring_bytes() const { return naive_ring_bytes_; }
  /// What it would receive if every branch longer than its shard gathered its strands from all ranks, as torchscale
  /// does.
  std::int64_t all_gather_bytes() const { return all_gather_bytes_; }
  /// For each branch: positions of this rank whose queries need no remote row in it, ascending.
  const std::vector<std::vector<RowRange>>& local_ranges() const { return local_ranges_; }
  /// Several lines for people.
  std::string to_string() const;

 private:
  Shards shards_;
  int rank_ = 0;
  std::vector<ExchangePeer> peers_;
  std::vector<std::vector<RowRange>> local_ranges_;
  std::int64_t bytes_per_pair_ = 0;
  std::int64_t gradient_bytes_per_pair_ = 0;
  std::int64_t naive_ring_bytes_ = 0;
  std::int64_t all_gather_bytes_ = 0;
};

}  // namespace longspan
