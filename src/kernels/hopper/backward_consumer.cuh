// Consumers of the Hopper backward (see backward.cuh): two warp groups that work in step, of 64 keys each; of heads
// over 128 (S::kShared) both have the same keys, and half of the queries.
#pragma once

#include "kernels/hopper/backward_extras.cuh"
#include "kernels/hopper/wgmma.cuh"

namespace longspan::hopper {

using cuda::fast_exp2;

/// One warp group: 64 keys by kOwnQueries queries at a time. A thread has two keys, 8 apart, and of each two queries in
/// every 8.
template <class S>
struct BackwardConsumer {
  using T = typename S::Element;
  static constexpr int kColumns = S::kColumns, kQueries = S::kQueries;
  static constexpr int kOwnQueries = S::kOwnQueries, kBlocks8 = kOwnQueries / 8;
  static constexpr int kSums = S::kShared ? kColumns / 2 : kColumns;  // numbers of dV and dK that a thread has
  static constexpr int kTilesOfSum = cuda::kRowsOfSum / kQueries;
  // Named barriers. "Read" is arrived at by one group and waited for by the other: both pass kWritten once in a tile,
  // so nobody can arrive twice before the other has waited.
  static constexpr int kWritten = 1, kRead = 2, kGroup = 4, kItem = 6;
  static constexpr int kBoth = 2 * kGroupThreads;

  const BackwardLaunch& a;
  const BackwardMemory<S> memory;
  typename S::Tasks& tasks;
  const typename S::Notes& notes;
  const int group, thread, lane;
  float scores[kOwnQueries / 2], dscores[kOwnQueries / 2];
  float dvalues[kColumns / 2], dkeys[S::kShared ? 1 : kColumns / 2];  // of heads over 128 the first is dK in one group
  float dqueries[S::kSumColumns / 2], dmore[S::kMoreColumns > 0 ? S::kMoreColumns / 2 : 1];
  std::uint32_t taken = 0;
  Ring<S::kStages> q;
  Ring<S::kKeyStages> k;
  // Registers are scarce: what is needed rarely is looked up in the task again.
  int tile;          // of queries
  int masked_until;  // the tile from which on nothing is to be masked
  int add;           // 0 makes dV and dK start from zero

  __device__ __forceinline__ BackwardConsumer(const BackwardLaunch& launch, BackwardMemory<S> shared,
                                              typename S::Tasks& task_slots, const typename S::Notes& tile_notes,
                                              int group_index)
      : a(launch),
        memory(shared),
        tasks(task_slots),
        notes(tile_notes),
        group(group_index),
        thread(threadIdx.x % kGroupThreads),
        lane(threadIdx.x % kWarpThreads) {}

  __device__ __forceinline__ int warp() const { return thread / kWarpThreads; }
  __device__ __forceinline__ int own_row() const { return warp() * 16 + lane / 4; }
  __device__ __forceinline__ int own_key() const { return group * S::kGroupStep + own_row(); }  // of the item's tile
  /// Of dP and dV.
  __device__ __forceinline__ float output_factor() const {
    const cuda::Rules& rules = a.parts.base.rules;
    return S::kDropout ? rules.output_scale * rules.keep_factor : rules.output_scale;
  }
  __device__ __forceinline__ int own_query() const { return S::kShared ? group * kOwnQueries : 0; }  // of the tile
  /// A number that is the same in a warp, computed where it is used: what follows from it would be kept, and spilled.
  __device__ __forceinline__ static int here(int number) {
    if constexpr (S::kShared) return uniform(number);
    else return number;
  }
  __device__ __forceinline__ void sync_group() const { sync_threads(kGroup + group, kGroupThreads); }

  /// The next item, or false. Counts go through a shuffle so that they and all that follows from them stay uniform.
  __device__ __forceinline__ bool fetch() {
    wait(memory.key_full(k.stage), k.parity);
    const auto& task = tasks[taken % kTaskSlots];
    const int tiles = uniform(task.tiles);
    if (tiles < 0) return false;
    tile = uniform(task.first_tile);
    const int last_key = uniform(task.diagonal) + group * S::kGroupStep + kGroupRows - 1;  // as a query
    masked_until = a.parts.base.rules.causal ? (max(0, last_key) + kQueries - 1) / kQueries : 0;
    if (uniform(task.plain_keys) < group * S::kGroupStep + kGroupRows) masked_until = tiles;
    return true;
  }

