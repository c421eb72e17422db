// Forward of one task: some rows of one strand against all keys they see.
//   keys in blocks of kKeyBlock, counted from the strand's start: packed once, used by every row of the task
//     k_panels [keys / panel][depth][panel], values [keys][columns]
//   rows in groups of kGroup: scores [kGroup][kKeyBlock] stay in the first-level cache from product to product
//     scores = q k^T;  largest = max;  weights = exp2(scores - largest);  out = out * correction + weights values
//   Every decision is per row, and masked pairs are exact no-ops, so a row's bits depend on its own keys only.
//   Under a block mask groups never cross a block row: their rows see the same runs of keys, and the rest costs
//   nothing. Up to kKeyBlock of a row's keys are taken together, from a window of several blocks, and lie side by side
//   in `scores`.
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
  static constexpr int kRowMultiple = kTileRows;  // rows that products read and write together
  static constexpr int kPanel = kTileVectors * kLanes;
  static constexpr std::int64_t kKeyBlock = 512;
  static constexpr std::int64_t kScoreStride = kKeyBlock;
  static constexpr std::int64_t kRunMultiple = kChunk;
  static constexpr bool kStartsFresh = false;
  static constexpr bool kPrefetches = true;

  static void begin() {}
  static void end() {}

  /// scores[row][begin .. end) for the group's `rows` (each sees `limits` keys); begin is a multiple of kRunMultiple.
  void scores(std::int64_t rows, const std::int64_t*, const float* q, const float* k_panels, std::int64_t begin,
              std::int64_t end, float* scores) const {
    for (std::int64_t key = begin, within = begin % kPanel; key < end; key += kPanel - within, within = 0) {
      const int vectors =
          static_cast<int>(std::min<std::int64_t>((kPanel - within) / kLanes, (end - key + kLanes - 1) / kLanes));
      const float* const panel = k_panels + (key - within) * this->depth + within;
      const int inner = static_cast<int>(this->product_depth());
      if (rows == 1) product_some<Products, 1, kTileVectors>(vectors, q, 0, panel, kPanel, inner, scores + key, 0);
      else
        product_some<Products, kGroup, kTileVectors>(vectors, q, this->query_stride(), panel, kPanel, inner,
                                                     scores + key, kScoreStride);
    }
  }
  /// out = corrections * out + weights[.. begin .. end) * values.
  void outputs(std::int64_t rows, const std::int64_t*, const float* weights, const float* values, std::int64_t begin,
               std::int64_t end, float* out, const float* corrections) const {
    const float* const a = weights + begin / Products::kPerUnit;
    const float* const b = values + this->value_offset(begin);
    const int inner = static_cast<int>((end - begin + Products::kPerUnit - 1) / Products::kPerUnit);
    const std::int64_t width = this->columns;
    if (rows == 1) accumulate_columns<Products, false, true, 1>(width, a, 0, b, width, inner, out, 0, corrections);
    else
      accumulate_columns<Products, false, true, kGroup>(width, a, kScoreStride, b, width, inner, out, width,
                                                        corrections);
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
  float *closed_out, *closed_largest, *closed_sums;  // of keys before those that out and sums are over
  float *bias, *keep, *excluded;
  std::int64_t* limits;

  ForwardMemory(Carver& carver, const Scheme& scheme, std::int64_t slots, std::int64_t window) {
    const std::int64_t padded = round_up(slots, Scheme::kGroup) + Scheme::kGroup, block = Scheme::kKeyBlock;
    k_rows = carver.take<const std::byte*>(window);
    v_rows = carver.take<const std::byte*>(window);
    q = carver.take<float>(padded * scheme.query_stride());
    out = carver.take<float>(padded * scheme.columns);
    largest = carver.take<float>(padded + kLanes);
    sums = carver.take<float>(padded * kLanes);
    limits = carver.take<std::int64_t>(padded);
    k_panels = carver.take<float>(round_up(window, Scheme::kPanel) * scheme.depth);
    values = carver.take<float>(Scheme::value_floats(window, scheme.columns));
    scores = carver.take<float>(Scheme::kGroup * Scheme::kScoreStride);
    scratch = carver.take<float>(std::max<std::int64_t>(kLanes * scheme.depth, kMaxHeadDim));
    corrections = carver.take<float>(round_up(Scheme::kGroup, kLanes));
    bases = carver.take<float>(round_up(Scheme::kGroup, kLanes));
    bias = carver.take<float>(block);
    keep = carver.take<float>(Scheme::kGroup * block);
    excluded = carver.take<float>(window);
    closed_out = carver.take<float>(padded * scheme.columns);
    closed_largest = carver.take<float>(padded);
    closed_sums = carver.take<float>(padded * kLanes);
  }
};

