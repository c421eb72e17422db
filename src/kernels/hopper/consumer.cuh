// Consumers of the Hopper forward (see forward.cuh): each warp group has 64 query rows and goes through the keys of an
// item, from the last tile to the first: scores, mask, softmax, accumulate; the epilogue merges and stores.
#pragma once

#include "kernels/hopper/cut_lists.cuh"
#include "kernels/hopper/extras.cuh"
#include "kernels/hopper/lists.cuh"
#include "kernels/hopper/shape.cuh"
#include "kernels/hopper/softmax.cuh"
#include "kernels/hopper/wgmma.cuh"

namespace longspan::hopper {

/// One warp group of consumers: 64 query rows. A thread has two of them, 8 apart, and of each two columns in every 8.
template <class S>
struct Consumer {
  using T = typename S::Element;
  using Note = std::conditional_t<S::kParts, PartsNote, ListNote>;
  static constexpr int kColumns = S::kColumns, kKeys = S::kKeys;
  static constexpr int kTilesOfSum = cuda::kRowsOfSum / kKeys;

  const HopperLaunch& a;
  const Memory<S> memory;
  typename S::Tasks& tasks;
  const typename S::Notes& notes;
  typename S::Shares& shares;
  const int stream, group, thread, lane;
  const int packed_index, first_row;  // of the items taken together the one of this group, and its first row there
  float scores[kKeys / 2];
  float out[kColumns / 2];
  std::uint32_t weights[kKeys / 4];
  Softmax<kKeys> softmax;
  std::uint32_t taken = 0;
  Ring<S::kStages> k, v;
  Ring<S::kQuerySlots> q;
  // The item: tiles that this group hands on before and after its own, which are [first_tile, end_tile) of the strand;
  // those below `unmasked` need no mask.
  int skipped_before, skipped_after, first_tile, end_tile, unmasked, keys, own_row;
  int passed = 0;  // lists: tiles since the last one computed whose values are still to be handed on
  bool idle;       // the group has no rows: it computes one tile, so that its pipeline is that of the others
  std::uint32_t q_tile;
  float factor;            // takes scores to base 2
  unsigned allowed = ~0u;  // by key_mask, of the thread's columns
  [[no_unique_address]] std::conditional_t<S::kExtras, Extras<S>, NoExtras> extras;
  int add = 0;  // 0 makes P V start from zero: clearing registers while products run would serialise them

  __device__ __forceinline__ Consumer(const HopperLaunch& launch, Memory<S> shared, typename S::Tasks& task_slots,
                                      const typename S::Notes& tile_notes, typename S::Shares& row_shares,
                                      int stream_index, int group_index)
      : a(launch),
        memory(shared),
        tasks(task_slots),
        notes(tile_notes),
        shares(row_shares),
        stream(stream_index),
        group(group_index),
        thread(threadIdx.x % kGroupThreads),
        lane(threadIdx.x % kWarpThreads),
        packed_index(group / (S::kGroups / launch.packed)),
        first_row(group % (S::kGroups / launch.packed) * kGroupRows),
        factor(launch.base.rules.scale * cuda::kLog2E) {}

  // The token that lets a group start its products, handed round by named barriers 1 .. kGroups of a stream.
  __device__ __forceinline__ int named(int index) const { return 1 + stream * 2 * S::kGroups + index; }
  __device__ __forceinline__ void await_token() const { sync_threads(named(group), 2 * kGroupThreads); }
  __device__ __forceinline__ void pass_token() const {
    arrive_threads(named(group + 1 == S::kGroups ? 0 : group + 1), 2 * kGroupThreads);
  }
  __device__ __forceinline__ void sync_group() const { sync_threads(named(S::kGroups + group), kGroupThreads); }