  /// S^T = K Q^T
  __device__ __forceinline__ void multiply_queries() {
    const std::uint64_t key = operand(memory.keys(k.stage) + group * S::kGroupKeys, 16),
                        query = operand(memory.queries(q.stage) + here(own_query()) * 128, 16);
    products_begin();
#pragma unroll
    for (int step = 0; step < kColumns / 16; ++step) {
      const std::uint32_t block = step / 4, inside = step % 4 * 32;
      Product<T, kOwnQueries>::scores(scores, key + ((block * S::kKeyBlock + inside) >> 4),
                                      query + ((block * S::kQueryBlock + inside) >> 4), step > 0);
    }
    products_commit();
  }
  /// dP^T = V dO^T
  __device__ __forceinline__ void multiply_douts() {
    const std::uint64_t value = operand(memory.values(k.stage) + group * S::kGroupKeys, 16),
                        dout = operand(memory.douts(q.stage) + here(own_query()) * 128, 16);
    products_begin();
#pragma unroll
    for (int step = 0; step < kColumns / 16; ++step) {
      const std::uint32_t block = step / 4, inside = step % 4 * 32;
      Product<T, kOwnQueries>::scores(dscores, value + ((block * S::kKeyBlock + inside) >> 4),
                                      dout + ((block * S::kQueryBlock + inside) >> 4), step > 0);
    }
    products_commit();
  }
  /// sums += weights times a tile of Q or dO
  __device__ __forceinline__ void add_rows(float (&rows)[kColumns / 2], const std::uint32_t* weights,
                                           std::uint32_t tile_address) {
    const std::uint64_t source = operand(tile_address, S::kQueryBlock);
    products_begin();
#pragma unroll
    for (int step = 0; step < kQueries / 16; ++step)
      Product<T, kColumns>::values(rows, weights + 4 * step, source + ((step * 2048) >> 4), step > 0 ? 1 : add);
    products_commit();
  }
  /// The same with weights in shared memory: dV in one group, dK in the other.
  __device__ __forceinline__ void add_own_rows() {
    const std::uint32_t keys = group;  // of the second group; no choice, which would leave the uniform registers
    const std::uint64_t weight = operand(memory.weights() - keys * S::kScoreBytes, 16),
                        source = operand(memory.douts(q.stage) - keys * S::kStages * S::kQueryBytes, S::kQueryBlock);
    products_begin();
#pragma unroll
    for (int step = 0; step < kQueries / 16; ++step)
      Product<T, kColumns>::stored(dvalues, weight + ((step * 32) >> 4), source + ((step * 2048) >> 4),
                                   step > 0 ? 1 : add);
    products_commit();
  }
  /// dQ = dS K: 64 queries each (narrow heads), or half of the columns each.
  __device__ __forceinline__ void multiply_keys(int part) {
    const int block = S::kShared ? group * 2 + part : group;  // of columns, of heads over 64
    const std::uint64_t score = operand(memory.scores() + (S::kWide ? 0 : group * S::kScoreBlock), 16),
                        key = operand(memory.keys(k.stage) + (S::kWide ? block * S::kKeyBlock : 0), 16);
    products_begin();
#pragma unroll
    for (int step = 0; step < S::kKeys / 16; ++step)
      Product<T, S::kSumColumns>::rows(dqueries, score + ((step * 2048) >> 4), key + ((step * 2048) >> 4), step > 0);
    if constexpr (S::kMoreColumns > 0) {
      const std::uint64_t middle = operand(memory.keys(k.stage) + S::kKeyBlock + group * S::kMoreColumns * 2, 16);
#pragma unroll
      for (int step = 0; step < S::kKeys / 16; ++step)
        Product<T, S::kMoreColumns>::rows(dmore, score + ((step * 2048) >> 4), middle + ((step * 2048) >> 4), step > 0);
    }
    products_commit();
  }