/// Keys that are packed together: one block, or under a mask as many as leave room in the second-level cache.
template <class Scheme>
std::int64_t key_window(std::int64_t head_dim, bool masked) {
  constexpr std::int64_t kCachedKeys = 64 * 1024 * Scheme::Products::kPerUnit;  // times head_dim
  return masked ? Scheme::kKeyBlock * std::clamp<std::int64_t>(kCachedKeys / head_dim / Scheme::kKeyBlock, 1, 8)
                : Scheme::kKeyBlock;
}

template <class Scheme, class Policy>
class ForwardRun {
 public:
  ForwardRun(const ForwardShared& shared, const ForwardTask& task, std::byte* memory)
      : shared_(shared),
        task_(task),
        scheme_(shared.q.dtype, shared.plan.problem().head_dim, shared.scale),
        rows_{task.heads, task.rows.begin, task.rows.count},
        blocks_(shared, task),
        window_(key_window<Scheme>(scheme_.head_dim, blocks_.masked())),
        carver_(memory),
        m_(carver_, scheme_, slots(), window_),
        policy_(shared, task) {}

  void run() {
    Scheme::begin();
    policy_.prepare(m_.bias, Scheme::kKeyBlock, m_.keep, Scheme::kGroup * Scheme::kKeyBlock);
    load_queries();
    const std::int64_t last = rows_.begin + rows_.count;
    const std::int64_t key_end = shared_.causal ? std::min(last, task_.strand.count) : task_.strand.count;
    for (std::int64_t first = 0; (first = next_window(first)) < key_end; first += window_) {
      const std::int64_t keys = std::min(window_, key_end - first);
      policy_.begin_keys(first, keys, m_.excluded);
      if (policy_.first_open(first, first + keys) == first + keys) continue;
      if (first >= sums_begin_ + kTermsPerSum) {
        join_sums<false>();
        sums_begin_ = first / kTermsPerSum * kTermsPerSum;
      }
      point_to_rows(shared_, task_, first, keys, window_, m_.k_rows, m_.v_rows);
      scheme_.template pack_panels<Scheme::kPanel>(m_.k_panels, m_.k_rows, keys, m_.scratch);
      scheme_.pack_values(m_.values, m_.v_rows, round_up(keys, Scheme::kKeyMultiple));
      for_each_span([&](const Span& span) {
        for (std::int64_t from = 0; from < keys;) {
          KeyRun runs[kMostRuns];
          const int count = take_runs(span, first, keys, from, runs);
          if (count == 0) break;
          for (std::int64_t at = 0; at < span.rows; at += Scheme::kGroup) {
            if (Scheme::kPrefetches && task_.next) prefetch_next();
            attend(span, at, std::min<std::int64_t>(Scheme::kGroup, span.rows - at), first, keys, runs, count);
          }
        }
      });
    }
    Scheme::end();
    if (closed_) join_sums<true>();
    for_each_span([&](const Span& span) { epilogue(span); });
    if (shared_.non_temporal) hwy::FlushStream();
  }

 private:
  static constexpr int kMostRuns = static_cast<int>(Scheme::kKeyBlock / kChunk);

