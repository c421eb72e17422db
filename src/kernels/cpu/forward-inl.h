// Forward of one task: some rows of one strand against all keys they see.
//   keys in blocks of kKeyBlock, counted from the strand's start: packed once, used by every row of the task
//     k_panels [keys / panel][depth][panel], values [keys][columns]
//   rows in groups of kGroup: scores [kGroup][kKeyBlock] stay in the first-level cache from product to product
//     scores = q k^T;  largest = max;  weights = exp2(scores - largest);  out = out * correction + weights values
//   Every decision is per row, and masked pairs are exact no-ops, so a row's bits depend on its own keys only.
#pragma once

#include <array>

#include "kernels/cpu/extras-inl.h"
#include "kernels/cpu/pack-inl.h"

HWY_BEFORE_NAMESPACE();
namespace longspan::cpu {
namespace HWY_NAMESPACE {
namespace {

/// How register tiles run the two products of a group.
template <class Layout>
struct VectorForward : Layout {
  using Layout::Layout;
  using Products = typename Layout::Products;
  static constexpr int kGroup = kTileRows;
  static constexpr int kPanel = kTileVectors * kLanes;
  static constexpr std::int64_t kKeyBlock = 512;
  static constexpr std::int64_t kScoreStride = kKeyBlock;
  static constexpr std::int64_t kRunMultiple = kChunk;

  static void begin() {}
  static void end() {}

  /// scores[row][begin .. end) for the group's `rows` (each sees `limits` keys); begin is a multiple of kRunMultiple.
  void scores(std::int64_t rows, const std::int64_t*, const float* q, const float* k_panels, std::int64_t begin, std::int64_t end,
              float* scores) const {
    for (std::int64_t key = begin / kPanel * kPanel; key < end; key += kPanel) {
      const int vectors = static_cast<int>(std::min<std::int64_t>(kTileVectors, (end - key + kLanes - 1) / kLanes));
      const float* const panel = k_panels + key * this->depth;
      const int inner = static_cast<int>(this->product_depth());
      if (rows == 1) product_some<Products, 1, kTileVectors>(vectors, q, 0, panel, kPanel, inner, scores + key, 0);
      else product_some<Products, kGroup, kTileVectors>(vectors, q, this->query_stride(), panel, kPanel, inner, scores + key, kScoreStride);
    }
  }
  /// out = corrections * out + weights[.. begin .. end) * values.
  void outputs(std::int64_t rows, const std::int64_t*, const float* weights, const float* values, std::int64_t begin, std::int64_t end,
               float* out, const float* corrections) const {
    const float* const a = weights + begin / Products::kPerUnit;
    const float* const b = values + this->value_offset(begin);
    const int inner = static_cast<int>((end - begin + Products::kPerUnit - 1) / Products::kPerUnit);
    const std::int64_t width = this->columns;
    if (rows == 1) accumulate_columns<Products, false, true, 1>(width, a, 0, b, width, inner, out, 0, corrections);
    else accumulate_columns<Products, false, true, kGroup>(width, a, kScoreStride, b, width, inner, out, width, corrections);
  }
};
using FloatForward = VectorForward<FloatLayout>;

/// The largest of scores[0 .. limit) and `largest`.
HWY_INLINE float row_max(const float* scores, std::int64_t limit, float largest) {
  V most = broadcast(largest), other = most;
  std::int64_t key = 0;
  for (; key + 2 * kLanes <= limit; key += 2 * kLanes) {
    most = hn::Max(most, load(scores + key));
    other = hn::Max(other, load(scores + key + kLanes));
  }
  for (; key + kLanes <= limit; key += kLanes) most = hn::Max(most, load(scores + key));
  if (key < limit) {
    const auto valid = hn::FirstN(kFloat, static_cast<std::size_t>(limit - key));
    other = hn::Max(other, hn::IfThenElse(valid, load(scores + key), broadcast(-kInfinity)));
  }
  return max_lanes(hn::Max(most, other));
}

template <class Scheme>
struct ForwardMemory {
  const std::byte **k_rows, **v_rows;
  float *q, *out, *largest, *sums, *k_panels, *values, *scores, *scratch, *corrections, *bases;
  float *bias, *keep, *excluded;
  std::int64_t* limits;