  /// What the producer says of the tile of queries, in lists.
  __device__ __forceinline__ const BackwardNote& note() const { return notes[q.parity * S::kStages + q.stage]; }
  __device__ __forceinline__ int first_query() const {
    if constexpr (S::kLists) return note().first;
    else return tile * kQueries;
  }
  __device__ __forceinline__ bool masks() const {
    if constexpr (S::kLists) return note().masks >> group & 1;
    else return tile < masked_until;
  }
  /// Sixteen queries at a time that do not see the warp's sixteen keys.
  __device__ __forceinline__ void mask_unseen() {
    const std::uint32_t sees = note().sees[S::kShared ? 0 : group] >> (8 * warp() + own_query() / kChunkRows);
#pragma unroll
    for (int chunk = 0; chunk < kOwnQueries / kChunkRows; ++chunk) {
      if (sees >> chunk & 1) continue;
#pragma unroll
      for (int j = 0; j < 8; ++j) scores[chunk * 8 + j] = -LONGSPAN_INFINITY;
    }
  }
  /// Keys after the strand's end, under a causal mask queries before a key, and those whose block does not see this
  /// one.
  __device__ __forceinline__ void mask() {
    const auto& task = tasks[taken % kTaskSlots];
    const int own = own_key(), first = first_query() + own_query() + 2 * (lane % 4);
    const int keys = task.keys, diagonal = task.diagonal;
    const auto open_from = [&](int key) {
      return key >= keys ? kQueries : a.parts.base.rules.causal ? key + diagonal - first : -kQueries;
    };
    const int upper = open_from(own), lower = open_from(own + 8);
    if constexpr (S::kLists) {
      mask_unseen();
      if (!__any_sync(~0u, max(upper, lower) > 0)) return;
    }
#pragma unroll
    for (int j = 0; j < kBlocks8; ++j) {
      if (8 * j < upper) scores[4 * j] = -LONGSPAN_INFINITY;
      if (8 * j + 1 < upper) scores[4 * j + 1] = -LONGSPAN_INFINITY;
      if (8 * j < lower) scores[4 * j + 2] = -LONGSPAN_INFINITY;
      if (8 * j + 1 < lower) scores[4 * j + 3] = -LONGSPAN_INFINITY;
    }
  }
  /// dS of P and dP.
  __device__ __forceinline__ float dscore(int i, float factor, float shift) const {
    if constexpr (S::kDropout) {
      const float kept = scores[i] < 0.0f ? 0.0f : dscores[i];
      return fabsf(scores[i]) * fmaf(kept, factor, shift);
    } else {
      return scores[i] * fmaf(dscores[i], factor, shift);
    }
  }
  /// Draws the bits of the tile of queries whose scores are computed next (backward_extras.cuh).
  __device__ __forceinline__ void draw() const {
    if constexpr (S::kDropout) {
      const auto& task = tasks[taken % kTaskSlots];
      const std::uint32_t position = task.position + (first_query() + own_query() - task.diagonal) * task.stride;
      draw_bits<S>(
          a.parts.base.rules, memory.bits(group), position, task.stride,
          {0, task.draw_group + group * (S::kGroupStep / 8), task.draw_head, static_cast<std::uint32_t>(task.entry)});
    }
  }

  /// Brings the exponents of a tile to at most 0, NaN as it is: they become the scores, of rows of lse 0. Both groups
  /// come here in every tile of an item, or in none.
  __device__ __forceinline__ void clamp(float factor) {
    const std::uint32_t lse = memory.lse(q.stage) + own_query() * 4 + lane % 4 * 8;
    const float inverse = 1.0f / factor;
#pragma unroll
    for (int j = 0; j < kBlocks8; ++j) {
      const float2 shift = load_pair(lse + j * 32);
#pragma unroll
      for (int i = 0; i < 4; ++i)
        scores[4 * j + i] = cuda::least(fmaf(scores[4 * j + i], factor, i % 2 ? shift.y : shift.x), 0.0f) * inverse;
    }
    sync_threads(kItem, kBoth);  // both have read lse
    if (thread < kQueries / 2) store_word(memory.lse(q.stage) + (group * kQueries / 2 + thread) * 4, 0);
    sync_threads(kItem, kBoth);
  }
  /// scores become P, of some blocks of 8 queries.
  __device__ __forceinline__ void exponentiate(int first, int last, float factor) {
    const std::uint32_t lse = memory.lse(q.stage) + own_query() * 4 + lane % 4 * 8;
#pragma unroll
    for (int j = first; j < last; ++j) {
      const float2 shift = load_pair(lse + j * 32);
      scores[4 * j] = fast_exp2(fmaf(scores[4 * j], factor, shift.x));
      scores[4 * j + 1] = fast_exp2(fmaf(scores[4 * j + 1], factor, shift.y));
      scores[4 * j + 2] = fast_exp2(fmaf(scores[4 * j + 2], factor, shift.x));
      scores[4 * j + 3] = fast_exp2(fmaf(scores[4 * j + 3], factor, shift.y));
    }
  }

