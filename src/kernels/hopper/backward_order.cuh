// Lists of block masks around the main kernel of the Hopper backward: tiles of queries before it, the order in which
// items add to them, and the keys of lists that are cut.
#pragma once

#include "kernels/hopper/backward_shape.cuh"

namespace longspan::hopper {

/// The lists of one head of one mask, of those that a call has; false for a head that the branch does not own.
struct MaskHead {
  int branch, entry, head;
  unsigned rest;  // of the index, within the head

  /// `of(branch)`: how many indices a head of a branch has.
  template <class Count>
  __device__ __forceinline__ bool find(const PartsLaunch& a, unsigned index, Count&& of) {
    const cuda::Schedule& schedule = a.base.schedule;
    for (branch = 0; branch < schedule.branch_count; ++branch) {
      const cuda::BlockLists& lists = schedule.lists[branch];
      if (!lists.places) continue;
      const unsigned entries = lists.entry_places ? a.base.tensors.batch : 1,
                     heads = lists.head_places ? a.base.tensors.heads : 1, each = of(branch);
      if (index >= entries * heads * each) {
        index -= entries * heads * each;
        continue;
      }
      const unsigned by_head = index / each;
      rest = index - by_head * each;
      entry = static_cast<int>(by_head / heads);
      head = static_cast<int>(by_head - entry * heads);
      return lists.head_places == 0 || schedule.branches[branch].owns(head);
    }
    return false;
  }
};

/// A thread for each place of each mask.
template <class S>
__device__ __forceinline__ void list_places(const PartsLaunch& a, unsigned index) {
  MaskHead of{};
  const auto& all = a.base.schedule.lists;
  if (!of.find(a, index, [&](int branch) { return static_cast<unsigned>(all[branch].place_count); })) return;
  const cuda::BlockLists& lists = all[of.branch];
  const cuda::BlockPlace& place = lists.place(of.entry, of.head, static_cast<int>(of.rest));
  if (place.tile >= 0)
    list_tiles(lists, place, S::kQueries, a.listed[of.branch] + listed_from(lists, place, S::kQueries));
}

/// `deterministic`: the turns of all items of each strand, of kUnitsAtOnce times 64 queries of one head of a mask. A
/// thread looks through one place at a time, and a warp's counts are bits of its threads.
template <class S>
__global__ void __launch_bounds__(kPartsThreads) order_lists(const __grid_constant__ PartsLaunch a) {
  constexpr int kWarps = kPartsThreads / kWarpThreads;
  __shared__ unsigned seen[kWarps][kUnitsAtOnce], before[kWarps][kUnitsAtOnce];
  allow_next();
  MaskHead of{};
  if (!of.find(a, blockIdx.x, [&](int branch) { return a.ordered_blocks(branch); })) return;
  const cuda::BlockLists& lists = a.base.schedule.lists[of.branch];
  const int warp = threadIdx.x / kWarpThreads, lane = threadIdx.x % kWarpThreads;
  const int first = static_cast<int>(of.rest) * kUnitsAtOnce * kSumTileRows;
  unsigned items = 0;  // of warp 0: those that came to the lane's queries
  for (int base = 0; base < lists.place_count; base += kPartsThreads) {
    const int index = base + static_cast<int>(threadIdx.x);
    ListedTile* tiles = nullptr;
    int begin = 0, end = 0;
    unsigned units = 0;
    const auto each_unit = [&](auto&& body) {
      for (int i = begin; i < end; ++i) {
#pragma unroll
        for (int half = 0; half < S::kQueries / kSumTileRows; ++half)
          if (tiles[i].meets(half)) body((tiles[i].first - first) / kSumTileRows + half, tiles[i].turn[half]);
      }
    };
    if (index < lists.place_count) {
      const cuda::BlockPlace& place = lists.place(of.entry, of.head, index);
      if (place.tile >= 0 && place.count > 0) {
        tiles = a.listed[of.branch] + listed_from(lists, place, S::kQueries);
        begin = tiles_before(tiles, tiles[0].tiles, first);
        end = tiles_before(tiles, tiles[0].tiles, first + kUnitsAtOnce * kSumTileRows);
        each_unit([&](int unit, unsigned&) { units |= 1u << unit; });
      }
    }
    for (int unit = 0; unit < kUnitsAtOnce; ++unit) {
      const unsigned lanes = __ballot_sync(~0u, units >> unit & 1);
      if (lane == unit) seen[warp][unit] = lanes;
    }
    __syncthreads();
    if (warp == 0) {
      for (int w = 0; w < kWarps; ++w) {
        before[w][lane] = items;
        items += __popc(seen[w][lane]);
      }
    }
    __syncthreads();
    each_unit(
        [&](int unit, unsigned& turn) { turn = before[warp][unit] + __popc(seen[warp][unit] & ((1u << lane) - 1)); });
    __syncthreads();
  }
}

/// Eight columns of dk and dv from their sums.
template <class T>
__device__ __forceinline__ void convert_key(const PartsLaunch& a, int entry, int head, int row, int column) {
  const std::int64_t place =
      ((static_cast<std::int64_t>(entry) * a.base.tensors.kv_heads + head) * a.base.tensors.tokens + row) *
          a.base.tensors.columns +
      column;
#pragma unroll
  for (int which = 0; which < 2; ++which) {
    const cuda::Rows& target = which == 0 ? a.base.gradients.dk : a.base.gradients.dv;
    const float4* const sums =
        reinterpret_cast<const float4*>((which == 0 ? a.base.gradients.dk_sum : a.base.gradients.dv_sum) + place);
    const float4 low = __ldcs(sums), high = __ldcs(sums + 1);
    *reinterpret_cast<uint4*>(reinterpret_cast<T*>(target.data) + target.offset(entry, row, head) + column) =
        make_uint4(cuda::pack<T>(low.x, low.y), cuda::pack<T>(low.z, low.w), cuda::pack<T>(high.x, high.y),
                   cuda::pack<T>(high.z, high.w));
  }
}
/// Tiles of keys whose lists are cut into several items, which add up in float32: zeros before, dk and dv after. One
/// block for each item of the main kernel; the first of a tile does it.
template <class T, bool kFinish>
__global__ void __launch_bounds__(kPartsThreads) split_keys(const __grid_constant__ PartsLaunch a) {
  const cuda::Item item = a.base.schedule.decode(blockIdx.x);
  const cuda::BlockLists& lists = a.base.schedule.lists[item.branch];
  if (!lists.places || part_of(lists, item) != 0) return;
  const cuda::StrandRows strand =
      a.base.schedule.branches[item.branch].strand(item.head, item.segment, a.base.tensors.length(item.entry));
  const int first = lists.place(item.entry, item.head, item.tile).tile << lists.tile_shift;
  const int chunks = a.base.tensors.columns / 8, rows = min(1 << lists.tile_shift, strand.count - first);
  for (int i = threadIdx.x; i < rows * chunks; i += kPartsThreads) {
    const int row = strand.start + (first + i / chunks) * strand.stride, column = i % chunks * 8;
    if constexpr (kFinish) {
      convert_key<T>(a, item.entry, item.head, row, column);
    } else {
      const std::int64_t place =
          ((static_cast<std::int64_t>(item.entry) * a.base.tensors.heads + item.head) * a.base.tensors.tokens + row) *
              a.base.tensors.columns +
          column;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        reinterpret_cast<float4*>(a.base.gradients.dk_sum + place)[half] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        reinterpret_cast<float4*>(a.base.gradients.dv_sum + place)[half] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
      }
    }
  }
}

}  // namespace longspan::hopper
