// What a CUDA kernel is told: tensors, branches and work, by value in the launch's parameters (under 4 KB, so nothing
// is uploaded). A flat item index becomes (branch, range, entry, head, segment, tile) by arithmetic.
#pragma once

#include <cstdint>

#include "kernels/cuda/block_lists.h"
#include "plan/strands.h"

namespace longspan::cuda {

inline constexpr int kMaxBranches = 16;
inline constexpr int kMaxWork = 24;
inline constexpr int kMaxRanges = 8;
inline constexpr int kMaxPieces = 8;
inline constexpr int kFillRows = 256;
inline constexpr int kRowsOfSum = 65536;   // keys, or queries of a key, after whose last whole tile sums are closed
inline constexpr int kCounterWords = 256;  // of a stream (counters.h)

/// A tensor [batch, row, head, column]; strides in elements.
struct Rows {
  char* data;
  std::int64_t batch, row, head;
  LONGSPAN_DEVICE std::int64_t offset(std::int64_t entry, std::int64_t r, std::int64_t h) const {
    return entry * batch + r * row + h * head;
  }
};

// Strands as devices count them (plan/strands.h).
using StrandRows = strands::StrandOf<int>;
using StrandQueries = strands::QueryRunOf<int>;
using DeviceBranch = strands::BranchOf<int>;

/// Positions start .. start + count - 1 are rows first_row .. of q.
struct DeviceRange {
  int start, count;
  std::int64_t first_row;
  /// The rows of a strand in it.
  LONGSPAN_DEVICE StrandQueries of(const StrandRows& strand) const {
    return strands::query_run(strand, start, count, first_row);
  }
};

/// Row i of `rows` in k and v here is position first + i * step, of key/value heads kv_head .. kv_head + heads - 1.
struct DevicePiece {
  Rows k, v;
  int first, step, rows, kv_head, heads;
};
/// Where the gradients of a piece's rows are added, float32.
struct PieceGradients {
  Rows dk, dv;
};

/// Items first_item .. : entries x segments x heads x tiles of one branch in one range. Branch -1 fills uncovered rows.
/// `chunk` strands at a time, tile by tile: where tiles differ in length, the long ones of a chunk then come first. Of
/// the tiles of a strand a work may hold a part, so that the long ones of every branch come first.
struct Work {
  unsigned first_item = 0, strands = 0, chunk = 1;
  int branch = 0, range = 0;
  int head_begin = 0, head_step = 1, head_count = 0;
  int first_segment = 0, segments = 1, first_tile = 0, tiles = 0;
  int finished_before = 0;  // items of earlier branches, per entry and head of the range
};

struct Item {
  int branch, range, entry, head, segment, tile;
  int finished_before;
};

/// A float32 for each [batch, row, head]; strides in elements.
struct RowValues {
  float* data;
  std::int64_t batch, row, head;
  LONGSPAN_DEVICE float& at(int entry, std::int64_t r, int h) const { return data[entry * batch + r * row + h * head]; }
};

/// Sizes, what a call reads, and what a forward writes.
struct Tensors {
  Rows q, k, v, out;
  RowValues lse;  // without data where nobody asked for it
  const void* lengths;
  std::int64_t lengths_batch, query_rows;
  int batch, tokens, heads, kv_heads, columns, piece_count;
  bool lengths_64, aligned;
  DevicePiece pieces[kMaxPieces];
  const DevicePiece* piece_table;  // in device memory, where there are more than that