  /// Rows of the task that see the same blocks: virtual rows row .. row + rows, kept in slots of their own.
  struct Span {
    std::int64_t row, rows, slot;
  };
  template <class Body>
  void for_each_span(Body&& body) const {
    std::int64_t slot = 0;
    for (std::int64_t index = rows_.begin, end = rows_.begin + rows_.count; index < end;) {
      const std::int64_t stop = blocks_.next_row(index, end);
      const Span span{(index - rows_.begin) * rows_.heads.count, (stop - index) * rows_.heads.count, slot};
      body(span);
      slot += round_up(span.rows, Scheme::kRowMultiple);
      index = stop;
    }
  }
  std::int64_t slots() const {
    std::int64_t count = 0;
    for_each_span([&](const Span& span) { count = span.slot + round_up(span.rows, Scheme::kRowMultiple); });
    return count;
  }
  /// Start of the first window of keys from `key` on that some row sees.
  std::int64_t next_window(std::int64_t key) const {
    std::int64_t first = std::int64_t{1} << 62;
    for_each_span([&](const Span& span) {
      first = std::min(first, blocks_.next_key(rows_.head(span.row), rows_.index(span.row), key));
    });
    return first / window_ * window_;
  }
  /// The next runs that a span sees, from key `from` of the window on: together at most kKeyBlock keys. Moves `from`
  /// behind them.
  int take_runs(const Span& span, std::int64_t first, std::int64_t keys, std::int64_t& from, KeyRun* runs) const {
    const std::int64_t head = rows_.head(span.row), row = rows_.index(span.row);
    int count = 0;
    for (std::int64_t room = Scheme::kKeyBlock; room > 0 && count < kMostRuns;) {
      std::int64_t begin = blocks_.next_key(head, row, first + from) - first;
      if (begin >= keys) {
        from = keys;
        break;
      }
      // Without a mask of blocks, keys that key_mask leaves out before the first open one and after the last cost
      // nothing.
      if (!blocks_.masked()) begin = policy_.first_open(first + begin, first + keys) - first;
      begin = std::max(from, begin / Scheme::kRunMultiple * Scheme::kRunMultiple);
      from = begin + blocks_.run_length(head, row, first + begin, std::min(room, keys - begin), Scheme::kRunMultiple);
      const KeyRun run{begin, blocks_.masked() ? from : policy_.open_end(first + begin, first + from) - first};
      room -= round_up(run.end - run.begin, Scheme::kRunMultiple);
      runs[count++] = run;
    }
    return count;
  }

  void load_queries() {
    constexpr std::int64_t kAhead = 8;
    const std::int64_t padded = round_up(slots(), Scheme::kGroup);
    const auto q_of = places<const std::byte>(shared_.q);
    for (std::int64_t slot = 0; slot < padded; ++slot) {
      m_.limits[slot] = 0;
      m_.largest[slot] = -kInfinity;
    }
    for_each_span([&](const Span& span) {
      for (std::int64_t i = 0; i < round_up(span.rows, Scheme::kRowMultiple); ++i) {
        const std::int64_t row = span.row + i, slot = span.slot + i;
        const std::byte* source = zero_row();
        if (i < span.rows) {
          source = q_of(row);
          m_.limits[slot] = shared_.causal ? rows_.index(row) + 1 : task_.strand.count;
        }
        if (row + kAhead < rows_.size()) prefetch_row(q_of(row + kAhead), scheme_.row_bytes());
        scheme_.pack_query(m_.q + slot * scheme_.query_stride(), source, scheme_.query_factor);
      }
    });
    if (!starts_fresh()) std::memset(m_.out, 0, static_cast<std::size_t>(padded * scheme_.columns) * sizeof(float));
    std::memset(m_.sums, 0, static_cast<std::size_t>(padded * kLanes) * sizeof(float));
  }

  template <class Element, class View>
  RowPlaces<Element> places(const View& view) const {
    return {view, task_.entry, rows_, task_.rows.q_row, task_.strand.stride};
  }
  std::int64_t q_row(std::int64_t row) const {
    return task_.rows.q_row + (rows_.index(row) - rows_.begin) * task_.strand.stride;
  }
  template <class View>
  std::int64_t offset(const View& view, std::int64_t row) const {
    return view.offset(task_.entry, q_row(row), rows_.head(row)) * size_of(view.dtype);
  }

  /// Prefetches some more rows of the next strand, while products run.
  void prefetch_next() {
    const ForwardTask& next = *task_.next;
    const VirtualRows rows{next.heads, next.rows.begin, next.rows.count};
    const RowPlaces<const std::byte> q_of(shared_.q, next.entry, rows, next.rows.q_row, next.strand.stride);
    const std::int64_t end = next_rows_ + Scheme::kGroup;
    prefetch_keys(shared_, next, next_rows_, end);
    for (std::int64_t i = next_rows_; i < std::min(end, rows.size()); ++i) prefetch_early(q_of(i), scheme_.row_bytes());
    next_rows_ = end;
  }

  /// Whether the first block of keys, of which every row sees some, writes the sums instead of adding to zeros.
  bool starts_fresh() const { return Scheme::kStartsFresh && !blocks_.masked() && !shared_.call.key_mask.given(); }

