// The grid of a forward with few query rows: which block takes which keys of which rows, and where partial results lie.
//   chunk     kDecodeKeys keys of a strand, counted from its start, whatever else there is: the same sums in every call
//   a block   one chunk for up to 16 (query row, head) pairs of one strand and one key/value head
//   merging   up to kDecodeFan chunks make a group, up to kDecodeFan groups are merged at once, those parts one after
//             the other, then branches in order. The last block of a group, and of a key/value head, does so. Merging
//             one part alone is exact, so short strands, which have no groups, give the same bits.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "kernels/cuda/launch.h"
#include "longspan/plan.h"
#include "longspan/tensor_view.h"

namespace longspan::cuda {

inline constexpr int kDecodeRows = 16;  // of queries in a call
inline constexpr int kDecodeKeys = 256, kDecodeFan = 16;

struct DecodePlace {
  int branch, entry, kv_head, segment, variant, tile, chunk;
  unsigned group_counter;  // of the strand's first group
};

/// Blocks of one branch: entries x key/value heads x segments x variants x chunks x tiles.
struct DecodeBranch {
  unsigned first_block, first_counter;
  std::int64_t first_record;
  int kv_begin, kv_count;
  int segments;        // that query rows lie in; leaders: the first row in each
  int variants;        // strands of a segment: one, or one for each head of a group where phases depend on heads
  int tiles;           // of 16 (row, head) pairs
  int chunks, groups;  // no groups: chunks are few enough to be merged at once
  std::uint8_t leaders[kDecodeRows];
};

struct DecodeGrid {
  int rows, group, heads, kv_heads, branch_count;
  unsigned blocks, counters;  // the first batch * kv_heads counters are of key/value heads
  std::int64_t records;
  std::int64_t first_row;  // of q
  bool causal;
  int positions[kDecodeRows];
  DeviceBranch strands[kMaxBranches];
  DecodeBranch branches[kMaxBranches];

  LONGSPAN_DEVICE DecodePlace place(unsigned block) const {
    int b = 0;
    while (b + 1 < branch_count && block >= branches[b + 1].first_block) ++b;
    const DecodeBranch& of = branches[b];
    unsigned left = block - of.first_block;
    const auto next = [&](int count) {
      const unsigned whole = left / static_cast<unsigned>(count), index = left - whole * static_cast<unsigned>(count);
      left = whole;
      return static_cast<int>(index);
    };
    DecodePlace p;
    p.branch = b;
    p.tile = next(of.tiles);
    p.chunk = next(of.chunks);
    const unsigned strand = left;
    p.variant = next(of.variants);
    p.segment = next(of.segments);
    p.kv_head = of.kv_begin + next(of.kv_count);
    p.entry = static_cast<int>(left);
    p.group_counter = of.first_counter + (strand * static_cast<unsigned>(of.tiles) + static_cast<unsigned>(p.tile)) *
                                             static_cast<unsigned>(of.groups);
    return p;
  }
  /// How often blocks count at the counter of a key/value head.
  LONGSPAN_DEVICE unsigned arrivals(int kv_head) const {
    unsigned sum = 0;
    for (int b = 0; b < branch_count; ++b) {
      const DecodeBranch& of = branches[b];
      if (kv_head < of.kv_begin || kv_head >= of.kv_begin + of.kv_count) continue;
      sum += static_cast<unsigned>(of.segments * of.variants * of.tiles * (of.groups > 0 ? of.groups : of.chunks));
    }
    return sum;
  }
  LONGSPAN_DEVICE int leader_head(const DecodePlace& p) const {
    const int first = p.kv_head * group, owned = strands[p.branch].head_begin;
    return branches[p.branch].variants > 1 ? first + p.variant : first > owned ? first : owned;
  }
  /// Whether a place has a strand of its own: of heads with one phase the first one names it.
  LONGSPAN_DEVICE bool leads(const DecodePlace& p) const {
    if (branches[p.branch].variants == 1) return true;
    const DeviceBranch& branch = strands[p.branch];
    const int head = leader_head(p);
    if (!branch.owns(head)) return false;
    for (int other = p.kv_head * group; other < head; ++other) {
      if (branch.owns(other) && branch.phase(other) == branch.phase(head)) return false;
    }
    return true;
  }
  LONGSPAN_DEVICE StrandRows strand(const DecodePlace& p, int length) const {
    const DeviceBranch& branch = strands[p.branch];
    return branch.strand(leader_head(p), positions[branches[p.branch].leaders[p.segment]] / branch.segment, length);
  }
  /// Whether the strand of a place that leads is that of a pair (query row, head of the group).
  LONGSPAN_DEVICE bool joins(const DecodePlace& p, int pair, int length) const {
    const DeviceBranch& branch = strands[p.branch];
    const int position = positions[pair / group], head = p.kv_head * group + pair % group;
    return branch.owns(head) && position < length && branch.active(length) && branch.covers(head, position) &&
           branch.phase(head) == branch.phase(leader_head(p)) &&
           position / branch.segment == positions[branches[p.branch].leaders[p.segment]] / branch.segment;
  }
  /// Keys of a strand that a position in it attends to, from the first one on.
  LONGSPAN_DEVICE int keys(const StrandRows& strand, int position) const {
    return causal ? (position - strand.start) / strand.stride + 1 : strand.count;
  }
  /// Record of a chunk, or, from `chunks` on, of a group.
  LONGSPAN_DEVICE std::int64_t record(int b, int entry, int head, int row, int index) const {
    const DecodeBranch& of = branches[b];
    const DeviceBranch& branch = strands[b];
    return of.first_record +
           ((static_cast<std::int64_t>(entry) * branch.head_count + head - branch.head_begin) * rows + row) *
               (of.chunks + of.groups) +
           index;
  }
};

/// The rows of a launch's ranges, at most kDecodeRows. A grid for any rows of a plan is at least as large in
/// everything.
DecodeGrid decode_grid(const Launch& launch);
struct DecodeBounds {
  double blocks = 0, counters = 0, records = 0;
};
DecodeBounds decode_bounds(const Plan& plan);

struct Decode {
  Tensors tensors;
  Rules rules;
  DecodeGrid grid;
  float* records;      // {maximum, sum, -, -, columns of out} each
  unsigned* counters;  // zero, and left so
};
static_assert(sizeof(Decode) <= 4000, "kernel parameters are limited to 4 KB");
constexpr std::size_t decode_record_bytes(std::int64_t columns) {
  return static_cast<std::size_t>(columns + 4) * sizeof(float);
}

/// Shared memory of a block; `wide`: float32 storage.
constexpr int decode_shared_bytes(bool wide, int columns) {
  return (64 + (columns <= 64 ? 2 : columns <= 128 ? 4 : 8) * (wide ? 2 : 1)) * 1024;
}

cudaError_t start_decode(const Decode& decode, DType dtype, cudaStream_t stream);

}  // namespace longspan::cuda
