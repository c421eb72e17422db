// The scheduler warp of a producer (see forward.cuh): takes items of work and describes them, ahead of their turn.
#pragma once

#include "kernels/hopper/extras.cuh"
#include "kernels/hopper/lists.cuh"
#include "kernels/hopper/shape.cuh"

namespace longspan::hopper {

inline constexpr unsigned kRotation = 7;

template <class S>
struct Scheduler {
  const HopperLaunch& a;
  const Memory<S> memory;
  typename S::Tasks& tasks;
  const int stream;

  /// Streams of all blocks, and which of them this is.
  __device__ __forceinline__ unsigned workers() const { return gridDim.x * S::kStreams; }
  __device__ __forceinline__ unsigned worker() const { return blockIdx.x * S::kStreams + stream; }

  /// Takes one item off the counter, for the whole warp.
  __device__ __forceinline__ unsigned take(int lane) const {
    unsigned item = 0;
    if (lane == 0) item = atomicAdd(a.ticket, 1u);
    return __shfl_sync(~0u, item, 0);
  }
  __device__ __forceinline__ unsigned first_item(int lane) const {
    // Branches that wait for others need items in the order in which blocks come to run.
    return S::kMerges ? take(lane) : worker();
  }
  __device__ __forceinline__ unsigned next_item(unsigned item, int lane) const {
    if (!a.ticket) {
      // Blocks take turns, rotated by a few places each round: a strand's last tile is the shortest, and where the
      // number of tiles divides that of blocks one block would get all of those. Under a causal mask items get shorter,
      // so every second round is reversed instead.
      const unsigned round = item / workers(), place = item - round * workers();
      return (round + 1) * workers() + (a.base.rules.causal ? workers() - 1 - place : (place + kRotation) % workers());
    }
    return take(lane) + (S::kMerges ? 0 : workers());
  }

  /// Whether the place at `index` is the first of its tile.
  __device__ __forceinline__ static bool is_first_part(const cuda::BlockPlace* place, int index) {
    return index == 0 || place[-1].tile != place->tile;
  }
  /// Fills in the task of an item; an empty one if it has no rows (strands differ in length, items are counted for the
  /// longest). One thread does this; most of its time goes into divisions.
  __device__ __forceinline__ void describe(unsigned flat, typename S::Item& task) const {
    task = {};
    if (flat >= a.items) return;
    const cuda::Item item = a.base.schedule.decode(flat);
    const cuda::DeviceBranch& branch = a.base.schedule.branches[item.branch];
    const int length = a.base.tensors.length(item.entry);
    const cuda::StrandRows strand = branch.strand(item.head, item.segment, length);
    const cuda::StrandQueries queries =
        a.whole ? cuda::StrandQueries{0, strand.count, strand.start} : a.base.schedule.ranges[item.range].of(strand);
    // Tiles of a branch with a block mask lie on the strand's grid: the first may begin before the range.
    const cuda::BlockLists& lists = a.base.schedule.lists[item.branch];
    const bool masked = S::kLists && lists.places;
    const cuda::BlockPlace* const place = masked ? &lists.place(item.entry, item.head, item.tile) : nullptr;
    const int tile = masked ? place->tile : item.tile;
    const int before = tile * S::kRows - (masked ? queries.begin : 0);
    const int rows = min(S::kRows, queries.count - before), first_row = S::kLists ? max(0, -before) : 0;
    if (rows <= first_row || tile < 0) {  // heads differ in how many parts their lists have
      if constexpr (S::kMerges) atomicAdd(a.finished(item.branch, item.range, item.entry, item.head), 1u);
      return;
    }
    const int first = queries.begin + before, q_row = static_cast<int>(queries.q_row) + before * strand.stride;
    const int last_key = a.base.rules.causal ? min(strand.count, first + rows) : strand.count;
    task.tiles = (last_key + S::kKeys - 1) / S::kKeys;
    if constexpr (S::kLists) {
      task.first_row = first_row;
      if (masked) {
        task.tiles = find_list<S>(lists, *place, strand.count, task);
        task.cut = place->slot > 0;
        task.slot = a.first_slot[item.branch] + place->slot - 1 +
                    ((static_cast<std::int64_t>(item.entry) * branch.segments(a.base.tensors.tokens) + item.segment) *
                         a.base.tensors.heads +
                     item.head) *
                        a.slots[item.branch];
      }
    }
    task.keys = strand.count;
    task.first_query = first;
    task.rows = rows;
    const int packed = a.whole ? -1 : a.places.row(item, a.base.tensors.heads);
    if (packed >= 0) {
      task.k_map = kPackedMap;
      task.k_index = packed;
      task.k_phase = 0;
    } else {
      const int start =
          a.whole ? strand.start : a.places.key_row(item, a.base.schedule.ranges[item.range], strand.start);
      task.k_index = start / strand.stride;
      task.k_phase = start - task.k_index * strand.stride;
      task.k_map = a.map(item.branch, task.k_phase, a.longer_keys[item.branch]);
    }
    task.q_index = a.whole     ? task.k_index + before
                   : S::kLists ? first_index(q_row, before, strand.stride)
                               : q_row / strand.stride;
    task.q_phase = q_row - task.q_index * strand.stride;
    task.q_map = a.map(item.branch, task.q_phase, a.longer_queries[item.branch]);
    task.head = item.head;
    task.kv_head = packed >= 0 ? 0 : a.query_group == 1 ? item.head : item.head / a.query_group;
    task.entry = item.entry;
    task.q_row = q_row;
    task.stride = strand.stride;
    task.branch = item.branch;
    if constexpr (S::kExtras) task.branch += a.first_branch;
    task.range = item.range;
    task.length = length;
    task.position = strand.start + first * strand.stride;
    task.padding = branch.padding(strand.count, length, a.base.rules.causal);
    if constexpr (S::kLists) task.padding = task.cut && !is_first_part(place, item.tile) ? 0 : task.padding;
    if constexpr (S::kExtras) {
      task.masked = a.base.rules.key_mask != nullptr;
      task.slope = a.base.rules.alibi
                       ? a.base.rules.alibi[item.head * a.base.rules.alibi_head] * (cuda::kLog2E * strand.stride)
                       : 0.0f;
    }
  }
  /// Leaves out the tiles before the first and after the last key that key_mask allows, by a warp. One tile remains.
  __device__ __forceinline__ void trim(typename S::Item& task, int lane) const {
    const MaskedKeys keys(a.base, task);
    const int count = task.keys, rows = task.first_query + task.rows;
    if (task.tiles == 0) return;
    const int end = keys.end_of_allowed(lane), first = end > 0 ? keys.first_allowed(lane) : 0;
    // Padding at the end: what is left is as without a mask. Items that share a tile have to be alike.
    const bool whole = a.packed == 1 && first % S::kKeys == 0 && end > 0 && keys.all_allowed(first, end, lane);
    if (lane == 0) {
      const int end_tile = max(1, ((a.base.rules.causal ? min(end, rows) : end) + S::kKeys - 1) / S::kKeys);
      task.keys = end;
      task.first_tile = min(first / S::kKeys, end_tile - 1);
      task.tiles = end_tile - task.first_tile;
      task.masked = !whole;
    }
  }
  /// Finds work from `item` on: one item of the table, or several whose strands are short, described by a thread each.
  __device__ __forceinline__ void find(unsigned& item, typename S::Item* task, int lane) const {
    for (;; item = next_item(item, lane)) {
      const bool none = item * a.packed >= a.items;
      int tiles = 0, below = 0, total = 0;
      if (lane < a.packed) describe(item * a.packed + lane, task[lane]);
      if constexpr (S::kExtras && !S::kLists) {
        __syncwarp();
        for (int i = 0; i < a.packed && a.base.rules.key_mask; ++i) trim(task[i], lane);
        __syncwarp();
      }
      if (lane < a.packed) tiles = task[lane].tiles;
      for (int i = 0; i < a.packed; ++i) {
        const int others = __shfl_sync(~0u, tiles, i);
        if (i < lane) below += others;
        total += others;
      }
      if (lane < a.packed) {
        task[lane].below = below;
        task[lane].above = total - below - tiles;
        if (none) task[lane].tiles = -1;
      }
      __syncwarp();
      if constexpr (S::kLists) {
        bring_entries<S>(task[0], lane);
        __syncwarp();  // lanes have read of the task before the first describes another one there
      }
      if (none || total > 0) return;
    }
  }

