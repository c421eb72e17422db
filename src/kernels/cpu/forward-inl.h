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
  std::int64_t* limits;
  ExtrasMemory extras;

  ForwardMemory(Arena& carver, const Scheme& scheme, std::int64_t slots, std::int64_t window)
      : extras(carver, window, Scheme::kGroup * Scheme::kKeyBlock) {
    const std::int64_t padded = round_up(slots, Scheme::kGroup) + Scheme::kGroup;
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
        carver_(task_memory(memory)),
        m_(carver_, scheme_, slots(), window_),
        policy_(shared, task, blocks_, m_.extras) {}

  void run() {
    Scheme::begin();
    load_queries();
    const std::int64_t last = rows_.begin + rows_.count;
    const std::int64_t key_end = shared_.causal ? std::min(last, task_.strand.count) : task_.strand.count;
    for (first_ = 0; (first_ = next_window(first_)) < key_end; first_ += window_) {
      keys_ = std::min(window_, key_end - first_);
      point_to_rows(shared_, task_, first_, keys_, window_, m_.k_rows, m_.v_rows);
      packed_ = policy_.begin_keys(first_, keys_, m_.k_rows, m_.v_rows);
      if (packed_ == 0) continue;
      if (first_ >= sums_begin_ + kTermsPerSum) {
        join_sums<false>();
        sums_begin_ = first_ / kTermsPerSum * kTermsPerSum;
      }
      scheme_.template pack_panels<Scheme::kPanel>(m_.k_panels, m_.k_rows, packed_, m_.scratch);
      scheme_.pack_values(m_.values, m_.v_rows, round_up(packed_, Scheme::kKeyMultiple));
      for_each_span([&](const Span& span) {
        for (std::int64_t from = 0; from < packed_;) {
          KeyRun runs[kMostRuns];
          const int count = take_runs(span, from, runs);
          if (count == 0) break;
          for (std::int64_t at = 0; at < span.rows; at += Scheme::kGroup) {
            if (Scheme::kPrefetches && task_.next) prefetch_next();
            attend(span, at, std::min<std::int64_t>(Scheme::kGroup, span.rows - at), runs, count);
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
  /// The next runs that a span sees, from packed key `from` of the window on: together at most kKeyBlock keys. Moves
  /// `from` behind them.
  int take_runs(const Span& span, std::int64_t& from, KeyRun* runs) const {
    const std::int64_t head = rows_.head(span.row), row = rows_.index(span.row);
    int count = 0;
    for (std::int64_t room = Scheme::kKeyBlock; room > 0 && count < kMostRuns;) {
      std::int64_t begin = blocks_.next_key(head, row, first_ + from) - first_;
      if (begin >= packed_) {
        from = packed_;
        break;
      }
      begin = std::max(from, begin / Scheme::kRunMultiple * Scheme::kRunMultiple);
      from =
          begin + blocks_.run_length(head, row, first_ + begin, std::min(room, packed_ - begin), Scheme::kRunMultiple);
      room -= round_up(from - begin, Scheme::kRunMultiple);
      runs[count++] = {begin, from};
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

  /// Rows of a span and the runs of keys that they see, which lie side by side among the scores.
  struct Group {
    Group(const Span& of, std::int64_t first, std::int64_t count)
        : span(of), at(first), slot(of.slot + first), rows(count) {}

    const Span& span;
    const std::int64_t at, slot, rows;
    std::int64_t limits[Scheme::kGroup] = {};  // how many of the window's packed keys a row sees
    KeyRun runs[kMostRuns];
    std::int64_t places[kMostRuns];
    int count = 0;
    // Runs of whole vectors: a row that sees all of them takes them as one.
    bool whole = true;
    std::int64_t together = 0;

    bool sees_all(std::int64_t i) const { return whole && limits[i] >= runs[count - 1].end; }
    /// body(place, keys that row i sees, keys) for each run.
    template <class Body>
    HWY_INLINE void for_each_run(std::int64_t i, Body&& body) const {
      if (sees_all(i)) return body(0, together, together);
      for (int run = 0; run < count; ++run) {
        const std::int64_t keys = runs[run].end - runs[run].begin;
        body(places[run], std::clamp<std::int64_t>(limits[i] - runs[run].begin, 0, keys), keys);
      }
    }
  };

  /// Some rows of a span against keys of the window, of which they see `seen`.
  HWY_NOINLINE void attend(const Span& span, std::int64_t at, std::int64_t rows, const KeyRun* seen, int seen_count) {
    Group group(span, at, rows);
    if (!cut_runs(group, seen, seen_count)) return;
    for (int run = 0; run < group.count; ++run) {
      scheme_.scores(rows, group.limits, m_.q + group.slot * scheme_.query_stride(), m_.k_panels, group.runs[run].begin,
                     group.runs[run].end, m_.scores + (group.places[run] - group.runs[run].begin));
    }
    if constexpr (Policy::kActive) apply_extras(group);
    if (blocks_.rounded(Scheme::kRunMultiple)) mask_unseen(group);
    softmax(group);
    accumulate(group);
  }

  /// False if no row sees any key.
  bool cut_runs(Group& group, const KeyRun* seen, int seen_count) const {
    std::int64_t most = 0, place = 0;
    for (std::int64_t i = 0; i < group.rows; ++i) {
      group.limits[i] = policy_.packed(std::clamp<std::int64_t>(m_.limits[group.slot + i] - first_, 0, keys_));
      most = std::max(most, group.limits[i]);
    }
    for (; group.count < seen_count && seen[group.count].begin < most; ++group.count) {
      const KeyRun run{seen[group.count].begin, std::min(seen[group.count].end, most)};
      group.whole = group.whole && group.together == place;
      group.runs[group.count] = run;
      group.places[group.count] = place;
      group.together = place + run.end - run.begin;
      place += round_up(seen[group.count].end - seen[group.count].begin, Scheme::kRunMultiple);
    }
    return group.count > 0;
  }

  /// Scores become base-2 exponents with ALiBi's bias; keep bits are drawn.
  void apply_extras(const Group& group) {
    const V factor = broadcast(scheme_.score_factor);
    for (std::int64_t i = 0; i < group.rows; ++i) {
      const std::int64_t head = rows_.head(group.span.row + group.at + i),
                         row = rows_.index(group.span.row + group.at + i);
      const auto slope = policy_.slope(head, row);
      for (int run = 0; run < group.count && group.limits[i] > 0; ++run) {
        const std::int64_t begin = group.runs[run].begin, count = group.runs[run].end - begin;
        float* const scores = m_.scores + i * Scheme::kScoreStride + group.places[run];
        if (policy_.drops())
          policy_.draw(head, row, begin, count, m_.extras.keep + i * Scheme::kKeyBlock + group.places[run]);
        if (!policy_.biased()) continue;
        for (std::int64_t key = 0; key < count; key += kLanes)
          store(hn::MulAdd(load(scores + key), factor, policy_.bias(slope, begin + key)), scores + key);
      }
    }
  }

  /// Scores become weights; their sums and what earlier sums are multiplied by.
  HWY_INLINE void softmax(const Group& group) {
    for (std::int64_t i = 0; i < group.rows; ++i) {
      const float* const scores = m_.scores + i * Scheme::kScoreStride;
      float largest = -kInfinity;
      group.for_each_run(i, [&](std::int64_t place, std::int64_t seen, std::int64_t) HWY_ATTR {
        if (seen > 0) largest = row_max(scores + place, seen, largest);
      });
      m_.bases[i] = largest;
    }
    const float factor = exponent_factor();
    raise(group.slot, group.rows, factor);
    for (std::int64_t i = 0; i < group.rows; ++i) {
      float* const scores = m_.scores + i * Scheme::kScoreStride;
      V sums = hn::Mul(load(m_.sums + (group.slot + i) * kLanes), broadcast(m_.corrections[i]));
      group.for_each_run(i, [&](std::int64_t place, std::int64_t seen, std::int64_t keys) HWY_ATTR {
        // Weights take the place of scores: they are no wider, and written after what they cover was read.
        float* const weights = scores + place / Scheme::Products::kPerUnit;
        const std::uint16_t* const keep = m_.extras.keep + i * Scheme::kKeyBlock + place;
        if (Policy::kActive && policy_.drops())
          sums = Scheme::template weights<true>(scores + place, weights, seen, keys, factor, m_.bases[i], keep, sums);
        else
          sums = Scheme::template weights<false>(scores + place, weights, seen, keys, factor, m_.bases[i], keep, sums);
      });
      store(sums, m_.sums + (group.slot + i) * kLanes);
    }
  }

  /// out = out * corrections + weights values.
  HWY_INLINE void accumulate(const Group& group) {
    float* const out = m_.out + group.slot * scheme_.columns;
    if constexpr (requires { &Scheme::outputs_of_runs; }) {
      std::int64_t all = 0;
      while (all < group.rows && group.sees_all(all)) ++all;
      if (group.count > 1 && all == group.rows) {
        scheme_.outputs_of_runs(group.rows, m_.scores, m_.values, group.runs, group.count, out, m_.corrections);
        return;
      }
    }
    const float* corrections = starts_fresh() && first_ == 0 ? nullptr : m_.corrections;
    for (int run = 0; run < group.count; ++run) {
      const KeyRun& keys = group.runs[run];
      scheme_.outputs(group.rows, group.limits,
                      m_.scores + (group.places[run] - keys.begin) / Scheme::Products::kPerUnit, m_.values, keys.begin,
                      keys.end, out, corrections);
      corrections = kOnes;
    }
  }

  /// Runs were rounded out to what products take: keys between the blocks lose their scores.
  void mask_unseen(const Group& group) {
    const std::int64_t head = rows_.head(group.span.row), row = rows_.index(group.span.row);
    for (int run = 0; run < group.count; ++run) {
      for (std::int64_t key = group.runs[run].begin; key < group.runs[run].end; key += kChunk) {
        if (blocks_.seen(head, row, first_ + key)) continue;
        float* const scores = m_.scores + group.places[run] + key - group.runs[run].begin;
        for (std::int64_t i = 0; i < group.rows; ++i) {
          for (int lane = 0; lane < kChunk; lane += kLanes)
            store(broadcast(kMasked), scores + i * Scheme::kScoreStride + lane);
        }
      }
    }
  }

  /// What turns scores into base-2 exponents; a bias has done so already.
  float exponent_factor() const { return policy_.biased() ? 1.0f : scheme_.score_factor; }

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
  Arena carver_;
  const ForwardMemory<Scheme> m_;
  Policy policy_;
  std::int64_t first_ = 0, keys_ = 0, packed_ = 0;  // the window: its first key, its keys, and those that are packed
  std::int64_t next_rows_ = 0;                      // of the next strand, prefetched so far
  std::int64_t sums_begin_ = 0;                     // first key that out and sums are over
  bool closed_ = false;                             // whether there are closed sums
};

template <class Scheme>
std::size_t forward_bytes(std::int64_t head_dim, std::int64_t rows, bool masked) {
  Arena carver = task_memory(nullptr);
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