  // dQ of a tile: put down in shared memory, and handed to a warp of the producer in the middle of the next tile's
  // exponentials: the fence before that waits for the stores, which are long done there.
  __device__ __forceinline__ void stage() const {
    wait(memory.sum_free(group), q.stage ^ 1);  // one tile, one turn: the stage of Q, which has gone on, is the parity
    if constexpr (S::kMerges) {  // in blocks of 16 columns (backward_launch.h), as the copy engine swizzles them
      const int row = own_row();
      const std::uint32_t even = memory.sums(group) + row * S::kSumRow +
                                 (((lane & 2) ^ (row >> 1 & 3)) << 4 | (lane & 1) << 3),
                          odd = even ^ 16;
#pragma unroll
      for (int j = 0; j < S::kSumColumns / 8; ++j) {
        const std::uint32_t at = (j % 2 ? odd : even) + j / 2 * S::kSumBlock;
        store_pair(at, dqueries[4 * j], dqueries[4 * j + 1]);
        store_pair(at + 8 * S::kSumRow, dqueries[4 * j + 2], dqueries[4 * j + 3]);
      }
    } else {
      const std::uint32_t place = memory.sums(group) + warp() * S::kWarpSums * 4 + lane * 16;
#pragma unroll
      for (int j = 0; j < S::kSumColumns / 8; ++j)
        store_floats(place + j * 512, dqueries[4 * j], dqueries[4 * j + 1], dqueries[4 * j + 2], dqueries[4 * j + 3]);
    }
  }
  __device__ __forceinline__ void hand_on() const {
    if constexpr (S::kShared) return;
    fence_shared();
    __syncwarp();
    arrive(memory.sum_full(group));
  }

  /// All lanes arrive. With heads over 128 the compiler is not told that they do: a predicate costs it a word less of
  /// spilled registers in the loop than none, unless branches share rows.
  __device__ __forceinline__ void free_tile(std::uint32_t stage) {
    if constexpr (S::kShared && !S::kMerges) {
      if (cuda::computed_here(lane) < kWarpThreads) arrive(memory.tile_free(stage));
    } else {
      arrive(memory.tile_free(stage));
    }
  }

  /// dQ of a tile, straight to memory: with heads over 128 shared memory has no room for it.
  __device__ __forceinline__ void add_queries(const typename S::Item& task, int of_tile, int part) const {
    add_columns<S::kSumColumns / 2>(task, of_tile, dqueries, group * 2 + part, 0);
    if constexpr (S::kMoreColumns > 0)
      add_columns<S::kMoreColumns / 2>(task, of_tile, dmore, 1, group * (S::kMoreColumns / 8));
  }
  /// Columns of a block of 64, from the `eighth`th eight on. To rows that branches share: what there is of rows after
  /// the strand's end, and of columns after the last, are zeros unless the strand has NaN. They go to its last row and
  /// to the last columns, since predicated reductions become branches.
  template <int kCount>
  __device__ __forceinline__ void add_columns(const typename S::Item& task, int of_tile, const float* numbers,
                                              int block, int eighth) const {
    if constexpr (S::kMerges) {
      const int first = min(block * kBlockColumns, a.parts.sum_columns - kBlockColumns) + eighth * 8;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = min(of_tile * kSumTileRows + own_row() + 8 * half, task.queries - 1);
        float* const place = task.sums + row * task.query_step + first + lane % 4 * 2;
#pragma unroll
        for (int j = 0; j < kCount / 4; ++j)
          add_two(place + 8 * j, numbers[4 * j + 2 * half], numbers[4 * j + 2 * half + 1]);
      }
    } else {
      const std::int64_t sums = static_cast<std::int64_t>(task.first_sums + of_tile) * S::kBlocks + block;
      float* const place = a.parts.sums + sums * S::kSumTile + warp() * S::kWarpSums + eighth * 128 + lane * 4;
#pragma unroll
      for (int j = 0; j < kCount / 4; ++j)
        cuda::add_four(place + j * 128,
                       make_float4(numbers[4 * j], numbers[4 * j + 1], numbers[4 * j + 2], numbers[4 * j + 3]));
    }
  }

