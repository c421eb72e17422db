// Tile shapes of the Hopper forward, and what lies where in a block's shared memory.
#pragma once

#include <type_traits>

#include "kernels/cuda/fill.cuh"
#include "kernels/hopper/launch.h"
#include "kernels/ptx/hopper.cuh"

namespace longspan::hopper {

using cuda::kWarpThreads;

inline constexpr int kTaskSlots = 4;
inline constexpr int kPartRows = 16;

/// What a producer notes on a tile of keys in parts (lists.cuh).
struct PartsOfTile {
  int words[8];
};

/// kMerges: several branches may share rows, which are then handed from one to the next.
/// kStreams: items that a block works on side by side, each with groups and shared memory of its own.
/// kLists: keys are those that lists of a block mask name (lists.cuh). kPasses: the groups of an item have blocks of
/// their own, and hand on those that only others see.
/// kExtras: key_mask, ALiBi, scales that are not positive (extras.cuh), as the call says. kDrops: dropout, too.
/// kParts: tiles of keys are parts of 16 rows, each of a block of its own (lists.cuh).
template <class T, bool kMergesValue, int kColumnsValue, int kGroupsValue, int kKeysValue, int kStagesValue,
          int kStreamsValue = 1, bool kListsValue = false, bool kPassesValue = false, bool kExtrasValue = false,
          bool kDropsValue = false, bool kPartsValue = false>
struct Shape {
  using Element = T;
  static constexpr bool kMerges = kMergesValue;
  static constexpr int kColumns = kColumnsValue, kGroups = kGroupsValue, kKeys = kKeysValue, kStages = kStagesValue;
  static constexpr int kStreams = kStreamsValue, kAllGroups = kGroups * kStreams;
  static constexpr bool kLists = kListsValue, kPasses = kPassesValue, kExtras = kExtrasValue, kDrops = kDropsValue;
  static constexpr bool kParts = kPartsValue;
  // Whether rows of K that key_mask excludes become zeros, so that sums know what they are (extras.cuh). Wider heads
  // have longer rows and fewer scores; dropout and parts leave no registers for it.
  static constexpr bool kClearsKeys = kExtras && kColumns <= 64 && !kDrops && !kParts;
  // Lists: a warp loads Q and K, another V, where streams leave one; what they keep takes registers from the consumers.
  static constexpr bool kSplitsLoads = kLists && kStreams == 1 && !kMerges;
  static constexpr int kRows = kGroupRows * kGroups, kThreads = kGroupThreads * (kAllGroups + 1);
  static constexpr int kQuerySlots = kGroups == 4 && !kMerges ? 3 : 2;  // short strands need Q early
  static constexpr int kBlocks = (kColumns + kBlockColumns - 1) / kBlockColumns;
  // Blocks of 64 columns: rows of 128 bytes, one block after the other.
  static constexpr std::uint32_t kQueryBlock = kGroupRows * 128, kGroupBytes = kQueryBlock * kBlocks;
  static constexpr std::uint32_t kQueryBytes = kGroupBytes * kGroups;
  static constexpr std::uint32_t kKeyBlock = kKeys * 128, kKeyBytes = kKeyBlock * kBlocks;
  // After setmaxnreg the groups together may hold what they were launched with: 65536 / kThreads, in steps of 8.
  static constexpr int kConsumerRegisters = kAllGroups == 4 ? 112 : kAllGroups == 3 ? 160 : kSplitsLoads ? 224 : 232;
  static constexpr int kProducerRegisters = kSplitsLoads ? 56 : kAllGroups == 2 ? 40 : 32;
  static_assert(kAllGroups * kConsumerRegisters + kProducerRegisters <= (65536 / kThreads) / 8 * 8 * (kAllGroups + 1));
  // Tiles that a group hands on without need before its own; whether it may still hold a stage of V meanwhile.
  static constexpr int kMostSkipped = ((kGroups - 1) * kGroupRows + kKeys - 1) / kKeys;
  static constexpr bool kSkipsHolding = kMostSkipped < kStages;
  static constexpr bool kHasZeros = !kMerges && !kLists && !kExtras && kColumns <= kWidestWithZeros;
  // What earlier branches left of an item's rows is brought to shared memory where there is room. Rows are kept apart
  // by 32 bytes, so that four of them are in different banks.
  static constexpr bool kHoldsState = kMerges && kColumns <= 64;
  static constexpr std::uint32_t kStateRow = kColumns * 4 + 32;
  static constexpr int kTotals = total_floats(kColumns);
  using PlainItem = std::conditional_t<kLists, ListTask, Task>;
  using Item = std::conditional_t<kExtras, ExtrasTask<PlainItem>, PlainItem>;
  using Tasks = Item[kTaskSlots][kMerges || kLists ? 1 : kGroups];
  using Notes = std::conditional_t<kParts, PartsOfTile, int>[kLists ? kStages : 1];
  /// How rows of an item are shared between branches: maximum and sum that earlier ones left, and whether there are
  /// earlier (1) and later ones (2).
  struct Shares {
    float2 found[kMerges ? kRows : 1];
    unsigned char others[kMerges ? kRows : 1];
  };
};

/// Addresses in shared memory.
template <class S>
struct Memory {
  static constexpr std::uint32_t kZeros = S::kHasZeros ? kGroupRows * 128 : 0;
  static constexpr std::uint32_t kState = S::kHoldsState ? S::kRows * S::kStateRow : 0;
  static constexpr std::uint32_t kBarriers =
      8 * (2 * S::kQuerySlots + (S::kExtras ? 6 : 4) * S::kStages + 3 * kTaskSlots);
  static constexpr std::uint32_t kBits = S::kExtras ? 16 * S::kStages : 0;
  static constexpr std::uint32_t kUsed =
      S::kQuerySlots * S::kQueryBytes + 2 * S::kStages * S::kKeyBytes + kZeros + kState + kBits + kBarriers;
  static constexpr std::uint32_t kStream = (kUsed + 1023) / 1024 * 1024;  // from a stream to the next
  static constexpr int kBytes = static_cast<int>(1024 + (S::kStreams - 1) * kStream + kUsed);
  std::uint32_t base;