  __device__ __forceinline__ bool cleans() const {
    if constexpr (S::kExtras) return extras.is(Extras<S>::kMasked);
    else return false;
  }
  template <Loop kLoop>
  __device__ __forceinline__ bool may(int mode) const {
    if constexpr (S::kExtras) return extras.template may<kLoop>(mode);
    else return false;
  }
  static constexpr int kMasked = Extras<S>::kMasked;
  template <Loop kLoop = Loop::kAny>
  __device__ __forceinline__ void await_key() const {
    wait(may<kLoop>(kMasked) ? memory.key_clean(k.stage) : memory.key_full(k.stage), k.parity);
  }
  template <Loop kLoop = Loop::kAny>
  __device__ __forceinline__ void await_value() const {
    wait(may<kLoop>(kMasked) ? memory.value_clean(v.stage) : memory.value_full(v.stage), v.parity);
  }
  __device__ __forceinline__ void release_key() {
    if (lane == 0) arrive(memory.key_free(k.stage));
    k.advance();
  }
  __device__ __forceinline__ void release_value(std::uint32_t stage) const {
    if (lane == 0) arrive(memory.value_free(stage));
  }
  /// Releases the stages of tiles that this group does not need, and passes the token on.
  __device__ __forceinline__ void skip(int count) {
    for (int i = 0; i < count; ++i) {
      await_key();
      release_key();
      await_token();
      pass_token();
      await_value();
      release_value(v.stage);
      v.advance();
    }
  }

  /// Fetches the next item; false if there is none. Counts go through a shuffle, so that the compiler sees that they
  /// and what follows from them are uniform.
  __device__ __forceinline__ bool fetch() {
    wait(memory.query_full(q.stage), q.parity);
    const auto& task = tasks[taken % kTaskSlots][packed_index];
    const int tiles = uniform(task.tiles);
    if (tiles < 0) return false;
    const int above = uniform(task.above), below = uniform(task.below);
    keys = uniform(task.keys);
    const int first = uniform(task.first_query) + first_row;
    unmasked = keys / kKeys;
    first_tile = 0;
    if constexpr (S::kExtras) first_tile = S::kLists ? 0 : uniform(task.first_tile);
    end_tile = first_tile + tiles;
    idle = !S::kLists && first_row >= uniform(task.rows);
    if (S::kLists) {
      skipped_before = skipped_after = 0;
    } else if (idle) {
      first_tile = above + tiles + below - 1;
      end_tile = first_tile + 1;
      skipped_before = 0;
      skipped_after = first_tile;
    } else {
      if (a.base.rules.causal) {
        end_tile = min(end_tile, (first + kGroupRows + kKeys - 1) / kKeys);
        if constexpr (S::kExtras) end_tile = max(end_tile, first_tile + 1);
        unmasked = min((first + 1) / kKeys, unmasked);
      }
      skipped_before = above + tiles - (end_tile - first_tile);
      skipped_after = below;
    }
    own_row = first + thread / kWarpThreads * 16 + lane / 4;
    q_tile = memory.queries(q.stage) + group * S::kGroupBytes;
    if constexpr (S::kExtras) {
      extras.begin(a.base, task, own_row, first);
      factor = extras.factor;
    }
    return true;
  }

  /// scores = Q K^T
  __device__ __forceinline__ void multiply_queries() {
    const std::uint64_t query = operand(q_tile, 16), key = operand(memory.keys(k.stage), 16);
    pin(scores);
    products_begin();
#pragma unroll
    for (int step = 0; step < kColumns / 16; ++step) {
      const std::uint32_t block = step / 4, inside = step % 4 * 32;
      Product<T, kKeys>::scores(scores, query + ((block * S::kQueryBlock + inside) >> 4),
                                key + ((block * S::kKeyBlock + inside) >> 4), step > 0);
    }
    products_commit();
  }
  /// out += P V
  __device__ __forceinline__ void multiply_values() {
    const std::uint64_t value = operand(memory.values(v.stage), S::kKeyBlock);
    pin(out);
    pin(weights);
    products_begin();
#pragma unroll
    for (int step = 0; step < kKeys / 16; ++step)
      Product<T, kColumns>::values(out, weights + 4 * step, value + ((step * 2048) >> 4), step > 0 ? 1 : add);
    products_commit();
    add = 1;
  }

