// The grid of a forward with few query rows: which block takes which keys of which rows, and where partial results lie.
//   chunk     64 keys of a strand at its start, up to 1,024 far from it (kLevels): the same sums in every call. Short
//             strands need many chunks, to be read by all of the GPU; of long ones, many small ones would cost records
//   a warp    one chunk for up to 16 (query row, head) pairs of one strand and one key/value head
//   a block   as many chunks as it has warps; or, where there are many pairs (`shares`), one chunk and as many tiles of
//             16 pairs. Long chunks first
//   merging   a second kernel merges up to kDecodeFan chunks at once, those groups one after the other, then branches
//             in order
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "kernels/cuda/launch.h"
#include "longspan/plan.h"
#include "longspan/strand_cache.h"
#include "longspan/tensor_view.h"

namespace longspan::cuda {

inline constexpr int kDecodeRows = 16;  // of queries in a call
inline constexpr int kDecodeFan = 16;

/// From key `begin` of a strand on chunks have `keys` keys; `first` is the number of the first one.
struct ChunkLevel {
  int begin, keys, first;
};
/// The first chunk of each level is a multiple of the warps of any block.
LONGSPAN_DEVICE constexpr ChunkLevel chunk_level(int index) {
  return index == 0   ? ChunkLevel{0, 64, 0}
         : index == 1 ? ChunkLevel{2048, 128, 32}
         : index == 2 ? ChunkLevel{8192, 256, 80}
         : index == 3 ? ChunkLevel{16384, 512, 112}
                      : ChunkLevel{32768, 1024, 144};
}
LONGSPAN_DEVICE constexpr ChunkLevel level_of_chunk(int chunk) {
  int level = 4;
  while (chunk < chunk_level(level).first) --level;
  return chunk_level(level);
}
LONGSPAN_DEVICE constexpr int chunk_begin(int chunk) {
  const ChunkLevel level = level_of_chunk(chunk);
  return level.begin + (chunk - level.first) * level.keys;
}
LONGSPAN_DEVICE constexpr int chunk_end(int chunk, int keys) {
  const int begin = chunk_begin(chunk), most = level_of_chunk(chunk).keys;
  return keys - begin < most ? keys : begin + most;
}
LONGSPAN_DEVICE constexpr int chunks_of(int keys) {
  if (keys == 0) return 0;
  int index = 4;
  while (keys <= chunk_level(index).begin) --index;
  const ChunkLevel level = chunk_level(index);
  return level.first + (keys - 1 - level.begin) / level.keys + 1;
}

struct DecodePlace {
  int branch, entry, kv_head, segment, variant, tile, chunk;
  int first_chunk;  // of the block
};

/// Blocks of one branch: chunks, the last ones first, x entries x key/value heads x segments x variants x tiles.
struct DecodeBranch {
  unsigned first_block;
  std::int64_t first_record;
  int strands, kv_begin, kv_count;
  int segments;  // that query rows lie in
  int variants;  // strands of a segment: one, or one for each head of a group where phases depend on heads
  int tiles;     // of 16 (row, head) pairs
  int chunks;
  int block_tiles, block_chunks;  // blocks for the tiles and for the chunks of a strand
  int segment[kDecodeRows];       // their indices
};

struct DecodeGrid {
  int rows, group, heads, kv_heads, branch_count;
  unsigned blocks;
  std::int64_t records;
  std::int64_t first_row;  // of q
  bool causal, shares;
  int warps;  // of a block
  int positions[kDecodeRows], last_position;
  DeviceBranch rules[kMaxBranches];
  DecodeBranch branches[kMaxBranches];

  LONGSPAN_DEVICE DecodePlace place(unsigned block, int warp) const {
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
    p.tile = next(of.block_tiles);
    const unsigned strand = static_cast<unsigned>(next(of.strands));
    p.first_chunk = p.chunk = of.block_chunks - 1 - static_cast<int>(left);
    if (shares) p.tile = p.tile * warps + warp;
    else p.first_chunk *= warps, p.chunk = p.first_chunk + warp;
    left = strand;
    p.variant = next(of.variants);
    p.segment = next(of.segments);
    p.kv_head = of.kv_begin + next(of.kv_count);
    p.entry = static_cast<int>(left);
    return p;
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
  /// Rows of a strand that some query may attend to: behind them memory may hold anything.
  LONGSPAN_DEVICE int rows_before_end(const StrandRows& strand) const {
    if (!causal) return strand.count;
    const int distance = last_position - strand.start;
    return distance < 0 ? 0 : (strand.stride == 1 ? distance : distance / strand.stride) + 1;
  }
  /// Keys that row `own` of a strand attends to, from the first one on.
  LONGSPAN_DEVICE int keys(const StrandRows& strand, int own) const { return causal ? own + 1 : strand.count; }
  LONGSPAN_DEVICE std::int64_t record(int b, int entry, int head, int row, int chunk) const {
    const DecodeBranch& of = branches[b];
    const DeviceBranch& branch = rules[b];
    return of.first_record +
           ((static_cast<std::int64_t>(entry) * branch.head_count + head - branch.head_begin) * rows + row) *
               of.chunks +
           chunk;
  }
};

/// The rows of a launch's ranges, at most kDecodeRows, for blocks of so many warps. A plan's bounds hold for any rows.
DecodeGrid decode_grid(const Launch& launch, int warps);
struct DecodeBounds {
  double blocks = 0, records = 0;
};
DecodeBounds decode_bounds(const Plan& plan);

struct Decode {
  Tensors tensors;
  Rules rules;
  DecodeGrid grid;
  float* records;  // {maximum, sum, -, -, columns of out} each
};
static_assert(sizeof(Decode) <= 4000, "kernel parameters are limited to 4 KB");
constexpr std::size_t decode_record_bytes(std::int64_t columns) {
  return static_cast<std::size_t>(columns + 4) * sizeof(float);
}

/// What a block of 32 * warps threads keeps in shared memory: a tile of Q, and for each warp `stages` steps of `keys`
/// rows of K and of V. `columns`: as instantiated.
struct DecodeMemory {
  int pitch, keys, step, warps, stages, bytes;
  constexpr DecodeMemory(bool wide, int columns)
      : pitch((columns * (wide ? 4 : 2) + 127) / 128 * 128),
        keys(pitch == 128 ? 32 : 16),
        step(2 * keys * pitch),
        warps(step >= 32768   ? 1
              : step >= 16384 ? 2
                              : 4),
        stages(step < 16384 ? 3 : 2),
        bytes(16 * pitch + warps * stages * step) {}
};
constexpr int decode_width(std::int64_t columns) { return columns <= 64 ? 64 : columns <= 128 ? 128 : 256; }

/// Both kernels. `overlaps`: the device starts a kernel while the one before it ends (programmatic dependent launch).
cudaError_t start_decode(const Decode& decode, DType dtype, bool overlaps, cudaStream_t stream);

/// Of at least one unit. `aligned`: all rows to 16 bytes.
cudaError_t start_append(const StrandCache& cache, const TokenRows& key, const TokenRows& value, bool aligned,
                         cudaStream_t stream);

}  // namespace longspan::cuda
