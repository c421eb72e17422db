// Backward of one task: some keys of one strand against all queries that see them.
//   keys of the task are packed once: k and v panels (for scores), k rows (for dq); dk and dv are summed beside them
//   queries stream past in tiles: q, dout [kQueryTile][columns], and per key tile of kKeyTile keys five products:
//     scores = q k^T, dweights = dout v^T       in register tiles, turned at once into
//     weights = exp2(scores - lse), dscores = weights * (dweights - delta)
//     dv += weights^T dout, dk += dscores^T q   (a read by columns: nothing is transposed)
//     dq += dscores k                           summed over the task's keys, then added to dq in the order of tasks
//   Under a block mask query tiles never cross a block row, and key tiles are cut to the runs of keys that it sees.
#pragma once

#include <thread>

#include "kernels/cpu/extras-inl.h"

HWY_BEFORE_NAMESPACE();
namespace longspan::cpu {
namespace HWY_NAMESPACE {
namespace {

/// How register tiles run the five products.
template <class Layout>
struct VectorBackward : Layout {
  using Layout::Layout;
  using Products = typename Layout::Products;
  static constexpr int kPerUnit = Products::kPerUnit;
  static constexpr int kRows = kScoreRows;
  static constexpr int kPanel = kScoreVectors * kLanes;
  static constexpr std::int64_t kQueryTile = kPerUnit == 2 ? 96 : 48;
  static constexpr std::int64_t kKeyTile = kPerUnit == 2 ? 192 : 96;
  static constexpr std::int64_t kRunMultiple = kChunk;
  static constexpr bool kClearUnseen = false;
  static constexpr bool kPrefetches = true;
  static_assert(kKeyTile % kPanel == 0 && kKeyTile % kTileRows == 0 && kQueryTile % kRows == 0 &&
                kQueryTile % kTileRows == 0);

  static void begin() {}
  static void end() {}

  /// Weights and dscores of rows row, row + 1 and the kLanes keys at `key`.
  static HWY_INLINE void put(float* weights, float* dscores, float* dscore_rows, std::int64_t row, std::int64_t key,
                             V w0, V w1, V d0, V d1) {
    if constexpr (kPerUnit == 2) {
      Layout::template put_pairs<kKeyTile>(weights, dscores, dscore_rows, row, key, w0, w1, d0, d1);
    } else {
      store(w0, weights + row * kKeyTile + key);
      store(w1, weights + (row + 1) * kKeyTile + key);
      store(d0, dscores + row * kKeyTile + key);
      store(d1, dscores + (row + 1) * kKeyTile + key);
    }
  }

  /// kRows rows of q (and of dout) times `vectors` vectors of one panel.
  HWY_INLINE void score_tiles(int vectors, const float* q, const float* dout, const float* k_panel,
                              const float* v_panel, float* scores, float* dweights) const {
    const int inner = static_cast<int>(this->product_depth());
    const std::int64_t stride = this->query_stride_backward();
    product_some<Products, kRows, kScoreVectors>(vectors, q, stride, k_panel, kPanel, inner, scores, kPanel);
    product_some<Products, kRows, kScoreVectors>(vectors, dout, stride, v_panel, kPanel, inner, dweights, kPanel);
  }

