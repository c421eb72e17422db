// The warps of a producer that load tiles by TMA (see forward.cuh), and the one that prepares key_mask for consumers.
#pragma once

#include "kernels/hopper/extras.cuh"
#include "kernels/hopper/lists.cuh"
#include "kernels/hopper/shape.cuh"

namespace longspan::hopper {

template <class S>
struct Loader {
  const HopperLaunch& a;
  const Memory<S> memory;
  typename S::Tasks& tasks;
  typename S::Notes& notes;
  const int lane;  // of tiles in parts all load, of others the first

  /// Walks over the tiles of items taken together: from the last item's last tile to the first item's first.
  struct Cursor {
    using Item = typename S::Item;
    const Item* task;
    int left, tile, first_tile = 0;
    __device__ __forceinline__ Cursor(const Item* first, int packed) : task(first + packed), left(packed), tile(0) {
      advance();
    }
    __device__ __forceinline__ void advance() {
      --tile;
      while (tile < first_tile && left > 0) {
        --left;
        --task;
        if constexpr (S::kExtras) first_tile = task->first_tile;
        tile = first_tile + task->tiles - 1;
      }
    }
    __device__ __forceinline__ int first_key() const { return tile * S::kKeys; }
  };
  __device__ __forceinline__ void load_keys(const CUtensorMap* maps, std::uint32_t target, std::uint32_t full,
                                            const Task& task, const TilePlace& place) const {
    if constexpr (S::kParts) {
      __syncwarp();  // notes are written
      if (lane == 0) arrive_and_expect(full, S::kKeyBytes);
      __syncwarp();
      if (!place.mine || place.row % a.part_rows != 0) return;
    } else {
      arrive_and_expect(full, S::kKeyBytes);
    }
#pragma unroll
    for (int block = 0; block < S::kBlocks; ++block)
      load_box(target + block * S::kKeyBlock + place.row * 128, maps + task.k_map, full,
               {block * kBlockColumns, task.k_index + place.first_key, task.k_phase, task.kv_head, task.entry});
  }
  __device__ __forceinline__ void load_tile(const CUtensorMap* maps, std::uint32_t target, std::uint32_t full,
                                            const Cursor& at) const {
    load_keys(maps, target, full, *at.task, {at.first_key()});
  }

  __device__ __forceinline__ void load() const {
    if constexpr (S::kSplitsLoads) load_listed_keys();
    else if constexpr (S::kLists) load_lists();
    else load_strands();
  }
  __device__ __forceinline__ void load_strands() const {
    Ring<S::kStages> k{0, 1}, v{0, 1};
    Ring<S::kQuerySlots> q{0, 1};
    Ring<kTaskSlots> ready;
    const int rows_each = S::kRows / a.packed;
    for (;; q.advance(), ready.advance()) {
      wait(memory.task_full(ready.stage), ready.parity);
      const typename S::Item* const task = tasks[ready.stage];
      const int tiles = task[0].tiles < 0 ? -1 : task[0].above + task[0].tiles;
      const std::uint32_t full = memory.query_full(q.stage);
      wait(memory.query_free(q.stage), q.parity);
      if (tiles < 0) {
        arrive(full);
        return;
      }
      arrive_and_expect(full, S::kQueryBytes);
      const typename S::Item* own = task;
      std::uint32_t target = memory.queries(q.stage);
#pragma unroll 1
      for (int group = 0, row = 0; group < S::kGroups; ++group, row += kGroupRows) {
        if (row == rows_each) {
          row = 0;
          ++own;
        }
#pragma unroll
        for (int block = 0; block < S::kBlocks; ++block, target += S::kQueryBlock)
          load_box(target, &a.q[own->q_map], full,
                   {block * kBlockColumns, own->q_index + row, own->q_phase, own->head, own->entry});
      }
      // Consumers multiply by K of a tile before V of the tile above it.
      Cursor key(task, a.packed), value(task, a.packed);
#pragma unroll 1
      for (int left = tiles; left >= 0; --left) {
        if (left > 0) {
          wait(memory.key_free(k.stage), k.parity);
          load_tile(a.k, memory.keys(k.stage), memory.key_full(k.stage), key);
          k.advance();
          key.advance();
        }
        if (left < tiles) {
          wait(memory.value_free(v.stage), v.parity);
          load_tile(a.v, memory.values(v.stage), memory.value_full(v.stage), value);
          v.advance();
          value.advance();
        }
      }
    }
  }

