// The grid of a forward with few query rows: which block takes which keys of which rows, and where partial results lie.
//   chunk     256 keys of a strand, the first 16 times, then 1,024, whatever else there is: the same sums in every
//   call.
//             Short strands need many blocks, to be read by all of the GPU, and long ones few, since each begins anew
//   a block   one chunk for up to 16 (query row, head) pairs of one strand and one key/value head; long ones first
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
inline constexpr int kDecodeFan = 16;
inline constexpr int kShortChunk = 256, kLongChunk = 1024, kKeysInShort = kDecodeFan * kShortChunk;

LONGSPAN_DEVICE constexpr int chunk_begin(int chunk) {
  return chunk < kDecodeFan ? chunk * kShortChunk : kKeysInShort + (chunk - kDecodeFan) * kLongChunk;
}
LONGSPAN_DEVICE constexpr int chunk_end(int chunk, int keys) {
  const int begin = chunk_begin(chunk), most = chunk < kDecodeFan ? kShortChunk : kLongChunk;
  return keys - begin < most ? keys : begin + most;
}
LONGSPAN_DEVICE constexpr int chunks_of(int keys) {
  return keys <= kKeysInShort ? (keys + kShortChunk - 1) / kShortChunk
                              : kDecodeFan + (keys - kKeysInShort - 1) / kLongChunk + 1;
}

struct DecodePlace {
  int branch, entry, kv_head, segment, variant, tile, chunk;
  unsigned group_counter;  // of the strand's first group
};

/// Blocks of one branch: chunks, the last one first, x entries x key/value heads x segments x variants x tiles.
struct DecodeBranch {
  unsigned first_block, first_counter;
  std::int64_t first_record;
  int strands, kv_begin, kv_count;
  int segments;              // that query rows lie in
  int variants;              // strands of a segment: one, or one for each head of a group where phases depend on heads
  int tiles;                 // of 16 (row, head) pairs
  int chunks, groups;        // no groups: chunks are few enough to be merged at once
  int segment[kDecodeRows];  // their indices
};

struct DecodeGrid {
  int rows, group, heads, kv_heads, branch_count;
  unsigned blocks, counters;  // the first batch * kv_heads counters are of key/value heads
  std::int64_t records;
  std::int64_t first_row;  // of q
  bool causal;
  int positions[kDecodeRows];
  DeviceBranch rules[kMaxBranches];
  DecodeBranch branches[kMaxBranches];

  LONGSPAN_DEVICE DecodePlace place(unsigned block) const {
    int b = 0;
    while (b + 1 < branch_count && block >= branches[b + 1].first_block) ++b;
    const DecodeBranch& of = branches[b];
    unsigned left = block - of.first_block;
    const auto next = [&](int count) {
      if (count == 1) return 0;  // divisions take long
      const unsigned whole = left / static_cast<unsigned>(count), index = left - whole * static_cast<unsigned>(count);
      left = whole;
      return static_cast<int>(index);
    };
    DecodePlace p;
    p.branch = b;
    p.tile = next(of.tiles);
    const unsigned strand = static_cast<unsigned>(next(of.strands));
    p.chunk = of.chunks - 1 - static_cast<int>(left);
    left = strand;
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
    const int first = p.kv_head * group, owned = rules[p.branch].head_begin;
    return branches[p.branch].variants > 1 ? first + p.variant : first > owned ? first : owned;
  }
  /// Whether a place has a strand of its own: of heads with one phase the first one names it.
  LONGSPAN_DEVICE bool leads(const DecodePlace& p) const {
    if (branches[p.branch].variants == 1) return true;
    const DeviceBranch& branch = rules[p.branch];
    const int head = leader_head(p);
    if (!branch.owns(head)) return false;
    for (int other = p.kv_head * group; other < head; ++other) {
      if (branch.owns(other) && branch.phase(other) == branch.phase(head)) return false;
    }
    return true;
  }
  LONGSPAN_DEVICE StrandRows strand(const DecodePlace& p, int length) const {
    return rules[p.branch].strand(leader_head(p), branches[p.branch].segment[p.segment], length);
  }
  /// The place of a pair (query row, head of the group) in the strand of a place that leads; -1 if it is in another
  /// one.
  LONGSPAN_DEVICE int find(const DecodePlace& p, const StrandRows& strand, int pair) const {
    const DeviceBranch& branch = rules[p.branch];
    const int head = p.kv_head * group + head_of(pair);
    if (!branch.owns(head) || (branches[p.branch].variants > 1 && branch.phase(head) != branch.phase(leader_head(p))))
      return -1;
    return strands::piece_row(strand.start, strand.stride, strand.count, positions[row_of(pair)]);
  }
  /// Few divisions: each takes as long as a load from shared memory and many instructions.
  LONGSPAN_DEVICE int row_of(int pair) const { return rows == 1 ? 0 : group == 1 ? pair : pair / group; }
  LONGSPAN_DEVICE int head_of(int pair) const { return rows == 1 ? pair : group == 1 ? 0 : pair % group; }
  /// Keys that row `own` of a strand attends to, from the first one on.
  LONGSPAN_DEVICE int keys(const StrandRows& strand, int own) const { return causal ? own + 1 : strand.count; }
  /// Record of a chunk, or, from `chunks` on, of a group.
  LONGSPAN_DEVICE std::int64_t record(int b, int entry, int head, int row, int index) const {
    const DecodeBranch& of = branches[b];
    const DeviceBranch& branch = rules[b];
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

/// What a block of 32 * warps threads keeps in shared memory: Q, and for each warp `stages` steps of 16 rows of K and
/// of V, in whose place then come states of 8 pairs. `columns`: as instantiated.
struct DecodeMemory {
  int pitch, step, warps, stages, ring, state_pitch, bytes;
  constexpr DecodeMemory(bool wide, int columns)
      : pitch((columns * (wide ? 4 : 2) + 127) / 128 * 128),
        step(32 * pitch),
        warps(step >= 32768   ? 1
              : step >= 16384 ? 2
                              : 4),
        stages(step < 8192 ? 3 : 2),
        ring(warps * stages * step),
        state_pitch(columns + 4),
        bytes(16 * pitch + ring) {}
};
constexpr int decode_width(std::int64_t columns) { return columns <= 64 ? 64 : columns <= 128 ? 128 : 256; }

cudaError_t start_decode(const Decode& decode, DType dtype, cudaStream_t stream);

}  // namespace longspan::cuda
