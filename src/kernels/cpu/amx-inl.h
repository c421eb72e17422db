// AMX: products of tiles of 16 rows x 64 bytes, on the layouts of bfloat16 pairs.
//   c [16 rows x 16 floats] += a [16 rows x 16 units] * b [16 units x 16 columns]; two by two tiles of c at a time.
//   Forward and scores: a = rows of q, weights or dscores; b = panels of keys, values.
//   dv and dk are summed transposed, [columns][keys]: a = dout or q transposed, b = weights or dscores interleaved by
//   query rows, which is how they are stored for the dot products too.
// Needs AMX-TILE and AMX-BF16 in HWY_TARGET_STR.
#pragma once

#include "kernels/cpu/pairs-inl.h"

HWY_BEFORE_NAMESPACE();
namespace longspan::cpu {
namespace HWY_NAMESPACE {
namespace {

constexpr int kTile = 16;  // rows, units and columns of a tile

struct alignas(64) TileShapes {
  std::uint8_t palette = 1, start_row = 0, reserved[14] = {};
  std::uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  std::uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};
// Static, since GCC's intrinsic names only its first bytes as read: stores to a local one may be dropped.
constexpr TileShapes kTileShapes;
inline void configure_tiles() { _tile_loadconfig(&kTileShapes); }

/// GCC's tile loads do not say that they read memory: without this, stores of what they load could move behind them.
HWY_INLINE void finish_stores() { asm volatile("" ::: "memory"); }

/// c = a b, or c += a b, for kRows x kColumns tiles of c (1 or 2 each); `steps` tiles of inner units, those of b where
/// `b_of(step)` says.
template <int kRows, int kColumns, bool kAdd, class Place>
HWY_INLINE void multiply_tiles(const float* a, std::int64_t a_stride, const Place& b_of, std::int64_t b_stride,
                               std::int64_t steps, float* c, std::int64_t c_stride) {
  const std::int64_t a_bytes = a_stride * 4, b_bytes = b_stride * 4, c_bytes = c_stride * 4;
  finish_stores();
  if constexpr (kAdd) {
    _tile_loadd(0, c, c_bytes);
    if constexpr (kColumns == 2) _tile_loadd(1, c + kTile, c_bytes);
    if constexpr (kRows == 2) _tile_loadd(2, c + kTile * c_stride, c_bytes);
    if constexpr (kRows == 2 && kColumns == 2) _tile_loadd(3, c + kTile * c_stride + kTile, c_bytes);
  } else {
    _tile_zero(0);
    if constexpr (kColumns == 2) _tile_zero(1);
    if constexpr (kRows == 2) _tile_zero(2);
    if constexpr (kRows == 2 && kColumns == 2) _tile_zero(3);
  }
  for (std::int64_t step = 0; step < steps; ++step) {
    const float* const left = a + step * kTile;
    const float* const right = b_of(step);
    _tile_loadd(4, left, a_bytes);
    _tile_loadd(6, right, b_bytes);
    _tile_dpbf16ps(0, 4, 6);
    if constexpr (kColumns == 2) {
      _tile_loadd(7, right + kTile, b_bytes);
      _tile_dpbf16ps(1, 4, 7);
    }
    if constexpr (kRows == 2) {
      _tile_loadd(5, left + kTile * a_stride, a_bytes);
      _tile_dpbf16ps(2, 5, 6);
      if constexpr (kColumns == 2) _tile_dpbf16ps(3, 5, 7);
    }
  }
  _tile_stored(0, c, c_bytes);
  if constexpr (kColumns == 2) _tile_stored(1, c + kTile, c_bytes);
  if constexpr (kRows == 2) _tile_stored(2, c + kTile * c_stride, c_bytes);
  if constexpr (kRows == 2 && kColumns == 2) _tile_stored(3, c + kTile * c_stride + kTile, c_bytes);
}

/// The same for any number of tiles.
template <bool kAdd, class Place>
HWY_NOINLINE void multiply_placed(std::int64_t row_tiles, std::int64_t column_tiles, const float* a,
                                  std::int64_t a_stride, const Place& b_of, std::int64_t b_stride, std::int64_t steps,
                                  float* c, std::int64_t c_stride) {
  for (std::int64_t column = 0; column < column_tiles; column += 2) {
    const auto right = [&](std::int64_t step) HWY_ATTR { return b_of(step) + column * kTile; };
    for (std::int64_t row = 0; row < row_tiles; row += 2) {
      const float* const left = a + row * kTile * a_stride;
      float* const target = c + row * kTile * c_stride + column * kTile;
      const bool two_rows = row + 1 < row_tiles, two_columns = column + 1 < column_tiles;
      if (two_rows && two_columns) multiply_tiles<2, 2, kAdd>(left, a_stride, right, b_stride, steps, target, c_stride);
      else if (two_rows) multiply_tiles<2, 1, kAdd>(left, a_stride, right, b_stride, steps, target, c_stride);
      else if (two_columns) multiply_tiles<1, 2, kAdd>(left, a_stride, right, b_stride, steps, target, c_stride);
      else multiply_tiles<1, 1, kAdd>(left, a_stride, right, b_stride, steps, target, c_stride);
    }
  }
}
/// b in one piece.
template <bool kAdd>
HWY_INLINE void multiply_all(std::int64_t row_tiles, std::int64_t column_tiles, const float* a, std::int64_t a_stride,
                             const float* b, std::int64_t b_stride, std::int64_t steps, float* c,
                             std::int64_t c_stride) {
  const auto b_of = [=](std::int64_t step) HWY_ATTR { return b + step * kTile * b_stride; };
  multiply_placed<kAdd>(row_tiles, column_tiles, a, a_stride, b_of, b_stride, steps, c, c_stride);
}

struct AmxForward : PairLayout<kTile> {
  using PairLayout::PairLayout;
  // Four tiles of rows use a panel before the next is loaded: products wait for the second-level cache, not for the
  // tiles.
  static constexpr int kGroup = 4 * kTile;
  static constexpr int kRowMultiple = kTile;
  static constexpr int kPanel = 2 * kTile;
  static constexpr std::int64_t kKeyBlock = 512;
  static constexpr std::int64_t kScoreStride =
      kKeyBlock + kTile;  // not a power of two: rows of a tile fall into different sets
  static constexpr std::int64_t kRunMultiple = 2 * kTile;
  static constexpr bool kStartsFresh = true;
  static constexpr bool kPrefetches = false;  // tiles wait in the same queue as prefetches