  /// The producer's note on the next tile of keys. It is read early, because branches wait for it, and by the lane that
  /// releases the stage.
  __device__ __forceinline__ Note read_note() const {
    if constexpr (S::kParts) return PartsNote(notes[k.stage].words[lane % PartsNote::kWords]);
    else if constexpr (S::kLists) return {uniform(lane == 0 ? notes[k.stage] : 0)};
    else return {0};
  }
  /// Masks columns [kBegin, kEnd) of the tile, of which the first is `first_key`.
  template <int kBegin = 0, int kEnd = kKeys>
  __device__ __forceinline__ void mask(int first_key, int end) {
    const int first = first_key - kBegin + lane % 4 * 2;
    const int upper = (a.base.rules.causal ? min(end, own_row + 1) : end) - first;
    const int lower = (a.base.rules.causal ? min(end, own_row + 9) : end) - first;
#pragma unroll
    for (int j = kBegin / 8; j < kEnd / 8; ++j) {
      if (8 * j >= upper) scores[4 * j] = -LONGSPAN_INFINITY;
      if (8 * j + 1 >= upper) scores[4 * j + 1] = -LONGSPAN_INFINITY;
      if (8 * j >= lower) scores[4 * j + 2] = -LONGSPAN_INFINITY;
      if (8 * j + 1 >= lower) scores[4 * j + 3] = -LONGSPAN_INFINITY;
    }
  }

  __device__ __forceinline__ void rescale(const float (&correction)[2]) {
#pragma unroll
    for (int j = 0; j < kColumns / 2; ++j) out[j] *= correction[j / 2 % 2];
  }
  /// Weights of the next P V, without those that dropout drops.
  template <Loop kLoop>
  __device__ __forceinline__ void exponentiate(const Note& note, int tile) {
    if constexpr (S::kExtras) extras.template exponentiate<kLoop>(softmax, scores, first_key(note, tile));
    else softmax.exponentiate(scores, factor);
#pragma unroll
    for (int j = 0; j < kKeys / 4; ++j) weights[j] = cuda::pack<T>(scores[2 * j], scores[2 * j + 1]);
    if constexpr (S::kParts && S::kDrops) extras.drop_parts(weights, note);
    else if constexpr (S::kDrops) extras.drop(weights, first_key(note, tile));
  }

  /// Rows after the strand's end belong to other strands. Their weight is 0, but 0 * NaN is NaN, so their values are
  /// overwritten with zeros. Every group does this itself, so that no group waits for another.
  __device__ __forceinline__ void clear_values_beyond(int end) {
    if (cleans()) return;  // the producer has
    await_value();
    clear_rows(end, kKeys);
    fence_shared();
    sync_group();
  }
  __device__ __forceinline__ void clear_rows(int begin, int end) const {
    const std::uint32_t first = memory.values(v.stage) + begin * 128;
#pragma unroll 1
    for (int i = thread; i < (end - begin) * 8; i += kGroupThreads) {
#pragma unroll
      for (int block = 0; block < S::kBlocks; ++block) store_zeros(first + block * S::kKeyBlock + i * 16);
    }
  }

  template <int kPart = 0>
  __device__ __forceinline__ void mask_parts(const PartsNote& note) {
    mask<kPart * kPartRows, (kPart + 1) * kPartRows>(note.first_key(kPart), note.sees_part(kPart, warp()) ? keys : 0);
    if constexpr ((kPart + 1) * kPartRows < kKeys) mask_parts<kPart + 1>(note);
  }
  __device__ __forceinline__ void mask_tile(const Note& note, int tile) {
    if constexpr (S::kParts) mask_parts(note);
    else mask(first_key(note, tile), S::kLists && !note.sees(group) ? 0 : keys);
  }
  __device__ __forceinline__ void clear_values_after_end(const Note& note) {
    if (!note.ends() || cleans()) return;
    if constexpr (S::kParts) {
      await_value();
#pragma unroll
      for (int part = 0; part < kKeys / kPartRows; ++part) {
        const int there = min(max(keys - note.first_key(part), 0), kPartRows);
        clear_rows(part * kPartRows + there, (part + 1) * kPartRows);
      }
      fence_shared();
      sync_group();
    } else {
      clear_values_beyond(max(keys - note.first_key(), 0));
    }
  }