  /// sums of the tile's keys += a^T b, six keys at a time, from the first rows that see them on.
  HWY_INLINE void add_to_keys(const float* a, const float* b, float* sums, std::int64_t key, std::int64_t tile_keys,
                              std::int64_t, std::int64_t rows, const std::int64_t* seen) const {
    const std::int64_t width = this->columns, groups = (rows + kRows - 1) / kRows,
                       end = (rows + kPerUnit - 1) / kPerUnit;
    std::int64_t group = 0;
    for (std::int64_t k = 0; k < tile_keys; k += kTileRows) {
      while (group < groups && seen[group] <= k) ++group;
      const std::int64_t from = group * kRows / kPerUnit;
      if (from >= end) break;
      accumulate_columns<Products, true, false, kTileRows>(width, a + from * kKeyTile + k, kKeyTile, b + from * width,
                                                           width, static_cast<int>(end - from),
                                                           sums + (key + k) * width, width, nullptr);
    }
  }
  /// dq of the tile's rows += dscores k.
  HWY_INLINE void add_to_queries(const float* dscore_rows, const float* k_values, float* dq, std::int64_t rows,
                                 const std::int64_t* seen) const {
    const std::int64_t width = this->columns;
    for (std::int64_t row = 0; row < rows; row += kTileRows) {
      const std::int64_t most = std::max(seen[row / kRows], seen[std::min(row + kTileRows - 1, rows - 1) / kRows]);
      if (most <= 0) continue;
      accumulate_columns<Products, false, false, kTileRows>(
          width, dscore_rows + row * kKeyTile / kPerUnit, kKeyTile / kPerUnit, k_values, width,
          static_cast<int>((most + kPerUnit - 1) / kPerUnit), dq + row * width, width, nullptr);
    }
  }
  /// Sums of key `key`, one row.
  const float* key_sums(const float* sums, std::int64_t key, std::int64_t, float*) const {
    return sums + key * this->columns;
  }
};
using FloatBackward = VectorBackward<FloatLayout>;

/// Adds to (or sets) a row of sums; `non_temporal` says that nobody adds to it afterwards and it is larger than a
/// cache.
HWY_INLINE void add_row(float* target, const float* source, float factor, std::int64_t columns, bool add,
                        bool non_temporal = false) {
  if (add) mix_row(target, 1.0f, source, factor, columns);
  else if (non_temporal) write_row_non_temporal(target, source, factor, columns);
  else write_row(target, source, factor, columns);
}

template <class Scheme>
struct BackwardMemory {
  const std::byte **k_rows, **v_rows;
  float *k_panels, *v_panels, *k_values, *dk, *dv;                     // of the task's keys
  float *q, *dout, *q_pairs, *dout_pairs, *lse, *delta, *dq;           // of a query tile
  float *weights, *dscores, *dscore_rows, *score_tile, *dweight_tile;  // of a query tile and a key tile
  float* scratch;
  float *closed_dk, *closed_dv;  // of query rows before those that dk and dv are over
  std::int64_t* limits;          // packed keys that a row sees, counted from the task's first
  ExtrasMemory extras;

  BackwardMemory(Arena& carver, const Scheme& scheme, std::int64_t key_count)
      : extras(carver, round_up(key_count, Scheme::kKeyTile), Scheme::kRows * Scheme::kKeyTile) {
    const std::int64_t keys = round_up(key_count, Scheme::kKeyTile), columns = scheme.columns;
    constexpr std::int64_t kTile = Scheme::kQueryTile * Scheme::kKeyTile / Scheme::Products::kPerUnit;
    constexpr bool kPairs = Scheme::Products::kPerUnit == 2;
    k_rows = carver.take<const std::byte*>(keys);
    v_rows = carver.take<const std::byte*>(keys);
    k_panels = carver.take<float>(keys * scheme.depth);
    v_panels = carver.take<float>(keys * scheme.depth);
    k_values = carver.take<float>(Scheme::value_floats(keys, columns));
    dk = carver.take<float>((keys + kTileRows) * columns);  // a run's last keys are added to a few at a time
    dv = carver.take<float>((keys + kTileRows) * columns);
    q = carver.take<float>(Scheme::kQueryTile * columns);
    dout = carver.take<float>(Scheme::kQueryTile * columns);
    q_pairs = kPairs ? carver.take<float>(Scheme::kQueryTile * columns / 2) : q;
    dout_pairs = kPairs ? carver.take<float>(Scheme::kQueryTile * columns / 2) : dout;
    lse = carver.take<float>(Scheme::kQueryTile);
    delta = carver.take<float>(Scheme::kQueryTile);
    limits = carver.take<std::int64_t>(Scheme::kQueryTile);
    dq = carver.take<float>(Scheme::kQueryTile * columns);
    weights = carver.take<float>(kTile);
    dscores = carver.take<float>(kTile);
    dscore_rows = kPairs ? carver.take<float>(kTile) : dscores;
    score_tile = carver.take<float>(Scheme::kRows * Scheme::kPanel);
    dweight_tile = carver.take<float>(Scheme::kRows * Scheme::kPanel);
    scratch = carver.take<float>(std::max<std::int64_t>(kLanes * scheme.columns, Scheme::kQueryTile / 2 * columns));
    closed_dk = carver.take<float>(keys * columns);
    closed_dv = carver.take<float>(keys * columns);
  }
};

template <class Scheme, class Policy>
class BackwardRun {
  static constexpr std::int64_t kQueryTile = Scheme::kQueryTile, kKeyTile = Scheme::kKeyTile;
  static constexpr int kRows = Scheme::kRows;
  static constexpr std::int64_t kGroups = kQueryTile / kRows;
  static constexpr std::int64_t kWriteAhead = 8;          // rows between prefetching a place and writing there
  static constexpr std::int64_t kPackedRows = 2 * kRows;  // rows are packed in multiples of this
  static_assert(kKeyTile % kChunk == 0 && kRows % 2 == 0);

