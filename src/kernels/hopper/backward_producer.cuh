// The producer of the Hopper backward (see backward.cuh): looks up items and loads tiles.
#pragma once

#include "kernels/hopper/backward_extras.cuh"
#include "kernels/hopper/backward_lists.cuh"

namespace longspan::hopper {

template <class S>
struct BackwardProducer {
  struct NoCursor {
    __device__ __forceinline__ explicit NoCursor(const BackwardTask&) {}
  };
  using Cursor = std::conditional_t<S::kLists, QueryCursor<S>, NoCursor>;
  static constexpr int kFewestHalved = 4;  // tiles of queries that are worth two items
  // Tiles of queries before an item's end at which the next one is looked up: lists take longer.
  static constexpr int kEarly = S::kLists ? 4 : 1;
  const BackwardLaunch& a;
  const BackwardMemory<S> memory;
  typename S::Tasks& tasks;
  typename S::Notes& notes;

  /// Fills in the task of an item; false if it has no keys, or no query sees them (items are counted for the longest
  /// strands).
  __device__ __forceinline__ bool describe(unsigned flat, typename S::Item& task) const {
    const cuda::Launch& base = a.parts.base;
    const unsigned whole = a.parts.items - a.halved;
    const bool halved = flat >= whole;
    task.half = static_cast<int>(flat - whole) & 1;
    task.pair = halved ? static_cast<int>(flat - whole) / 2 : -1;
    const std::int64_t found = a.item_at(halved ? whole + task.pair : flat);
    if (found < 0) return false;
    const cuda::Item item = base.schedule.decode(static_cast<unsigned>(found));
    const cuda::StrandRows strand =
        base.schedule.branches[item.branch].strand(item.head, item.segment, base.tensors.length(item.entry));
    const cuda::StrandQueries queries = base.schedule.ranges[item.range].of(strand);
    int first_key = item.tile * S::kKeys;
    if constexpr (S::kLists) {
      const cuda::BlockLists& lists = base.schedule.lists[item.branch];
      task.list = nullptr, task.empty = task.split = false, task.part = -1;
      if (lists.places) first_key = lists.place(item.entry, item.head, item.tile).tile * S::kKeys;
      if (first_key < 0) return false;
      task.first_key = first_key;
    }
    task.key_tile = item.tile;
    task.last_key_tile = (strand.count + S::kKeys - 1) / S::kKeys - 1;
    task.keys = min(S::kKeys, strand.count - first_key);
    task.queries = queries.count;
    task.diagonal = first_key - queries.begin;
    task.tiles = (queries.count + S::kQueries - 1) / S::kQueries;
    task.first_tile = base.rules.causal ? max(0, task.diagonal) / S::kQueries : 0;
    if (halved) {  // few queries are left to the first half
      const int split = task.tiles < kFewestHalved ? task.tiles : task.tiles / 4 * 2;
      if (split == task.tiles) task.pair = -1;
      if (task.half == 0) task.tiles = split;
      else task.first_tile = split;
    }
    if (task.keys <= 0 || task.tiles <= task.first_tile) return false;
    // A rank may have no rows for keys after all of its queries, which see none of them.
    if (a.parts.packed.ranges[item.range] && base.rules.causal)
      task.keys = min(task.keys, max(0, queries.begin + queries.count - first_key));
    if constexpr (S::kLists) {
      const cuda::BlockLists& lists = base.schedule.lists[item.branch];
      if (lists.places) {
        const cuda::BlockPlace& place = lists.place(item.entry, item.head, item.tile);
        task.list = a.parts.listed[item.branch] + listed_from(lists, place, S::kQueries);
        task.first_tile = 0;
        task.tiles = tiles_before(task.list, place.count > 0 ? task.list[0].tiles : 0, queries.count);
        task.empty = task.tiles == 0;
        task.part = part_of(lists, item);
        task.split = a.parts.splits && task.part >= 0;
        const bool counts = a.parts.turns && task.part >= 0;
        if (task.empty && (base.gradients.sum_keys || task.split) && !counts) return false;
        task.tiles = max(1, task.tiles);
      }
    }
    const int q_row = static_cast<int>(queries.q_row);
    task.entry = item.entry;
    task.kv_head = a.query_group == 1 ? item.head : item.head / a.query_group;
    const PackedPlaces& places = a.parts.packed;
    const int packed = places.row(item, base.tensors.heads);
    if (packed >= 0) {
      task.k_map = kPackedMap;
      task.k_index = packed + first_key;
      task.k_phase = task.kv_head = 0;
      task.sum_row = places.sums + static_cast<std::int64_t>(item.entry) * places.rows + task.k_index;
      task.sum_step = 1;
    } else {
      const int start = places.key_row(item, base.schedule.ranges[item.range], strand.start),
                start_index = start / strand.stride;
      task.k_index = start_index + first_key;
      task.k_phase = start - start_index * strand.stride;
      task.k_map = a.map(item.branch, task.k_phase, a.longer_keys[item.branch]);
      task.sum_row = (static_cast<std::int64_t>(item.entry) * base.tensors.kv_heads + task.kv_head) * places.key_rows +
                     start + static_cast<std::int64_t>(first_key) * strand.stride;
      task.sum_step = strand.stride;
    }
    task.q_index = q_row / strand.stride;
    task.q_phase = q_row - task.q_index * strand.stride;
    task.q_map = a.map(item.branch, task.q_phase, a.longer_queries[item.branch]);
    task.head = item.head;
    task.position = strand.start + first_key * strand.stride;
    task.stride = strand.stride;
    task.row = a.parts.row(item);
    task.first_sums = static_cast<int>(task.row / kSumTileRows);
    if constexpr (S::kMerges && S::kShared) {
      task.sums = a.parts.merged_row(item.entry, item.head, queries.q_row);
      task.query_step = static_cast<std::int64_t>(strand.stride) * a.parts.sum_columns;
    }
    if constexpr (S::kExtras) {
      const cuda::Rules& rules = base.rules;
      task.bias = rules.alibi ? rules.alibi[item.head * rules.alibi_head] * cuda::kLog2E * strand.stride : 0.0f;
      task.draw_group = static_cast<std::uint32_t>(first_key / 8);
      task.draw_head = static_cast<std::uint32_t>(item.branch * base.tensors.heads + item.head);
    }
    return true;
  }
  /// Whether one of the tiles of queries that this lane looks at has a large lse.
  __device__ __forceinline__ bool has_far_lse(const typename S::Item& task, int lane) const {
    const std::uint8_t* const marks = a.parts.far_lse + task.first_sums;
    bool far = false;
    if constexpr (S::kLists) {
      if (task.list) {
        constexpr int kEach = S::kQueries / kSumTileRows;
        const int end = (task.queries + kSumTileRows - 1) / kSumTileRows;
        for (int i = lane; i < (task.empty ? 0 : task.tiles) * kEach; i += kWarpThreads) {
          const int tile = task.list[i / kEach].first / kSumTileRows + i % kEach;
          far = far || (tile < end && marks[tile] != 0);
        }
        return far;
      }
    }
    const int begin = task.first_tile * S::kQueries / kSumTileRows;
#pragma unroll 4
    for (int i = begin + lane; i * kSumTileRows < task.queries; i += kWarpThreads) far = far || marks[i] != 0;
    return far;
  }
  /// Leaves the leading keys of a tile, if these are all that key_mask allows; the others have no gradient. False if
  /// there is nothing to compute, or others are allowed too.
  __device__ __forceinline__ bool take_leading(typename S::Item& task, int lane) const {
    const cuda::Launch& base = a.parts.base;
    const int keys = task.keys, leading = leading_keys(base, task, lane);
    if (leading < 0) return false;
    const int chunks = base.tensors.columns / 8;
    for (int i = leading * chunks + lane; i < (base.gradients.sum_keys ? 0 : keys * chunks); i += kWarpThreads) {
      const std::int64_t position = task.position + static_cast<std::int64_t>(i / chunks) * task.stride;
#pragma unroll
      for (int which = 0; which < 2; ++which) {
        const cuda::Rows& target = which == 0 ? base.gradients.dk : base.gradients.dv;
        auto* const row =
            reinterpret_cast<typename S::Element*>(target.data) + target.offset(task.entry, position, task.kv_head);
        store_global(row + i % chunks * 8, make_uint4(0, 0, 0, 0));
      }
    }
    __syncwarp();
    if (lane == 0) task.keys = leading;
    return leading > 0;
  }
  /// The same as describe by a whole warp, and what takes all of it. Where key_mask excludes all keys, dK and dV are
  /// zeros, which one tile of queries gives; deterministic calls count every item.
  __device__ __forceinline__ bool look_up(unsigned flat, typename S::Item& task, int lane) const {
    const bool found = lane == 0 && describe(flat, task);
    if (!__shfl_sync(~0u, found, 0)) return false;
    __syncwarp();
    const bool far = __any_sync(~0u, has_far_lse(task, lane));
    bool counts = true;
    if constexpr (!S::kExtras && !S::kLists) {
      if (a.parts.taken == KeysTaken::leading && !take_leading(task, lane)) return false;
    }
    if constexpr (S::kExtras) {
      const bool some = find_allowed<S>(a.parts.base, task, lane);
      if (a.parts.taken == KeysTaken::scattered && leading_keys(a.parts.base, task, lane) >= 0) return false;
      if (!some && !a.parts.turns) {
        counts = !a.parts.base.gradients.sum_keys;
        if constexpr (S::kLists) counts = counts && !task.split;
        if (lane == 0) task.tiles = task.first_tile + 1;
      }
    }
    if (lane == 0) {
      task.clamps = far;
      task.plain_keys = far ? 0 : task.keys;
    }
    __syncwarp();
    return counts;
  }