  __device__ __forceinline__ static int first_key(const Note& note, int tile) {
    if constexpr (S::kParts) return 0;
    else return S::kLists ? note.first_key() : tile * kKeys;
  }
  /// Of those of an item's tile, 16 rows each.
  __device__ __forceinline__ int warp() const { return group * 4 + uniform(thread / kWarpThreads); }
  __device__ __forceinline__ bool is_cut(const Note& note, int tile) const {
    if constexpr (S::kParts) return note.masks(warp());
    else return S::kLists ? note.masks(group) : tile >= unmasked;
  }
  /// Whether a row of the thread does not see all keys of the tile, for other reasons than key_mask.
  __device__ __forceinline__ bool is_row_cut(int tile, int row) const {
    return (tile + 1) * kKeys > (a.base.rules.causal ? min(keys, row + 1) : keys);
  }
  /// Releases the stage of K, and makes masked scores of its products.
  template <Loop kLoop>
  __device__ __forceinline__ void begin_scores(const Note& note, int tile) {
    const bool cut = is_cut(note, tile);
    if constexpr (!S::kExtras || kLoop == Loop::kPlain) {
      release_key();
      if (cut) mask_tile(note, tile);
    } else {
      using E = Extras<S>;
      allowed = may<kLoop>(kMasked) ? load_word(memory.key_bits(k.stage) + lane % 4 * 4) : TileBits<S>::kAll;
      release_key();
      const bool across = may<kLoop>(E::kLinear) && extras.is_across(first_key(note, tile), a.base.rules.causal);
      extras.excluded[0] = extras.excluded[1] = 0.0f;
      const bool changes = cut || across || may<kLoop>(E::kExact | E::kScales);
      if (__all_sync(~0u, !changes && allowed == TileBits<S>::kAll)) return;
      if (may<kLoop>(E::kExact | E::kScales)) {
        if constexpr (S::kParts) extras.score_parts(scores, note, a.base.rules.scale);
        else extras.score(scores, first_key(note, tile), a.base.rules.causal, a.base.rules.scale);
      }
      if (across) extras.turn_back(scores, first_key(note, tile));
      if (cut) mask_tile(note, tile);
      if (!may<kLoop>(kMasked) || __all_sync(~0u, allowed == TileBits<S>::kAll)) return;
      if (extras.template subtracts<kLoop>())
        extras.subtract(scores, allowed, is_row_cut(tile, own_row), is_row_cut(tile, own_row + 8));
      else extras.exclude(scores, allowed, true, true);
    }
  }
  template <Loop kLoop>
  __device__ __forceinline__ bool raise(const Note& note, int tile, float (&correction)[2]) {
    if constexpr (!S::kExtras || kLoop == Loop::kPlain || kLoop == Loop::kGeneral) {
      return softmax.raise(scores, factor, correction);
    } else {
      float top[2];
      extras.template find_tops<kLoop, Softmax<kKeys>>(scores, first_key(note, tile), top);
      return softmax.raise(scores, factor, top, correction, [&] {
        if (extras.template subtracts<kLoop>()) extras.prepare(softmax, scores, allowed, top);
      });
    }
  }

  __device__ __forceinline__ void first_softmax() {
    softmax.begin();
    add = 0;
    const Note note = read_note();
    begin_scores<Loop::kAny>(note, end_tile - 1);
    if constexpr (S::kLists) {
      clear_values_after_end(note);
    } else {
      if (end_tile * kKeys > keys && !idle) clear_values_beyond(keys - (end_tile - 1) * kKeys);
    }
    float correction[2];
    raise<Loop::kAny>(note, end_tile - 1, correction);
    exponentiate<Loop::kAny>(note, end_tile - 1);
  }
  /// Lists: skips the next tile of keys if this group does not see it. The stage of the last tile's values is still
  /// held, so the other stages limit how many tiles can be skipped in a row; further ones are computed, masked.
  __device__ __forceinline__ bool pass() {
    await_key();
    if (read_note().sees(group) || passed == S::kStages - 2) return false;
    release_key();
    await_token();
    pass_token();
    ++passed;
    return true;
  }
  __device__ __forceinline__ void pass_values() {
    for (; passed > 0; --passed) {
      await_value();
      release_value(v.stage);
      v.advance();
    }
  }
  template <Loop kLoop>
  __device__ __forceinline__ void next_tile(int tile) {
    await_key<kLoop>();
    const Note note = read_note();
    await_token();
    multiply_queries();
    await_value<kLoop>();
    multiply_values();
    products_wait<1>();
    pin(scores);
    pass_token();
    begin_scores<kLoop>(note, tile);
    float correction[2];
    const bool raised = raise<kLoop>(note, tile, correction);
    products_wait<0>();
    pin(out);
    if (raised) rescale(correction);
    release_value(v.stage);
    v.advance();
    if constexpr (S::kPasses) pass_values();
    exponentiate<kLoop>(note, tile);
    if constexpr (S::kLists) clear_values_after_end(note);
  }

