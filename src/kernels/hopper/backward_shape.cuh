// Tile shape of the Hopper backward, and what lies where in a block's shared memory.
#pragma once

#include "kernels/hopper/backward_launch.h"
#include "kernels/hopper/shape.cuh"

namespace longspan::hopper {

/// kLists: queries are those that lists of a block mask name (backward_lists.cuh). kMerges: branches share rows, and
/// one row of sums of dq. kCloses: sums of long strands are closed. kChosen: see BackwardExtras.
template <class T, int kColumnsValue, bool kListsValue = false, bool kMergesValue = false, bool kClosesValue = false,
          BackwardExtras kChosen = BackwardExtras::none>
struct BackwardShape {
  static constexpr bool kLists = kListsValue, kMerges = kMergesValue;
  static constexpr bool kExtras = kChosen != BackwardExtras::none, kDropout = kChosen == BackwardExtras::dropout;
  // What closes sums is compiled apart where a loop around it has more moves or spilled registers.
  static constexpr bool kClosesApart = kColumnsValue == 64 || kColumnsValue > 128;
  static constexpr bool kCloses = kClosesValue || !kClosesApart;
  using Element = T;
  static constexpr int kColumns = kColumnsValue;
  static constexpr int kBlocks = (kColumns + kBlockColumns - 1) / kBlockColumns;
  static constexpr bool kWide = kBlocks > 1;
  // Heads over 128: dK and dV of 64 keys fill the registers, so one group has dV and the other dK. Each computes the
  // scores of half of the queries, and P goes through shared memory like dS.
  static constexpr bool kShared = kBlocks > 2;
  static constexpr int kKeys = kShared ? kGroupRows : kKeyTileRows;
  static constexpr int kGroupStep = kShared ? 0 : kGroupRows;  // keys from one group's first to the other's
  static constexpr int kQueries =
      kWide ? 64 : 128;  // of a tile: scores, their gradients and two sums fill the registers
  static constexpr int kOwnQueries = kShared ? kQueries / 2 : kQueries;  // of a group's scores
  static constexpr int kStages = 2, kKeyStages = kWide ? 1 : 2;
  static constexpr int kThreads = 3 * kGroupThreads;
  // Blocks of 64 columns: rows of 128 bytes, one block after the other.
  static constexpr std::uint32_t kQueryBlock = kQueries * 128, kQueryBytes = kQueryBlock * kBlocks;
  static constexpr std::uint32_t kKeyBlock = kKeys * 128, kKeyBytes = kKeyBlock * kBlocks;
  static constexpr std::uint32_t kGroupKeys = kGroupStep * 128;  // of a block of K or V, to the second group's rows
  static constexpr std::uint32_t kValueBytes = kQueries * 4;     // lse or delta of a tile
  static constexpr std::uint32_t kScoreBlock = kKeys * 128, kScoreBytes = kScoreBlock * (kQueries / 64);
  // dQ of a tile: each group has 64 rows (narrow heads), or half of the columns (wide ones).
  static constexpr int kSumColumns = kColumns < 64 ? kColumns : 64;
  static constexpr int kSumTile = kSumTileRows * kSumColumns, kWarpSums = kSumTile / 4;  // floats
  // Of three blocks of dQ a group has one and half of the one in the middle, of four it has two, one after the other.
  static constexpr int kMoreColumns = kBlocks == 3 ? 32 : 0, kSumParts = kBlocks > 3 ? 2 : 1;
  static constexpr std::uint32_t kSumRow = kSumBlockColumns * 4, kSumBlock = kSumTileRows * kSumRow;  // kMerges
  static constexpr std::uint32_t kSumBytes = kShared ? 0 : kSumTile * 4;  // over 128 they are added from registers
  static constexpr int kConsumerRegisters = 232, kProducerRegisters = 40;
  static_assert(2 * kConsumerRegisters + kProducerRegisters <= (65536 / kThreads) / 8 * 8 * 3);
  static constexpr std::uint32_t kBitBytes = kDropout ? 4 * kOwnQueries * (kGroupRows / 32) : 0;  // of a group
  using PlainItem = std::conditional_t<kMerges && kShared, BackwardMergedTask, BackwardTask>;
  using ListItem = std::conditional_t<kLists, BackwardListTask<PlainItem>, PlainItem>;
  using Item = std::conditional_t<kExtras, BackwardExtrasTask<ListItem>, ListItem>;
  using Tasks = Item[kTaskSlots];
  // Of the tiles in stages, and of as many before: their dQ is on its way.
  using Notes = BackwardNote[kLists ? 2 * kStages : 1];
};

/// Addresses in shared memory.
template <class S>
struct BackwardMemory {
  static constexpr std::uint32_t kKeysEnd = 2 * S::kKeyStages * S::kKeyBytes,
                                 kQueriesEnd = kKeysEnd + 2 * S::kStages * S::kQueryBytes,
                                 kScoresEnd = kQueriesEnd + (S::kShared ? 2 : 1) * S::kScoreBytes,
                                 kSumsEnd = kScoresEnd + 2 * S::kSumBytes,
                                 kValuesEnd = kSumsEnd + 2 * S::kStages * S::kValueBytes,
                                 kBitsEnd = kValuesEnd + 2 * S::kBitBytes;
  static constexpr std::uint32_t kBarriers = 3 * S::kStages + 2 * S::kKeyStages + 2 * kTaskSlots + 6;
  static constexpr int kBytes = static_cast<int>(1024 + kBitsEnd + 8 * kBarriers);
  static_assert(kBytes + static_cast<int>(sizeof(typename S::Tasks)) <= 227 * 1024);
  std::uint32_t base;