  /// Looks up items, each while the last queries of the one before it are loaded: early enough for the loads, and so
  /// late that a block with short items takes more of them, and that items start in their order. What an item of a
  /// deterministic call waits for has been taken before it.
  __device__ __forceinline__ void schedule(int lane) const {
    const unsigned items = a.parts.items + a.halved;
    for (std::uint32_t count = 0;; ++count) {
      const std::uint32_t slot = count % kTaskSlots;
      if (count > 0) wait(memory.task_wanted(), (count - 1) & 1);
      if (count > 1) wait(memory.task_free((count - 2) % kTaskSlots), (count - 2) / kTaskSlots & 1);
      unsigned item = 0;
      do {
        if (lane == 0) item = atomicAdd(a.parts.ticket, 1u) - a.first_ticket;
        item = __shfl_sync(~0u, item, 0);
      } while (item < items && !look_up(item, tasks[slot], lane));
      if (lane == 0 && item >= items) tasks[slot].tiles = -1;
      if (lane == 0) arrive(memory.task_full(slot));
      if (item >= items) return;
    }
  }

  /// Zeros in rows from `first` on: they are other strands' or excluded, and 0 times NaN is NaN.
  __device__ __forceinline__ void clear(std::uint32_t tile, int first, int rows, std::uint32_t block_bytes,
                                        int lane) const {
#pragma unroll 1
    for (int i = lane; i < (rows - first) * 8; i += kWarpThreads) {
#pragma unroll
      for (int block = 0; block < S::kBlocks; ++block) store_zeros(tile + block * block_bytes + first * 128 + i * 16);
    }
  }
  /// The same to rows of K and V that key_mask excludes.
  __device__ __forceinline__ void clear_hidden(const typename S::Item& task, std::uint32_t keys, std::uint32_t values,
                                               int lane) const {
#pragma unroll 1
    for (int i = lane; i < S::kKeys * 8; i += kWarpThreads) {
      if (task.allows(i / 8)) continue;
#pragma unroll
      for (int block = 0; block < S::kBlocks; ++block) {
        store_zeros(keys + block * S::kKeyBlock + i * 16);
        store_zeros(values + block * S::kKeyBlock + i * 16);
      }
    }
  }
  __device__ __forceinline__ void load_tile(const CUtensorMap* map, std::uint32_t target, std::uint32_t block_bytes,
                                            std::uint32_t full, Place place) const {
#pragma unroll
    for (int block = 0; block < S::kBlocks; ++block, place.column += kBlockColumns)
      load_box(target + block * block_bytes, map, full, place);
  }

