// The arithmetic of strands, once for host and device: which positions a branch covers, the strand of a head in a
// segment, the part of a strand that a query range holds, the row of a piece that holds a position, the tiles of a
// strand. Plan, exchange and every engine use it. `Index` is std::int64_t on the host and int on a GPU. Divisions are
// unsigned, because those take half the instructions there.
#pragma once

#include <cstdint>
#include <type_traits>

#include "util/host_device.h"

namespace longspan::strands {

/// a / b rounded up, for a >= 0 and b > 0. Does not overflow.
template <class Index>
LONGSPAN_DEVICE constexpr Index ceil_divide(Index a, Index b) {
  using Unsigned = std::make_unsigned_t<Index>;
  return a == 0 ? 0 : static_cast<Index>((static_cast<Unsigned>(a) - 1) / static_cast<Unsigned>(b)) + 1;
}

/// Rows start, start + stride, ... of one head inside one segment.
template <class Index>
struct StrandOf {
  Index start = 0, stride = 1, count = 0;
};

/// Rows [begin, begin + count) of a strand are rows q_row, q_row + stride, ... of q.
template <class Index>
struct QueryRunOf {
  Index begin = 0, count = 0;
  std::int64_t q_row = 0;
};

/// What strands need to know of a branch.
template <class Index>
struct BranchOf {
  Index segment, dilation, head_begin, head_count;
  Index fixed_phase;    // phase of all heads (head groups), or -1
  Index phase_divisor;  // torchscale: phase = head / phase_divisor; 0: phase = head mod dilation
  bool skip_if_longer, pad_keys;

  LONGSPAN_DEVICE constexpr bool owns(Index head) const { return head >= head_begin && head < head_begin + head_count; }
  LONGSPAN_DEVICE constexpr Index phase(Index head) const {
    if (fixed_phase >= 0) return fixed_phase;
    return phase_divisor > 0 ? head / phase_divisor : head % dilation;
  }
  /// Whether the branch takes part in a sequence of `length` rows.
  LONGSPAN_DEVICE constexpr bool active(Index length) const { return !(skip_if_longer && segment > length); }
  LONGSPAN_DEVICE constexpr bool covers(Index head, Index position) const {
    return (position % segment) % dilation == phase(head);
  }
  LONGSPAN_DEVICE constexpr Index segments(Index length) const { return ceil_divide(length, segment); }
  /// Rows of the longest strand in a sequence of `length` rows.
  LONGSPAN_DEVICE constexpr Index longest_strand(Index length) const {
    return ceil_divide(segment < length ? segment : length, dilation);
  }
  /// The strand of a head in segment `index` of a sequence of `length` rows. Its count is 0 where the phase lies beyond
  /// the segment's end or the branch takes no part.
  LONGSPAN_DEVICE constexpr StrandOf<Index> strand(Index head, Index index, Index length) const {
    const std::int64_t begin = static_cast<std::int64_t>(index) * segment;
    const std::int64_t left = length - begin, rows = left < segment ? left : segment;
    const Index offset = phase(head);
    if (!active(length) || offset >= rows) return {static_cast<Index>(begin + offset), dilation, 0};
    return {static_cast<Index>(begin + offset), dilation, ceil_divide(static_cast<Index>(rows - offset), dilation)};
  }
  /// Zero keys that torchscale would have attended to beside a strand of `count` rows.
  LONGSPAN_DEVICE constexpr Index padding(Index count, Index length, bool causal) const {
    return pad_keys && !causal ? longest_strand(length) - count : 0;
  }
};

/// The part of a strand at positions range_start .. range_start + range_count - 1, the first of which is row `q_first`
/// of q.
template <class Index>
LONGSPAN_DEVICE constexpr QueryRunOf<Index> query_run(const StrandOf<Index>& strand, Index range_start,
                                                      Index range_count, std::int64_t q_first) {
  const std::int64_t high = static_cast<std::int64_t>(range_start) + range_count - strand.start;  // exclusive
  const Index begin =
      range_start > strand.start ? ceil_divide(static_cast<Index>(range_start - strand.start), strand.stride) : 0;
  Index end = strand.count;
  if (high <= 0) end = 0;
  else if (const Index rows = ceil_divide(static_cast<Index>(high), strand.stride); rows < end) end = rows;
  if (begin >= end) return {};
  return {begin, end - begin, q_first + strand.start + static_cast<std::int64_t>(begin) * strand.stride - range_start};
}

/// Which row of a piece (rows first, first + step, ...) holds a position; -1 if none does.
template <class Index>
LONGSPAN_DEVICE constexpr Index piece_row(Index first, Index step, Index rows, Index position) {
  const Index distance = position - first;
  if (distance < 0) return -1;
  const Index row = step == 1 ? distance : distance / step;
  return row < rows && row * step == distance ? row : -1;
}

}  // namespace longspan::strands
