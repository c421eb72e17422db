// The producer of the Hopper forward (see forward.cuh): takes items, loads tiles, and zeroes rows that no branch
// covers.
#pragma once

#include "kernels/hopper/extras.cuh"
#include "kernels/hopper/lists.cuh"
#include "kernels/hopper/shape.cuh"

namespace longspan::hopper {

inline constexpr unsigned kRotation = 7;

template <class S>
struct Producer {
  using T = typename S::Element;
  const HopperLaunch& a;
  const Memory<S> memory;
  typename S::Tasks& tasks;
  typename S::Notes& notes;
  typename S::Shares& shares;
  const int stream;

  /// Streams of all blocks, and which of them this is.
  __device__ __forceinline__ unsigned workers() const { return gridDim.x * S::kStreams; }
  __device__ __forceinline__ unsigned worker() const { return blockIdx.x * S::kStreams + stream; }

  /// One off the counter for the whole warp.
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
      // In turn, but each round a few places on: a strand's last tile is the shortest, and where the number of tiles
      // divides that of blocks one block would get all of them. Items that get shorter go there and back instead.
      const unsigned round = item / workers(), place = item - round * workers();
      return (round + 1) * workers() + (a.base.rules.causal ? workers() - 1 - place : (place + kRotation) % workers());
    }
    return take(lane) + (S::kMerges ? 0 : workers());
  }

  /// Fills in the task of an item; an empty one if it has no rows (strands differ in length, items are counted for the
  /// longest). One thread does this, a few instructions after the other: divisions are what it spends its time on.
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
    const bool masked = S::kLists && a.base.schedule.lists[item.branch].places;
    const int before = item.tile * S::kRows - (masked ? queries.begin : 0);
    const int rows = min(S::kRows, queries.count - before), first_row = S::kLists ? max(0, -before) : 0;
    if (rows <= first_row) {
      if constexpr (S::kMerges) atomicAdd(a.finished(item.branch, item.range, item.entry, item.head), 1u);
      return;
    }
    const int first = queries.begin + before, q_row = static_cast<int>(queries.q_row) + before * strand.stride;
    const int last_key = a.base.rules.causal ? min(strand.count, first + rows) : strand.count;
    task.tiles = (last_key + S::kKeys - 1) / S::kKeys;
    if constexpr (S::kLists) {
      task.first_row = first_row;
      if (masked) task.tiles = find_list<S>(a.base.schedule.lists[item.branch], item, strand.count, task);
    }
    task.keys = strand.count;
    task.first_query = first;
    task.rows = rows;
    task.k_index = strand.start / strand.stride;
    task.k_phase = strand.start - task.k_index * strand.stride;
    task.k_map = a.map(item.branch, task.k_phase, a.longer_keys[item.branch]);
    task.q_index = a.whole     ? task.k_index + before
                   : S::kLists ? first_index(q_row, before, strand.stride)
                               : q_row / strand.stride;
    task.q_phase = q_row - task.q_index * strand.stride;
    task.q_map = a.map(item.branch, task.q_phase, a.longer_queries[item.branch]);
    task.head = item.head;
    task.kv_head = a.query_group == 1 ? item.head : item.head / a.query_group;
    task.entry = item.entry;
    task.q_row = q_row;
    task.stride = strand.stride;
    task.branch = item.branch;
    task.range = item.range;
    task.length = length;
    task.position = strand.start + first * strand.stride;
    task.padding = branch.padding(strand.count, length, a.base.rules.causal);
    if constexpr (S::kExtras)
      task.slope = a.base.rules.alibi
                       ? a.base.rules.alibi[item.head * a.base.rules.alibi_head] * (cuda::kLog2E * strand.stride)
                       : 0.0f;
  }
  /// Leaves out the tiles before the first and after the last key that key_mask allows, by a warp. One tile remains.
  __device__ __forceinline__ void trim(typename S::Item& task, int lane) const {
    const MaskedKeys keys(a.base, task);
    const int count = task.keys, rows = task.first_query + task.rows;
    if (task.tiles == 0) return;
    const int end = keys.end_of_allowed(lane), first = end > 0 ? keys.first_allowed(lane) : 0;
    if (lane == 0) {
      const int end_tile = max(1, ((a.base.rules.causal ? min(end, rows) : end) + S::kKeys - 1) / S::kKeys);
      task.keys = end;
      task.first_tile = min(first / S::kKeys, end_tile - 1);
      task.tiles = end_tile - task.first_tile;
    }
  }
  /// Looks for work from `item` on: one item of the table, or several whose strands are short, by a thread each.
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

  /// Until consumers are done with a task; then later branches are told, in the consumers' stead, since it takes long
  /// until what they wrote is visible everywhere.
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
  /// After the last of this stream's items: the last stream of all leaves the counters as it found them.
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
  /// Keeps tasks ready for the loads and for the consumers.
  __device__ __forceinline__ void schedule(int lane) const {
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

  /// Whether earlier (1) and later (2) branches cover rows of a task: two bits for each of a thread's, which are every
  /// 32nd. They are equal steps apart, so that only the first needs divisions; those that all threads need are done by
  /// one of them for each branch.
  __device__ __forceinline__ unsigned other_branches(const Task& task, int lane) const {
    static_assert(cuda::kMaxBranches <= kWarpThreads);
    const unsigned step = static_cast<unsigned>(kWarpThreads) * task.stride;
    const cuda::DeviceBranch& mine = a.base.schedule.branches[min(lane, a.base.schedule.branch_count - 1)];
    const unsigned my_phase = mine.phase(task.head), my_advance = step % mine.segment;
    const unsigned my_turn = my_advance % mine.dilation, my_loss = static_cast<unsigned>(mine.segment) % mine.dilation;
    unsigned left = __ballot_sync(~0u, lane < a.base.schedule.branch_count && lane != task.branch &&
                                           mine.owns(task.head) && mine.active(task.length));
    unsigned others = 0;
    for (; left != 0; left &= left - 1) {
      const int b = __ffs(left) - 1;
      const unsigned phase = __shfl_sync(~0u, my_phase, b), advance = __shfl_sync(~0u, my_advance, b);
      const unsigned turn = __shfl_sync(~0u, my_turn, b), loss = __shfl_sync(~0u, my_loss, b);
      const unsigned segment = a.base.schedule.branches[b].segment, dilation = a.base.schedule.branches[b].dilation;
      unsigned place = (static_cast<unsigned>(task.position) + lane * static_cast<unsigned>(task.stride)) % segment;
      unsigned rest = place % dilation;
#pragma unroll
      for (int i = 0; i < S::kRows / kWarpThreads; ++i) {
        if (rest == phase) others |= (b < task.branch ? 1u : 2u) << 2 * i;
        place += advance;
        rest += turn;
        if (rest >= dilation) rest -= dilation;
        if (place >= segment) {
          place -= segment;
          rest += rest < loss ? dilation - loss : 0 - loss;
        }
      }
    }
    const int own_rows = max((task.rows - lane + kWarpThreads - 1) / kWarpThreads, 0);
    return others & ((1u << 2 * own_rows) - 1);
  }
  /// Until the earlier branches of a task's rows are done, one of them for each thread.
  __device__ __forceinline__ void await_earlier(const Task& task, int lane) const {
    static_assert(cuda::kMaxWork <= kWarpThreads);
    if (lane < a.base.schedule.work_count) {
      const cuda::Work& work = a.base.schedule.work[lane];
      if (work.branch >= 0 && work.branch < task.branch && work.range == task.range) {
        const unsigned expected = static_cast<unsigned>(work.segments * work.tiles);
        const unsigned* const counter = a.finished(work.branch, task.range, task.entry, task.head);
        while (cuda::load_acquire(counter) < expected) __nanosleep(64);
      }
    }
    __syncwarp();
  }
  /// Brings what earlier branches left of each task's rows, while consumers compute what this one adds.
  __device__ __forceinline__ void bring_state(int lane) const {
    constexpr int kEach = S::kRows / kWarpThreads;  // rows of a thread
    for (std::uint32_t number = 0;; ++number) {
      const std::uint32_t slot = number % kTaskSlots, full = memory.state_full(slot);
      wait(memory.task_full(slot), number / kTaskSlots & 1);
      const Task& task = tasks[slot][0];
      if (task.tiles < 0) return;
      const unsigned others = other_branches(task, lane);
      int count = 0;
#pragma unroll
      for (int i = 0; i < kEach; ++i) count += __popc(__ballot_sync(~0u, others >> 2 * i & 1));
      await_earlier(task, lane);
      // One buffer: the consumers must be done with the task before.
      if (number > 0) wait(memory.task_free((number - 1) % kTaskSlots), (number - 1) / kTaskSlots & 1);
      fence_memory();  // other blocks wrote the state, consumers read the buffer; now the copy engine does both
      std::int64_t packed = a.base.tensors.packed_row(task.entry, task.q_row + lane * task.stride, task.head);
#pragma unroll 2
      for (int i = 0, row = lane; i < kEach; ++i, row += kWarpThreads, packed += kWarpThreads * task.stride) {
        float2 found = make_float2(-LONGSPAN_INFINITY, 0.0f);
        if (others >> 2 * i & 1) {
          if constexpr (S::kHoldsState)
            load_bytes(memory.state(row), a.base.scratch.state + packed * a.base.tensors.columns,
                       a.base.tensors.columns * 4, full);
          found = __ldcg(reinterpret_cast<const float2*>(a.base.scratch.state_sums) + packed);
        }
        shares.found[row] = found;
        shares.others[row] = others >> 2 * i & 3;
      }
      if (lane == 0 && S::kHoldsState) arrive_and_expect(full, count * a.base.tensors.columns * 4);
      else arrive(full);
    }
  }

  /// A place in the stream of tiles: from the last item's last to the first item's first.
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
                                            const Task& task, int first_key) const {
    arrive_and_expect(full, S::kKeyBytes);
#pragma unroll
    for (int block = 0; block < S::kBlocks; ++block)
      load_box(target + block * S::kKeyBlock, maps + task.k_map, full,
               {block * kBlockColumns, task.k_index + first_key, task.k_phase, task.kv_head, task.entry});
  }
  __device__ __forceinline__ void load_tile(const CUtensorMap* maps, std::uint32_t target, std::uint32_t full,
                                            const Cursor& at) const {
    load_keys(maps, target, full, *at.task, at.first_key());
  }

  __device__ __forceinline__ void load() const {
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
      arrive(full);
      return nullptr;
    }
    arrive_and_expect(full, S::kQueryBytes);