  /// Whether sums of this item have been closed by its end.
  __device__ __forceinline__ bool has_totals() const {
    if constexpr (S::kExtras) return (end_tile - 1) / kTilesOfSum * kTilesOfSum > first_tile && !idle;
    else return end_tile > kTilesOfSum && !idle;
  }
  __device__ __forceinline__ Totals<kColumns> totals() const {
    const int group_of_all = (blockIdx.x * S::kStreams + stream) * S::kGroups + group;
    return {a.totals + static_cast<std::int64_t>(group_of_all) * S::kTotals * kGroupThreads + thread};
  }
  __device__ __forceinline__ void close_sums(bool first) {
    totals().close(softmax, out, first);
    add = 0;
  }

  __device__ __forceinline__ void store_lse(const Task& task, int row, int half) const {
    if (!a.base.tensors.lse.data || lane % 4 != 0) return;
    const std::int64_t q_row = task.q_row + static_cast<std::int64_t>(row) * task.stride;
    a.base.tensors.lse.at(task.entry, q_row, task.head) = softmax.lse(half);
  }

  /// Merges the rows with the state that earlier branches left of them, and stores the state of rows that a later
  /// branch continues. Returns a bit for each of the two rows that no later branch continues.
  __device__ __forceinline__ unsigned merge(const typename S::Item& task, std::uint32_t number, int row,
                                            const float (&correction)[2]) {
    constexpr int kPairs = kColumns / 8, kPart = kPairs % 8 == 0 ? 8 : 6;  // of columns; not all at once, for registers
    static_assert(kPairs % kPart == 0);
    const int pairs = (a.base.tensors.columns - lane % 4 * 2 + 7) / 8;  // that exist
    const std::int64_t first = a.base.tensors.packed_row(task.entry, task.q_row, task.head);
    wait(memory.state_full(number % kTaskSlots), number / kTaskSlots & 1);
    unsigned finished = 0;
    unsigned others[2];
    float2* state[2];
    float own_factor[2], old_factor[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int own = row + 8 * half;
      const float2 found = shares.found[own];
      const std::int64_t packed = first + static_cast<std::int64_t>(own) * task.stride;
      others[half] = shares.others[own];
      state[half] = reinterpret_cast<float2*>(a.base.scratch.state + packed * a.base.tensors.columns) + lane % 4;
      const float top = fmaxf(softmax.found[half], found.x), grown = fast_exp2(softmax.found[half] - finite(top));
      old_factor[half] = fast_exp2(found.x - finite(top));
      own_factor[half] = correction[half] * grown;
      softmax.found[half] = top;
      softmax.sum[half] = fmaf(softmax.sum[half], grown, found.y * old_factor[half]);
      if (others[half] & 2) {
        if (lane % 4 == 0)
          __stcg(reinterpret_cast<float2*>(a.base.scratch.state_sums) + packed, make_float2(top, softmax.sum[half]));
      } else if (exists<S>(task, own)) {
        finished |= 1u << half;
        store_lse(task, own, half);
      }
    }
    const std::uint32_t held = memory.state(row) + lane % 4 * 8;
#pragma unroll
    for (int part = 0; part < kPairs; part += kPart) {
      float2 old[2][kPart];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
#pragma unroll
        for (int j = 0; j < kPart; ++j) {
          old[half][j] = make_float2(0.0f, 0.0f);
          if (!(others[half] & 1) || part + j >= pairs) continue;
          if constexpr (S::kHoldsState) old[half][j] = load_pair(held + half * 8 * S::kStateRow + (part + j) * 32);
          else old[half][j] = __ldcg(state[half] + 4 * (part + j));
        }
      }
#pragma unroll
      for (int half = 0; half < 2; ++half) {
#pragma unroll
        for (int j = 0; j < kPart; ++j) {
          float& x = out[4 * (part + j) + 2 * half];
          float& y = out[4 * (part + j) + 2 * half + 1];
          x = fmaf(x, own_factor[half], old[half][j].x * old_factor[half]);
          y = fmaf(y, own_factor[half], old[half][j].y * old_factor[half]);
          if (others[half] & 2 && part + j < pairs) __stcg(state[half] + 4 * (part + j), make_float2(x, y));
        }
      }
    }
    return finished;
  }