  /// Q of the next item; null after the last one.
  __device__ __forceinline__ const ListTask* load_listed_queries(Ring<kTaskSlots>& ready,
                                                                 Ring<S::kQuerySlots>& q) const {
    wait(memory.task_full(ready.stage), ready.parity);
    const ListTask& task = tasks[ready.stage][0];
    const std::uint32_t full = memory.query_full(q.stage);
    wait(memory.query_free(q.stage), q.parity);
    if (task.tiles < 0) {
      if (lane == 0) arrive(full);
      return nullptr;
    }
    if (lane == 0) {
      arrive_and_expect(full, S::kQueryBytes);
#pragma unroll
      for (int i = 0; i < S::kGroups * S::kBlocks; ++i)
        load_box(memory.queries(q.stage) + i * S::kQueryBlock, &a.q[task.q_map], full,
                 {i % S::kBlocks * kBlockColumns, task.q_index + i / S::kBlocks * kGroupRows, task.q_phase, task.head,
                  task.entry});
    }
    q.advance();
    ready.advance();
    return &task;
  }
  /// Items with lists: tiles in the order of the list, each with a note on what to mask. Lists are short, so the next
  /// item is prefetched: its Q in the middle of this item, as soon as its slot can be free, and its first K before this
  /// item's last V.
  __device__ __forceinline__ void load_lists() const {
    Ring<S::kStages> k{0, 1}, v{0, 1};
    Ring<S::kQuerySlots> q{0, 1};
    Ring<kTaskSlots> ready;
    const ListTask* above = nullptr;  // the tile whose V is next
    TilePlace above_place;
    const auto load_values = [&] {
      if (!above) return;
      wait(memory.value_free(v.stage), v.parity);
      load_keys(a.v, memory.values(v.stage), memory.value_full(v.stage), *above, above_place);
      v.advance();
      above = nullptr;
    };
    const ListTask* next = load_listed_queries(ready, q);
    while (next) {
      const ListTask& task = *next;
      const int tiles = task.tiles, early = min(S::kStages, tiles - 1);
      Walk<S> at(task, lane);
#pragma unroll 1
      for (int tile = 0; tile < tiles; ++tile) {
        const TilePlace tile_place = at.place();
        wait(memory.key_free(k.stage), k.parity);
        at.write_note(notes[k.stage], a.base.rules.causal);
        load_keys(a.k, memory.keys(k.stage), memory.key_full(k.stage), task, tile_place);
        k.advance();
        at.advance();
        load_values();
        above = &task;
        above_place = tile_place;
        if (tile != early) continue;
        // The item before releases its slot when this item's first tile is done, which may need that tile's V.
        if (tile == 0) load_values();
        next = load_listed_queries(ready, q);
      }
    }
    load_values();
  }
  /// With a warp each, neither K nor V waits for a free stage of the other. The task's place is kept in registers,
  /// because the compiler reads shared memory again after every load. The task is not read after its last load: from
  /// then on consumers may release it.
  __device__ __forceinline__ void load_listed_keys() const {
    Ring<S::kStages> k{0, 1};
    Ring<S::kQuerySlots> q{0, 1};
    Ring<kTaskSlots> ready;
    const ListTask* next = load_listed_queries(ready, q);
    while (next) {
      const Task place = *next;
      const int early = min(S::kStages, place.tiles - 1);
      Walk<S> at(*next, lane);
#pragma unroll 1
      for (int tile = 0; tile < place.tiles; ++tile) {
        const TilePlace tile_place = at.place();
        wait(memory.key_free(k.stage), k.parity);
        at.write_note(notes[k.stage], a.base.rules.causal);
        at.advance();
        load_keys(a.k, memory.keys(k.stage), memory.key_full(k.stage), place, tile_place);
        k.advance();
        if (tile == early) next = load_listed_queries(ready, q);
      }
    }
  }
  __device__ __forceinline__ void load_listed_values() const {
    Ring<S::kStages> v{0, 1};
    Ring<kTaskSlots> ready;
    for (;; ready.advance()) {
      wait(memory.task_full(ready.stage), ready.parity);
      const Task place = tasks[ready.stage][0];
      if (place.tiles < 0) return;
      Walk<S> at(tasks[ready.stage][0], lane);
#pragma unroll 1
      for (int tile = 0; tile < place.tiles; ++tile) {
        const TilePlace tile_place = at.place();
        at.advance();
        wait(memory.value_free(v.stage), v.parity);
        load_keys(a.v, memory.values(v.stage), memory.value_full(v.stage), place, tile_place);
        v.advance();
      }
    }
  }

  /// Turns key_mask into bits beside each stage of K, and overwrites excluded keys and their values with zeros. Bytes
  /// of a tile are asked for while the tile before it is worked on.
  __device__ __forceinline__ void mask_keys() const {
    Ring<S::kStages> k, v;
    const auto clean = [&](const TileBits<S>& bits, bool clears, std::uint32_t full, std::uint32_t parity,
                           std::uint32_t place, std::uint32_t clean) {
      wait(full, parity);
      if (clears && !bits.all()) {
        bits.clear_excluded(place, lane);
        fence_shared();
        __syncwarp();
      }
      if (lane == 0) arrive(clean);
    };
    Ring<kTaskSlots> ready;
    const auto mask_tiles = [&](const auto& task, auto next_key) {
      if (!task.masked) {
        for (int tiles = task.tiles; tiles > 0; --tiles) k.advance(), v.advance();
        return;
      }
      const MaskedKeys keys(a.base, task);
      typename TileBits<S>::Bytes bytes(keys, next_key(), lane);
#pragma unroll 1
      for (int tiles = task.tiles; tiles > 0; --tiles) {
        const TileBits<S> bits(bytes);
        if (tiles > 1) bytes = typename TileBits<S>::Bytes(keys, next_key(), lane);
        wait(memory.key_full(k.stage), k.parity);
        if (lane == 0) store_words(memory.key_bits(k.stage), bits.word);
        clean(bits, S::kClearsKeys, memory.key_full(k.stage), k.parity, memory.keys(k.stage),
              memory.key_clean(k.stage));
        k.advance();
        clean(bits, true, memory.value_full(v.stage), v.parity, memory.values(v.stage), memory.value_clean(v.stage));
        v.advance();
      }
    };
    for (;; ready.advance()) {
      wait(memory.task_full(ready.stage), ready.parity);
      const typename S::Item* const task = tasks[ready.stage];
      if (task[0].tiles < 0) return;
      if constexpr (S::kLists) {
        mask_tiles(task[0], [at = Walk<S>(task[0], lane)]() mutable {
          const int key = at.key_of_lane();
          at.advance();
          return key;
        });
      } else {
        for (int i = a.packed - 1; i >= 0; --i) {
          if (task[i].tiles == 0) continue;
          mask_tiles(task[i], [tile = task[i].first_tile + task[i].tiles, this]() mutable {
            return --tile * S::kKeys + lane / 2 * 8 + lane % 2;
          });
        }
      }
    }
  }
};

}  // namespace longspan::hopper
