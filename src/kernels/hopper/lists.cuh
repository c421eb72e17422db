// Items whose keys are named by a list of a block mask: which tiles of keys they are, and what is to be masked in each.
//   A tile of queries is 128 rows of the strand's grid, 64 for each of two groups; a tile of keys is a block or half of
//   one. Blocks of 64 give each group a list of its own; both go through the union of the two.
#pragma once

#include "kernels/hopper/shape.cuh"

namespace longspan::hopper {

/// The producer's note on a tile of keys: its first key, and in the bits that a multiple of 32 leaves free, whether
/// group 0 (1: the next bit) masks anything, whether it sees the block at all, and whether the strand ends inside.
struct ListNote {
  static constexpr int kMasks = 1, kSees = 4, kEnds = 16;
  int bits;
  __device__ __forceinline__ int first_key() const { return bits & ~31; }
  __device__ __forceinline__ bool masks(int group) const { return bits & kMasks << group; }
  __device__ __forceinline__ bool sees(int group) const { return bits & kSees << group; }
  __device__ __forceinline__ bool ends() const { return bits & kEnds; }
};

/// The producer's note on a tile of keys whose parts are of different blocks. Warps are counted in the tile of queries;
/// each has rows of one block row only.
///   word 0      a bit for each warp that masks anything; from kSees on for each group that sees anything; kEnds
///   words 1-4   first key of each part; where the list has no more, the strand's end
///   word 5      a byte for each part: which warps see it
struct PartsNote {
  static constexpr int kWords = 8, kSees = 1 << 8, kEnds = 1 << 10;
  int word, bits;  // a lane's own word; the first one
  __device__ __forceinline__ explicit PartsNote(int of_lane) : word(of_lane), bits(__shfl_sync(~0u, of_lane, 0)) {}
  __device__ __forceinline__ int first_key(int part) const { return __shfl_sync(~0u, word, 1 + part); }
  __device__ __forceinline__ bool sees_part(int part, int warp) const {
    return __shfl_sync(~0u, word, 5) >> (8 * part + warp) & 1;
  }
  __device__ __forceinline__ bool masks(int warp) const { return bits >> warp & 1; }
  __device__ __forceinline__ bool sees(int group) const { return bits & kSees << group; }
  __device__ __forceinline__ bool ends() const { return bits & kEnds; }
};

/// An entry of an item's list: the first key of its block, and in the bits below, which groups see it. Where tiles have
/// parts: the block, and in the lowest 8 bits, which warps see it.
template <class S>
__device__ __forceinline__ int read_entry(const ListTask& task, int at) {
  if constexpr (S::kParts) {
    int entry = task.list.block(at) << 8;
#pragma unroll
    for (int warp = 0; warp < 4 * S::kGroups; ++warp)
      entry |= task.list.meets(at, task.first_query + warp * kPartRows) ? 1 << warp : 0;
    return entry;
  }
  int entry = task.list.block(at) << task.list.shift;
#pragma unroll
  for (int group = 0; group < S::kGroups; ++group)
    entry |= task.list.meets(at, task.first_query + group * kGroupRows) ? 1 << group : 0;
  return entry;
}

/// The list of an item, and how many tiles it has: at least one, since rows without keys are written too.
template <class S>
__device__ __forceinline__ int find_list(const cuda::BlockLists& lists, const cuda::BlockPlace& place, int keys,
                                         ListTask& task) {
  task.listed = true;
  task.list = lists.walk(place, 0, keys);
  return max(1, (task.list.rows() + S::kKeys - 1) / S::kKeys);
}
/// Copies the first entries of a list to shared memory, by a warp, so that loads of tiles need not wait for memory.
template <class S>
__device__ __forceinline__ void bring_entries(ListTask& task, int lane) {
  static_assert(kNearEntries == kWarpThreads);
  if (task.tiles > 0 && task.listed && lane < task.list.count) task.entries[lane] = read_entry<S>(task, lane);
}

/// Index on the grid of a tile's first row, `before` rows after the range's first in its strand; it may be negative,
/// which TMA takes for rows that do not exist.
__device__ __forceinline__ int first_index(int q_row, int before, int stride) {
  return (q_row - before * stride) / stride + before;
}

/// Where a tile's keys begin; of tiles in parts, one for each lane: whether the part is the tile's, and where it lies.
struct TilePlace {
  int first_key;
  bool mine = true;
  int row = 0;  // of the tile
};

/// Walks over the tiles of an item whose keys come in parts, by a warp: each lane has a part, so that several tiles are
/// looked up at once, ahead of their turn.
template <class S>
struct PartsCursor {
  static constexpr int kParts = S::kKeys / kPartRows, kTiles = cuda::kWarpThreads / kParts;
  struct Part {
    int first_key;
    unsigned warps;  // that see it
  };
  const ListTask& task;
  const int lane;
  int tile = 0;
  Part own, next;