  __device__ __forceinline__ std::uint32_t queries(std::uint32_t slot) const { return base + slot * S::kQueryBytes; }
  __device__ __forceinline__ std::uint32_t keys(std::uint32_t stage) const {
    return base + S::kQuerySlots * S::kQueryBytes + stage * S::kKeyBytes;
  }
  __device__ __forceinline__ std::uint32_t values(std::uint32_t stage) const { return keys(S::kStages + stage); }
  __device__ __forceinline__ std::uint32_t zeros() const { return keys(2 * S::kStages); }
  __device__ __forceinline__ std::uint32_t state(std::uint32_t row) const {
    return zeros() + kZeros + row * S::kStateRow;
  }
  __device__ __forceinline__ std::uint32_t barrier(std::uint32_t index) const {
    return zeros() + kZeros + kState + kBits + 8 * index;
  }
  /// What key_mask says of a stage of K: a word for each of the four pairs of columns that threads have.
  __device__ __forceinline__ std::uint32_t key_bits(std::uint32_t stage) const {
    return zeros() + kZeros + kState + 16 * stage;
  }
  __device__ __forceinline__ std::uint32_t query_full(std::uint32_t slot) const { return barrier(slot); }
  __device__ __forceinline__ std::uint32_t query_free(std::uint32_t slot) const {
    return barrier(S::kQuerySlots + slot);
  }
  __device__ __forceinline__ std::uint32_t ring(std::uint32_t which, std::uint32_t stage) const {
    return barrier(2 * S::kQuerySlots + which * S::kStages + stage);
  }
  __device__ __forceinline__ std::uint32_t task_full(std::uint32_t slot) const { return ring(4, slot); }
  __device__ __forceinline__ std::uint32_t task_free(std::uint32_t slot) const { return ring(4, kTaskSlots + slot); }
  __device__ __forceinline__ std::uint32_t state_full(std::uint32_t slot) const {
    return ring(4, 2 * kTaskSlots + slot);
  }
  __device__ __forceinline__ std::uint32_t key_full(std::uint32_t stage) const { return ring(0, stage); }
  __device__ __forceinline__ std::uint32_t key_free(std::uint32_t stage) const { return ring(1, stage); }
  __device__ __forceinline__ std::uint32_t value_full(std::uint32_t stage) const { return ring(2, stage); }
  __device__ __forceinline__ std::uint32_t value_free(std::uint32_t stage) const { return ring(3, stage); }
  /// Where key_mask excludes keys: a stage of V or K is loaded, and zero where it does; K's bits are known.
  __device__ __forceinline__ std::uint32_t value_clean(std::uint32_t stage) const {
    return ring(4, 3 * kTaskSlots + stage);
  }
  __device__ __forceinline__ std::uint32_t key_clean(std::uint32_t stage) const {
    return ring(5, 3 * kTaskSlots + stage);
  }
};

/// A place in a ring of kStages buffers and how often it went round.
template <int kStages>
struct Ring {
  std::uint32_t stage = 0, parity = 0;
  __device__ __forceinline__ void advance() {
    if (++stage == kStages) {
      stage = 0;
      parity ^= 1;
    }
  }
};

/// A value that is the same in a whole warp, in a form that shows it: what follows from it stays in uniform registers.
__device__ __forceinline__ int uniform(int value) { return __shfl_sync(~0u, value, 0); }

}  // namespace longspan::hopper