  __device__ __forceinline__ float output_scale() const {
    return S::kExtras ? a.base.rules.output_scale * a.base.rules.keep_factor : a.base.rules.output_scale;
  }
  /// Stores rows through the group's own Q tile: a whole tile by TMA, others row by row.
  __device__ __forceinline__ void store(const typename S::Item& task, std::uint32_t number, std::uint32_t tile,
                                        float (&factor)[2]) {
    const int warp = thread / kWarpThreads, warp_row = warp * 16, row = warp_row + lane / 4;
    if constexpr (S::kLists || S::kExtras) {
#pragma unroll
      for (int j = 0; j < kColumns / 2; ++j)  // rows without keys: weights of 0 times whatever lay there
        if (softmax.sum[j / 2 % 2] == 0.0f) out[j] = 0.0f;
    }
    if constexpr (S::kLists && !S::kMerges) {
      if (task.cut) {
        store_part<S>(a, task, group, softmax, out, factor);
        sync_group();
        return;
      }
    }
    const int rows = task.rows - first_row;
    unsigned finished = (row < rows) | (row + 8 < rows) << 1;
    int before = 0;  // rows of the group that are not of the query range
    if constexpr (S::kLists) {
      before = task.first_row - first_row;
      finished &= (row >= before) | (row + 8 >= before) << 1;
    }
    if constexpr (S::kMerges) {
      finished = merge(task, number, first_row + row, factor);
      factor[0] = factor[1] = 1.0f;
    }
#pragma unroll
    for (int half = 0; half < 2; ++half)
      factor[half] *= softmax.sum[half] == 0.0f ? 0.0f : __fdividef(output_scale(), softmax.sum[half]);
    const std::uint32_t target = tile + row * 128 + lane % 4 * 4;
#pragma unroll
    for (int j = 0; j < kColumns / 8; ++j) {
      const std::uint32_t place = target + j / 8 * S::kQueryBlock + ((j % 8 ^ (row & 7)) << 4);
      store_word(place, cuda::pack<T>(out[4 * j] * factor[0], out[4 * j + 1] * factor[0]));
      store_word(place + 1024, cuda::pack<T>(out[4 * j + 2] * factor[1], out[4 * j + 3] * factor[1]));
    }
    const bool whole = rows >= kGroupRows && before <= 0 && !S::kMerges;
    if (!whole) {
      __syncwarp();
      constexpr int kChunks = kColumns / 8;
#pragma unroll 2
      for (int i = lane; i < 16 * kChunks; i += kWarpThreads) {
        const int local = i / kChunks, chunk = i % kChunks;
        const unsigned bits = __shfl_sync(~0u, finished, (local & 7) * 4);
        if (!(bits >> (local >> 3) & 1) || chunk * 8 >= a.base.tensors.columns) continue;
        const uint4 words =
            load_words(tile + chunk / 8 * S::kQueryBlock + (warp_row + local) * 128 + ((chunk % 8 ^ (local & 7)) << 4));
        const std::int64_t q_row = task.q_row + static_cast<std::int64_t>(first_row + warp_row + local) * task.stride;
        T* const place =
            reinterpret_cast<T*>(a.base.tensors.out.data) + a.base.tensors.out.offset(task.entry, q_row, task.head);
        store_global(place + chunk * 8, words);
      }
    }
    fence_shared();  // TMA reads this tile next, or loads another one over it
    sync_group();
    if (thread != 0) return;
    if (!whole) return;
#pragma unroll
    for (int block = 0; block < S::kBlocks; ++block)
      store_box(&a.out[task.q_map], tile + block * S::kQueryBlock,
                {block * kBlockColumns, task.q_index + first_row, task.q_phase, task.head, task.entry});
    commit_stores();
  }