  __device__ __forceinline__ PartsCursor(const ListTask& of, int own_lane)
      : task(of), lane(own_lane), own(look(0)), next(look(kTiles)) {}
  /// This lane's part of the tiles from `first_tile` on.
  __device__ __forceinline__ Part look(int first_tile) const {
    const int row = first_tile * S::kKeys + lane * kPartRows;
    if (!task.listed) return {row, 0xFFu};
    const int at = row >> task.list.shift;
    if (at >= task.list.count) return {task.keys, 0};
    const int entry = at < kNearEntries ? task.entries[at] : read_entry<S>(task, at);
    return {((entry >> 8) << task.list.shift) + (row & ((1 << task.list.shift) - 1)), entry & 0xFFu};
  }
  __device__ __forceinline__ void advance() {
    if (++tile % kTiles != 0) return;
    own = next;
    next = look(tile + kTiles);
  }
  __device__ __forceinline__ TilePlace place() const {
    return {own.first_key, lane / kParts == tile % kTiles, lane % kParts * kPartRows};
  }
  __device__ __forceinline__ int key_of_lane() const {
    const int part = min(lane / 4, kParts - 1);
    return __shfl_sync(~0u, own.first_key, tile % kTiles * kParts + part) + lane / 2 % 2 * 8 + lane % 2;
  }
  __device__ __forceinline__ void write_note(PartsOfTile& note, bool causal) const {
    const int part = lane % kParts;
    const bool cut = own.first_key + kPartRows > task.keys;
    // Warps whose first row is before the part's last key.
    const int diagonal = causal ? min(max((own.first_key + 2 * kPartRows - 2 - task.first_query) >> 4, 0), 8) : 0;
    const unsigned masked = cut ? 0xFFu : (~own.warps & 0xFFu) | ((1u << diagonal) - 1);
    unsigned bits = masked | (own.warps & 0x0Fu ? PartsNote::kSees : 0) |
                    (own.warps & 0xF0u ? PartsNote::kSees << 1 : 0) | (cut ? PartsNote::kEnds : 0);
    unsigned seen = own.warps << 8 * part;
#pragma unroll
    for (int other = 1; other < kParts; other *= 2) {
      bits |= __shfl_xor_sync(~0u, bits, other);
      seen |= __shfl_xor_sync(~0u, seen, other);
    }
    if (lane / kParts != tile % kTiles) return;
    note.words[1 + part] = own.first_key;
    if (part == 0) {
      note.words[0] = static_cast<int>(bits);
      note.words[5] = static_cast<int>(seen);
    }
  }
};

/// Walks over the tiles of an item. Entries that are not in shared memory are prefetched.
template <class S>
struct ListCursor {
  const ListTask& task;
  int at = 0, part = 0, entry = 0, next = 0;  // part: of a block, in tiles

  __device__ __forceinline__ ListCursor(const ListTask& of, int) : task(of), entry(look(0)), next(look(1)) {}
  __device__ __forceinline__ int look(int index) const {
    if (!task.listed || index >= task.list.count) return 0;
    return index < kNearEntries ? task.entries[index] : read_entry<S>(task, index);
  }
  __device__ __forceinline__ int first_key() const { return (entry & ~63) + part * S::kKeys; }
  __device__ __forceinline__ TilePlace place() const { return {first_key()}; }
  __device__ __forceinline__ void write_note(int& note, bool causal) const { note = make_note(causal); }
  __device__ __forceinline__ int make_note(bool causal) const {
    const int first = first_key(), end = first + S::kKeys;
    const bool ends = end > task.keys;
    int bits = first | (ends ? ListNote::kEnds : 0);
#pragma unroll
    for (int group = 0; group < S::kGroups; ++group) {
      const bool sees = !task.listed || entry >> group & 1;
      const bool diagonal = causal && end > task.first_query + group * kGroupRows + 1;
      bits |= (sees ? ListNote::kSees : 0) << group | (!sees || diagonal || ends ? ListNote::kMasks : 0) << group;
    }
    return bits;
  }
  __device__ __forceinline__ void advance() {
    ++part;
    if (task.listed && part * S::kKeys == 1 << task.list.shift) {
      part = 0;
      ++at;
      entry = next;
      next = look(at + 1);
    }
  }
};
template <class S>
using Walk = std::conditional_t<S::kParts, PartsCursor<S>, ListCursor<S>>;

}  // namespace longspan::hopper
