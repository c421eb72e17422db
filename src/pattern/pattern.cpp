// Making patterns, and checking that what they say makes sense.
#include "longspan/pattern.h"

#include <cfloat>
#include <cmath>

#include "util/hash.h"
#include "util/reject.h"

namespace longspan {
namespace {

std::vector<Branch> make_branches(const std::vector<std::int64_t>& segments,
                                  const std::vector<std::int64_t>& dilations) {
  if (segments.size() != dilations.size())
    reject("dilations", "segments has {} entries, dilations has {}: give one dilation per segment", segments.size(),
           dilations.size());
  std::vector<Branch> branches;
  branches.reserve(segments.size());
  for (std::size_t i = 0; i < segments.size(); ++i) branches.push_back({segments[i], dilations[i], std::nullopt});
  return branches;
}

}  // namespace

Pattern Pattern::dense() {
  Pattern pattern;
  pattern.branches_.push_back({});
  return pattern;
}

Pattern Pattern::dilated(const std::vector<std::int64_t>& segments, const std::vector<std::int64_t>& dilations) {
  Pattern pattern;
  pattern.assignment_ = HeadAssignment::groups;
  pattern.branches_ = make_branches(segments, dilations);
  pattern.check();
  return pattern;
}

Pattern Pattern::longnet(const std::vector<std::int64_t>& segments, const std::vector<std::int64_t>& dilations,
                         PhaseRule phase) {
  Pattern pattern;
  pattern.phase_rule_ = phase;
  pattern.branches_ = make_branches(segments, dilations);
  pattern.check();
  return pattern;
}

Pattern Pattern::block_sparse(BlockPattern mask) { return dense().with_mask(0, std::move(mask)); }

Pattern Pattern::with_pad_keys(bool pad_keys) const {
  Pattern pattern = *this;
  pattern.pad_keys_ = pad_keys;
  return pattern;
}

Pattern Pattern::with_long_segments(LongSegments policy) const {
  Pattern pattern = *this;
  pattern.long_segments_ = policy;
  return pattern;
}

Pattern Pattern::with_output_scale(double output_scale) const {
  Pattern pattern = *this;
  pattern.output_scale_ = output_scale;
  pattern.check();
  return pattern;
}

Pattern Pattern::with_mask(std::size_t branch, BlockPattern mask) const {
  if (branch >= branches_.size()) reject("branch", "branch {}: the pattern has {} branches", branch, branches_.size());
  Pattern pattern = *this;
  pattern.branches_[branch].mask = std::move(mask);
  return pattern;
}

void Pattern::check() const {
  if (branches_.empty()) reject("segments", "segments is empty: give at least one segment length and its dilation");
  for (std::size_t i = 0; i < branches_.size(); ++i) {
    if (branches_[i].segment < 1)
      reject("segments", "segments[{}] is {}: segment lengths are at least 1", i, branches_[i].segment);
    if (branches_[i].dilation < 1)
      reject("dilations", "dilations[{}] is {}: dilations are at least 1", i, branches_[i].dilation);
  }
  if (!(std::abs(output_scale_) <= static_cast<double>(FLT_MAX) / 2))
    reject("output_scale", "output_scale is {}: give a factor that float32 can hold", output_scale_);
}

std::uint64_t Pattern::hash() const {
  Hasher hasher;
  hasher.add(assignment_);
  hasher.add(phase_rule_);
  hasher.add(long_segments_);
  hasher.add(pad_keys_);
  hasher.add(output_scale_);
  for (const Branch& branch : branches_) {
    hasher.add(branch.segment);
    hasher.add(branch.dilation);
    hasher.add(branch.mask ? branch.mask->hash() : 0);
  }
  return hasher.value();
}

}  // namespace longspan