  LONGSPAN_DEVICE int length(int entry) const {
    if (!lengths) return tokens;
    const std::int64_t value = lengths_64 ? static_cast<const std::int64_t*>(lengths)[entry * lengths_batch]
                                          : static_cast<const std::int32_t*>(lengths)[entry * lengths_batch];
    return static_cast<int>(value < 0 ? 0 : value > tokens ? tokens : value);
  }
  LONGSPAN_DEVICE std::int64_t packed_row(int entry, std::int64_t row, int head) const {
    return (static_cast<std::int64_t>(entry) * heads + head) * query_rows + row;
  }
  /// Address of a row of k and v, in bytes from their types' size; null in both if no piece holds it.
  LONGSPAN_DEVICE void key_row(int entry, int kv_head, int position, int element, const char*& k_row,
                               const char*& v_row) const {
    if (piece_count == 0) {
      k_row = k.data + k.offset(entry, position, kv_head) * element;
      v_row = v.data + v.offset(entry, position, kv_head) * element;
      return;
    }
    k_row = v_row = nullptr;
    int row = 0;
    const int index = find_piece(kv_head, position, row);
    if (index < 0) return;
    const DevicePiece& piece = piece_list()[index];
    k_row = piece.k.data + piece.k.offset(entry, row, kv_head - piece.kv_head) * element;
    v_row = piece.v.data + piece.v.offset(entry, row, kv_head - piece.kv_head) * element;
  }
  LONGSPAN_DEVICE const DevicePiece* piece_list() const { return piece_table ? piece_table : pieces; }
  /// The first piece that has a row, and which of its rows it is; -1 if none has it.
  LONGSPAN_DEVICE int find_piece(int kv_head, int position, int& row) const {
    const DevicePiece* const list = piece_list();
    for (int i = 0; i < piece_count; ++i) {
      const DevicePiece& piece = list[i];
      if (kv_head < piece.kv_head || kv_head - piece.kv_head >= piece.heads) continue;
      row = strands::piece_row(piece.first, piece.step, piece.rows, position);
      if (row >= 0) return i;
    }
    return -1;
  }
};

/// What becomes of a pair of rows.
struct Rules {
  float scale, output_scale, keep_factor;
  std::uint32_t drop_threshold;
  std::uint64_t seed;
  const std::uint64_t* seed_pointer;
  const std::uint8_t* key_mask;
  std::int64_t key_mask_batch, key_mask_row;
  const float* alibi;
  std::int64_t alibi_head;
  bool causal, dropout;

  LONGSPAN_DEVICE bool allowed(int entry, int position) const {
    return !key_mask || key_mask[entry * key_mask_batch + position * key_mask_row] != 0;
  }
};

/// Which rows meet which, cut into items.
struct Schedule {
  std::int64_t items;
  unsigned whole_tiles, halved_tiles;  // forward: after that many items come that many tiles as two items each
  unsigned whole_each;                 // whole tiles of each multiprocessor
  int branch_count, work_count, range_count;
  bool merges;      // branches share rows
  bool fill;        // some rows may be in no branch
  bool descending;  // tiles of a strand, so that long ones come first
  bool listed;      // some branch has a block mask
  DeviceBranch branches[kMaxBranches];
  BlockLists lists[kMaxBranches];  // of branches with a block mask, for the tiles of this launch
  DeviceRange ranges[kMaxRanges];
  Work work[kMaxWork];