 public:
  BackwardRun(const BackwardShared& shared, const BackwardTask& task, std::byte* memory)
      : shared_(shared),
        task_(task),
        scheme_(shared.q.dtype, shared.plan.problem().head_dim, shared.scale),
        carver_(task_memory(memory)),
        m_(carver_, scheme_, task.key_end - task.key_begin),
        blocks_(shared, task),
        policy_(shared, task, blocks_, m_.extras),
        dweight_factor_(shared.output_scale * shared.keep_factor) {}

  void run() {
    Scheme::begin();
    load_keys();
    std::int64_t first_row = 0;
    const bool one_ticket = shared_.ranges.size() > 1;
    if (task_.tickets && one_ticket) wait_for(task_.tickets[0]);
    for (const RowRange& range : shared_.ranges) {
      run_queries(query_run(task_.strand, range, first_row), one_ticket);
      first_row += range.count;
    }
    if (task_.tickets && one_ticket) pass_on(task_.tickets[0]);
    Scheme::end();
    if (closed_) join_key_sums<true>();
    write_keys();
    if (shared_.non_temporal) hwy::FlushStream();
  }

 private:
  /// Whether this task's rows of dq, of dk and dv are final, so that non-temporal stores write them.
  bool non_temporal_queries() const { return shared_.non_temporal && !shared_.add_queries && !task_.tickets; }
  bool non_temporal_keys() const { return shared_.non_temporal && !shared_.add_keys; }
  std::int64_t keys() const { return task_.key_end - task_.key_begin; }

  void load_keys() {
    const std::int64_t padded = round_up(keys(), kKeyTile);
    point_to_rows(shared_, task_, task_.key_begin, keys(), padded, m_.k_rows, m_.v_rows);
    policy_.begin_keys(task_.key_begin, keys(), m_.k_rows, m_.v_rows);
    scheme_.template pack_panels<Scheme::kPanel>(m_.k_panels, m_.k_rows, padded, m_.scratch);
    scheme_.template pack_panels<Scheme::kPanel>(m_.v_panels, m_.v_rows, padded, m_.scratch);
    scheme_.pack_values(m_.k_values, m_.k_rows, padded);
    std::memset(m_.dk, 0, static_cast<std::size_t>(padded * scheme_.columns) * sizeof(float));
    std::memset(m_.dv, 0, static_cast<std::size_t>(padded * scheme_.columns) * sizeof(float));
  }

  /// Tasks of one strand pass a chunk of query rows on to each other in the order of their keys. The one waited for
  /// was started before this one, so it is running or done.
  void wait_for(std::atomic<std::uint32_t>& ticket) const {
    for (int spins = 0; ticket.load(std::memory_order_acquire) != static_cast<std::uint32_t>(task_.block); ++spins) {
      if (spins > 256) std::this_thread::yield();
    }
  }
  void pass_on(std::atomic<std::uint32_t>& ticket) const {
    ticket.store(static_cast<std::uint32_t>(task_.block + 1), std::memory_order_release);
  }