#pragma unroll
    for (int i = 0; i < S::kGroups * S::kBlocks; ++i)
      load_box(memory.queries(q.stage) + i * S::kQueryBlock, &a.q[task.q_map], full,
               {i % S::kBlocks * kBlockColumns, task.q_index + i / S::kBlocks * kGroupRows, task.q_phase, task.head,
                task.entry});
    q.advance();
    ready.advance();
    return &task;
  }
  /// The same for items with lists: tiles in the order of the list, each with a note on what to mask. Lists are short,
  /// so items follow one another without a gap: Q of the next one is loaded in the midst of this one, as soon as its
  /// place can be free, and its first K before this one's last V.
  __device__ __forceinline__ void load_lists() const {
    Ring<S::kStages> k{0, 1}, v{0, 1};
    Ring<S::kQuerySlots> q{0, 1};
    Ring<kTaskSlots> ready;
    const ListTask* above = nullptr;  // the tile whose V is next
    int above_key = 0;
    const auto load_values = [&] {
      if (!above) return;
      wait(memory.value_free(v.stage), v.parity);
      load_keys(a.v, memory.values(v.stage), memory.value_full(v.stage), *above, above_key);
      v.advance();
      above = nullptr;
    };
    const ListTask* next = load_listed_queries(ready, q);
    while (next) {
      const ListTask& task = *next;
      const int tiles = task.tiles, early = min(S::kStages, tiles - 1);
      ListCursor<S> at(task);
#pragma unroll 1
      for (int tile = 0; tile < tiles; ++tile) {
        const int first_key = at.first_key(), note = at.note(a.base.rules.causal);
        wait(memory.key_free(k.stage), k.parity);
        notes[k.stage] = note;
        load_keys(a.k, memory.keys(k.stage), memory.key_full(k.stage), task, first_key);
        k.advance();
        at.advance();
        load_values();
        above = &task;
        above_key = first_key;
        if (tile != early) continue;
        // The item before gives its place up when this one's first tile is done, which may take that tile's V.
        if (tile == 0) load_values();
        next = load_listed_queries(ready, q);
      }
    }
    load_values();
  }
  /// Where K and V have a warp each, neither waits until a stage of the other is free. Where rows lie is kept in
  /// registers, since shared memory is read anew after every load. The task is not read after its last load: from then
  /// on consumers may give it back.
  __device__ __forceinline__ void load_listed_keys() const {
    Ring<S::kStages> k{0, 1};
    Ring<S::kQuerySlots> q{0, 1};
    Ring<kTaskSlots> ready;
    const ListTask* next = load_listed_queries(ready, q);
    while (next) {
      const Task place = *next;
      const int early = min(S::kStages, place.tiles - 1);
      ListCursor<S> at(*next);
#pragma unroll 1
      for (int tile = 0; tile < place.tiles; ++tile) {
        const int first_key = at.first_key(), note = at.note(a.base.rules.causal);
        at.advance();
        wait(memory.key_free(k.stage), k.parity);
        notes[k.stage] = note;
        load_keys(a.k, memory.keys(k.stage), memory.key_full(k.stage), place, first_key);
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
      ListCursor<S> at(tasks[ready.stage][0]);
#pragma unroll 1
      for (int tile = 0; tile < place.tiles; ++tile) {
        const int first_key = at.first_key();
        at.advance();
        wait(memory.value_free(v.stage), v.parity);
        load_keys(a.v, memory.values(v.stage), memory.value_full(v.stage), place, first_key);
        v.advance();
      }
    }
  }

  /// Turns key_mask into bits beside each stage of K, and overwrites the values of excluded keys with zeros. Bytes of a
  /// tile are asked for while the tile before it is worked on.
  __device__ __forceinline__ void mask_keys(int lane) const {
    Ring<S::kStages> k{0, 1}, v;
    Ring<kTaskSlots> ready;
    for (;; ready.advance()) {
      wait(memory.task_full(ready.stage), ready.parity);
      const typename S::Item* const task = tasks[ready.stage];
      int tiles = task[0].tiles;
      if (tiles < 0) return;
      const auto mask_tiles = [&](auto at, const auto& task_of) {
        typename TileBits<S>::Bytes bytes(a.base, task_of(at), at.first_key(), lane);
#pragma unroll 1
        for (; tiles > 0; --tiles) {
          const TileBits<S> bits(bytes);
          if (tiles > 1) {
            at.advance();
            bytes = typename TileBits<S>::Bytes(a.base, task_of(at), at.first_key(), lane);
          }
          wait(memory.key_free(k.stage), k.parity);
          if (lane == 0) {
            bits.store(memory.key_bits(k.stage));
            arrive(memory.key_full(k.stage));
          }
          k.advance();
          wait(memory.value_full(v.stage), v.parity);
          bits.clear_excluded(memory.values(v.stage), lane);
          fence_shared();
          __syncwarp();
          if (lane == 0) arrive(memory.value_clean(v.stage));
          v.advance();
        }
      };
      if constexpr (S::kLists) {
        mask_tiles(ListCursor<S>(task[0]), [&](const auto&) -> const typename S::Item& { return task[0]; });
      } else {
        tiles += task[0].above;
        mask_tiles(Cursor(task, a.packed), [](const auto& at) -> const typename S::Item& { return *at.task; });
      }
    }
  }

  /// Zeros to the phases that no strand has, by boxes; few at a time, since loads share the copy engine.
  __device__ __forceinline__ void fill_boxes() const {
    const int rows = a.base.tensors.tokens;
#pragma unroll 1
    for (int b = 0; b < a.base.schedule.branch_count; ++b) {
      const cuda::DeviceBranch& branch = a.base.schedule.branches[b];
      const unsigned others = branch.dilation - 1, per_row = branch.head_count * S::kBlocks;
      if (others == 0) continue;
      const unsigned boxes = ((rows + branch.dilation - 1) / branch.dilation + kGroupRows - 1) / kGroupRows;
      const unsigned total = a.base.tensors.batch * boxes * others * per_row;
#pragma unroll 1
      for (unsigned i = blockIdx.x; i < total; i += gridDim.x) {
        const unsigned by_phase = i / per_row, by_box = by_phase / others, entry = by_box / boxes;
        const int column = i - by_phase * per_row, head = branch.head_begin + column / S::kBlocks;
        const int other = by_phase - by_box * others, phase = other + (other >= branch.phase(head));
        store_box_once(&a.out[a.map(b, phase, a.longer_queries[b])], memory.zeros(),
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
    if (!a.base.tensors.lse.data) return;
#pragma unroll 1
    for (int b = 0; b < a.base.schedule.branch_count; ++b) {
      const cuda::DeviceBranch& branch = a.base.schedule.branches[b];
      const int dilation = branch.dilation, step = kWarpThreads % dilation;
      if (dilation == 1) continue;
      const unsigned runs = (a.base.tensors.tokens + kRun - 1) / kRun,
                     total = runs * branch.head_count * a.base.tensors.batch;
#pragma unroll 1
      for (unsigned i = worker; i < total; i += workers) {
        const unsigned by_head = i / runs, entry = by_head / branch.head_count;
        const int head = branch.head_begin + static_cast<int>(by_head - entry * branch.head_count);
        const int first = static_cast<int>(i - by_head * runs) * kRun, last = min(first + kRun, a.base.tensors.tokens);
        const int phase = branch.phase(head);
        float* const lse = &a.base.tensors.lse.at(entry, 0, head);
        int at = (first + lane) % dilation;
#pragma unroll 1
        for (int row = first + lane; row < last; row += kWarpThreads) {
          if (at != phase) lse[row * a.base.tensors.lse.row] = -LONGSPAN_INFINITY;
          at += step;
          if (at >= dilation) at -= dilation;
        }
      }
    }
  }

  /// Zeros to rows that no branch covers, where boxes do not fit: `workers` warps share them.
  __device__ __forceinline__ void fill_rows(unsigned worker, unsigned workers) const {
#pragma unroll 1
    for (unsigned i = worker; i < a.fill_items; i += workers)
      cuda::fill_uncovered<T>(a.base, a.base.schedule.decode(a.items + i), 0, 1);
  }

  /// One warp of a stream's.
  __device__ __forceinline__ void run(int warp) const {
    constexpr unsigned kFirstFill = S::kMerges || S::kSplitsLoads ? 3 : 2, kFillWarps = S::kExtras ? 1 : 4 - kFirstFill;
    const int lane = threadIdx.x % kWarpThreads;
    if (warp == 0) {
      if constexpr (S::kSplitsLoads) {
        if (lane == 0) load_listed_keys();
      } else if constexpr (S::kLists) {
        if (lane == 0) load_lists();
      } else {
        if (lane == 0) load();
      }
    } else if (warp == 1) {
      schedule(lane);
      if (S::kStreams > 1 || (S::kExtras && kFirstFill == 3 && a.base.rules.key_mask))
        fill_rows(worker(), workers());  // no warp is left for it
    } else if (S::kExtras && warp == 3 && (a.base.rules.key_mask || kFirstFill == 2)) {
      if constexpr (S::kExtras) {
        if (a.base.rules.key_mask) mask_keys(lane);
      }
    } else if (S::kSplitsLoads && warp == 2) {
      if constexpr (S::kSplitsLoads) {
        if (lane == 0) load_listed_values();
      }
    } else if (S::kMerges && warp == 2) {
      if constexpr (S::kMerges) bring_state(lane);
    } else if (S::kHasZeros && a.fill_boxes) {
      if (warp == 2) fill_lse(blockIdx.x, gridDim.x, lane);
      else if (lane == 0) fill_boxes();
    } else {
      fill_rows((warp - kFirstFill) * gridDim.x + blockIdx.x, kFillWarps * gridDim.x);
    }
  }
};

}  // namespace longspan::hopper