  static void begin() { configure_tiles(); }
  static void end() { _tile_release(); }

  /// Two tiles of rows at a time, so that rows on the diagonal cost what they see: calls part(first row, tiles, keys
  /// seen).
  template <class Part>
  static HWY_INLINE void for_row_pairs(std::int64_t rows, const std::int64_t* limits, std::int64_t end, Part part) {
    for (std::int64_t row = 0; row < rows; row += 2 * kTile) {
      const std::int64_t most = *std::max_element(limits + row, limits + row + 2 * kTile);
      part(row, std::min<std::int64_t>(2, (rows - row + kTile - 1) / kTile), std::min(most, end));
    }
  }

  void scores(std::int64_t rows, const std::int64_t* limits, const float* q, const float* k_panels, std::int64_t begin,
              std::int64_t end, float* scores) const {
    for (std::int64_t key = begin; key < end; key += kPanel) {
      for_row_pairs(rows, limits, end, [&](std::int64_t row, std::int64_t tiles, std::int64_t seen) {
        if (key >= seen) return;
        multiply_all<false>(tiles, 2, q + row * depth, depth, k_panels + key * depth, kPanel, depth / kTile,
                            scores + row * kScoreStride + key, kScoreStride);
      });
    }
  }
  /// As for register tiles; without corrections out is written, whatever was there.
  void outputs(std::int64_t rows, const std::int64_t* limits, const float* weights, const float* values,
               std::int64_t begin, std::int64_t end, float* out, const float* corrections) const {
    if (!corrections) {
      add_outputs<false>(rows, limits, weights, values, begin, end, out);
      return;
    }
    correct(rows, out, corrections);
    add_outputs<true>(rows, limits, weights, values, begin, end, out);
  }
  /// The same for runs of keys whose weights lie side by side and that every row sees: sums stay in tiles from run to
  /// run.
  void outputs_of_runs(std::int64_t rows, const float* weights, const float* values, const KeyRun* runs, int count,
                       float* out, const float* corrections) const {
    correct(rows, out, corrections);
    const float* places[kKeyBlock / (2 * kTile)];
    std::int64_t steps = 0;
    for (int run = 0; run < count; ++run) {
      for (std::int64_t key = runs[run].begin; key < runs[run].end; key += 2 * kTile)
        places[steps++] = values + value_offset(key);
    }
    multiply_placed<true>((rows + kTile - 1) / kTile, columns / kTile, weights, kScoreStride,
                          [&](std::int64_t step) HWY_ATTR { return places[step]; }, columns, steps, out, columns);
  }