  /// Waits for loads that the warp looks through before it hands them on.
  __device__ __forceinline__ void await_ragged(std::uint32_t& parity) const {
    wait(memory.ragged(), parity);
    parity ^= 1;
  }
  /// K and V of an item, by the whole warp, of which `leader` starts the loads.
  __device__ __forceinline__ void load_keys(const typename S::Item& task, std::uint32_t stage, int there, int lane,
                                            std::uint32_t& ragged_parity) const {
    const std::uint32_t keys = memory.keys(stage), values = memory.values(stage), key_full = memory.key_full(stage);
    const bool leader = lane == 0;
    bool cleans = there < S::kKeys;
    if constexpr (S::kExtras) cleans = cleans || task.hides;
    if (leader) {
      const std::uint32_t full = cleans ? memory.ragged() : key_full;
      const Place place{0, task.k_index, task.k_phase, task.kv_head, task.entry};
      arrive_and_expect(full, 2 * S::kKeyBytes);
      load_tile(&a.k[task.k_map], keys, S::kKeyBlock, full, place);
      load_tile(&a.v[task.k_map], values, S::kKeyBlock, full, place);
    }
    if (cleans) {
      await_ragged(ragged_parity);
      clear(keys, there, S::kKeys, S::kKeyBlock, lane);
      clear(values, there, S::kKeys, S::kKeyBlock, lane);
      if constexpr (S::kExtras) {
        if (task.hides) clear_hidden(task, keys, values, lane);
      }
      fence_shared();
    }
    if (cleans || !leader) arrive(key_full);
  }

