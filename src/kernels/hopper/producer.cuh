// The producer of the Hopper forward (see forward.cuh): takes items, loads tiles, and zeroes rows that no branch
// covers.
#pragma once

#include "kernels/hopper/shape.cuh"

namespace longspan::hopper {

inline constexpr unsigned kRotation = 7;

template <class S>
struct Producer {
  using T = typename S::Element;
  const HopperLaunch& a;
  const Memory<S> memory;
  Task* const tasks;

  __device__ __forceinline__ unsigned first_item() const {
    // Branches that wait for others need items in the order in which blocks come to run.
    return S::kMerges ? atomicAdd(a.ticket, 1u) : blockIdx.x;
  }
  __device__ __forceinline__ unsigned next_item(unsigned item) const {
    if (!a.ticket) {
      // In turn, but each round a few places on: a strand's last tile is the shortest, and where the number of tiles
      // divides that of blocks one block would get all of them.
      const unsigned round = item / gridDim.x;
      return (round + 1) * gridDim.x + (item - round * gridDim.x + kRotation) % gridDim.x;
    }
    return atomicAdd(a.ticket, 1u) + (S::kMerges ? 0 : gridDim.x);
  }

  /// Fills in the task of an item; false if the item has no rows (strands differ in length, items are counted for the
  /// longest).
  __device__ __forceinline__ bool describe(unsigned flat, Task& task) const {
    const cuda::Item item = a.base.decode(flat);
    const cuda::DeviceBranch& branch = a.base.branches[item.branch];
    const int length = a.base.length(item.entry);
    const cuda::StrandRows strand = branch.strand(item.head, item.segment, length);
    const cuda::StrandQueries queries = cuda::queries_of(strand, a.base.ranges[item.range]);
    const int before = item.tile * S::kRows, rows = min(S::kRows, queries.count - before);
    if (rows <= 0) {
      if constexpr (S::kMerges) atomicAdd(a.finished(item.branch, item.range, item.entry, item.head), S::kGroups);
      return false;
    }
    const int first = queries.begin + before, q_row = static_cast<int>(queries.q_row) + before * strand.stride;
    const int last_key = a.base.causal ? min(strand.count, first + rows) : strand.count;
    task.tiles = (last_key + S::kKeys - 1) / S::kKeys;
    task.keys = strand.count;
    task.first_query = first;
    task.rows = rows;
    task.q_index = q_row / strand.stride;
    task.q_phase = q_row - task.q_index * strand.stride;
    task.q_map = a.map(item.branch, task.q_phase, static_cast<int>(a.base.query_rows));
    task.k_index = strand.start / strand.stride;
    task.k_phase = strand.start - task.k_index * strand.stride;
    task.k_map = a.map(item.branch, task.k_phase, a.base.tokens);
    task.head = item.head;
    task.kv_head = item.head / (a.base.heads / a.base.kv_heads);
    task.entry = item.entry;
    task.q_row = q_row;
    task.stride = strand.stride;
    task.branch = item.branch;
    task.range = item.range;
    task.length = length;
    task.position = strand.start + first * strand.stride;
    task.padding = branch.padding(strand, length, a.base.causal);
    return true;
  }
  __device__ __forceinline__ void find(unsigned& item, Task& task) const {
    while (item < a.items && !describe(item, task)) item = next_item(item);
    if (item >= a.items) task.tiles = -1;
  }

  __device__ __forceinline__ void load() const {
    Ring<S::kStages> k{0, 1}, v{0, 1};
    unsigned item = first_item();
    find(item, tasks[0]);
    for (std::uint32_t taken = 0;; ++taken) {
      const Task& task = tasks[taken % kTaskSlots];
      const std::uint32_t slot = taken % kQuerySlots;
      const int tiles = task.tiles;
      wait(memory.query_free(slot), (taken / kQuerySlots & 1) ^ 1);
      if (tiles < 0) {
        arrive(memory.query_full(slot));
        return;
      }
      arrive_and_expect(memory.query_full(slot), S::kQueryBytes);
#pragma unroll
      for (int box = 0; box < S::kGroups * S::kBlocks; ++box) {
        const int group = box / S::kBlocks, column = box % S::kBlocks * kBlockColumns;
        load_box(memory.queries(slot) + box * S::kQueryBlock, &a.q[task.q_map], memory.query_full(slot),
                 {column, task.q_index + group * kGroupRows, task.q_phase, task.head, task.entry});
      }
      const Place place{0, task.k_index, task.k_phase, task.kv_head, task.entry};
      const CUtensorMap *const key_map = &a.k[task.k_map], *const value_map = &a.v[task.k_map];
      const auto load_tile = [&](const CUtensorMap* map, std::uint32_t target, std::uint32_t full, int tile) {
        arrive_and_expect(full, S::kKeyBytes);
#pragma unroll
        for (int block = 0; block < S::kBlocks; ++block)
          load_box(target + block * S::kKeyBlock, map, full,
                   {block * kBlockColumns, place.index + tile * S::kKeys, place.phase, place.head, place.entry});
      };
      // Consumers multiply by K of a tile before V of the tile above it. The next item is looked up once they have
      // work.
      const int look_up = max(tiles - S::kStages, -1);
#pragma unroll 1
      for (int tile = tiles - 1; tile >= -1; --tile) {
        if (tile >= 0) {
          wait(memory.key_free(k.stage), k.parity);
          load_tile(key_map, memory.keys(k.stage), memory.key_full(k.stage), tile);
          k.advance();
        }
        if (tile < tiles - 1) {
          wait(memory.value_free(v.stage), v.parity);
          load_tile(value_map, memory.values(v.stage), memory.value_full(v.stage), tile + 1);
          v.advance();
        }
        if (tile == look_up) {
          item = next_item(item);
          find(item, tasks[(taken + 1) % kTaskSlots]);
        }
      }
    }
  }