  /// dK or dV of this group's keys to float32 sums, where several items add to one row; pairs of lanes swap halves so
  /// that each adds four columns of one row.
  __device__ __forceinline__ void add_to_sums(const float (&rows)[kColumns / 2], float factor, float* target,
                                              const BackwardTask& task) const {
    const bool odd = lane & 1;
    const int row = own_row() + (odd ? 8 : 0), columns = a.parts.base.tensors.columns;
    const bool valid = row < task.keys - group * S::kGroupStep;
    const std::int64_t first = task.sum_row;
    float* const place =
        target +
        (first + (valid ? static_cast<std::int64_t>(group * S::kGroupStep + row) * task.sum_step : 0)) * columns;
#pragma unroll
    for (int j = 0; j < kColumns / 8; ++j) {
      const float give0 = odd ? rows[4 * j] : rows[4 * j + 2], give1 = odd ? rows[4 * j + 1] : rows[4 * j + 3];
      const float take0 = __shfl_xor_sync(~0u, give0, 1), take1 = __shfl_xor_sync(~0u, give1, 1);
      const float4 four =
          odd ? make_float4(take0 * factor, take1 * factor, rows[4 * j + 2] * factor, rows[4 * j + 3] * factor)
              : make_float4(rows[4 * j] * factor, rows[4 * j + 1] * factor, take0 * factor, take1 * factor);
      const int column = j * 8 + lane % 4 / 2 * 4;
      if (valid && column < columns) cuda::add_four(place + column, four);
    }
  }
  /// The same to this group's rows of a tile in shared memory.
  __device__ __forceinline__ void put(const float (&rows)[kColumns / 2], float factor,
                                      std::uint32_t tile_address) const {
    const int row = own_row();
    const std::uint32_t place = tile_address + group * S::kGroupKeys + row * 128 + lane % 4 * 4;
#pragma unroll
    for (int j = 0; j < kColumns / 8; ++j) {
      const std::uint32_t at = place + j / 8 * S::kKeyBlock + ((j % 8 ^ (row & 7)) << 4);
      store_word(at, cuda::pack<T>(rows[4 * j] * factor, rows[4 * j + 1] * factor));
      store_word(at + 1024, cuda::pack<T>(rows[4 * j + 2] * factor, rows[4 * j + 3] * factor));
    }
  }
  /// Row by row from there, where the copy engine would write past the strand's end.
  __device__ __forceinline__ void write_rows(const cuda::Rows& target, std::uint32_t tile_address, int rows,
                                             const BackwardTask& task) const {
    constexpr int kChunks = kColumns / 8;
#pragma unroll 1
    for (int i = lane; i < 16 * kChunks; i += kWarpThreads) {
      const int row = warp() * 16 + i / kChunks, chunk = i % kChunks;
      if (row >= rows || chunk * 8 >= a.parts.base.tensors.columns) continue;
      const uint4 words = load_words(tile_address + group * S::kGroupKeys + chunk / 8 * S::kKeyBlock + row * 128 +
                                     ((chunk % 8 ^ (row & 7)) << 4));
      const std::int64_t position =
          task.position + static_cast<std::int64_t>(group * S::kGroupStep + row) * task.stride;
      T* const place = reinterpret_cast<T*>(target.data) + target.offset(task.entry, position, task.kv_head);
      store_global(place + chunk * 8, words);
    }
  }

  /// Two items with half of the queries each: what both have is put down, and the warp that comes second adds the
  /// other's to its own, in either order the same, and writes them.
  __device__ __forceinline__ bool join(const BackwardTask& task) {
    constexpr int kFours = kSums / 4;
    const int pair = (task.pair * 2 + group) * 4 + warp();
    const auto place = [&](int half) {
      return reinterpret_cast<float4*>(a.halves) + (pair * 2 + half) * kFours * kWarpThreads + lane;
    };
    const auto each = [&](float4* at, auto&& body) {
#pragma unroll
      for (int i = 0; i < kColumns / 8; ++i) {
        body(at[i * kWarpThreads], dvalues + 4 * i);
        if constexpr (!S::kShared) body(at[(kFours / 2 + i) * kWarpThreads], dkeys + 4 * i);
      }
    };
    each(place(task.half), [](float4& four, const float* own) { four = make_float4(own[0], own[1], own[2], own[3]); });
    __threadfence();
    __syncwarp();
    unsigned others = 0;
    if (lane == 0) others = atomicAdd(a.parts.joined + pair, 1u);
    if (__shfl_sync(~0u, others, 0) == 0) return false;
    __threadfence();
    each(place(task.half ^ 1), [](const float4& four, float* own) {
      const float4 other = __ldcg(&four);
      own[0] += other.x, own[1] += other.y, own[2] += other.z, own[3] += other.w;
    });
    return true;
  }