  void run_queries(const QueryRun& run, bool one_ticket) {
    const std::int64_t end = run.begin + run.count;
    for (std::int64_t begin = shared_.causal ? std::max(run.begin, task_.key_begin) : run.begin; begin < end;) {
      const bool ticketed = task_.tickets && !one_ticket;
      const std::int64_t stop = ticketed ? std::min(end, (begin / kTicketRows + 1) * kTicketRows) : end;
      if (ticketed) wait_for(task_.tickets[begin / kTicketRows]);
      for (std::int64_t first = begin; first < stop;) {
        const std::int64_t last = blocks_.next_row(first, stop);
        q_begin_ = run.q_row + (first - run.begin) * task_.strand.stride;
        if (!blocks_.heads_differ()) {
          following_ = (end - first) * task_.heads.count;
          run_rows({task_.heads, first, last - first});
        } else {
          following_ = last - first;
          for (std::int64_t head = 0; head < task_.heads.count; ++head)
            run_rows({{task_.heads.at(head), 1, 1}, first, last - first});
        }
        first = last;
      }
      if (ticketed) pass_on(task_.tickets[begin / kTicketRows]);
      begin = stop;
    }
  }

  /// Rows that see the same blocks of keys, in tiles of about equal size.
  void run_rows(const VirtualRows& rows) {
    rows_ = rows;
    std::int64_t size = kQueryTile;
    if (blocks_.masked()) {
      const std::int64_t tiles = (rows_.size() + kQueryTile - 1) / kQueryTile;
      size = std::min(kQueryTile, round_up((rows_.size() + tiles - 1) / tiles, kPackedRows));
    }
    for (std::int64_t tile = 0; tile < rows_.size(); tile += size)
      query_tile(tile, std::min(size, rows_.size() - tile));
  }

  template <class Element, class View>
  RowPlaces<Element> places(const View& view) const {
    return {view, task_.entry, rows_, q_begin_, task_.strand.stride};
  }

  float row_delta(const std::byte* dout, const std::byte* out) const {
    const std::int64_t columns = scheme_.head_dim;
    if (scheme_.dtype == DType::f32)
      return dot_rows(reinterpret_cast<const float*>(dout), reinterpret_cast<const float*>(out), columns);
    if (scheme_.dtype == DType::bf16)
      return dot_rows(reinterpret_cast<const BFloat16*>(dout), reinterpret_cast<const BFloat16*>(out), columns);
    return dot_rows(reinterpret_cast<const Float16*>(dout), reinterpret_cast<const Float16*>(out), columns);
  }

  /// How many of the task's packed keys a strand row sees.
  std::int64_t seen_keys(std::int64_t row) const {
    return policy_.packed(shared_.causal ? std::clamp<std::int64_t>(row + 1 - task_.key_begin, 0, keys()) : keys());
  }

  void load_queries(std::int64_t tile, std::int64_t count) {
    const std::int64_t packed = std::min(kQueryTile, round_up(count, kPackedRows));
    const auto q_of = places<const std::byte>(shared_.q), dout_of = places<const std::byte>(shared_.dout),
               out_of = places<const std::byte>(shared_.out);
    const auto lse_of = places<const float>(shared_.lse), delta_of = places<const float>(shared_.delta),
               dlse_of = places<const float>(shared_.call.dlse);
    for (std::int64_t i = 0; i < packed; ++i) {
      const std::byte *q = zero_row(), *dout = zero_row();
      m_.lse[i] = -kMasked;  // rows that are not there, or saw no key, have weight 0 everywhere
      m_.delta[i] = 0.0f;
      m_.limits[i] = 0;
      if (i < count) {
        const float lse = *lse_of(tile + i);
        m_.limits[i] = seen_keys(rows_.index(tile + i));
        if (lse != -kInfinity) {
          q = q_of(tile + i);
          dout = dout_of(tile + i);
          m_.lse[i] = lse * kLog2e;
          m_.delta[i] = (delta_of ? *delta_of(tile + i) : row_delta(dout, out_of(tile + i))) -
                        (dlse_of ? *dlse_of(tile + i) : 0.0f);
        }
      }
      m_.k_rows[i] = q;  // keys are packed by now: their pointers' place is free
      m_.v_rows[i] = dout;
    }
    scheme_.pack_queries(m_.q, m_.q_pairs, m_.k_rows, packed, scheme_.query_factor, m_.scratch);
    scheme_.pack_queries(m_.dout, m_.dout_pairs, m_.v_rows, packed, 1.0f, m_.scratch);
  }