  /// Waits until consumers are done with a task, then tells later branches: consumers would have to wait until what
  /// they wrote is visible to other blocks.
  __device__ __forceinline__ void await_done(std::uint32_t number, int lane) const {
    wait(memory.task_free(number % kTaskSlots), number / kTaskSlots & 1);
    if constexpr (S::kMerges) {
      const Task& task = tasks[number % kTaskSlots][0];
      if (lane == 0) {
        __threadfence();
        atomicAdd(a.finished(task.branch, task.range, task.entry, task.head), 1u);
      }
      __syncwarp();
    }
  }
  /// After this stream's last item. The last stream of all resets the counters for the next launch.
  __device__ __forceinline__ void leave(int lane) const {
    if (!a.base.scratch.leaving) return;
    unsigned before = 0;
    if (lane == 0) {
      __threadfence();
      before = atomicAdd(a.base.scratch.leaving, 1u);
      __threadfence();
    }
    if (__shfl_sync(~0u, before, 0) + 1 < workers()) return;
    for (int i = lane; i < cuda::kCounterWords; i += kWarpThreads) a.base.scratch.leaving[i] = 0;
  }
  /// Keeps tasks described ahead of the loads and of the consumers.
  __device__ __forceinline__ void run(int lane) const {
    const std::uint32_t ahead = static_cast<std::uint32_t>(a.ahead);
    unsigned item = first_item(lane);
    for (std::uint32_t count = 0;; ++count, item = next_item(item, lane)) {
      const std::uint32_t slot = count % kTaskSlots;
      if (count >= ahead) await_done(count - ahead, lane);
      find(item, tasks[slot], lane);
      arrive(memory.task_full(slot));
      if (tasks[slot][0].tiles >= 0) continue;
      if constexpr (S::kMerges) {
        for (std::uint32_t number = count < ahead ? 0 : count - ahead + 1; number < count; ++number)
          await_done(number, lane);
      }
      return leave(lane);
    }
  }
};

}  // namespace longspan::hopper