  /// Some rows of a span against one block of keys, of which they see `seen`.
  HWY_NOINLINE void attend(const Span& span, std::int64_t at, std::int64_t valid, std::int64_t block, std::int64_t keys,
                           const KeyRun* seen, int seen_count) {
    const std::int64_t group = span.slot + at;
    std::int64_t limits[Scheme::kGroup] = {};
    std::int64_t most = 0;
    for (int i = 0; i < valid; ++i) {
      limits[i] = std::clamp<std::int64_t>(m_.limits[group + i] - block, 0, keys);
      most = std::max(most, limits[i]);
    }
    KeyRun runs[kMostRuns];
    std::int64_t places[kMostRuns];  // where a run lies among the scores
    int run_count = 0;
    for (std::int64_t place = 0; run_count < seen_count && seen[run_count].begin < most; ++run_count) {
      runs[run_count] = {seen[run_count].begin, std::min(seen[run_count].end, most)};
      places[run_count] = place;
      place += round_up(seen[run_count].end - seen[run_count].begin, Scheme::kRunMultiple);
    }
    if (run_count == 0) return;
    for (int run = 0; run < run_count; ++run) {
      scheme_.scores(valid, limits, m_.q + group * scheme_.query_stride(), m_.k_panels, runs[run].begin, runs[run].end,
                     m_.scores + (places[run] - runs[run].begin));
    }
    if constexpr (Policy::kActive) {
      for (int i = 0; i < valid; ++i) {
        const std::int64_t row = span.row + at + i;
        for (int run = 0; run < run_count && limits[i] > 0; ++run) {
          const std::int64_t place = places[run], count = round_up(runs[run].end - runs[run].begin, kLanes);
          policy_.fill(rows_.head(row), rows_.index(row), block + runs[run].begin, count, m_.bias + place,
                       m_.keep + i * Scheme::kKeyBlock + place);
          if (policy_.biased()) add_bias(m_.scores + i * Scheme::kScoreStride + place, m_.bias + place, count);
        }
      }
    }
    if (blocks_.rounded(Scheme::kRunMultiple)) mask_unseen(span, valid, block, runs, places, run_count);
    // Runs of whole vectors lie side by side: a row that sees all of them takes them as one.
    const KeyRun last = runs[run_count - 1];
    const std::int64_t together = places[run_count - 1] + last.end - last.begin;
    bool whole = true;
    for (int run = 0; run + 1 < run_count; ++run)
      whole = whole && places[run + 1] - places[run] == runs[run].end - runs[run].begin;
    const auto for_each_run = [&](int i, auto&& body) HWY_ATTR {  // body(place, keys that the row sees, keys)
      if (whole && limits[i] >= last.end) return body(0, together, together);
      for (int run = 0; run < run_count; ++run) {
        const std::int64_t keys_of_run = runs[run].end - runs[run].begin;
        body(places[run], std::clamp<std::int64_t>(limits[i] - runs[run].begin, 0, keys_of_run), keys_of_run);
      }
    };
    for (int i = 0; i < valid; ++i) {
      const float* const scores = m_.scores + i * Scheme::kScoreStride;
      float largest = -kInfinity;
      for_each_run(i, [&](std::int64_t place, std::int64_t seen_keys, std::int64_t) HWY_ATTR {
        if (seen_keys > 0) largest = row_max(scores + place, seen_keys, largest);
      });
      m_.bases[i] = largest;
    }
    const float factor = exponent_factor();
    raise(group, valid, factor);
    for (int i = 0; i < valid; ++i) {
      float* const scores = m_.scores + i * Scheme::kScoreStride;
      V sums = hn::Mul(load(m_.sums + (group + i) * kLanes), broadcast(m_.corrections[i]));
      for_each_run(i, [&](std::int64_t place, std::int64_t seen_keys, std::int64_t keys_of_run) HWY_ATTR {
        // Weights take the place of scores: they are no wider, and written after what they cover was read.
        float* const weights = scores + place / Scheme::Products::kPerUnit;
        const float* const keep = m_.keep + i * Scheme::kKeyBlock + place;
        if (Policy::kActive && policy_.drops())
          sums = Scheme::template weights<true>(scores + place, weights, seen_keys, keys_of_run, factor, m_.bases[i],
                                                keep, sums);
        else
          sums = Scheme::template weights<false>(scores + place, weights, seen_keys, keys_of_run, factor, m_.bases[i],
                                                 keep, sums);
      });
      store(sums, m_.sums + (group + i) * kLanes);
    }
    if constexpr (requires { &Scheme::outputs_of_runs; }) {
      if (run_count > 1 && whole && *std::min_element(limits, limits + valid) >= last.end) {
        scheme_.outputs_of_runs(valid, m_.scores, m_.values, runs, run_count, m_.out + group * scheme_.columns,
                                m_.corrections);
        return;
      }
    }
    const float* corrections = starts_fresh() && block == 0 ? nullptr : m_.corrections;
    for (int run = 0; run < run_count; ++run) {
      scheme_.outputs(valid, limits, m_.scores + (places[run] - runs[run].begin) / Scheme::Products::kPerUnit,
                      m_.values, runs[run].begin, runs[run].end, m_.out + group * scheme_.columns, corrections);
      corrections = kOnes;
    }
  }