  /// The whole warp; one thread of it starts the loads. A tile that ends after its strand is waited for and cleaned up
  /// before it is handed on.
  __device__ __forceinline__ void load(int lane) const {
    Ring<S::kStages> stage{0, 1};
    Ring<S::kKeyStages> key{0, 1};
    Ring<kTaskSlots> ready;
    std::uint32_t ragged_parity = 0;
    const bool leader = lane == 0;
    for (;; ready.advance(), key.advance()) {
      wait(memory.task_full(ready.stage), ready.parity);
      const auto& task = tasks[ready.stage];
      wait(memory.key_free(key.stage), key.parity);
      if (task.tiles < 0) {
        arrive(memory.key_full(key.stage));
        return;
      }
      int keys_there = task.keys, queries_there = task.queries;
      if constexpr (S::kLists) {
        if (task.empty) keys_there = queries_there = 0;
      }
      load_keys(task, key.stage, keys_there, lane, ragged_parity);
      [[maybe_unused]] Cursor cursor(task);
#pragma unroll 1
      for (int tile = task.first_tile; tile < task.tiles; ++tile, stage.advance()) {
        int first = tile * S::kQueries;
        if constexpr (S::kLists) first = cursor.next.first;
        const int rows = min(S::kQueries, queries_there - first);
        const bool short_tile = rows < S::kQueries;
        const std::uint32_t queries = memory.queries(stage.stage), douts = memory.douts(stage.stage),
                            query_full = memory.query_full(stage.stage), dout_full = memory.dout_full(stage.stage);
        const Place place{0, task.q_index + first, task.q_phase, task.head, task.entry};
        const bool wants = S::kLists ? tile == max(task.first_tile, task.tiles - kEarly) : tile + 1 == task.tiles;
        if (leader && wants) arrive(memory.task_wanted());
        wait(memory.tile_free(stage.stage), stage.parity);
        if constexpr (S::kLists) {
          if (leader) notes[(stage.parity ^ 1) * S::kStages + stage.stage] = cursor.note(a.parts.base.rules.causal);
          cursor.advance();
        }
        if (leader) {
          const std::uint32_t full = short_tile ? memory.ragged() : query_full;
          arrive_and_expect(full, (short_tile ? 2 : 1) * (S::kQueryBytes + S::kValueBytes));
          load_tile(&a.q[task.q_map], queries, S::kQueryBlock, full, place);
          load_bytes(memory.lse(stage.stage), a.parts.lse + task.row + first, S::kValueBytes, full);
          const std::uint32_t second = short_tile ? full : dout_full;
          if (!short_tile) arrive_and_expect(second, S::kQueryBytes + S::kValueBytes);
          load_tile(&a.dout[task.q_map], douts, S::kQueryBlock, second, place);
          load_bytes(memory.delta(stage.stage), a.parts.delta + task.row + first, S::kValueBytes, second);
        }
        __syncwarp();
        if (!short_tile) {
          if (!leader) {
            arrive(query_full);
            arrive(dout_full);
          }
          continue;
        }
        await_ragged(ragged_parity);
        clear(queries, rows, S::kQueries, S::kQueryBlock, lane);
        clear(douts, rows, S::kQueries, S::kQueryBlock, lane);
        for (int row = rows + lane; row < S::kQueries; row += kWarpThreads) {
          store_word(memory.lse(stage.stage) + row * 4, 0xff800000u);  // -inf: no weight
          store_word(memory.delta(stage.stage) + row * 4, 0);
        }
        fence_shared();
        arrive(query_full);
        arrive(dout_full);
      }
    }
  }