  /// While products run: where dq of some rows of a tile goes, and as many rows of the next tile, or of the next
  /// strand.
  void prefetch_ahead(std::int64_t tile, std::int64_t count, std::int64_t row) {
    const auto sums_of = places<const std::byte>(shared_.dq_sums), dq_of = places<const std::byte>(shared_.dq);
    const auto q_of = places<const std::byte>(shared_.q), dout_of = places<const std::byte>(shared_.dout),
               out_of = places<const std::byte>(shared_.out);
    const std::int64_t row_bytes = scheme_.row_bytes();
    for (std::int64_t i = tile + row, end = tile + std::min(row + kRows, count); i < end; ++i) {
      if (!non_temporal_queries()) {
        if (sums_of) prefetch_row<true>(sums_of(i), scheme_.head_dim * 4);
        else prefetch_row<true>(dq_of(i), row_bytes);
      }
      if (const std::int64_t next = i + count; next < following_) {
        prefetch_early(q_of(next), row_bytes);
        prefetch_early(dout_of(next), row_bytes);
        if (!shared_.delta.data) prefetch_early(out_of(next), row_bytes);
      }
    }
    if (!task_.next) return;
    const std::int64_t next_key = task_.next->key_begin + next_keys_;
    prefetch_keys(shared_, *task_.next, next_key, std::min(next_key + kRows, task_.next->key_end));
    next_keys_ += kRows;
  }

  void query_tile(std::int64_t tile, std::int64_t count) {
    std::memset(m_.dq, 0, static_cast<std::size_t>(round_up(count, kPackedRows) * scheme_.columns) * sizeof(float));
    const std::int64_t head = rows_.head(tile), row = rows_.index(tile);
    const std::int64_t packed = policy_.packed(keys());
    const std::int64_t end = seen_keys(rows_.index(tile + count - 1));  // which some row of the tile may see
    bool loaded = false;
    for (std::int64_t key = 0;;) {
      std::int64_t from = blocks_.next_key(head, row, task_.key_begin + key) - task_.key_begin;
      if (from >= end) break;
      from = std::max(key, from / Scheme::kRunMultiple * Scheme::kRunMultiple);
      const std::int64_t length = blocks_.run_length(head, row, task_.key_begin + from,
                                                     std::min(kKeyTile, packed - from), Scheme::kRunMultiple);
      key = from + length;
      if (!loaded) load_queries(tile, count);
      key_tile(tile, count, from, length, !loaded);
      loaded = true;
    }
    if (loaded || !adds()) write_queries(tile, count);
    if (loaded && (rows_summed_ += count) >= kTermsPerSum) join_key_sums<false>();
  }
  /// Adds dk and dv of the last rows to the closed sums and begins new ones, or (kLast) leaves all together in dk, dv.
  template <bool kLast>
  HWY_NOINLINE void join_key_sums() {
    const auto join = [&](float* open, float* closed) HWY_ATTR {
      for (std::int64_t i = 0, end = round_up(keys(), kKeyTile) * scheme_.columns; i < end; i += kLanes) {
        V sum = load(open + i);
        if (closed_) sum = hn::Add(load(closed + i), sum);
        store(sum, (kLast ? open : closed) + i);
        if (!kLast) store(hn::Zero(kFloat), open + i);
      }
    };
    join(m_.dk, m_.closed_dk);
    join(m_.dv, m_.closed_dv);
    closed_ = true;
    rows_summed_ = 0;
  }
  /// Whether dq is added to; otherwise this task is the first to write it, and writes all of it.
  bool adds() const { return shared_.add_queries || task_.block > 0; }