  /// Runs were rounded out to what products take: keys between the blocks lose their scores.
  void mask_unseen(const Span& span, std::int64_t valid, std::int64_t block, const KeyRun* runs,
                   const std::int64_t* places, int run_count) {
    for (int run = 0; run < run_count; ++run) {
      for (std::int64_t key = runs[run].begin; key < runs[run].end; key += kChunk) {
        if (blocks_.seen(rows_.head(span.row), rows_.index(span.row), block + key)) continue;
        for (std::int64_t i = 0; i < valid; ++i) {
          for (int lane = 0; lane < kChunk; lane += kLanes)
            store(broadcast(kMasked),
                  m_.scores + i * Scheme::kScoreStride + places[run] + key - runs[run].begin + lane);
        }
      }
    }
  }

  /// What turns scores into base-2 exponents; add_bias has done so already.
  float exponent_factor() const { return policy_.biased() ? 1.0f : scheme_.score_factor; }

  /// Scores become base-2 exponents with the row's bias.
  HWY_INLINE void add_bias(float* scores, const float* bias, std::int64_t keys) {
    const V factor = broadcast(scheme_.score_factor);
    for (std::int64_t key = 0; key < keys; key += kLanes)
      store(hn::MulAdd(load(scores + key), factor, load(bias + key)), scores + key);
  }

  /// Streaming softmax, many rows per vector: bases hold the block's maxima and become what is subtracted from scores;
  /// corrections are what earlier sums are multiplied by, exactly 1 for rows whose maximum stays.
  HWY_INLINE void raise(std::int64_t group, std::int64_t valid, float factor) {
    const V scale = broadcast(factor), none = broadcast(-kInfinity);
    for (std::int64_t i = 0; i < valid; i += kLanes) {
      const V before = load(m_.largest + group + i), found = load(m_.bases + i);
      // A NaN maximum is dropped here; the weights of its row are NaN all the same.
      const auto rises = hn::Gt(found, before);
      const V largest = hn::IfThenElse(rises, found, before);
      V correction = exp2<5>(hn::Max(hn::Mul(hn::Sub(before, largest), scale), broadcast(-1e4f)));
      correction = hn::IfThenZeroElse(hn::Eq(before, none), correction);
      hn::StoreU(hn::IfThenElse(rises, correction, broadcast(1.0f)), kFloat, m_.corrections + i);
      hn::StoreU(hn::IfThenZeroElse(hn::Lt(largest, broadcast(kMaskedLimit)), largest), kFloat, m_.bases + i);
      // Lanes beyond the group belong to rows of the next: they keep what they have.
      const auto own = hn::FirstN(kFloat, static_cast<std::size_t>(std::min<std::int64_t>(kLanes, valid - i)));
      hn::StoreU(hn::IfThenElse(own, largest, before), kFloat, m_.largest + group + i);
    }
  }

  /// Adds the sums over keys from sums_begin_ on to the closed ones and begins new ones, or (kLast) leaves all together
  /// in out and sums. A row that saw none of these keys keeps its closed sums, to the bit.
  template <bool kLast>
  HWY_NOINLINE void join_sums() {
    const float factor = exponent_factor();
    const std::int64_t padded = round_up(slots(), Scheme::kGroup);
    for (std::int64_t slot = 0; slot < padded; ++slot) {
      const bool seen = m_.limits[slot] > sums_begin_;
      if (m_.limits[slot] == 0 || (!seen && !kLast)) continue;
      const float before = m_.closed_largest[slot], largest = m_.largest[slot];
      const V correction = broadcast(closed_ && largest > before ? exp2_scalar((before - largest) * factor) : 1.0f);
      const auto join = [&](float* open, float* closed, std::int64_t count) HWY_ATTR {
        for (std::int64_t i = 0; i < count; i += kLanes) {
          V sum = load(open + i);
          if (closed_) sum = seen ? hn::MulAdd(load(closed + i), correction, sum) : load(closed + i);
          store(sum, (kLast ? open : closed) + i);
          if (!kLast) store(hn::Zero(kFloat), open + i);
        }
      };
      join(m_.out + slot * scheme_.columns, m_.closed_out + slot * scheme_.columns, scheme_.columns);
      join(m_.sums + slot * kLanes, m_.closed_sums + slot * kLanes, kLanes);
      m_.closed_largest[slot] = largest;
    }
    closed_ = true;
  }