  ForwardMemory(Carver& carver, const Scheme& scheme, std::int64_t rows) {
    const std::int64_t padded = round_up(rows, Scheme::kGroup), block = Scheme::kKeyBlock;
    k_rows = carver.take<const std::byte*>(block);
    v_rows = carver.take<const std::byte*>(block);
    q = carver.take<float>(padded * scheme.query_stride());
    out = carver.take<float>(padded * scheme.columns);
    largest = carver.take<float>(padded + kLanes);
    sums = carver.take<float>(padded * kLanes);
    limits = carver.take<std::int64_t>(padded);
    k_panels = carver.take<float>(round_up(block, Scheme::kPanel) * scheme.depth);
    values = carver.take<float>(Scheme::value_floats(block, scheme.columns));
    scores = carver.take<float>(Scheme::kGroup * Scheme::kScoreStride);
    scratch = carver.take<float>(std::max<std::int64_t>(kLanes * scheme.depth, kMaxHeadDim));
    corrections = carver.take<float>(round_up(Scheme::kGroup, kLanes));
    bases = carver.take<float>(round_up(Scheme::kGroup, kLanes));
    bias = carver.take<float>(block);
    keep = carver.take<float>(Scheme::kGroup * block);
    excluded = carver.take<float>(block);
  }
};

template <class Scheme, class Policy>
class ForwardRun {
 public:
  ForwardRun(const ForwardShared& shared, const ForwardTask& task, std::byte* memory)
      : shared_(shared), task_(task), scheme_(shared.q.dtype, shared.plan.problem().head_dim, shared.scale),
        carver_(memory), m_(carver_, scheme_, task.rows.count * task.heads.count), policy_(shared, task),
        rows_{task.heads, task.rows.begin, task.rows.count} {}

  void run() {
    Scheme::begin();
    load_queries();
    const std::int64_t last = rows_.begin + rows_.count;
    const std::int64_t key_end = shared_.causal ? std::min(last, task_.strand.count) : task_.strand.count;
    for (std::int64_t block = 0; block < key_end; block += Scheme::kKeyBlock) {
      const std::int64_t keys = std::min(Scheme::kKeyBlock, key_end - block);
      if (!any_active(block, keys)) continue;
      point_to_rows(shared_, task_, block, keys, Scheme::kKeyBlock, m_.k_rows, m_.v_rows);
      scheme_.template pack_panels<Scheme::kPanel>(m_.k_panels, m_.k_rows, keys, m_.scratch);
      scheme_.pack_values(m_.values, m_.v_rows, round_up(keys, Scheme::kKeyMultiple));
      policy_.begin_keys(block, keys, m_.excluded);
      for (std::int64_t group = 0; group < rows_.size(); group += Scheme::kGroup) attend(group, block, keys);
    }
    Scheme::end();
    for (std::int64_t row = 0; row < rows_.size(); ++row) finish(row);
  }

 private:
  void load_queries() {
    constexpr std::int64_t kAhead = 8;
    const std::int64_t rows = rows_.size(), padded = round_up(rows, Scheme::kGroup);
    for (std::int64_t row = 0; row < padded; ++row) {
      const std::byte* source = zero_row();
      if (row < rows) source = static_cast<const std::byte*>(shared_.q.data) + offset(shared_.q, row);
      if (row + kAhead < rows) prefetch_row(static_cast<const std::byte*>(shared_.q.data) + offset(shared_.q, row + kAhead), scheme_.row_bytes());
      scheme_.pack_query(m_.q + row * scheme_.query_stride(), source, scheme_.query_factor);
      m_.limits[row] = row >= rows ? 0 : shared_.causal ? rows_.index(row) + 1 : task_.strand.count;
      m_.largest[row] = -kInfinity;
    }
    std::memset(m_.out, 0, static_cast<std::size_t>(padded * scheme_.columns) * sizeof(float));
    std::memset(m_.sums, 0, static_cast<std::size_t>(padded * kLanes) * sizeof(float));
  }

  std::int64_t q_row(std::int64_t row) const {
    return task_.rows.q_row + (rows_.index(row) - rows_.begin) * task_.strand.stride;
  }
  template <class View>
  std::int64_t offset(const View& view, std::int64_t row) const {
    return view.offset(task_.entry, q_row(row), rows_.head(row)) * size_of(view.dtype);
  }

  bool any_active(std::int64_t block, std::int64_t keys) const {
    if constexpr (!Policy::kActive) return true;
    const std::uint64_t wanted = (std::uint64_t{1} << ((keys + kChunk - 1) / kChunk)) - 1;
    for (std::int64_t row = 0; row < rows_.size(); ++row) {
      if (policy_.active_chunks(rows_.head(row), rows_.index(row), block) & wanted) return true;
    }
    return false;
  }

  struct Run {
    std::int64_t begin, end;
  };

  /// Runs of keys below `most` that some row of the group sees; the others cost nothing.
  static int find_runs(std::uint32_t any, std::int64_t most, Run* runs) {
    int count = 0;
    for (std::int64_t key = 0; key < most;) {
      std::int64_t end = key;
      while (end < most && (any >> (end / kChunk) & 1u)) end += kChunk;
      if (end > key) {
        const std::int64_t begin = key / Scheme::kRunMultiple * Scheme::kRunMultiple;
        end = std::min(round_up(end, Scheme::kRunMultiple), most);
        if (count > 0 && runs[count - 1].end >= begin) runs[count - 1].end = end;
        else runs[count++] = {begin, end};
      }
      key = end > key ? end : key + kChunk;
    }
    return count;
  }

