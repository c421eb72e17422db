// Where the rows of k and v are: one strided tensor each, or an ordered list of pieces. Kernels ask for runs of rows.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <tuple>

#include "longspan/attention.h"
#include "plan/strands.h"

namespace longspan {

/// Consecutive rows of a strand at a constant distance in memory.
struct RowRun {
  const std::byte* k = nullptr;
  const std::byte* v = nullptr;
  std::int64_t k_stride = 0;  // bytes between rows
  std::int64_t v_stride = 0;
  std::int64_t count = 0;
  std::byte* dk = nullptr;  // gradients, where pieces have them
  std::byte* dv = nullptr;
  std::int64_t dk_stride = 0;
  std::int64_t dv_stride = 0;
};

class KeyRows {
 public:
  KeyRows(const ConstTensorView& k, const ConstTensorView& v, std::span<const KeyPiece> pieces)
      : k_(k), v_(v), pieces_(pieces) {}

  /// The longest run that starts at row `index` of the strand, at most `limit` rows. count is 0 if no piece has the
  /// row.
  RowRun run(std::int64_t entry, std::int64_t kv_head, const Strand& strand, std::int64_t index,
             std::int64_t limit) const {
    const std::int64_t position = strand.start + index * strand.stride;
    const auto make = [&](const auto& k, const auto& v, std::int64_t head, std::int64_t row, std::int64_t row_step) {
      const std::int64_t step_bytes = row_step * size_of(k.dtype);
      return std::tuple(k.bytes_at(entry, row, head), v.bytes_at(entry, row, head), k.strides[1] * step_bytes,
                        v.strides[1] * step_bytes);
    };
    RowRun run;
    if (pieces_.empty()) {
      std::tie(run.k, run.v, run.k_stride, run.v_stride) = make(k_, v_, kv_head, position, strand.stride);
      run.count = limit;
      return run;
    }
    for (const KeyPiece& piece : pieces_) {
      const std::int64_t row = strands::piece_row(piece.first, piece.step, piece.k.rows(), position);
      const std::int64_t head = kv_head - piece.kv_head;
      if (row < 0 || head < 0 || head >= piece.k.heads()) continue;
      const bool regular = strand.stride % piece.step == 0;
      const std::int64_t row_step = regular ? strand.stride / piece.step : 0;
      std::tie(run.k, run.v, run.k_stride, run.v_stride) = make(piece.k, piece.v, head, row, row_step);
      if (piece.dk.given())
        std::tie(run.dk, run.dv, run.dk_stride, run.dv_stride) = make(piece.dk, piece.dv, head, row, row_step);
      run.count = regular ? std::min(limit, strands::ceil_divide(piece.k.rows() - row, row_step)) : 1;
      return run;
    }
    return run;
  }

  /// Calls body(index, run) for runs that together are rows [begin, end) of the strand, less those that no piece has.
  template <class Body>
  void for_each_run(std::int64_t entry, std::int64_t kv_head, const Strand& strand, std::int64_t begin,
                    std::int64_t end, Body&& body) const {
    for (std::int64_t index = begin; index < end;) {
      const RowRun rows = run(entry, kv_head, strand, index, end - index);
      if (rows.count > 0) body(index, rows);
      index += std::max<std::int64_t>(rows.count, 1);
    }
  }

 private:
  const ConstTensorView& k_;
  const ConstTensorView& v_;
  std::span<const KeyPiece> pieces_;
};

/// As the caller gives it, on the host.
inline std::int64_t length_of(const ConstTensorView& lengths, std::int64_t entry) {
  return lengths.dtype == DType::i64 ? *lengths.at<std::int64_t>(entry, 0, 0) : *lengths.at<std::int32_t>(entry, 0, 0);
}

/// Rows of entry `entry`: its length if lengths are given (already checked or clamped to [0, N]), else N.
inline std::int64_t rows_of_entry(const ConstTensorView& lengths, std::int64_t entry, std::int64_t tokens) {
  return lengths.given() ? std::clamp<std::int64_t>(length_of(lengths, entry), 0, tokens) : tokens;
}

/// Whether position may be attended in this entry, as far as key_mask says.
inline bool key_allowed(const ConstTensorView& key_mask, std::int64_t entry, std::int64_t position) {
  return !key_mask.given() || *key_mask.at<std::uint8_t>(entry, position, 0) != 0;
}

}  // namespace longspan