  LONGSPAN_DEVICE bool covered(int head, int position, int length_of_entry, int first_branch, int last_branch) const {
    for (int b = first_branch; b < last_branch; ++b) {
      if (branches[b].owns(head) && branches[b].active(length_of_entry) && branches[b].covers(head, position))
        return true;
    }
    return false;
  }
  /// Items are fewer than 2^31, so 32 bits do, which divide several times faster.
  LONGSPAN_DEVICE Item decode(unsigned flat) const {
    int w = 0;
    while (w + 1 < work_count && flat >= work[w + 1].first_item) ++w;
    const Work& entry_of = work[w];
    const unsigned local = flat - entry_of.first_item, tiles = static_cast<unsigned>(entry_of.tiles);
    const unsigned first_strand = local / (tiles * entry_of.chunk) * entry_of.chunk;
    const unsigned left = entry_of.strands - first_strand, together = left < entry_of.chunk ? left : entry_of.chunk;
    const unsigned within = local - first_strand * tiles;
    const int tile = static_cast<int>(within / together);
    const unsigned strand = first_strand + within % together;
    const unsigned by_head = strand / static_cast<unsigned>(entry_of.head_count);
    const unsigned segments = static_cast<unsigned>(entry_of.segments);
    Item item;
    item.branch = entry_of.branch;
    item.range = entry_of.range;
    item.head = entry_of.head_begin +
                static_cast<int>(strand - by_head * static_cast<unsigned>(entry_of.head_count)) * entry_of.head_step;
    item.entry = static_cast<int>(by_head / segments);
    item.segment = entry_of.first_segment + static_cast<int>(by_head % segments);
    item.tile = entry_of.first_tile + (descending ? entry_of.tiles - 1 - tile : tile);
    item.finished_before = entry_of.finished_before;
    return item;
  }
  /// The same where some tiles are two items each; `tile` of those counts half tiles.
  LONGSPAN_DEVICE Item decode_halves(unsigned flat, bool& half) const {
    const bool before = flat < whole_tiles;
    const unsigned beyond = flat - whole_tiles;
    half = !before && beyond < 2 * halved_tiles;
    Item item = decode(before ? flat : half ? whole_tiles + beyond / 2 : flat - halved_tiles);
    if (half) item.tile = 2 * item.tile + static_cast<int>(beyond % 2);
    return item;
  }
};

/// Memory of the call that blocks share.
struct Scratch {
  float* state;        // float32 accumulators of rows that several branches share, [entry, row, head][columns]
  float* state_sums;   // their running maximum and sum
  unsigned* ticket;    // next item, when items must start in order; next whole tile and next other item (halves)
  unsigned* finished;  // items done per range, entry and head
  unsigned* leaving;   // see counters.h; null: nothing has to be left at zero
  float* totals;       // of closed sums (closed_sums.cuh): places of total_floats each, which blocks take and give back
  unsigned* total_places;  // whether they are taken
  int total_count, total_floats;
};

/// What a backward adds.
struct Gradients {
  Rows dout, dq, dk, dv;
  RowValues dlse;
  const PieceGradients* piece_gradients;  // one for each piece, where gradients are added to those
  float* delta;                           // [entry, head, row] (x branch with detached_mix)
  float *dq_sum, *dk_sum, *dv_sum;        // float32 accumulators
  float dscore_scale, sum_scale;          // their product is scale; see prepare.cpp
  bool detached, sum_keys;
  bool deltas;       // a forward that puts down delta of each branch instead of out
  bool compact;      // with little shared memory
  bool separate_dq;  // dq is another launch's
};

struct Launch {
  Tensors tensors;
  Rules rules;
  Schedule schedule;
  Scratch scratch;
  Gradients gradients;

  /// Where {lse, delta} of a row lies; with detached_mix every branch has its own.
  LONGSPAN_DEVICE std::int64_t delta_row(int branch, int entry, std::int64_t row, int head) const {
    const std::int64_t rows = static_cast<std::int64_t>(tensors.heads) * tensors.query_rows;
    return (gradients.detached ? branch * tensors.batch * rows : 0) + tensors.packed_row(entry, row, head);
  }
  /// Where the gradient of a row of k (or v) is added; null if no piece has it.
  LONGSPAN_DEVICE float* gradient_row(int entry, int kv_head, int position, bool values) const {
    int row = 0;
    const int index = tensors.find_piece(kv_head, position, row);
    if (index < 0) return nullptr;
    const PieceGradients& piece = gradients.piece_gradients[index];
    const Rows& rows = values ? piece.dv : piece.dk;
    return reinterpret_cast<float*>(rows.data) + rows.offset(entry, row, kv_head - tensors.piece_list()[index].kv_head);
  }
};
static_assert(sizeof(Launch) <= 4000, "kernel parameters are limited to 4 KB");

}  // namespace longspan::cuda