  /// first: of the query tile's key tiles.
  HWY_NOINLINE void key_tile(std::int64_t tile, std::int64_t count, std::int64_t key, std::int64_t tile_keys,
                             bool first) {
    std::int64_t most[kGroups];
    if (!weigh(tile, count, key, tile_keys, first, most)) return;
    const std::int64_t padded = round_up(keys(), kKeyTile);
    scheme_.add_to_keys(m_.weights, m_.dout_pairs, m_.dv, key, tile_keys, padded, count, most);
    scheme_.add_to_keys(m_.dscores, m_.q_pairs, m_.dk, key, tile_keys, padded, count, most);
    scheme_.add_to_queries(m_.dscore_rows, m_.k_values + scheme_.value_offset(key), m_.dq, count, most);
  }

  /// Fills weights and dscores of a tile; most[group] is how many keys the group's rows see. False if none does.
  HWY_INLINE bool weigh(std::int64_t tile, std::int64_t count, std::int64_t key, std::int64_t tile_keys, bool first,
                        std::int64_t* most) {
    bool any = false;
    // Products take keys a few at a time: so far beyond the tile's own they must find zeros.
    const std::int64_t cleared = std::min(kKeyTile, round_up(tile_keys + kTileRows - 1, 2 * kChunk));
    for (std::int64_t row = 0; row < count; row += kRows) {
      if (Scheme::kPrefetches && first) prefetch_ahead(tile, count, row);
      std::int64_t seen = 0;
      for (int i = 0; i < kRows; ++i) {
        const std::int64_t limit = std::clamp<std::int64_t>(m_.limits[row + i] - key, 0, tile_keys);
        seen = std::max(seen, limit);
        if constexpr (Policy::kActive) {
          if (limit == 0) continue;
          const std::int64_t head = rows_.head(tile + row + i), own = rows_.index(tile + row + i);
          slopes_[i] = policy_.slope(head, own);
          if (policy_.drops()) policy_.draw(head, own, key, limit, m_.extras.keep + i * kKeyTile);
        }
      }
      most[row / kRows] = seen;
      if (seen == 0) {
        clear_rows(row, 0, cleared);  // a product may take these rows together with seen ones
        continue;
      }
      any = true;
      for (std::int64_t panel = 0; panel < seen;) {
        if constexpr (Policy::kActive) {
          if (policy_.biased() && policy_.drops()) panel += score_panel<true, true>(row, key, panel, seen, tile_keys);
          else if (policy_.biased()) panel += score_panel<true, false>(row, key, panel, seen, tile_keys);
          else if (policy_.drops()) panel += score_panel<false, true>(row, key, panel, seen, tile_keys);
          else panel += score_panel<false, false>(row, key, panel, seen, tile_keys);
        } else {
          panel += score_panel<false, false>(row, key, panel, seen, tile_keys);
        }
      }
      clear_rows(row, round_up(seen, kLanes), cleared);
      if (blocks_.rounded(Scheme::kRunMultiple)) {
        for (std::int64_t chunk = 0; chunk < tile_keys; chunk += kChunk) {
          if (!blocks_.seen(rows_.head(tile), rows_.index(tile), task_.key_begin + key + chunk))
            clear_rows(row, chunk, chunk + kChunk);
        }
      }
    }
    if (Scheme::kClearUnseen && any) {
      for (std::int64_t row = round_up(count, kRows); row < round_up(count, 2 * kRows); row += kRows)
        clear_rows(row, 0, cleared);
    }
    return any;
  }

  /// Zeros for keys from .. to in the rows of a group.
  void clear_rows(std::int64_t row, std::int64_t from, std::int64_t to) {
    const V zero = hn::Zero(kFloat);
    for (int i = 0; i < kRows; i += 2) {
      for (std::int64_t key = from; key < to; key += kLanes) {
        Scheme::put(m_.weights, m_.dscores, m_.dscore_rows, row + i, key, zero, zero, zero, zero);
      }
    }
  }

