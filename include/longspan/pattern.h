// What attends to what: a list of branches (segment, dilation) and how heads are assigned to them. Pure integers.
#pragma once

#include <cstdint>
#include <limits>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "longspan/block_pattern.h"
#include "longspan/export.h"

namespace longspan {

/// A segment as long as the sequence, whatever its length.
inline constexpr std::int64_t kWholeSequence = std::numeric_limits<std::int64_t>::max();

/// groups: branch i owns the i-th contiguous range of heads. all: every branch owns every head.
enum class HeadAssignment : std::uint8_t { groups, all };
/// Offset of a head's strands when every branch owns all heads: h mod r, or floor(h / ceil(H / r)).
/// Head groups always use (branch index) mod r.
enum class PhaseRule : std::uint8_t { paper, torchscale };
/// A segment longer than the sequence becomes the sequence (clip), or its branch is dropped and its rows are zero
/// (skip).
enum class LongSegments : std::uint8_t { clip, skip };

struct Branch {
  std::int64_t segment = kWholeSequence;
  std::int64_t dilation = 1;
  std::optional<BlockPattern> mask{};  ///< in strand coordinates; none means every pair of the strand
  bool operator==(const Branch&) const = default;
};

/// An immutable description of an attention pattern. Cheap to copy, comparable, hashable, and equal to its own text.
class LONGSPAN_API Pattern {
 public:
  /// Every position sees every position (or every earlier one, if causal).
  static Pattern dense();
  /// Dilated attention by head groups, as the classes named DilatedAttention compute it.
  static Pattern dilated(const std::vector<std::int64_t>& segments, const std::vector<std::int64_t>& dilations);
  /// LongNet: every branch on all heads, mixed by one softmax.
  static Pattern longnet(const std::vector<std::int64_t>& segments, const std::vector<std::int64_t>& dilations,
                         PhaseRule phase = PhaseRule::paper);
  /// One branch over the whole sequence with a block mask, structured or the caller's own.
  static Pattern block_sparse(BlockPattern mask);
  /// Reads the text that to_string() prints; the leading version may be left out. Throws InvalidArgument.
  static Pattern parse(std::string_view text);

  /// The same pattern with one thing changed.
  Pattern with_pad_keys(bool pad_keys = true) const;
  Pattern with_long_segments(LongSegments policy) const;
  Pattern with_output_scale(double output_scale) const;
  Pattern with_mask(std::size_t branch, BlockPattern mask) const;

  const std::vector<Branch>& branches() const { return branches_; }
  HeadAssignment assignment() const { return assignment_; }
  PhaseRule phase_rule() const { return phase_rule_; }
  LongSegments long_segments() const { return long_segments_; }
  /// torchscale compatibility: zero keys of score 0 stand in for the padding of short strands (not when causal).
  bool pad_keys() const { return pad_keys_; }
  /// Factor on the output unless Options::output_scale overrides it.
  double output_scale() const { return output_scale_; }

  /// Canonical, versioned text: parse(p.to_string()) == p.
  std::string to_string() const;
  bool operator==(const Pattern&) const = default;
  std::uint64_t hash() const;

 private:
  Pattern() = default;
  void check() const;

  std::vector<Branch> branches_;
  HeadAssignment assignment_ = HeadAssignment::all;
  PhaseRule phase_rule_ = PhaseRule::paper;
  LongSegments long_segments_ = LongSegments::clip;
  bool pad_keys_ = false;
  double output_scale_ = 1.0;
};

}  // namespace longspan
