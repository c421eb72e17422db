// Rows of a shard: where positions lie, packing them into messages, and messages as pieces of k and v. On a GPU all of
// it happens in the order of a stream.
#pragma once

#include <algorithm>
#include <cstring>
#include <optional>
#include <span>
#include <vector>

#include "comm/messages.h"
#include "device/scratch.h"
#include "longspan/attention.h"
#include "longspan/exchange.h"
#include "longspan/threads.h"
#include "util/dispatch.h"
#include "util/parallel.h"

namespace longspan {

/// Rows first .. first + count - 1 of a tensor.
template <class Void>
BasicTensorView<Void> rows_of(BasicTensorView<Void> view, std::int64_t first, std::int64_t count) {
  if (!view.given()) return view;
  using Byte = std::conditional_t<std::is_const_v<Void>, const std::byte, std::byte>;
  if (view.data) view.data = static_cast<Byte*>(view.data) + first * view.strides[1] * size_of(view.dtype);
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

/// The row of a shard that holds a position.
inline std::int64_t row_of(std::span<const RowRange> ranges, std::int64_t position) {
  std::int64_t row = 0;
  for (const RowRange& range : ranges) {
    if (position < range.start + range.count) return row + position - range.start;
    row += range.count;
  }
  return row;
}

/// Where a run of a message lies: K (or its gradient), then V, each [batch, count, kv_heads, columns].
inline TensorView run_view(std::byte* payload, const ExchangeRun& run, bool values, std::int64_t batch,
                           std::int64_t columns, DType dtype, Device device) {
  const std::int64_t row_bytes = batch * columns * size_of(dtype);
  std::byte* const data = payload + (2 * run.offset + (values ? run.pairs() : 0)) * row_bytes;
  return TensorView::bnhd(data, dtype, batch, run.count, run.kv_heads, columns, device);
}

/// All rows of a message of `pairs` pairs, one behind the other.
inline TensorView message_rows(std::byte* payload, std::int64_t pairs, const ConstTensorView& k, DType dtype) {
  return TensorView::bnhd(payload, dtype, 1, 2 * pairs * k.batch(), 1, k.columns(), k.device);
}

inline constexpr std::int64_t kRowsAtOnce = 64;  // of a thread: enough that sharing out rows costs nothing

inline std::int64_t bytes_of(const ConstTensorView& view) {
  return view.batch() * view.rows() * view.heads() * view.columns() * size_of(view.dtype);
}

/// Calls body(entry, first row, last row) for blocks of all rows of a tensor, in parallel.
template <class Body>
void for_each_block(const ConstTensorView& view, int threads, Body&& body) {
  const std::int64_t rows = view.rows(), blocks = (rows + kRowsAtOnce - 1) / kRowsAtOnce;
  parallel_for(threads, view.batch() * blocks, {}, [&](int, std::int64_t item) {
    const std::int64_t begin = item % blocks * kRowsAtOnce;
    body(item / blocks, begin, std::min(begin + kRowsAtOnce, rows));
  });
}

/// A message and which rows it holds.
struct PackedRows {
  const MessageBuffer& message;
  std::span<const ExchangeRun> runs;
};

/// Calls body(message, run, entry, row of the run, position) for every row of some messages, in one parallel loop:
/// there may be many peers, and a run for every head.
template <class Body>
void for_each_row(std::span<const PackedRows> all, std::int64_t batch, Body&& body) {
  const auto blocks_of = [](const ExchangeRun& run) { return (run.count + kRowsAtOnce - 1) / kRowsAtOnce; };
  struct Part {
    std::int64_t end;  // of its items
    const MessageBuffer* message;
    const ExchangeRun* run;
  };
  std::vector<Part> parts;
  std::int64_t items = 0, bytes = 0;
  for (const PackedRows& rows : all) {
    bytes += static_cast<std::int64_t>(rows.message.bytes());
    for (const ExchangeRun& run : rows.runs) parts.push_back({items += batch * blocks_of(run), &rows.message, &run});
  }
  parallel_for(threads_for_bytes(bytes), items, {}, [&](int, std::int64_t item) {
    const auto part = std::upper_bound(parts.begin(), parts.end(), item,
                                       [](std::int64_t value, const Part& one) { return value < one.end; });
    const ExchangeRun& run = *part->run;
    if (part != parts.begin()) item -= std::prev(part)->end;
    const std::int64_t blocks = blocks_of(run), begin = item % blocks * kRowsAtOnce;
    for (std::int64_t row = begin; row < std::min(begin + kRowsAtOnce, run.count); ++row)
      body(*part->message, run, item / blocks, row, run.first + row * run.step);
  });
}

/// Copies the rows of messages out of a shard's k and v.
inline void pack(std::span<const PackedRows> all, std::span<const RowRange> ranges, const ConstTensorView& k,
                 const ConstTensorView& v) {
  if (k.device.type == DeviceType::cuda) {
    for (const PackedRows& rows : all)
      gpu::pack(rows.message.payload(), rows.runs, ranges, k, v, rows.message.place().stream);
    return;
  }
  const std::int64_t bytes = k.columns() * size_of(k.dtype);
  for_each_row(
      all, k.batch(),
      [&](const MessageBuffer& message, const ExchangeRun& run, std::int64_t entry, std::int64_t row,
          std::int64_t position) {
        const std::int64_t source = row_of(ranges, position);
        for (const auto& [view, values] : {std::pair<const ConstTensorView&, bool>{k, false}, {v, true}}) {
          const TensorView target = run_view(message.payload(), run, values, k.batch(), k.columns(), k.dtype, {});
          const std::int64_t together = view.strides[2] == view.columns() ? run.kv_heads : 1;  // heads side by side
          for (std::int64_t head = 0; head < run.kv_heads; head += together) {
            std::memcpy(static_cast<std::byte*>(target.data) + target.offset(entry, row, head) * size_of(k.dtype),
                        static_cast<const std::byte*>(view.data) +
                            view.offset(entry, source, run.kv_head + head) * size_of(k.dtype),
                        static_cast<std::size_t>(together * bytes));
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
  if (message.place().on_gpu())
    return gpu::add_gradients(message.payload(), runs, ranges, dk, dv, message.place().stream);
  const PackedRows packed{message, runs};
  with_sums(dk.dtype, [&]<class Real>() {
    for_each_row(
        {&packed, 1}, dk.batch(),
        [&](const MessageBuffer&, const ExchangeRun& run, std::int64_t entry, std::int64_t row, std::int64_t position) {
          const std::int64_t target = row_of(ranges, position);
          for (const auto& [view, values] : {std::pair<const TensorView&, bool>{dk, false}, {dv, true}}) {
            const TensorView source = run_view(message.payload(), run, values, dk.batch(), dk.columns(), dk.dtype, {});
            for (std::int64_t head = 0; head < run.kv_heads; ++head) {
              Real* const sum = view.template at<Real>(entry, target, run.kv_head + head);
              const Real* const value = source.template at<Real>(entry, row, head);
              for (std::int64_t column = 0; column < dk.columns(); ++column) sum[column] += value[column];
            }
          }
        });
  });
}

/// Adds the pieces of a message to a list; with gradients if there is memory for them.
inline void add_pieces(std::vector<KeyPiece>& pieces, std::span<const ExchangeRun> runs, std::byte* payload,
                       std::byte* gradients, std::int64_t batch, std::int64_t columns, DType dtype,
                       DType gradient_dtype, Device device = {}) {
  for (const ExchangeRun& run : runs) {
    KeyPiece piece{run.first,
                   run.step,
                   run_view(payload, run, false, batch, columns, dtype, device),
                   run_view(payload, run, true, batch, columns, dtype, device),
                   run.kv_head,
                   {},
                   {}};
    if (gradients) {
      piece.dk = run_view(gradients, run, false, batch, columns, gradient_dtype, device);
      piece.dv = run_view(gradients, run, true, batch, columns, gradient_dtype, device);
    }
    pieces.push_back(piece);
  }
}

/// Adds a shard's own rows to a list of pieces.
inline void add_own_pieces(std::vector<KeyPiece>& pieces, std::span<const RowRange> ranges, const ConstTensorView& k,
                           const ConstTensorView& v, const TensorView& dk = {}, const TensorView& dv = {}) {
  std::int64_t row = 0;
  if (ranges.empty()) pieces.push_back({0, 1, k, v, 0, dk, dv});  // no rows, but a list that says so
  for (const RowRange& range : ranges) {
    pieces.push_back({range.start, 1, rows_of(k, row, range.count), rows_of(v, row, range.count), 0,
                      rows_of(dk, row, range.count), rows_of(dv, row, range.count)});
    row += range.count;
  }
}

/// target = source, element by element, each in its own dtype.
inline void convert(const TensorView& target, const ConstTensorView& source, void* stream = nullptr) {
  if (target.device.type == DeviceType::cuda) return gpu::convert(target, source, stream);
  dispatch_storage(target.dtype, [&]<class To>() {
    dispatch_storage(source.dtype, [&]<class From>() {
      for_each_block(source, threads_for_bytes(bytes_of(source)),
                     [&](std::int64_t entry, std::int64_t begin, std::int64_t end) {
                       for (std::int64_t row = begin; row < end; ++row) {
                         for (std::int64_t head = 0; head < source.heads(); ++head) {
                           To* const to = target.at<To>(entry, row, head);
                           const From* const from = source.at<From>(entry, row, head);
                           for (std::int64_t column = 0; column < source.columns(); ++column) {
                             if constexpr (std::is_same_v<To, From>) to[column] = from[column];
                             else to[column] = from_float<To>(to_float(from[column]));
                           }
                         }
                       }
                     });
    });
  });
}

/// Zeroes every element of a strided tensor.
inline void clear(const TensorView& view, void* stream = nullptr) {
  if (view.device.type == DeviceType::cuda) return gpu::clear(view, stream);
  const std::size_t bytes = static_cast<std::size_t>(view.columns() * size_of(view.dtype));
  for_each_block(
      view, threads_for_bytes(bytes_of(view)), [&](std::int64_t entry, std::int64_t begin, std::int64_t end) {
        for (std::int64_t row = begin; row < end; ++row) {
          for (std::int64_t head = 0; head < view.heads(); ++head)
            std::memset(static_cast<std::byte*>(view.data) + view.offset(entry, row, head) * size_of(view.dtype), 0,
                        bytes);
        }
      });
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
