// Forward on Hopper: one block for each multiprocessor, which takes items (a tile of query rows of one strand) until
// none is left.
//   producer   a warp group with few registers: one warp looks up items, one thread loads Q, K and V by TMA,
//              two warps write zeros to rows that no branch covers; where branches merge, one of them brings what
//              earlier branches left of an item's rows instead; with block masks and one stream it loads V
//   consumers  kGroups warp groups of 64 query rows each. S = Q K^T reads both from shared memory, P stays in registers
//              as the A operand of P V; Q K^T of a tile runs together with P V of the tile before, and the first Q K^T
//              of the next item under this one's end. A token lets one group at a time start its products.
//   keys       tiles from the last to the first, so that only the first tiles need masks; the grid of tiles begins at
//              the strand's start and each row decides alone when to rescale: a row's bits are its own
#pragma once

#include "kernels/cuda/start.cuh"
#include "kernels/hopper/consumer.cuh"
#include "kernels/hopper/kernels.h"
#include "kernels/hopper/producer.cuh"

namespace longspan::hopper {

template <class S>
__global__ void __launch_bounds__(S::kThreads, 1) forward(const __grid_constant__ HopperLaunch a) {
  extern __shared__ char raw[];
  __shared__ typename S::Tasks tasks[S::kStreams];
  __shared__ typename S::Notes notes[S::kStreams];
  __shared__ typename S::Shares shares;
  const std::uint32_t base = (cuda::shared_address(raw) + 1023) & ~1023u;
  if (threadIdx.x < S::kStreams) {
    const Memory<S> memory{base + threadIdx.x * Memory<S>::kStream};
    for (std::uint32_t slot = 0; slot < S::kQuerySlots; ++slot) {
      barrier_init(memory.query_full(slot), 1);
      barrier_init(memory.query_free(slot), S::kGroups);
    }
    for (std::uint32_t slot = 0; slot < kTaskSlots; ++slot) {
      barrier_init(memory.task_full(slot), kWarpThreads);
      barrier_init(memory.task_free(slot), S::kMerges ? S::kGroups * kGroupThreads : S::kGroups);
      barrier_init(memory.state_full(slot), kWarpThreads);
    }
    // Stages are given back warp by warp: nothing is assumed about warps of a group ending together.
    for (std::uint32_t stage = 0; stage < S::kStages; ++stage) {
      barrier_init(memory.key_full(stage), 1);
      if constexpr (S::kExtras) {
        barrier_init(memory.key_clean(stage), 1);
        barrier_init(memory.value_clean(stage), 1);
      }
      barrier_init(memory.value_full(stage), 1);
      barrier_init(memory.key_free(stage), 4 * S::kGroups);
      barrier_init(memory.value_free(stage), 4 * S::kGroups);
    }
    publish_barriers();
  }
  if constexpr (S::kHasZeros) {
    for (std::uint32_t i = threadIdx.x * 16; i < Memory<S>::kZeros; i += S::kThreads * 16)
      store_zeros(Memory<S>{base}.zeros() + i);
  }
  fence_shared();
  __syncthreads();

  const int group = uniform(threadIdx.x / kGroupThreads);
  if (group == 0) {
    give_registers<S::kProducerRegisters>();
    // Warps are dealt out to streams; a stream alone has the four of them.
    constexpr int kWarps = 4 / S::kStreams;
    const int warp = threadIdx.x / kWarpThreads, stream = S::kStreams == 1 ? 0 : warp / kWarps;
    const Memory<S> memory{base + stream * Memory<S>::kStream};
    Producer<S>{a, memory, tasks[stream], notes[stream], shares, stream}.run(warp - stream * kWarps);
  } else {
    take_registers<S::kConsumerRegisters>();
    const int stream = S::kStreams == 1 ? 0 : (group - 1) / S::kGroups;
    const Memory<S> memory{base + stream * Memory<S>::kStream};
    Consumer<S>(a, memory, tasks[stream], notes[stream], shares, stream, group - 1 - stream * S::kGroups).run();
  }
}

/// Joins what a forward left of lists that are cut.
template <class T>
cudaError_t start_join(const HopperLaunch& launch, const Choice& choice, cudaStream_t stream) {
  const auto run = [&]<int kColumns, int kKeys, int kStages>() {
    using S = Shape<T, false, kColumns, 2, kKeys, kStages, 1, true, true, true, true, true>;
    return cuda::start<&join_parts<S>>(choice.blocks, S::kGroups * kGroupThreads, 0, stream, launch);
  };
  if (choice.columns == 64) return run.template operator()<64, 64, 4>();
  return choice.columns == 128 ? run.template operator()<128, 64, 4>() : run.template operator()<256, 32, 2>();
}

/// Head dims between those instantiated run with columns of zeros, which are in no tensor.
template <class T>
cudaError_t start_main(const HopperLaunch& launch, const Choice& choice, cudaStream_t stream) {
  const auto run_shape = [&]<class S>() {
    return cuda::start<&forward<S>>(choice.blocks, S::kThreads, Memory<S>::kBytes, stream, launch);
  };
  const auto run = [&]<bool kMerges, int kColumns, int kGroups, int kKeys, int kStages>() {
    return run_shape.template operator()<Shape<T, kMerges, kColumns, kGroups, kKeys, kStages>>();
  };
  const auto run_either = [&]<int kColumns, int kGroups, int kKeys, int kStages>() {
    return launch.base.schedule.merges ? run.template operator()<true, kColumns, kGroups, kKeys, kStages>()
                                       : run.template operator()<false, kColumns, kGroups, kKeys, kStages>();
  };
  const auto run_lists = [&]<int kColumns, int kKeys, int kStages, int kStreams, bool kPasses, bool kParts = false>() {
    return run_shape.template
    operator()<Shape<T, false, kColumns, 2, kKeys, kStages, kStreams, true, kPasses, false, false, kParts>>();
  };
  const bool merges = launch.base.schedule.merges;
  // Lists with options, of wide heads or of branches that merge: all in one, block sizes and dropout, too.
  const auto run_any_lists = [&]<int kColumns, int kKeys, int kStages>() {
    const auto run_merges = [&]<bool kMerges>() {
      return run_shape
          .template operator()<Shape<T, kMerges, kColumns, 2, kKeys, kStages, 1, true, true, true, true, true>>();
    };
    return merges ? run_merges.template operator()<true>() : run_merges.template operator()<false>();
  };
  const auto run_extras = [&]<bool kMerges, int kColumns, int kGroups, int kKeys, int kStages>() {
    const auto run_drops = [&]<bool kDrops>() {
      return run_shape
          .template operator()<Shape<T, kMerges, kColumns, kGroups, kKeys, kStages, 1, false, false, true, kDrops>>();
    };
    return kMerges || choice.drops ? run_drops.template operator()<true>() : run_drops.template operator()<kMerges>();
  };
  const auto is = [&](int columns, int groups, int keys, int stages) {
    return choice.columns == columns && choice.groups == groups && choice.keys == keys && choice.stages == stages;
  };
  if (choice.lists && choice.extras) {
    if (is(64, 2, 64, 4)) return run_any_lists.template operator()<64, 64, 4>();
    if (is(128, 2, 64, 4)) return run_any_lists.template operator()<128, 64, 4>();
    if (is(256, 2, 32, 2)) return run_any_lists.template operator()<256, 32, 2>();
    return cudaErrorInvalidValue;
  }
  if (choice.extras) {
    if (is(64, 3, 128, 4)) return run_extras.template operator()<false, 64, 3, 128, 4>();
    if (is(64, 3, 128, 3)) return run_extras.template operator()<true, 64, 3, 128, 3>();
    if (is(128, 3, 80, 3) && merges) return run_extras.template operator()<true, 128, 3, 80, 3>();
    if (is(128, 3, 80, 3)) return run_extras.template operator()<false, 128, 3, 80, 3>();
    if (is(256, 2, 48, 2) && merges) return run_extras.template operator()<true, 256, 2, 48, 2>();
    if (is(256, 2, 48, 2)) return run_extras.template operator()<false, 256, 2, 48, 2>();
    return cudaErrorInvalidValue;
  }
  if (choice.lists) {
    if (is(64, 2, 64, 4) && choice.part_rows > 0) return run_lists.template operator()<64, 64, 4, 2, true, true>();
    if (is(64, 2, 64, 4) && choice.passes) return run_lists.template operator()<64, 64, 4, 2, true>();
    if (is(64, 2, 64, 4)) return run_lists.template operator()<64, 64, 4, 2, false>();
    if (is(128, 2, 64, 4) && choice.part_rows > 0) return run_lists.template operator()<128, 64, 4, 1, true, true>();
    if (is(128, 2, 64, 4)) return run_lists.template operator()<128, 64, 4, 1, true>();
    if (is(128, 2, 128, 2)) return run_lists.template operator()<128, 128, 2, 1, false>();
    return cudaErrorInvalidValue;
  }
  if (is(48, 3, 128, 3)) return run.template operator()<true, 48, 3, 128, 3>();
  if (is(48, 4, 64, 4)) return run.template operator()<true, 48, 4, 64, 4>();
  if (is(64, 3, 128, 3)) return run.template operator()<true, 64, 3, 128, 3>();
  if (is(64, 4, 64, 4)) return run.template operator()<true, 64, 4, 64, 4>();
  if (is(48, 3, 128, 4)) return run.template operator()<false, 48, 3, 128, 4>();
  if (is(48, 4, 64, 6)) return run.template operator()<false, 48, 4, 64, 6>();
  if (is(64, 3, 128, 4)) return run.template operator()<false, 64, 3, 128, 4>();
  if (is(64, 4, 64, 6)) return run.template operator()<false, 64, 4, 64, 6>();
  if (is(96, 3, 80, 3)) return run_either.template operator()<96, 3, 80, 3>();
  if (is(128, 3, 80, 3)) return run_either.template operator()<128, 3, 80, 3>();
  if (is(192, 2, 80, 2)) return run_either.template operator()<192, 2, 80, 2>();
  if (is(256, 2, 48, 2)) return run_either.template operator()<256, 2, 48, 2>();
  return cudaErrorInvalidValue;
}

template <class T>
cudaError_t start_forward(const HopperLaunch& launch, const Choice& choice, cudaStream_t stream) {
  const cudaError_t status = start_main<T>(launch, choice, stream);
  return status == cudaSuccess && launch.parts ? start_join<T>(launch, choice, stream) : status;
}

}  // namespace longspan::hopper