  /// One group of rows against one block of keys.
  HWY_NOINLINE void attend(std::int64_t group, std::int64_t block, std::int64_t keys) {
    std::int64_t limits[Scheme::kGroup];
    std::uint32_t chunks[Scheme::kGroup];
    std::int64_t most = 0;
    std::uint32_t any = 0;
    for (int i = 0; i < Scheme::kGroup; ++i) {
      limits[i] = std::clamp<std::int64_t>(m_.limits[group + i] - block, 0, keys);
      most = std::max(most, limits[i]);
      if constexpr (Policy::kActive) {
        chunks[i] = limits[i] == 0 ? 0 : policy_.active_chunks(rows_.head(group + i), rows_.index(group + i), block);
        any |= chunks[i];
      }
    }
    if (most == 0) return;
    Run runs[Scheme::kKeyBlock / kChunk] = {{0, most}};
    const std::int64_t valid = std::min<std::int64_t>(Scheme::kGroup, rows_.size() - group);
    const int run_count = Policy::kActive ? find_runs(any, most, runs) : 1;
    for (int run = 0; run < run_count; ++run) {
      scheme_.scores(valid, limits, m_.q + group * scheme_.query_stride(), m_.k_panels, runs[run].begin, runs[run].end, m_.scores);
    }
    for (int i = 0; i < valid; ++i) {
      float* const scores = m_.scores + i * Scheme::kScoreStride;
      if constexpr (Policy::kActive) {
        if (limits[i] > 0) {
          policy_.fill(rows_.head(group + i), rows_.index(group + i), block, round_up(most, kLanes), chunks[i], m_.bias, m_.keep + i * Scheme::kKeyBlock);
          for (int run = 0; run < run_count; ++run) add_bias(scores, runs[run], chunks[i]);
        }
      }
      float largest = -kInfinity;
      for (int run = 0; run < run_count; ++run) {
        largest = row_max(scores + runs[run].begin, std::min(limits[i], runs[run].end) - runs[run].begin, largest);
      }
      m_.bases[i] = largest;
    }
    const float factor = Policy::kActive ? 1.0f : scheme_.score_factor;
    raise(group, factor);
    for (int i = 0; i < valid; ++i) {
      float* const scores = m_.scores + i * Scheme::kScoreStride;
      V sums = hn::Mul(load(m_.sums + (group + i) * kLanes), broadcast(m_.corrections[i]));
      for (int run = 0; run < run_count; ++run) {
        // Weights take the place of scores: they are no wider, and written after what they cover was read.
        const std::int64_t begin = runs[run].begin, keys_of_run = runs[run].end - begin;
        sums = Scheme::template weights<Policy::kActive>(scores + begin, scores + begin / Scheme::Products::kPerUnit,
                                                         std::clamp<std::int64_t>(limits[i] - begin, 0, keys_of_run), keys_of_run, factor,
                                                         m_.bases[i], m_.keep + i * Scheme::kKeyBlock + begin, sums);
      }
      store(sums, m_.sums + (group + i) * kLanes);
    }
    const float* corrections = m_.corrections;
    for (int run = 0; run < run_count; ++run) {
      scheme_.outputs(valid, limits, m_.scores, m_.values, runs[run].begin, runs[run].end, m_.out + group * scheme_.columns, corrections);
      corrections = kOnes;
    }
  }

  /// scores become base-2 exponents with the row's bias. Chunks the row does not see are written without being read.
  HWY_INLINE void add_bias(float* scores, const Run& run, std::uint32_t chunks) {
    const V factor = broadcast(scheme_.score_factor);
    for (std::int64_t key = run.begin; key < run.end; key += kLanes) {
      const V bias = load(m_.bias + key);
      store(chunks >> (key / kChunk) & 1u ? hn::MulAdd(load(scores + key), factor, bias) : bias, scores + key);
    }
  }