  /// All tiles of an item but its last one, whose scores were computed with the item before. The last values of a sum
  /// are added with the tile below it.
  template <Loop kLoop>
  __device__ __forceinline__ void other_tiles() {
    if constexpr (S::kLists) {  // one loop: in two, stages would leave the uniform registers
      for (int tile = end_tile - 2; tile >= 0; --tile) {
        const int first = tile + 2;
        if (first % kTilesOfSum == 0 && first < end_tile) close_sums(first + kTilesOfSum >= end_tile);
        if constexpr (S::kPasses) {
          if (pass()) continue;
        }
        next_tile<kLoop>(tile);
      }
    } else {
      for (int tile = end_tile - 2; tile >= first_tile;) {
        const int first = static_cast<int>((tile + 1u) / kTilesOfSum * kTilesOfSum);
        const int end = uniform(max(first - 1, first_tile));
#pragma unroll 1
        for (; tile >= end; --tile) next_tile<kLoop>(tile);
        if (first > first_tile) close_sums(first + kTilesOfSum >= end_tile);
      }
    }
  }
  /// In a loop that has what the item's options need.
  __device__ __forceinline__ void run_loop() {
    if constexpr (!S::kExtras) {
      other_tiles<Loop::kPlain>();
    } else if constexpr (S::kLists) {
      other_tiles<Loop::kGeneral>();
    } else {
      const Loop loop = extras.loop();
      if (loop == Loop::kPlain) {
        other_tiles<Loop::kPlain>();
      } else if (loop == Loop::kGeneral) {
        other_tiles<Loop::kGeneral>();
      } else if constexpr (Extras<S>::kHasWays) {
        if (loop == Loop::kMasked) other_tiles<Loop::kMasked>();
        else other_tiles<Loop::kLinear>();
      }
    }
  }

  /// Epilogue of an item; the first Q K^T of the next item runs meanwhile.
  __device__ __forceinline__ bool end_and_begin() {
    const auto& task = tasks[taken % kTaskSlots][packed_index];
    const std::uint32_t slot = q.stage, tile = q_tile;
    const int unneeded = skipped_after;
    const bool closed = has_totals();
    if (closed) totals().add_sums(softmax);
    await_value();
    const std::uint32_t last = v.stage;
    multiply_values();
    v.advance();
    float correction[2];
    softmax.finish(task.padding, correction);
    if constexpr (!S::kMerges) {
      const int row = first_row + thread / kWarpThreads * 16 + lane / 4;
      if (writes<S>(task, row)) store_lse(task, row, 0);
      if (writes<S>(task, row + 8)) store_lse(task, row + 8, 1);
    }
    const bool early = S::kPasses
                           ? passed > 0
                           : !S::kLists && (unneeded || (!S::kSkipsHolding && (a.base.rules.causal || a.packed > 1)));
    if (early) {
      products_wait<0>();
      release_value(last);
      if constexpr (S::kPasses) pass_values();
      else skip(unneeded);
    }
    ++taken;
    q.advance();
    const bool more = fetch();
    if (more) {
      skip(skipped_before);
      await_key();
      await_token();
    }
    multiply_queries();  // after the last item on what lies there, unused: a branch here would serialise all products
    if (more) pass_token();
    products_wait<1>();
    pin(out);
    if (!early) release_value(last);
    if (closed) totals().add_values(out);
    store(task, taken - 1, tile, correction);
    products_wait<0>();
    pin(scores);
    if (more) first_softmax();
    const std::uint32_t task_free = memory.task_free((taken - 1) % kTaskSlots);
    if constexpr (S::kMerges) arrive(task_free);  // every thread, for racecheck: all of them have read the state
    if (thread == 0) {                            // last, so that nobody waits for TMA to read the tile
      wait_stores_read<0>();
      arrive(memory.query_free(slot));
      if constexpr (!S::kMerges) arrive(task_free);
    }
    return more;
  }

  __device__ __forceinline__ void run() {
    if (group == S::kGroups - 1) pass_token();
    bool more = fetch();
    if (more) {
      skip(skipped_before);
      await_key();
      await_token();
      multiply_queries();
      pass_token();
      products_wait<0>();
      pin(scores);
      first_softmax();
    }
    // No product is in flight where branches meet: ptxas would serialise all of them.
    while (more) {
      run_loop();
      more = end_and_begin();
    }
    if (thread == 0) wait_stores();
  }
};

}  // namespace longspan::hopper
