// Rows of a shard: where positions lie, packing them into messages, and messages as pieces of k and v. On a GPU all of
// it happens in the order of a stream.
#pragma once

#include <algorithm>
#include <cstring>
#include <optional>
#include <span>
#include <vector>

#include "attention/tensors.h"
#include "comm/messages.h"
#include "device/scratch.h"
#include "longspan/attention.h"
#include "longspan/exchange.h"
#include "plan/exchange_runs.h"
#include "plan/row_ranges.h"

namespace longspan {

/// Rows first .. first + count - 1 of a tensor.
template <class Void>
BasicTensorView<Void> rows_of(BasicTensorView<Void> view, std::int64_t first, std::int64_t count) {
  if (!view.given()) return view;
  if (view.data) view.data = view.bytes_at(0, first, 0);
  view.sizes[1] = count;
  return view;
}

/// k or v as the whole sequence has it: a shape without memory, for calls whose rows are in pieces.
inline ConstTensorView shape_only(ConstTensorView view, std::int64_t tokens) {
  view.data = nullptr;
  view.sizes[1] = tokens;
  view.strides = {0, 0, 0, 1};
  return view;
}

/// Rows of K and V, or of their gradients.
struct RunRows {
  TensorView k, v;
};
/// Where a run lies in a message of `pairs`: [batch, count, kv_heads, columns] of K [batch, pairs] and of V behind it,
/// in the batch and columns of `k`.
inline RunRows rows_of_run(std::byte* payload, std::int64_t pairs, const ExchangeRun& run, const ConstTensorView& k,
                           DType dtype) {
  const auto rows = [&](std::int64_t first) {
    TensorView view = TensorView::bnhd(payload + (first + run.offset) * k.columns() * size_of(dtype), dtype, k.batch(),
                                       run.count, run.kv_heads, k.columns(), k.device);
    view.strides[0] = pairs * k.columns();
    return view;
  };
  return {rows(0), rows(k.batch() * pairs)};
}

/// All rows of a message of `pairs` pairs, one behind the other.
inline TensorView message_rows(std::byte* payload, std::int64_t pairs, const ConstTensorView& k, DType dtype) {
  return TensorView::bnhd(payload, dtype, 1, 2 * pairs * k.batch(), 1, k.columns(), k.device);
}

/// A message and which rows it holds.
struct PackedRows {
  const MessageBuffer& message;
  std::span<const ExchangeRun> runs;
};

/// A row of a message, and the shard's row that it is.
struct PackedRow {
  const MessageBuffer& message;
  const ExchangeRun& run;
  std::int64_t pairs;  // of the message
  std::int64_t entry, row, shard_row;
};

/// Calls body(PackedRow) for every row of some messages, in one parallel loop: there may be many peers, and a run for
/// every head.
template <class Body>
void for_each_packed_row(std::span<const PackedRows> all, std::span<const RowRange> ranges, std::int64_t batch,
                         Body&& body) {
  const auto blocks_of = [](const ExchangeRun& run) { return (run.count + kRowsAtOnce - 1) / kRowsAtOnce; };
  struct RunItems {
    std::int64_t end;
    const MessageBuffer* message;
    const ExchangeRun* run;
    std::int64_t pairs;
  };
  std::vector<RunItems> list;
  std::int64_t items = 0, bytes = 0;
  for (const PackedRows& rows : all) {
    bytes += rows.message.bytes();
    const std::int64_t pairs = pairs_of(rows.runs);
    for (const ExchangeRun& run : rows.runs)
      list.push_back({items += batch * blocks_of(run), &rows.message, &run, pairs});
  }
  parallel_for(threads_for_bytes(bytes), items, {}, [&](int, std::int64_t item) {
    const auto found = std::upper_bound(list.begin(), list.end(), item,
                                        [](std::int64_t value, const RunItems& one) { return value < one.end; });
    const ExchangeRun& run = *found->run;
    if (found != list.begin()) item -= std::prev(found)->end;
    const std::int64_t blocks = blocks_of(run), begin = item % blocks * kRowsAtOnce;
    for (std::int64_t row = begin; row < std::min(begin + kRowsAtOnce, run.count); ++row)
      body(PackedRow{*found->message, run, found->pairs, item / blocks, row,
                     row_of(ranges, run.first + row * run.step)});
  });
}

/// Copies the rows of messages out of a shard's k and v.
inline void pack(std::span<const PackedRows> all, std::span<const RowRange> ranges, const ConstTensorView& k,
                 const ConstTensorView& v) {
  if (k.device.type == DeviceType::cuda) {
    for (const PackedRows& rows : all)
      gpu::pack(rows.message.payload(), rows.runs, ranges, k, v, rows.message.memory().stream);
    return;
  }
  for_each_packed_row(all, ranges, k.batch(), [&](const PackedRow& at) {
    const RunRows targets = rows_of_run(at.message.payload(), at.pairs, at.run, k, k.dtype);
    for (const auto& [view, target] : {std::pair(&k, &targets.k), {&v, &targets.v}}) {
      const std::int64_t together = view->strides[2] == view->columns() ? at.run.kv_heads : 1;  // heads side by side
      for (std::int64_t head = 0; head < at.run.kv_heads; head += together) {
        std::memcpy(target->bytes_at(at.entry, at.row, head),
                    view->bytes_at(at.entry, at.shard_row, at.run.kv_head + head),
                    static_cast<std::size_t>(together * k.columns() * size_of(k.dtype)));
      }
    }
  });
}

/// Calls body.operator()<float>() or <double>() for the dtype of sums.
template <class Body>
void with_sums(DType dtype, Body&& body) {
  if (dtype == DType::f64) body.template operator()<double>();
  else body.template operator()<float>();
}

/// Adds the rows of a message of gradients to a shard's float32 (float64) sums.
inline void add_gradients(const MessageBuffer& message, std::span<const ExchangeRun> runs,
                          std::span<const RowRange> ranges, const TensorView& dk, const TensorView& dv) {
  if (message.memory().on_gpu())
    return gpu::add_gradients(message.payload(), runs, ranges, dk, dv, message.memory().stream);
  const PackedRows packed{message, runs};
  with_sums(dk.dtype, [&]<class Real>() {
    for_each_packed_row({&packed, 1}, ranges, dk.batch(), [&](const PackedRow& at) {
      const RunRows sources = rows_of_run(message.payload(), at.pairs, at.run, dk, dk.dtype);
      for (const auto& [view, source] : {std::pair(&dk, &sources.k), {&dv, &sources.v}}) {
        for (std::int64_t head = 0; head < at.run.kv_heads; ++head) {
          Real* const sum = view->template at<Real>(at.entry, at.shard_row, at.run.kv_head + head);
          const Real* const value = source->template at<Real>(at.entry, at.row, head);
          for (std::int64_t column = 0; column < dk.columns(); ++column) sum[column] += value[column];
        }
      }
    });
  });
}

/// Adds the rows of a message, in the dtype given, to a list of pieces; with gradients if there is memory for them.
inline void add_pieces(std::vector<KeyPiece>& pieces, std::span<const ExchangeRun> runs, std::byte* payload,
                       std::byte* gradients, const ConstTensorView& k, DType dtype) {
  const std::int64_t pairs = pairs_of(runs);
  for (const ExchangeRun& run : runs) {
    const RunRows rows = rows_of_run(payload, pairs, run, k, dtype);
    KeyPiece piece{run.first, run.step, rows.k, rows.v, run.kv_head, {}, {}};
    if (gradients) {
      const RunRows sums = rows_of_run(gradients, pairs, run, k, sum_dtype(k.dtype));
      piece.dk = sums.k, piece.dv = sums.v;
    }
    pieces.push_back(piece);
  }
}

/// A shard's own rows as pieces.
inline std::vector<KeyPiece> own_pieces(std::span<const RowRange> ranges, const ConstTensorView& k,
                                        const ConstTensorView& v, const TensorView& dk = {},
                                        const TensorView& dv = {}) {
  std::vector<KeyPiece> pieces;
  if (ranges.empty()) pieces.push_back({0, 1, k, v, 0, dk, dv});  // no rows, but a list that says so
  std::int64_t row = 0;
  for (const RowRange& range : ranges) {
    pieces.push_back({range.start, 1, rows_of(k, row, range.count), rows_of(v, row, range.count), 0,
                      rows_of(dk, row, range.count), rows_of(dv, row, range.count)});
    row += range.count;
  }
  return pieces;
}

/// target = source, element by element, each in its own dtype.
inline void convert(const TensorView& target, const ConstTensorView& source, void* stream = nullptr) {
  if (target.device.type == DeviceType::cuda) return gpu::convert(target, source, stream);
  convert_on_host(target, source);
}

/// Small call data (masks, lengths, slopes) where the host can read it.
class OnHost {
 public:
  OnHost(const ConstTensorView& view, void* stream) : view_(view) {
    if (!view.data || view.device.type == DeviceType::cpu) return;
    std::int64_t elements = 1;
    for (std::size_t d = 0; d < 4; ++d) elements += std::max<std::int64_t>(view.sizes[d] - 1, 0) * view.strides[d];
    const std::size_t bytes = static_cast<std::size_t>(elements * size_of(view.dtype));
    copy_.emplace(bytes);
    gpu::copy(copy_->data(), view.data, bytes, view.device.index, stream);
    gpu::wait(view.device.index, stream);
    view_.data = copy_->data();
    view_.device = {};
  }
  const ConstTensorView& view() const { return view_; }

 private:
  std::optional<gpu::PinnedLease> copy_;
  ConstTensorView view_;
};

}  // namespace longspan