  /// Scores of kRows rows and one panel of keys (or what is left of it), turned into weights and dscores. Returns how
  /// many keys that were.
  template <bool kBiased, bool kDrops>
  HWY_INLINE std::int64_t score_panel(std::int64_t row, std::int64_t key, std::int64_t panel, std::int64_t seen,
                                      std::int64_t tile_keys) {
    constexpr std::int64_t kPanel = Scheme::kPanel;
    const std::int64_t within = (key + panel) % kPanel;
    const int vectors =
        static_cast<int>(std::min<std::int64_t>((kPanel - within) / kLanes, (seen - panel + kLanes - 1) / kLanes));
    const std::int64_t offset = (key + panel - within) * scheme_.depth + within,
                       stride = scheme_.query_stride_backward();
    scheme_.score_tiles(vectors, m_.q + row * stride, m_.dout + row * stride, m_.k_panels + offset,
                        m_.v_panels + offset, m_.score_tile, m_.dweight_tile);
    const std::int64_t least =
        std::min(tile_keys, m_.limits[row] - key);  // limits ascend, the group's first is its least
    const bool ragged = least < panel + vectors * kLanes || m_.limits[row + kRows - 1] == 0;
    for (int i = 0; i < kRows; i += 2) {
      for (int vector = 0; vector < vectors; ++vector) {
        Held w[2], d[2];
        HWY_UNROLL(2)
        for (int j = 0; j < 2; ++j) {
          const std::int64_t at = (i + j) * kPanel + vector * kLanes, of_tile = panel + vector * kLanes;
          V shift = broadcast(-m_.lse[row + i + j]);
          if constexpr (kBiased) shift = hn::Add(shift, policy_.bias(slopes_[i + j], key + of_tile));
          // Large scores may exceed the stored lse by rounding: no weight is above 1.
          V weight = exp2<Scheme::kExpDegree>(
              at_most_zero(hn::MulAdd(load(m_.score_tile + at), broadcast(scheme_.score_factor), shift)));
          V dweight = load(m_.dweight_tile + at);
          if constexpr (kDrops) dweight = hn::And(dweight, load_keep(m_.extras.keep + (i + j) * kKeyTile + of_tile));
          V dscore = hn::Mul(weight, hn::MulSub(dweight, broadcast(dweight_factor_), broadcast(m_.delta[row + i + j])));
          if constexpr (kDrops) weight = hn::And(weight, load_keep(m_.extras.keep + (i + j) * kKeyTile + of_tile));
          if (ragged) {
            const std::int64_t left = std::min(tile_keys, m_.limits[row + i + j] - key) - panel - vector * kLanes;
            const auto valid = hn::FirstN(kFloat, static_cast<std::size_t>(std::clamp<std::int64_t>(left, 0, kLanes)));
            weight = hn::IfThenElseZero(valid, weight);
            dscore = hn::IfThenElseZero(valid, dscore);
          }
          w[j] = weight;
          d[j] = dscore;
        }
        Scheme::put(m_.weights, m_.dscores, m_.dscore_rows, row + i, panel + vector * kLanes, w[0], w[1], d[0], d[1]);
      }
    }
    return vectors * kLanes;
  }

  void write_queries(std::int64_t tile, std::int64_t count) {
    const bool add = adds();
    const auto sums_of = places<float>(shared_.dq_sums);
    const auto dq_of = places<std::byte>(shared_.dq);
    for (std::int64_t i = 0; i < count; ++i) {
      const float* const source = m_.dq + i * scheme_.columns;
      if (sums_of) add_row(sums_of(tile + i), source, shared_.scale, scheme_.head_dim, add, non_temporal_queries());
      else store_row(scheme_.dtype, dq_of(tile + i), source, shared_.scale, scheme_.head_dim);
    }
  }