 private:
  void correct(std::int64_t rows, float* out, const float* corrections) const {
    for (std::int64_t row = 0; row < rows; ++row) {
      if (corrections[row] == 1.0f)
        continue;  // the rule once the largest score was met; multiplying by 1 changes no bit
      for (std::int64_t column = 0; column < columns; column += kLanes) {
        float* const target = out + row * columns + column;
        store(hn::Mul(load(target), broadcast(corrections[row])), target);
      }
    }
  }
  template <bool kAdd>
  void add_outputs(std::int64_t rows, const std::int64_t* limits, const float* weights, const float* values,
                   std::int64_t begin, std::int64_t end, float* out) const {
    for_row_pairs(rows, limits, end, [&](std::int64_t row, std::int64_t tiles, std::int64_t seen) {
      if (begin >= seen) return;
      multiply_all<kAdd>(tiles, columns / kTile, weights + row * kScoreStride + begin / 2, kScoreStride,
                         values + value_offset(begin), columns, (seen - begin + 2 * kTile - 1) / (2 * kTile),
                         out + row * columns, columns);
    });
  }
};

struct AmxBackward : PairLayout<kTile> {
  using PairLayout::PairLayout;
  static constexpr int kRows = kTile;
  static constexpr int kPanel = 2 * kTile;
  static constexpr std::int64_t kQueryTile = 96;
  static constexpr std::int64_t kKeyTile = 128;
  static constexpr std::int64_t kRunMultiple = 2 * kTile;
  static constexpr bool kClearUnseen = true;  // a tile takes 32 query rows, which is two groups
  static constexpr bool kPrefetches = false;

  static void begin() { configure_tiles(); }
  static void end() { _tile_release(); }

  static HWY_INLINE void put(float* weights, float* dscores, float* dscore_rows, std::int64_t row, std::int64_t key,
                             V w0, V w1, V d0, V d1) {
    put_pairs<kKeyTile>(weights, dscores, dscore_rows, row, key, w0, w1, d0, d1);
  }
  HWY_INLINE void score_tiles(int, const float* q, const float* dout, const float* k_panel, const float* v_panel,
                              float* scores, float* dweights) const {
    const auto panel_of = [](const float* panel) {
      return [=](std::int64_t step) HWY_ATTR { return panel + step * kTile * kPanel; };
    };
    multiply_tiles<1, 2, false>(q, depth, panel_of(k_panel), kPanel, depth / kTile, scores, kPanel);
    multiply_tiles<1, 2, false>(dout, depth, panel_of(v_panel), kPanel, depth / kTile, dweights, kPanel);
  }
  void add_to_keys(const float* interleaved, const float* transposed, float* sums, std::int64_t key,
                   std::int64_t tile_keys, std::int64_t padded, std::int64_t rows, const std::int64_t* seen) const {
    const std::int64_t steps = (rows + 2 * kTile - 1) / (2 * kTile), groups = (rows + kTile - 1) / kTile;
    std::int64_t group = 0;
    for (std::int64_t k = 0; k < tile_keys; k += kPanel) {
      while (group < groups && seen[group] <= k) ++group;
      const std::int64_t from = group / 2;
      if (from >= steps) break;
      multiply_all<true>(columns / kTile, 2, transposed + from * kTile, kQueryTile / 2,
                         interleaved + from * kTile * kKeyTile + k, kKeyTile, steps - from, sums + key + k, padded);
    }
  }
  void add_to_queries(const float* dscore_rows, const float* k_values, float* dq, std::int64_t rows,
                      const std::int64_t* seen) const {
    for (std::int64_t row = 0; row < rows; row += 2 * kTile) {
      const bool two = row + kTile < rows;
      const std::int64_t most = two ? std::max(seen[row / kTile], seen[row / kTile + 1]) : seen[row / kTile];
      if (most <= 0) continue;
      multiply_all<true>(two ? 2 : 1, columns / kTile, dscore_rows + row * (kKeyTile / 2), kKeyTile / 2, k_values,
                         columns, (most + 2 * kTile - 1) / (2 * kTile), dq + row * columns, columns);
    }
  }
  /// Queries row by row, and transposed: [columns][kQueryTile / 2] units of two rows.
  HWY_NOINLINE void pack_queries(float* target, float* transposed, const std::byte* const* rows, std::int64_t count,
                                 float factor, float* scratch) const {
    PairLayout::pack_queries(target, scratch, rows, count, factor, nullptr);
    for (std::int64_t pair = 0; pair < count / 2; pair += kTile) {
      const float* group[kTile];
      for (int lane = 0; lane < kTile; ++lane) group[lane] = scratch + (pair + lane) * columns;
      for (std::int64_t column = 0; column < columns; column += 4) {
        transpose_quad(group, column, transposed + column * (kQueryTile / 2) + pair, kQueryTile / 2);
      }
    }
  }
  /// Sums lie transposed: 16 keys at a time come back as rows, in `rows`.
  const float* key_sums(const float* sums, std::int64_t key, std::int64_t padded, float* rows) const {
    if (key % kTile == 0) {
      for (std::int64_t column = 0; column < columns; column += kTile) {
        const float* group[kTile];
        for (int lane = 0; lane < kTile; ++lane) group[lane] = sums + (column + lane) * padded;
        for (int unit = 0; unit < kTile; unit += 4)
          transpose_quad(group, key + unit, rows + unit * columns + column, columns);
      }
    }
    return rows + key % kTile * columns;
  }
};

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace longspan::cpu
HWY_AFTER_NAMESPACE();
