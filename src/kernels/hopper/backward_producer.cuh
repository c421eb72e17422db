// The producer of the Hopper backward (see backward.cuh): looks up items and loads tiles.
#pragma once

#include "kernels/hopper/backward_shape.cuh"

namespace longspan::hopper {

template <class S>
struct BackwardProducer {
  static constexpr std::uint32_t kAhead = 2;  // items taken before their turn
  const BackwardLaunch& a;
  const BackwardMemory<S> memory;
  typename S::Tasks& tasks;

  /// Fills in the task of an item; false if it has no keys, or no query sees them (items are counted for the longest
  /// strands).
  __device__ __forceinline__ bool describe(unsigned flat, BackwardTask& task) const {
    const cuda::Launch& base = a.parts.base;
    const cuda::Item item = base.decode(flat);
    const cuda::StrandRows strand = base.branches[item.branch].strand(item.head, item.segment, base.length(item.entry));
    const cuda::StrandQueries queries = cuda::queries_of(strand, base.ranges[item.range]);
    const int first_key = item.tile * S::kKeys;
    task.keys = min(S::kKeys, strand.count - first_key);
    task.queries = queries.count;
    task.diagonal = first_key - queries.begin;
    task.turn = item.tile;
    task.tiles = (queries.count + S::kQueries - 1) / S::kQueries;
    task.first_tile = base.causal ? max(0, task.diagonal) / S::kQueries : 0;
    if (task.keys <= 0 || task.tiles <= task.first_tile) return false;
    const int start_index = strand.start / strand.stride, q_row = static_cast<int>(queries.q_row);
    task.k_index = start_index + first_key;
    task.k_phase = strand.start - start_index * strand.stride;
    task.k_map = a.map(item.branch, task.k_phase, a.longer_keys[item.branch]);
    task.q_index = q_row / strand.stride;
    task.q_phase = q_row - task.q_index * strand.stride;
    task.q_map = a.map(item.branch, task.q_phase, a.longer_queries[item.branch]);
    task.head = item.head;
    task.kv_head = a.query_group == 1 ? item.head : item.head / a.query_group;
    task.entry = item.entry;
    task.position = strand.start + first_key * strand.stride;
    task.stride = strand.stride;
    task.row = a.parts.row(item);
    task.first_sums = static_cast<int>(task.row / kSumTileRows);
    return true;
  }