  void write_keys() {
    const float dk_factor = scheme_.key_gradient_factor(shared_.scale);
    std::int64_t packed = 0;
    if (shared_.plan.problem().has_piece_gradients) {
      for (std::int64_t i = 0; i < keys();) {
        const RowRun run = shared_.keys.run(task_.entry, task_.kv_head, task_.strand, task_.key_begin + i, keys() - i);
        // A row in no piece: no query of this call attends to it. Its sums are passed by, since they are read in order.
        for (const std::int64_t end = i + std::max<std::int64_t>(run.count, 1); i < end; ++i) {
          if (!policy_.is_packed(i)) continue;
          const float *dk, *dv;
          next_sums(packed, dk, dv);
          if (run.count == 0) continue;
          const std::int64_t row = i - (end - run.count);
          add_row(reinterpret_cast<float*>(run.dk + row * run.dk_stride), dk, dk_factor, scheme_.head_dim, true);
          add_row(reinterpret_cast<float*>(run.dv + row * run.dv_stride), dv, dweight_factor_, scheme_.head_dim, true);
        }
      }
      return;
    }
    for (std::int64_t i = 0; i < keys(); ++i) {
      const std::int64_t position = task_.strand.start + (task_.key_begin + i) * task_.strand.stride;
      if (!non_temporal_keys() && i + kWriteAhead < keys()) {
        const std::int64_t later = position + kWriteAhead * task_.strand.stride;
        prefetch_target(shared_.dk, shared_.dk_sums, later);
        prefetch_target(shared_.dv, shared_.dv_sums, later);
      }
      const float *dk = kZeroRow, *dv = kZeroRow;
      if (policy_.is_packed(i)) next_sums(packed, dk, dv);
      write_key(shared_.dk, shared_.dk_sums, position, dk, dk_factor);
      write_key(shared_.dv, shared_.dv_sums, position, dv, dweight_factor_);
    }
  }
  /// Sums of the packed keys, one after the other.
  void next_sums(std::int64_t& packed, const float*& dk, const float*& dv) {
    const std::int64_t padded = round_up(keys(), kKeyTile);
    dk = scheme_.key_sums(m_.dk, packed, padded, m_.q);
    dv = scheme_.key_sums(m_.dv, packed++, padded, m_.dout);
  }
  void prefetch_target(const TensorView& view, const FloatRows& sums, std::int64_t position) const {
    if (sums.data) {
      prefetch_row<true>(reinterpret_cast<const std::byte*>(sums.at(task_.entry, position, task_.kv_head)),
                         scheme_.head_dim * 4);
    } else {
      prefetch_row<true>(row_place(view, task_.entry, position, task_.kv_head), scheme_.row_bytes());
    }
  }
  void write_key(const TensorView& view, const FloatRows& sums, std::int64_t position, const float* source,
                 float factor) {
    if (sums.data) {
      add_row(sums.at(task_.entry, position, task_.kv_head), source, factor, scheme_.head_dim, shared_.add_keys,
              non_temporal_keys());
    } else {
      store_row(scheme_.dtype, row_place(view, task_.entry, position, task_.kv_head), source, factor, scheme_.head_dim);
    }
  }

  const BackwardShared& shared_;
  const BackwardTask& task_;
  const Scheme scheme_;
  Arena carver_;
  const BackwardMemory<Scheme> m_;
  const BlockRows blocks_;
  Policy policy_;
  typename Policy::Slope slopes_[kRows];  // of a group of rows
  const float dweight_factor_;
  VirtualRows rows_;
  std::int64_t q_begin_ = 0;
  std::int64_t next_keys_ = 0;    // of the next strand, prefetched so far
  std::int64_t rows_summed_ = 0;  // in dk and dv, apart from closed sums
  bool closed_ = false;           // whether there are closed sums
  std::int64_t following_ = 0;    // end of the rows that may be prefetched, counted as those of rows_
};

template <class Scheme>
std::size_t backward_bytes(std::int64_t head_dim, std::int64_t keys) {
  Arena carver = task_memory(nullptr);
  const BackwardMemory<Scheme> memory(carver, Scheme(DType::f32, head_dim, 1.0f), keys);
  return carver.used();
}

template <class Scheme>
void backward(const BackwardShared& shared, const BackwardTask& task, std::byte* memory) {
  const NoDenormals scope;
  if (shared.extras) BackwardRun<Scheme, Extras>(shared, task, memory).run();
  else BackwardRun<Scheme, NoExtras>(shared, task, memory).run();
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace longspan::cpu
HWY_AFTER_NAMESPACE();
