// Where the rows of k and v are: one strided tensor each, or an ordered list of pieces. Kernels ask for runs of rows.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

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
      : k_(k), v_(v), pieces_(pieces), element_(size_of(k.dtype)) {}

  /// The longest run that starts at row `index` of the strand, at most `limit` rows. count is 0 if no piece has the
  /// row.
  RowRun run(std::int64_t entry, std::int64_t kv_head, const Strand& strand, std::int64_t index,
             std::int64_t limit) const {
    const std::int64_t position = strand.start + index * strand.stride;
    if (pieces_.empty()) return make(k_, v_, entry, kv_head, position, strand.stride, limit);
    for (const KeyPiece& piece : pieces_) {
      const std::int64_t row = strands::piece_row(piece.first, piece.step, piece.k.rows(), position);
      const std::int64_t head = kv_head - piece.kv_head;
      if (row < 0 || head < 0 || head >= piece.k.heads()) continue;
      const bool regular = strand.stride % piece.step == 0;
      const std::int64_t row_step = regular ? strand.stride / piece.step : 0;
      const std::int64_t rows_left = regular ? strands::ceil_divide(piece.k.rows() - row, row_step) : 1;
      RowRun run = make(piece.k, piece.v, entry, head, row, row_step, std::min(limit, rows_left));
      if (piece.dk.given()) {
        const std::int64_t element = size_of(piece.dk.dtype);
        run.dk = static_cast<std::byte*>(piece.dk.data) + piece.dk.offset(entry, row, head) * element;
        run.dv = static_cast<std::byte*>(piece.dv.data) + piece.dv.offset(entry, row, head) * element;
        run.dk_stride = row_step * piece.dk.strides[1] * element;
        run.dv_stride = row_step * piece.dv.strides[1] * element;
      }
      return run;
    }
    return {};
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
  RowRun make(const ConstTensorView& k, const ConstTensorView& v, std::int64_t entry, std::int64_t kv_head,
              std::int64_t row, std::int64_t row_step, std::int64_t count) const {
    return {static_cast<const std::byte*>(k.data) + k.offset(entry, row, kv_head) * element_,
            static_cast<const std::byte*>(v.data) + v.offset(entry, row, kv_head) * element_,
            row_step * k.strides[1] * element_,
            row_step * v.strides[1] * element_,
            count,
            nullptr,
            nullptr,
            0,
            0};
  }

  const ConstTensorView& k_;
  const ConstTensorView& v_;
  std::span<const KeyPiece> pieces_;
  std::int64_t element_;
};

/// Rows of entry `entry`: its length if lengths are given (already checked or clamped to [0, N]), else N.
inline std::int64_t rows_of_entry(const ConstTensorView& lengths, std::int64_t entry, std::int64_t tokens) {
  if (!lengths.given()) return tokens;
  const std::int64_t value =
      lengths.dtype == DType::i64 ? *lengths.at<std::int64_t>(entry, 0, 0) : *lengths.at<std::int32_t>(entry, 0, 0);
  return std::clamp<std::int64_t>(value, 0, tokens);
}

/// Whether position may be attended in this entry, as far as key_mask says.
inline bool key_allowed(const ConstTensorView& key_mask, std::int64_t entry, std::int64_t position) {
  return !key_mask.given() || *key_mask.at<std::uint8_t>(entry, position, 0) != 0;
}

}  // namespace longspan