  /// Keeps tasks ready for the loads and for the consumers. Items come off a counter in order, so that whatever an item
  /// of a deterministic call waits for has been taken before it.
  __device__ __forceinline__ void schedule() const {
    for (std::uint32_t count = 0;; ++count) {
      const std::uint32_t slot = count % kTaskSlots;
      if (count >= kAhead) wait(memory.task_free((count - kAhead) % kTaskSlots), (count - kAhead) / kTaskSlots & 1);
      unsigned item = 0;
      do item = atomicAdd(a.parts.ticket, 1u);
      while (item < a.parts.items && !describe(item, tasks[slot]));
      if (item >= a.parts.items) tasks[slot].tiles = -1;
      arrive(memory.task_full(slot));
      if (item >= a.parts.items) return;
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
  __device__ __forceinline__ void load_tile(const CUtensorMap* map, std::uint32_t target, std::uint32_t block_bytes,
                                            std::uint32_t full, Place place) const {
#pragma unroll
    for (int block = 0; block < S::kBlocks; ++block, place.column += kBlockColumns)
      load_box(target + block * block_bytes, map, full, place);
  }

  /// The whole warp; one thread of it starts the loads. A tile that ends after its strand is waited for and cleaned up
  /// before it is handed on.
  __device__ __forceinline__ void load(int lane) const {
    Ring<S::kStages> stage{0, 1};
    Ring<S::kKeyStages> key{0, 1};
    Ring<kTaskSlots> ready;
    std::uint32_t ragged_parity = 0;
    const bool leader = lane == 0;
    const auto await_ragged = [&] {
      wait(memory.ragged(), ragged_parity);
      ragged_parity ^= 1;
    };
    for (;; ready.advance(), key.advance()) {
      wait(memory.task_full(ready.stage), ready.parity);
      const BackwardTask& task = tasks[ready.stage];
      const std::uint32_t key_full = memory.key_full(key.stage);
      wait(memory.key_free(key.stage), key.parity);
      if (task.tiles < 0) {
        if (leader) arrive(key_full);
        return;
      }
      const std::uint32_t keys = memory.keys(key.stage), values = memory.values(key.stage);
      const bool short_keys = task.keys < S::kKeys;
      if (leader) {
        const std::uint32_t full = short_keys ? memory.ragged() : key_full;
        const Place place{0, task.k_index, task.k_phase, task.kv_head, task.entry};
        arrive_and_expect(full, 2 * S::kKeyBytes);
        load_tile(&a.k[task.k_map], keys, S::kKeyBlock, full, place);
        load_tile(&a.v[task.k_map], values, S::kKeyBlock, full, place);
      }
      if (short_keys) {
        await_ragged();
        clear(keys, task.keys, S::kKeys, S::kKeyBlock, lane);
        clear(values, task.keys, S::kKeys, S::kKeyBlock, lane);
        fence_shared();
        __syncwarp();
        if (leader) arrive(key_full);
      }
#pragma unroll 1
      for (int tile = task.first_tile; tile < task.tiles; ++tile, stage.advance()) {
        const int first = tile * S::kQueries, rows = min(S::kQueries, task.queries - first);
        const bool short_tile = rows < S::kQueries;
        const std::uint32_t queries = memory.queries(stage.stage), douts = memory.douts(stage.stage),
                            query_full = memory.query_full(stage.stage), dout_full = memory.dout_full(stage.stage);
        const Place place{0, task.q_index + first, task.q_phase, task.head, task.entry};
        wait(memory.query_free(stage.stage), stage.parity);
        if (leader) {
          const std::uint32_t full = short_tile ? memory.ragged() : query_full;
          arrive_and_expect(full, (short_tile ? 2 : 1) * (S::kQueryBytes + S::kValueBytes));
          load_tile(&a.q[task.q_map], queries, S::kQueryBlock, full, place);
          load_bytes(memory.lse(stage.stage), a.parts.lse + task.row + first, S::kValueBytes, full);
        }
        wait(memory.dout_free(stage.stage), stage.parity);
        if (leader) {
          const std::uint32_t full = short_tile ? memory.ragged() : dout_full;
          if (!short_tile) arrive_and_expect(full, S::kQueryBytes + S::kValueBytes);
          load_tile(&a.dout[task.q_map], douts, S::kQueryBlock, full, place);
          load_bytes(memory.delta(stage.stage), a.parts.delta + task.row + first, S::kValueBytes, full);
        }
        __syncwarp();
        if (!short_tile) continue;
        await_ragged();
        clear(queries, rows, S::kQueries, S::kQueryBlock, lane);
        clear(douts, rows, S::kQueries, S::kQueryBlock, lane);
        for (int row = rows + lane; row < S::kQueries; row += kWarpThreads) {
          store_word(memory.lse(stage.stage) + row * 4, 0xff800000u);  // -inf: no weight
          store_word(memory.delta(stage.stage) + row * 4, 0);
        }
        fence_shared();
        __syncwarp();
        if (leader) {
          arrive(query_full);
          arrive(dout_full);
        }
      }
    }
  }

  /// Adds one group's dQ to memory, tile by tile. Deterministic calls add in the order of keys: each pair of tiles of
  /// sums counts the tiles of keys that are done with it (pairs, since asking and telling take about as long as a
  /// tile). An item waits for items before it, which have been taken before it.
  __device__ __forceinline__ void add(int group) const {
    constexpr int kNone = -1;
    unsigned* const turns = a.parts.turns;
    std::uint32_t parity = 0;
    bool primed = false;
    int open = kNone, ready = kNone;  // the pair that is being added to; the next one, if its turn has come
    const auto close = [&] {
      wait_stores();
      if (open != kNone) add_release(turns + open);
      open = kNone;
    };
    for (Ring<kTaskSlots> at;; at.advance()) {
      wait(memory.task_full(at.stage), at.parity);
      const BackwardTask& task = tasks[at.stage];
      if (task.tiles < 0) break;
      const unsigned turn = static_cast<unsigned>(task.turn);
      const int first = task.first_sums * S::kBlocks + group, tiles = task.tiles, queries = task.queries;
      if (!primed) {  // consumers hand on nothing once
        wait(memory.sum_full(group), parity);
        arrive(memory.sum_free(group));
        parity ^= 1;
        primed = true;
      }
#pragma unroll 1
      for (int tile = task.first_tile; tile < tiles; ++tile, parity ^= 1) {
        wait(memory.sum_full(group), parity);
        if (!S::kWide && (2 * tile + group) * kSumTileRows >= queries) {  // no row of the strand
          arrive(memory.sum_free(group));
          continue;
        }
        const int pair = first + 2 * (tile & ~1);
        const bool opens = turns && pair != open;
        if (opens && pair != ready && cuda::load_acquire(turns + pair) != turn) {
          close();  // the one waited for may wait for that
          while (cuda::load_acquire(turns + pair) != turn) {}
        }
        if (opens) fence_memory();
        add_bytes(a.parts.sums + static_cast<std::int64_t>(first + 2 * tile) * S::kSumTile, memory.sums(group),
                  S::kSumBytes);
        commit_stores();
        wait_stores_read<0>();
        arrive(memory.sum_free(group));
        if (opens) {
          wait_stores<1>();  // all but the tile just added are there, by now without a wait
          if (open != kNone) add_release(turns + open);
          open = pair;
        } else if (turns && tile + 1 < tiles && cuda::load_acquire(turns + pair + 4) == turn) {
          ready = pair + 4;
        }
      }
      ready = kNone;
      // Items before the next one may wait for this one, and the next one for them.
      if (turns) close();
    }
    close();
  }

  __device__ __forceinline__ void run() const {
    const int warp = threadIdx.x / kWarpThreads, lane = threadIdx.x % kWarpThreads;
    if (warp == 0) load(lane);
    else if (warp == 1 && lane == 0) schedule();
    else if (warp >= 2 && lane == 0) add(warp - 2);
  }
};

}  // namespace longspan::hopper