  /// Adds a tile to sums that branches share. Rows after the strand's end are other strands': what was computed for
  /// them from zeros is NaN where a key is, and becomes zeros again.
  __device__ __forceinline__ void add_merged_tile(const BackwardTask& task, int group, int place) const {
    const int first = place * S::kQueries + (S::kWide ? 0 : group * kSumTileRows);
    const int rows = task.queries - first;
    const std::uint32_t sums = memory.sums(group);
    if (rows < kSumTileRows) {
#pragma unroll 1
      for (std::uint32_t at = rows * S::kSumRow; at < S::kSumBlock; at += 16) {
#pragma unroll
        for (int block = 0; block < S::kSumColumns / kSumBlockColumns; ++block)
          store_zeros(sums + block * S::kSumBlock + at);
      }
      fence_shared();
    }
    add_box(&a.sums[task.q_map], sums, task.q_index + first, S::kWide ? group * (kBlockColumns / kSumBlockColumns) : 0,
            task.q_phase, task.entry * a.parts.base.tensors.heads + task.head);
  }

  /// Starts to add a tile of one group's dQ, and hands its place in shared memory back.
  __device__ __forceinline__ void add_tile(const BackwardTask& task, int group, int place) const {
    if constexpr (S::kMerges) {
      add_merged_tile(task, group, place);
    } else {
      const std::int64_t tile = static_cast<std::int64_t>(task.first_sums) * S::kBlocks + group + 2 * place;
      add_bytes(a.parts.sums + tile * S::kSumTile, memory.sums(group), S::kSumBytes);
    }
    commit_stores();
    wait_stores_read<0>();
    arrive(memory.sum_free(group));
  }
  /// Adds one group's dQ to memory, tile by tile. Deterministic calls add in the order of items: one or two tiles of
  /// queries at a time count those that are done with them. Everything is told before anything is waited for.
  __device__ __forceinline__ void add(int group) const {
    [[maybe_unused]] std::uint32_t number = 0;
    std::uint32_t parity = 0;
    bool primed = false;
    for (Ring<kTaskSlots> at;; at.advance()) {
      wait(memory.task_full(at.stage), at.parity);
      const auto& task = tasks[at.stage];
      if (task.tiles < 0) break;
      if (!primed) {  // consumers hand on nothing once
        wait(memory.sum_full(group), parity);
        arrive(memory.sum_free(group));
        parity ^= 1;
        primed = true;
      }
      if constexpr (S::kLists) {
        add_listed(task, group, number, parity);
      } else {
        add_in_order(task, group, parity);
      }
    }
    wait_stores();
  }
  /// The same for an item whose tiles come one after the other.
  __device__ __forceinline__ void add_in_order(const BackwardTask& task, int group, std::uint32_t& parity) const {
    unsigned* const turns = a.parts.turns;
    const int step = a.told_tiles, first = task.first_sums * S::kBlocks + group, tiles = task.tiles;
    const int own = task.tiles_of(group, S::kQueries);
    bool asked = false;
#pragma unroll 1
    for (int tile = task.first_tile; tile < tiles; ++tile, parity ^= 1) {
      const int begin = tile & -step, end = task.told_end(tile, own, step);
      const auto is_turn = [&](int of_begin, int of_end) {
        return cuda::load_acquire(turns + first + 2 * of_begin) ==
               static_cast<unsigned>(task.turn(of_end * S::kQueries, a.parts.base.rules.causal));
      };
      const bool opens = turns && tile < own && (tile == task.first_tile || tile == begin);
      while (opens && !asked) asked = is_turn(begin, end);
      asked = false;
      wait(memory.sum_full(group), parity);
      if (tile >= own) {
        arrive(memory.sum_free(group));
        continue;
      }
      if (opens) fence_memory();
      add_tile(task, group, tile);
      if (turns && tile + 1 == end) {
        // Tile by tile there is no time to ask after telling, so that is done while the copy engine adds.
        if (step == 1 && end < own) asked = is_turn(end, end + 1);
        wait_stores();
        add_release(turns + first + 2 * begin);
      }
    }
  }
  /// The same for an item of lists, whose notes say which tiles and whose turn it is.
  __device__ __forceinline__ void add_listed(const typename S::Item& task, int group, std::uint32_t& number,
                                             std::uint32_t& parity) const {
    unsigned* const turns =
        a.parts.turns ? a.parts.turns + static_cast<std::int64_t>(task.first_sums) * S::kBlocks + group : nullptr;
    const int half = S::kWide ? 0 : group;  // of a tile: whose rows of dQ the group has
    bool asked = false;
#pragma unroll 1
    for (int left = task.tiles - task.first_tile; left > 0; --left, ++number, parity ^= 1) {
      const auto is_turn = [&](const BackwardNote& of) {
        return cuda::load_acquire(turns + 2 * (of.first / S::kQueries)) == of.turn[half];
      };
      wait(memory.sum_full(group), parity);
      const BackwardNote& note = notes[number % (2 * S::kStages)];
      const int place = note.first / S::kQueries;
      if (!note.meets(half) || note.first + half * kSumTileRows >= task.queries) {  // what there is, are zeros
        arrive(memory.sum_free(group));
        asked = false;
        continue;
      }
      while (turns && !asked) asked = is_turn(note);
      asked = false;
      if (turns) fence_memory();
      add_tile(task, group, place);
      if (turns) {
        if (left > 1) asked = is_turn(notes[(number + 1) % (2 * S::kStages)]);
        wait_stores();
        add_release(turns + 2 * place);
      }
    }
  }

  __device__ __forceinline__ void run() const {
    const int warp = threadIdx.x / kWarpThreads, lane = threadIdx.x % kWarpThreads;
    if (warp == 0) load(lane);
    else if (warp == 1) schedule(lane);
    else if (!S::kShared && warp >= 2 && lane == 0) add(warp - 2);
  }
};

}  // namespace longspan::hopper