  /// Streaming softmax, many rows per vector: bases hold the block's maxima and become what is subtracted from scores;
  /// corrections are what earlier sums are multiplied by, exactly 1 for rows whose maximum stays.
  HWY_INLINE void raise(std::int64_t group, float factor) {
    const V scale = broadcast(factor), none = broadcast(-kInfinity);
    for (int i = 0; i < Scheme::kGroup; i += kLanes) {
      const V before = load(m_.largest + group + i), found = load(m_.bases + i);
      // A NaN maximum is dropped here; the weights of its row are NaN all the same.
      const auto rises = hn::Gt(found, before);
      const V largest = hn::IfThenElse(rises, found, before);
      V correction = exp2<5>(hn::Max(hn::Mul(hn::Sub(before, largest), scale), broadcast(-1e4f)));
      correction = hn::IfThenZeroElse(hn::Eq(before, none), correction);
      hn::StoreU(hn::IfThenElse(rises, correction, broadcast(1.0f)), kFloat, m_.corrections + i);
      hn::StoreU(hn::IfThenZeroElse(hn::Lt(largest, broadcast(kMaskedLimit)), largest), kFloat, m_.bases + i);
      // Lanes beyond the group belong to rows of the next: they keep what they have.
      const auto own = hn::FirstN(kFloat, static_cast<std::size_t>(std::min(kLanes, Scheme::kGroup - i)));
      hn::StoreU(hn::IfThenElse(own, largest, before), kFloat, m_.largest + group + i);
    }
  }

  /// Divides by the denominator, adds pad keys, mixes with earlier branches, writes.
  void finish(std::int64_t row) {
    float* const out = m_.out + row * scheme_.columns;
    const float factor = Policy::kActive ? 1.0f : scheme_.score_factor;
    // In double: at scores of 1e4 every rounding of an exponent costs a weight 1e-3.
    double exponent = m_.largest[row] < kMaskedLimit ? 0.0 : static_cast<double>(m_.largest[row]) * factor;  // base 2
    float sum = sum_lanes(load(m_.sums + row * kLanes)), weight = 1.0f;
    if (task_.padding > 0) {
      const double raised = sum == 0.0f ? 0.0 : std::max(exponent, 0.0);
      weight = exp2_scalar(static_cast<float>(exponent - raised));
      sum = sum * weight + static_cast<float>(task_.padding) * exp2_scalar(static_cast<float>(-raised));
      exponent = raised;
    }
    float lse = sum == 0.0f ? -kInfinity : static_cast<float>(exponent * 0.693147180559945309 + std::log(sum));
    weight = sum == 0.0f ? 0.0f : weight / sum * shared_.output_scale * shared_.keep_factor;
    const std::int64_t head = rows_.head(row), target_row = q_row(row);
    if (shared_.delta.data) {
      write_delta(row, out, weight);
      return;
    }
    float* const lse_target = shared_.lse.template at<float>(task_.entry, target_row, head);
    if (shared_.sums.data) {
      float* const target = shared_.sums.at(task_.entry, target_row, head);
      const float earlier = *lse_target;
      if (earlier == -kInfinity) {
        write_row(target, out, weight, scheme_.head_dim);
      } else if (lse == -kInfinity) {
        return;
      } else {
        const float larger = std::max(lse, earlier);
        const float both = larger + std::log(std::exp(lse - larger) + std::exp(earlier - larger));
        mix_row(target, std::exp(earlier - both), out, weight * std::exp(lse - both), scheme_.head_dim);
        lse = both;
      }
    } else {
      store_row(shared_.out.dtype, static_cast<std::byte*>(shared_.out.data) + offset(shared_.out, row), out, weight,
                scheme_.head_dim);
    }
    *lse_target = lse;
  }

  /// delta of detached_mix: output_scale * <dout, this branch's own result>.
  void write_delta(std::int64_t row, const float* out, float weight) {
    const std::byte* const source = static_cast<const std::byte*>(shared_.dout.data) + offset(shared_.dout, row);
    widen_any(shared_.dout.dtype, m_.scratch, source, 1.0f, scheme_.head_dim, scheme_.head_dim);
    *shared_.delta.at(task_.entry, q_row(row), rows_.head(row)) = weight * dot_rows(m_.scratch, out, scheme_.head_dim);
  }

  static constexpr auto kOneFactors = [] {
    std::array<float, Scheme::kGroup> ones{};
    ones.fill(1.0f);
    return ones;
  }();
  static constexpr const float* kOnes = kOneFactors.data();

  const ForwardShared& shared_;
  const ForwardTask& task_;
  const Scheme scheme_;
  Carver carver_;
  const ForwardMemory<Scheme> m_;
  Policy policy_;
  const VirtualRows rows_;
};

template <class Scheme>
std::size_t forward_bytes(std::int64_t head_dim, std::int64_t rows) {
  Carver carver(nullptr);
  const ForwardMemory<Scheme> memory(carver, Scheme(DType::f32, head_dim, 1.0f), rows);
  return carver.used();
}

template <class Scheme>
void forward(const ForwardShared& shared, const ForwardTask& task, std::byte* memory) {
  if (shared.extras) ForwardRun<Scheme, Extras>(shared, task, memory).run();
  else ForwardRun<Scheme, NoExtras>(shared, task, memory).run();
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace longspan::cpu
HWY_AFTER_NAMESPACE();