  // As in the forward (consumer.cuh), sums of kTilesOfSum tiles of queries are closed and added up in float32, in
  // memory, thread by thread.
  __device__ __forceinline__ float* totals() const {
    const int consumer = cuda::computed_here((blockIdx.x * 2 + group) * kSums * kGroupThreads + thread);
    return a.totals + consumer;
  }
  __device__ __forceinline__ void close_sums(bool first) {
    float* const place = totals();
#pragma unroll
    for (int j = 0; j < kColumns / 2; ++j) {
      if (first) {
        place[j * kGroupThreads] = dvalues[j];
        if constexpr (!S::kShared) place[(kColumns / 2 + j) * kGroupThreads] = dkeys[j];
      } else {  // by reductions, since there are no registers to load totals to
        add_one(place + j * kGroupThreads, dvalues[j]);
        if constexpr (!S::kShared) add_one(place + (kColumns / 2 + j) * kGroupThreads, dkeys[j]);
      }
    }
    add = 0;
  }
  /// dV and dK from there, number by number: registers that changed here would have to be moved about in the loop.
  __device__ __forceinline__ void write_totals(const BackwardTask& task, bool sums) const {
    const cuda::Launch& base = a.parts.base;
    const float* const place = totals();
#pragma unroll 1
    for (int i = 0; i < kSums; ++i) {
      const bool keys = S::kShared ? group == 1 : i >= kColumns / 2;
      const int row = group * S::kGroupStep + own_row() + i / 2 % 2 * 8,
                column = i % (kColumns / 2) / 4 * 8 + lane % 4 * 2 + i % 2;
      if (row >= task.keys || column >= base.tensors.columns) continue;
      const float value = __ldcg(place + i * kGroupThreads) * (keys ? base.gradients.sum_scale : output_factor());
      if (sums) {
        const std::int64_t place_of = task.sum_row + static_cast<std::int64_t>(row) * task.sum_step;
        add_one((keys ? base.gradients.dk_sum : base.gradients.dv_sum) + place_of * base.tensors.columns + column,
                value);
      } else {
        const std::int64_t position = task.position + static_cast<std::int64_t>(row) * task.stride;
        const cuda::Rows& target = keys ? base.gradients.dk : base.gradients.dv;
        reinterpret_cast<T*>(target.data)[target.offset(task.entry, position, task.kv_head) + column] =
            cuda::from_float<T>(value);
      }
    }
  }

  /// `deterministic`: the items of a list that is cut add dK and dV in their order, each group its own.
  __device__ __forceinline__ unsigned* parts_done(const typename S::Item& task) const {
    return a.parts.key_turns + (task.first_sums + task.first_key / kGroupRows) * 2 + group;
  }
  __device__ __forceinline__ void await_parts(const typename S::Item& task) const {
    if (thread == 0) {
      while (cuda::load_acquire(parts_done(task)) != static_cast<unsigned>(task.part)) {}
      __threadfence();
    }
    sync_group();
  }
  /// dV and dK leave through the item's own tiles of V and K.
  __device__ __forceinline__ void write_keys(const typename S::Item& task, std::uint32_t stage_of_keys) {
    const cuda::Launch& base = a.parts.base;
    const int rows = task.keys - group * S::kGroupStep;
    bool sums = base.gradients.sum_keys;
    if constexpr (S::kLists) {
      sums = sums || task.split;
      if (a.parts.turns && task.part >= 0) await_parts(task);
    }
    // Never with halves. `tile` may be the next item's.
    const bool totals = S::kCloses && (task.tiles - 1) / kTilesOfSum * kTilesOfSum > task.first_tile;
    const bool halved = task.pair >= 0, boxes = !sums && !halved && !totals && rows >= kGroupRows;
    const bool first_is_keys = S::kShared && group == 1;  // what `dvalues` are
    const std::uint32_t keys_tile = memory.keys(stage_of_keys),
                        first_tile = first_is_keys ? keys_tile : memory.values(stage_of_keys);
    const float first_factor = first_is_keys ? base.gradients.sum_scale : output_factor();
    sync_threads(kItem, kBoth);  // dQ of both groups has read all of K
    if constexpr (S::kExtras) {
      if (task.hides) {  // no gradient, whatever NaN a query has
        overwrite_excluded(task, own_key(), dvalues, 0.0f);
        if constexpr (!S::kShared) overwrite_excluded(task, own_key(), dkeys, 0.0f);
      }
    }
    if (S::kCloses && totals) {
      close_sums(false);
      write_totals(task, sums);
    } else if (sums) {
      add_to_sums(dvalues, first_factor, first_is_keys ? base.gradients.dk_sum : base.gradients.dv_sum, task);
      if constexpr (!S::kShared) add_to_sums(dkeys, base.gradients.sum_scale, base.gradients.dk_sum, task);
    } else if (!halved || join(task)) {
      put(dvalues, first_factor, first_tile);
      if constexpr (!S::kShared) put(dkeys, base.gradients.sum_scale, keys_tile);
      if (!boxes) {
        __syncwarp();
        write_rows(first_is_keys ? base.gradients.dk : base.gradients.dv, first_tile, rows, task);
        if constexpr (!S::kShared) write_rows(base.gradients.dk, keys_tile, rows, task);
      }
    }
    fence_shared();  // next the copy engine reads these tiles, or loads others into their place
    if constexpr (S::kLists) {
      if (a.parts.turns && task.part >= 0) __threadfence();
    }
    sync_group();
    if constexpr (S::kLists) {
      if (thread == 0 && a.parts.turns && task.part >= 0) add_release(parts_done(task));
    }
    if (thread == 0 && boxes) {
      Place place{0, task.k_index + group * S::kGroupStep, task.k_phase, task.kv_head, task.entry};
#pragma unroll
      for (int block = 0; block < S::kBlocks; ++block, place.column += kBlockColumns) {
        const std::uint32_t offset = block * S::kKeyBlock + group * S::kGroupKeys;
        store_box(first_is_keys ? &a.dk[task.k_map] : &a.dv[task.k_map], first_tile + offset, place);
        if constexpr (!S::kShared) store_box(&a.dk[task.k_map], keys_tile + offset, place);
      }
      commit_stores();
      wait_stores_read<0>();
    }
    arrive(memory.key_free(stage_of_keys));
    arrive(memory.task_free((&task - tasks) % kTaskSlots));
  }