  __device__ __forceinline__ std::uint32_t keys(std::uint32_t stage) const { return base + stage * S::kKeyBytes; }
  __device__ __forceinline__ std::uint32_t values(std::uint32_t stage) const { return keys(S::kKeyStages + stage); }
  __device__ __forceinline__ std::uint32_t queries(std::uint32_t stage) const {
    return base + kKeysEnd + stage * S::kQueryBytes;
  }
  __device__ __forceinline__ std::uint32_t douts(std::uint32_t stage) const { return queries(S::kStages + stage); }
  /// dS of the tile, transposed: rows are keys, blocks of 64 queries.
  __device__ __forceinline__ std::uint32_t scores() const { return base + kQueriesEnd; }
  /// P of the tile, where groups exchange it.
  __device__ __forceinline__ std::uint32_t weights() const { return scores() + S::kScoreBytes; }
  __device__ __forceinline__ std::uint32_t sums(std::uint32_t group) const {
    return base + kScoresEnd + group * S::kSumBytes;
  }
  __device__ __forceinline__ std::uint32_t lse(std::uint32_t stage) const {
    return base + kSumsEnd + stage * S::kValueBytes;
  }
  __device__ __forceinline__ std::uint32_t delta(std::uint32_t stage) const { return lse(S::kStages + stage); }
  /// Which pairs of the tile dropout keeps: words of 32 keys, by query (backward_extras.cuh).
  __device__ __forceinline__ std::uint32_t bits(std::uint32_t group) const {
    return base + kValuesEnd + group * S::kBitBytes;
  }
  __device__ __forceinline__ std::uint32_t barrier(std::uint32_t index) const { return base + kBitsEnd + 8 * index; }
  __device__ __forceinline__ std::uint32_t query_full(std::uint32_t stage) const { return barrier(stage); }
  /// Of Q and dO.
  __device__ __forceinline__ std::uint32_t tile_free(std::uint32_t stage) const { return barrier(S::kStages + stage); }
  __device__ __forceinline__ std::uint32_t dout_full(std::uint32_t stage) const {
    return barrier(2 * S::kStages + stage);
  }
  __device__ __forceinline__ std::uint32_t key_full(std::uint32_t stage) const {
    return barrier(3 * S::kStages + stage);
  }
  __device__ __forceinline__ std::uint32_t key_free(std::uint32_t stage) const {
    return key_full(S::kKeyStages + stage);
  }
  __device__ __forceinline__ std::uint32_t task_full(std::uint32_t slot) const {
    return key_full(2 * S::kKeyStages + slot);
  }
  __device__ __forceinline__ std::uint32_t task_free(std::uint32_t slot) const { return task_full(kTaskSlots + slot); }
  /// Loads that the producer looks through before it hands them on.
  __device__ __forceinline__ std::uint32_t ragged() const { return task_full(2 * kTaskSlots); }
  __device__ __forceinline__ std::uint32_t sum_full(std::uint32_t group) const {
    return task_full(2 * kTaskSlots + 1 + group);
  }
  __device__ __forceinline__ std::uint32_t sum_free(std::uint32_t group) const { return sum_full(2 + group); }
  /// The item after the one that is being loaded should be looked up.
  __device__ __forceinline__ std::uint32_t task_wanted() const { return sum_full(4); }
};

}  // namespace longspan::hopper