  /// The epilogue: denominators and their logarithms a vector at a time; rows to write are prefetched one vector ahead.
  void epilogue(const Span& span) {
    const auto out_of = places<std::byte>(shared_.out);
    const auto lse_of = places<float>(shared_.lse);
    for (std::int64_t at = 0; at < span.rows; at += kLanes) {
      const std::int64_t count = std::min<std::int64_t>(kLanes, span.rows - at);
      float sums[kLanes] = {}, logs[kLanes];
      for (std::int64_t i = 0; i < count; ++i) sums[i] = sum_lanes(load(m_.sums + (span.slot + at + i) * kLanes));
      store(natural_log(load(sums)), logs);
      for (std::int64_t i = 0; i < count; ++i) {
        const std::int64_t row = span.row + at + i;
        if (row + kLanes < rows_.size() && out_of && !shared_.non_temporal)
          prefetch_row<true>(out_of(row + kLanes), scheme_.row_bytes());
        finish_row(row, span.slot + at + i, sums[i], logs[i], out_of, lse_of);
      }
    }
  }

  /// Divides by the denominator, adds pad keys, mixes with earlier branches, writes.
  void finish_row(std::int64_t row, std::int64_t slot, float sum, float log_of_sum, const RowPlaces<std::byte>& out_of,
                  const RowPlaces<float>& lse_of) {
    float* const out = m_.out + slot * scheme_.columns;
    const float factor = exponent_factor();
    // In double: at scores of 1e4 every rounding of an exponent costs a weight 1e-3.
    double exponent = m_.largest[slot] < kMaskedLimit ? 0.0 : static_cast<double>(m_.largest[slot]) * factor;  // base 2
    float weight = 1.0f;
    if (task_.padding > 0) {
      const double raised = sum == 0.0f ? 0.0 : std::max(exponent, 0.0);
      weight = exp2_scalar(static_cast<float>(exponent - raised));
      sum = sum * weight + static_cast<float>(task_.padding) * exp2_scalar(static_cast<float>(-raised));
      exponent = raised;
      log_of_sum = std::log(sum);
    }
    float lse = sum == 0.0f ? -kInfinity : static_cast<float>(exponent * 0.693147180559945309 + log_of_sum);
    weight = sum == 0.0f ? 0.0f : weight / sum * shared_.output_scale * shared_.keep_factor;
    if (shared_.delta.data) {
      write_delta(row, out, weight);
      return;
    }
    float* const lse_target = lse_of(row);
    if (shared_.sums.data) {
      float* const target = shared_.sums.at(task_.entry, q_row(row), rows_.head(row));
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
      if (shared_.non_temporal)
        write_row_non_temporal(reinterpret_cast<float*>(out_of(row)), out, weight, scheme_.head_dim);
      else store_row(shared_.out.dtype, out_of(row), out, weight, scheme_.head_dim);
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
  const VirtualRows rows_;
  const BlockRows blocks_;
  const std::int64_t window_;
  Carver carver_;
  const ForwardMemory<Scheme> m_;
  Policy policy_;
  std::int64_t next_rows_ = 0;   // of the next strand, prefetched so far
  std::int64_t sums_begin_ = 0;  // first key that out and sums are over
  bool closed_ = false;          // whether there are closed sums
};

template <class Scheme>
std::size_t forward_bytes(std::int64_t head_dim, std::int64_t rows, bool masked) {
  Carver carver(nullptr);
  const ForwardMemory<Scheme> memory(carver, Scheme(DType::f32, head_dim, 1.0f), rows,
                                     key_window<Scheme>(head_dim, masked));
  return carver.used();
}

template <class Scheme>
void forward(const ForwardShared& shared, const ForwardTask& task, std::byte* memory) {
  const NoDenormals scope;
  if (shared.extras) ForwardRun<Scheme, Extras>(shared, task, memory).run();
  else ForwardRun<Scheme, NoExtras>(shared, task, memory).run();
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace longspan::cpu
HWY_AFTER_NAMESPACE();