  /// Zeros to the phases that no strand has, by boxes; few at a time, since loads share the copy engine.
  __device__ __forceinline__ void fill_boxes() const {
    const int rows = a.base.tokens;
#pragma unroll 1
    for (int b = 0; b < a.base.branch_count; ++b) {
      const cuda::DeviceBranch& branch = a.base.branches[b];
      const unsigned others = branch.dilation - 1, per_row = branch.head_count * S::kBlocks;
      if (others == 0) continue;
      const unsigned boxes = ((rows + branch.dilation - 1) / branch.dilation + kGroupRows - 1) / kGroupRows;
      const unsigned total = a.base.batch * boxes * others * per_row;
#pragma unroll 1
      for (unsigned i = blockIdx.x; i < total; i += gridDim.x) {
        const unsigned by_phase = i / per_row, by_box = by_phase / others, entry = by_box / boxes;
        const int column = i - by_phase * per_row, head = branch.head_begin + column / S::kBlocks;
        const int other = by_phase - by_box * others, phase = other + (other >= branch.phase(head));
        store_box_once(&a.out[a.map(b, phase, rows)], memory.zeros(),
                       {column % S::kBlocks * kBlockColumns, static_cast<int>(by_box - entry * boxes) * kGroupRows,
                        phase, head, static_cast<int>(entry)});
        commit_stores();
        wait_stores_read<2>();
      }
    }
    wait_stores();
  }
  /// lse of the same rows.
  __device__ __forceinline__ void fill_lse(unsigned worker, unsigned workers, int lane) const {
    constexpr int kRun = 1024;
    if (!a.base.lse) return;
#pragma unroll 1
    for (int b = 0; b < a.base.branch_count; ++b) {
      const cuda::DeviceBranch& branch = a.base.branches[b];
      const int dilation = branch.dilation, step = kWarpThreads % dilation;
      if (dilation == 1) continue;
      const unsigned runs = (a.base.tokens + kRun - 1) / kRun, total = runs * branch.head_count * a.base.batch;
#pragma unroll 1
      for (unsigned i = worker; i < total; i += workers) {
        const unsigned by_head = i / runs, entry = by_head / branch.head_count;
        const int head = branch.head_begin + static_cast<int>(by_head - entry * branch.head_count);
        const int first = static_cast<int>(i - by_head * runs) * kRun, last = min(first + kRun, a.base.tokens);
        const int phase = branch.phase(head);
        float* const lse = a.base.lse + a.base.lse_offset(entry, 0, head);
        int at = (first + lane) % dilation;
#pragma unroll 1
        for (int row = first + lane; row < last; row += kWarpThreads) {
          if (at != phase) lse[row * a.base.lse_row] = -LONGSPAN_INFINITY;
          at += step;
          if (at >= dilation) at -= dilation;
        }
      }
    }
  }

  __device__ __forceinline__ void run() const {
    const int warp = threadIdx.x / kWarpThreads, lane = threadIdx.x % kWarpThreads;
    if (warp == 0) {
      if (lane == 0) load();
    } else if (a.fill_boxes) {
      if (warp > 1) fill_lse((warp - 2) * gridDim.x + blockIdx.x, 2 * gridDim.x, lane);
      else if (lane == 0) fill_boxes();
    } else {
#pragma unroll 1
      for (unsigned i = (warp - 1) * gridDim.x + blockIdx.x; i < a.fill_items; i += 3 * gridDim.x)
        cuda::fill_uncovered<T>(a.base, a.base.decode(a.items + i), 0, 1);
    }
  }
};

}  // namespace longspan::hopper
