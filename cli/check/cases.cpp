// The grid and the random generator of problems.
#include "check/cases.h"

#include <fmt/format.h>

#include <algorithm>
#include <random>

namespace longspan::cli {
namespace {

/// Small helpers over one generator. std distributions differ between libraries, so that only raw words are used.
class Dice {
 public:
  Dice(std::uint64_t seed, std::uint64_t index) {
    std::seed_seq sequence{static_cast<std::uint32_t>(seed), static_cast<std::uint32_t>(seed >> 32),
                           static_cast<std::uint32_t>(index), static_cast<std::uint32_t>(index >> 32)};
    engine_.seed(sequence);
  }
  std::int64_t between(std::int64_t low, std::int64_t high) {
    return low + static_cast<std::int64_t>(engine_() % static_cast<std::uint64_t>(high - low + 1));
  }
  bool one_in(std::int64_t chances) { return between(1, chances) == 1; }
  template <class Value>
  Value of(std::initializer_list<Value> values) {
    return values.begin()[between(0, static_cast<std::int64_t>(values.size()) - 1)];
  }
  std::uint64_t word() { return engine_(); }

 private:
  std::mt19937_64 engine_;
};

constexpr std::int64_t ceil_divide(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }

BlockMask random_mask(Dice& dice, std::int64_t strand_rows, std::int64_t heads) {
  const int size = dice.of({16, 32, 64, 128});
  const std::int64_t blocks = ceil_divide(strand_rows, size);
  const std::int64_t mask_heads = dice.one_in(2) ? 1 : heads;
  const std::int64_t chances = dice.between(1, 4);
  std::vector<std::uint8_t> dense(static_cast<std::size_t>(mask_heads * blocks * blocks));
  for (std::uint8_t& active : dense) active = dice.one_in(chances) ? 1 : 0;  // rows without any block happen too
  return BlockMask::from_dense(size, mask_heads, blocks, dense);
}

/// A mask of its own, a rule, or blocks that the call chooses.
Pattern random_block_sparse(Dice& dice, std::int64_t tokens, std::int64_t heads) {
  const std::int64_t kind = dice.between(0, 7);
  if (kind < 4) return Pattern::block_sparse(random_mask(dice, tokens, heads));
  const int size = dice.of({16, 32, 64, 128});
  const double density = dice.of({0.1, 0.3, 0.7});
  if (kind == 4) return Pattern::block_sparse(BlockPattern::adaptive(density, size));
  const std::int64_t global = dice.between(1, std::min<std::int64_t>(tokens, 40));
  const BlockPattern rules[] = {BlockPattern::global_local(global, dice.between(0, 200), size),
                                BlockPattern::bigbird(global, 3 * size, density, dice.word() % 1000, size),
                                BlockPattern::strided(3 * size, size)};
  return Pattern::block_sparse(rules[kind - 5]);
}

Pattern random_pattern(Dice& dice, std::int64_t tokens, std::int64_t heads) {
  const std::int64_t most = std::max<std::int64_t>(tokens, 1);
  Pattern pattern = Pattern::dense();
  const std::int64_t kind = dice.between(0, 9);
  if (kind == 1 && tokens > 0) return random_block_sparse(dice, tokens, heads);
  if (kind > 1) {
    const bool groups = kind < 6;
    const std::int64_t branches = groups ? dice.between(1, std::min<std::int64_t>(heads, 4)) : dice.between(1, 4);
    std::vector<std::int64_t> segments, dilations;
    for (std::int64_t i = 0; i < branches; ++i) {
      segments.push_back(dice.one_in(8) ? dice.between(1, 6) : dice.between(1, most * 3 / 2 + 1));
      dilations.push_back(dice.one_in(3) ? 1 : dice.between(1, 8));
    }
    pattern = groups ? Pattern::dilated(segments, dilations)
                     : Pattern::longnet(segments, dilations, dice.of({PhaseRule::paper, PhaseRule::torchscale}));
    if (dice.one_in(3)) pattern = pattern.with_pad_keys();
    if (dice.one_in(3)) pattern = pattern.with_long_segments(LongSegments::skip);
    if (dice.one_in(6) && tokens > 0) {
      const auto branch = static_cast<std::size_t>(dice.between(0, branches - 1));
      const std::int64_t rows = ceil_divide(std::min(segments[branch], tokens), dilations[branch]);
      pattern = pattern.with_mask(branch, random_mask(dice, rows, heads));
    }
  }
  if (dice.one_in(4)) pattern = pattern.with_output_scale(1.0 / 3);
  return pattern;
}

/// A few ranges, usually in order; sometimes empty ones, sometimes a position twice, often few rows in all.
std::vector<RowRange> random_ranges(Dice& dice, std::int64_t tokens) {
  std::vector<RowRange> ranges;
  const std::int64_t count = dice.between(1, 4), most = dice.one_in(2) ? 4 : 40;
  for (std::int64_t i = 0; i < count; ++i) {
    const std::int64_t start = dice.between(0, std::max<std::int64_t>(tokens - 1, 0));
    ranges.push_back({start, dice.between(0, std::min(tokens - start, most))});
  }
  if (!dice.one_in(3)) {
    std::sort(ranges.begin(), ranges.end(), [](const RowRange& a, const RowRange& b) { return a.start < b.start; });
  }
  return ranges;
}

}  // namespace

std::int64_t CheckCase::query_rows() const {
  if (query_ranges.empty()) return tokens;
  std::int64_t rows = 0;
  for (const RowRange& range : query_ranges) rows += range.count;
  return rows;
}

std::string CheckCase::to_string() const {
  std::string text =
      fmt::format("{}, {} tokens, batch {}, {} heads ({} key/value) of {}, {}, {}", pattern.to_string().substr(0, 160),
                  tokens, batch, heads, kv_heads, head_dim, name_of(dtype), layout == Layout::bnhd ? "bnhd" : "bhnd");
  if (options.causal) text += ", causal";
  if (options.dropout > 0) text += fmt::format(", dropout {}", options.dropout);
  if (options.scale) text += fmt::format(", scale {}", *options.scale);
  if (options.detached_mix) text += ", detached_mix";
  if (!query_ranges.empty()) text += fmt::format(", {} query rows in {} ranges", query_rows(), query_ranges.size());
  if (!lengths.empty()) text += fmt::format(", lengths {}", fmt::join(lengths, ","));
  if (!cuts.empty()) text += fmt::format(", {} pieces", cuts.size() + 1);
  if (key_mask) text += ", key_mask";
  if (alibi) text += ", alibi";
  if (dlse) text += ", dlse";
  return text;
}

std::vector<CheckCase> check_grid() {
  const std::vector<Pattern> patterns = {
      Pattern::dense(),
      Pattern::dilated({32, 64, 128}, {1, 2, 4}),
      Pattern::longnet({24, 70}, {1, 3}),
      Pattern::longnet({24, 70, 400}, {1, 3, 5}, PhaseRule::torchscale).with_pad_keys(),
      Pattern::block_sparse(BlockPattern::bigbird(20, 48, 0.2, 7, 16)),
      Pattern::block_sparse(BlockPattern::local_window(128, 64)),
      Pattern::block_sparse(BlockPattern::adaptive(0.3, 32)),
      Pattern::dilated({64, 190}, {1, 2}).with_mask(1, BlockPattern::strided(48, 16))};
  std::vector<CheckCase> cases;
  for (const Pattern& pattern : patterns) {
    for (const bool causal : {false, true}) {
      for (const DType dtype : {DType::f32, DType::bf16, DType::f16}) {
        for (const std::int64_t head_dim : {64, 40}) {
          CheckCase one;
          one.pattern = pattern;
          one.options.causal = causal;
          one.dtype = dtype;
          one.tokens = 200;
          one.heads = 4;
          one.kv_heads = 2;
          one.head_dim = head_dim;
          one.layout = head_dim == 64 ? Layout::bnhd : Layout::bhnd;
          one.seed = cases.size();
          cases.push_back(std::move(one));
        }
      }
    }
  }
  return cases;
}

CheckCase random_case(std::uint64_t seed, std::uint64_t index) {
  Dice dice(seed, index);
  CheckCase one;
  one.seed = dice.word();
  one.dtype = dice.of({DType::f32, DType::bf16, DType::f16});
  one.tokens = dice.one_in(30) ? dice.between(0, 2) : dice.one_in(6) ? dice.between(150, 330) : dice.between(1, 150);
  one.kv_heads = dice.between(1, 3);
  one.heads = one.kv_heads * dice.between(1, 3);
  one.head_dim = dice.one_in(2) ? dice.of<std::int64_t>({16, 32, 64, 128})
                                : dice.of<std::int64_t>({1, 3, 8, 24, 40, 48, 72, 80, 96, 100, 256});
  one.batch = dice.one_in(3) ? dice.between(2, 3) : 1;
  one.layout = dice.of({Layout::bnhd, Layout::bhnd});
  one.pattern = random_pattern(dice, one.tokens, one.heads);
  one.options.causal = dice.one_in(2);
  one.options.dropout = dice.one_in(4) ? dice.of({0.1, 0.5}) : 0.0;
  if (dice.one_in(5)) one.options.scale = dice.of({0.05, 0.3, -0.2});
  one.options.detached_mix = dice.one_in(4);
  one.dlse = !one.options.detached_mix && dice.one_in(3);
  if (dice.one_in(3)) one.query_ranges = random_ranges(dice, one.tokens);
  if (dice.one_in(3)) {
    for (std::int64_t entry = 0; entry < one.batch; ++entry) one.lengths.push_back(dice.between(0, one.tokens));
  }
  if (dice.one_in(4) && one.tokens > 3) {
    for (std::int64_t i = dice.between(1, 3); i > 0; --i) one.cuts.push_back(dice.between(1, one.tokens - 1));
    std::sort(one.cuts.begin(), one.cuts.end());
    one.cuts.erase(std::unique(one.cuts.begin(), one.cuts.end()), one.cuts.end());
  }
  one.key_mask = dice.one_in(4);
  one.alibi = dice.one_in(4);
  return one;
}

}  // namespace longspan::cli
