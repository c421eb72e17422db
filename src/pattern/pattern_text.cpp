// The canonical text of a pattern, and reading it back.
//
//   longspan/1 KIND [phase=torchscale] [pad_keys] [long=skip] [output_scale=X] SEGMENT/DILATION[{BLOCKS}] ...
//   KIND     dense (no branches follow), dilated (head groups), longnet (all heads)
//   SEGMENT  a length, or `whole`
//   BLOCKS   a block pattern as block_text.cpp has it
//   longspan/1 block_sparse [options] BLOCKS is one branch over the whole sequence; a term may stand for
//   `block_sparse`.
#include "longspan/pattern.h"
#include "pattern/text.h"

namespace longspan {
namespace {

constexpr std::string_view kVersion = "longspan/1";

}  // namespace

std::string Pattern::to_string() const {
  const bool is_dense = assignment_ == HeadAssignment::all && phase_rule_ == PhaseRule::paper &&
                        branches_.size() == 1 && branches_[0] == Branch{};
  const bool is_block_sparse = !is_dense && assignment_ == HeadAssignment::all && phase_rule_ == PhaseRule::paper &&
                               branches_.size() == 1 && branches_[0].segment == kWholeSequence &&
                               branches_[0].dilation == 1;
  std::string text = fmt::format("{} {}", kVersion,
                                 is_dense                                ? "dense"
                                 : is_block_sparse                       ? "block_sparse"
                                 : assignment_ == HeadAssignment::groups ? "dilated"
                                                                         : "longnet");
  if (phase_rule_ == PhaseRule::torchscale) text += " phase=torchscale";
  if (pad_keys_) text += " pad_keys";
  if (long_segments_ == LongSegments::skip) text += " long=skip";
  if (output_scale_ != 1.0) text += fmt::format(" output_scale={}", output_scale_);
  if (is_dense) return text;
  if (is_block_sparse) return text + ' ' + branches_[0].mask->to_string();
  for (const Branch& branch : branches_) {
    text += branch.segment == kWholeSequence ? " whole" : fmt::format(" {}", branch.segment);
    text += fmt::format("/{}", branch.dilation);
    if (branch.mask) text += '{' + branch.mask->to_string() + '}';
  }
  return text;
}

Pattern Pattern::parse(std::string_view text) {
  TextReader reader(text);
  std::string_view word = reader.next();
  if (word.starts_with("longspan/")) {
    if (word != kVersion) reader.fail(word, fmt::format("is another version: this library reads {}", kVersion));
    word = reader.next();
  }
  Pattern pattern;
  std::string blocks;  // of a block-sparse pattern: all words that are no options
  const bool dense = word == "dense";
  const bool branches_follow = word == "dilated" || word == "longnet";
  if (word == "dilated") pattern.assignment_ = HeadAssignment::groups;
  if (word.empty())
    reader.fail(word,
                "is empty: use dense, dilated 2048/1 4096/2, longnet 2048/1 4096/2 or a block pattern such as bigbird");
  if (!dense && !branches_follow && word != "block_sparse") blocks = word;

  for (word = reader.next(); !word.empty(); word = reader.next()) {
    if (word == "pad_keys") {
      pattern.pad_keys_ = true;
    } else if (word == "phase=torchscale" || word == "phase=paper") {
      if (pattern.assignment_ == HeadAssignment::groups)
        reader.fail(word, "goes with longnet: head groups have their own phase");
      pattern.phase_rule_ = word == "phase=paper" ? PhaseRule::paper : PhaseRule::torchscale;
    } else if (word == "long=skip" || word == "long=clip") {
      pattern.long_segments_ = word == "long=skip" ? LongSegments::skip : LongSegments::clip;
    } else if (word.starts_with("output_scale=")) {
      pattern.output_scale_ = reader.number<double>(word, word.substr(13));
    } else if (!dense && !branches_follow) {
      blocks += ' ';
      blocks += word;
    } else {
      const std::size_t slash = word.find('/');
      if (slash == std::string_view::npos) reader.fail(word, "is neither an option nor a branch like 2048/1");
      if (dense) reader.fail(word, "is a branch: dense has none; use longnet or dilated");
      const std::size_t brace = word.find('{');
      Branch branch;
      if (word.substr(0, slash) != "whole") branch.segment = reader.number<std::int64_t>(word, word.substr(0, slash));
      branch.dilation = reader.number<std::int64_t>(
          word, word.substr(slash + 1, brace == std::string_view::npos ? brace : brace - slash - 1));
      if (brace != std::string_view::npos) {
        if (word.back() != '}') reader.fail(word, "has text after its mask");
        branch.mask = BlockPattern::parse(word.substr(brace + 1, word.size() - brace - 2));
      }
      pattern.branches_.push_back(std::move(branch));
    }
  }
  if (!branches_follow) pattern.branches_.push_back({});
  if (!dense && !branches_follow) pattern.branches_[0].mask = BlockPattern::parse(blocks);
  pattern.check();
  return pattern;
}

}  // namespace longspan