  /// First scores of an item, with nothing in flight.
  __device__ __forceinline__ void begin() {
    wait(memory.query_full(q.stage), q.parity);
    multiply_queries();
    draw();
    products_wait<0>();
    pin(scores);
  }

  /// Scale, bias and masks, with no product in flight.
  __device__ __forceinline__ void adjust_scores(bool rescales, float factor) {
    if constexpr (S::kExtras) {
      const auto& task = tasks[taken % kTaskSlots];
      if (rescales) {
        const int first = first_query() + own_query() - task.diagonal - group * S::kGroupStep;
        rescale(scores, a.parts.base.rules.scale * cuda::kLog2E, task.bias, first, first + 2 * (lane % 4) - own_row());
      }
      if (uniform(task.hides)) overwrite_excluded(task, own_key(), scores, -LONGSPAN_INFINITY);
    }
    if (masks()) {
      mask();
      if (uniform(tasks[taken % kTaskSlots].clamps)) clamp(factor);
    }
  }
  __device__ __forceinline__ void pack_weights(std::uint32_t (&weights)[kOwnQueries / 4]) {
    if constexpr (S::kDropout) {
      sync_group();  // all bits have been drawn
      mark_dropped<S>(scores, memory.bits(group));
    }
#pragma unroll
    for (int j = 0; j < kOwnQueries / 4; ++j) {
      if constexpr (S::kDropout) weights[j] = pack_kept<T>(scores[2 * j], scores[2 * j + 1]);
      else weights[j] = cuda::pack<T>(scores[2 * j], scores[2 * j + 1]);
    }
  }
  /// dS, all of it before dV starts: fewer registers are alive at once, or products would be serialised.
  __device__ __forceinline__ void pack_dscores(std::uint32_t (&dweights)[kOwnQueries / 4], float dfactor) const {
    const std::uint32_t delta = memory.delta(q.stage) + own_query() * 4 + lane % 4 * 8;
#pragma unroll
    for (int j = 0; j < kBlocks8; ++j) {
      const float2 shift = load_pair(delta + j * 32);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int i = 4 * j + 2 * half;
        dweights[2 * j + half] = cuda::pack<T>(dscore(i, dfactor, shift.x), dscore(i + 1, dfactor, shift.y));
      }
    }
  }
  /// P or dS to a tile in shared memory, for both groups.
  __device__ __forceinline__ void share(const std::uint32_t (&packed)[kOwnQueries / 4], std::uint32_t target) const {
    const int first = S::kShared ? group * kBlocks8 : 0;
    const std::uint32_t place = target + (group * S::kGroupStep + warp() * 16 + (lane & 15)) * 128;
#pragma unroll
    for (int j = 0; j < kBlocks8; j += 2)  // keys 0 to 7 and 8 to 15 of queries 8 * j .. and 8 * (j + 1) ..
      store_blocks(place + j / 8 * S::kScoreBlock + ((((j % 8) | (lane >> 4)) ^ (lane & 7) ^ first) << 4),
                   packed + 2 * j);
  }
  /// Goes on to the next tile of queries, of the next item where K has a stage for it. True after an item's last.
  __device__ __forceinline__ bool advance(bool& more) {
    const bool last =
        ++tile == uniform(tasks[taken % kTaskSlots].tiles);  // read again: a count in a register loses its uniformity
    q.advance();
    if (last) {
      ++taken;
      if constexpr (S::kKeyStages > 1) {
        k.advance();
        more = fetch();
      }
    }
    if (!last || (S::kKeyStages > 1 && more)) wait(memory.query_full(q.stage), q.parity);
    return last;
  }

  __device__ __forceinline__ void run() {
    const cuda::Rules& rules = a.parts.base.rules;
    const bool rescales = S::kExtras && (rules.alibi || rules.scale < kLeastScale);
    const float factor = rescales ? 1.0f : rules.scale * cuda::kLog2E,
                dfactor = output_factor() * a.parts.base.gradients.dscore_scale;
    bool more = fetch();
    if (!more) return;
    arrive_threads(kRead + (group ^ 1), kBoth);  // the place of dS is free
    begin();
    add = 0;
    // No product is in flight where the loop closes or at the mask: the assembler would serialise all of them.
    while (true) {
      adjust_scores(rescales, factor);
      wait(memory.dout_full(q.stage), q.parity);
      multiply_douts();
      exponentiate(0, kBlocks8 / 2, factor);
      hand_on();  // the first time nothing
      exponentiate(kBlocks8 / 2, kBlocks8, factor);
      std::uint32_t weights[kOwnQueries / 4], dweights[kOwnQueries / 4];
      pack_weights(weights);
      if constexpr (S::kShared) {
        sync_threads(kRead + group, kBoth);  // both groups have read the last tile's P and dS
        share(weights, memory.weights());
      }
      products_wait<0>();
      pin(dscores);
      pack_dscores(dweights, dfactor);
      if constexpr (!S::kShared) {
        add_rows(dvalues, weights, memory.douts(q.stage));
        sync_threads(kRead + group, kBoth);  // both groups have read the last tile's dS
      }
      share(dweights, memory.scores());
      fence_shared();
      if constexpr (!S::kShared) {
        add_rows(dkeys, dweights, memory.queries(q.stage));
        products_wait<1>();  // dV: frees the registers of P
      }
      sync_threads(kWritten, kBoth);
      const auto& task = tasks[taken % kTaskSlots];
      if constexpr (S::kSumParts > 1) {
        multiply_keys(0);
        add_own_rows();
        products_wait<1>();
        pin(dqueries);
        add_queries(task, first_query() / kQueries, 0);
      } else if constexpr (S::kShared) {
        add_own_rows();
      }
      multiply_keys(S::kSumParts - 1);
      [[maybe_unused]] const int place = first_query() / kQueries;

      const std::uint32_t used = q.stage, used_key = k.stage;
      const bool last = advance(more);
      if constexpr (S::kWide && !S::kShared) products_wait<1>();  // dK: else registers would not do for the next scores
      multiply_queries();                                         // stale ones after the last
      products_wait<1>();
      pin(dqueries);
      if constexpr (S::kMoreColumns > 0) pin(dmore);
      if constexpr (!S::kShared) pin(dkeys);
      pin(dvalues);
      free_tile(used);
      arrive_threads(kRead + (group ^ 1), kBoth);
      if constexpr (S::kShared) add_queries(task, S::kLists ? place : tile - 1, S::kSumParts - 1);
      else stage();
      draw();
      products_wait<0>();
      pin(scores);
      add = 1;
      if (last) {
        write_keys(task, used_key);
        if constexpr (S::kKeyStages == 1) {
          k.advance();
          more = fetch();
          if (more) begin();
        }
        if (!more) break;
        add = 0;
      } else if (S::kCloses && tile % kTilesOfSum == 0) {
        close_sums(tile - kTilesOfSum <= task.first_tile);
      }
    }
    hand_on();
    if (thread == 0) wait_stores();
  }
};

}  // namespace longspan::hopper
