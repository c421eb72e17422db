// Backward on Hopper: one block for each multiprocessor, which takes items (a tile of 128 keys of one strand) until
// none is left and loops over the queries that see them.
//   producer   a warp group with few registers: one warp loads Q, dO, K, V and row values
//              by the copy engine, one thread
//              looks up items, two let the copy engine add dQ to memory
//   consumers  two warp groups of 64 keys (heads over 128: the same keys, half of the columns each).
//              S^T = K Q^T and dP^T = V dO^T, so that P and dS are, packed, the A operands of
//              dV += P^T dO and dK += dS^T Q in registers; only dS goes through shared memory, for dQ = dS K
//   order      [S] mask, dP under the exponentials, dS, dV, dK, barrier of both groups, dQ,
//              the next tile's S; dQ goes to
//              shared memory while S runs, and from there by the copy engine, which adds, under the next exponentials
// What limits this is the bandwidth of shared memory: see docs/hopper_backward.md.
#pragma once

#include "kernels/cuda/start.cuh"
#include "kernels/hopper/backward_consumer.cuh"
#include "kernels/hopper/backward_parts.cuh"
#include "kernels/hopper/backward_producer.cuh"
#include "kernels/hopper/kernels.h"

namespace longspan::hopper {

template <class S>
__global__ void __launch_bounds__(S::kThreads, 1) backward(const __grid_constant__ BackwardLaunch a) {
  extern __shared__ char raw[];
  __shared__ typename S::Tasks tasks;
  __shared__ typename S::Notes notes;
  const BackwardMemory<S> memory{(cuda::shared_address(raw) + 1023) & ~1023u};
  if (threadIdx.x == 0) {
    for (std::uint32_t stage = 0; stage < S::kStages; ++stage) {
      barrier_init(memory.query_full(stage), kWarpThreads);  // by lanes of the warp that loads
      barrier_init(memory.dout_full(stage), kWarpThreads);
      barrier_init(memory.tile_free(stage), 8 * kWarpThreads);  // by all lanes: racecheck reports one for its warp
    }
    for (std::uint32_t stage = 0; stage < S::kKeyStages; ++stage) {
      barrier_init(memory.key_full(stage), kWarpThreads);
      barrier_init(memory.key_free(stage), 2 * kGroupThreads);
    }
    for (std::uint32_t slot = 0; slot < kTaskSlots; ++slot) {
      barrier_init(memory.task_full(slot), 1);
      barrier_init(memory.task_free(slot), 2 * kGroupThreads);
    }
    for (std::uint32_t of = 0; of < 2; ++of) {
      barrier_init(memory.sum_full(of), 4 * kWarpThreads);  // by every lane of a group
      barrier_init(memory.sum_free(of), 1);
    }
    barrier_init(memory.ragged(), 1);
    barrier_init(memory.task_wanted(), 1);
    publish_barriers();
  }
  __syncthreads();
  allow_next();
  await_previous();

  const int group = uniform(threadIdx.x / kGroupThreads);
  if (group == 0) {
    give_registers<S::kProducerRegisters>();
    BackwardProducer<S>{a, memory, tasks, notes}.run();
  } else {
    take_registers<S::kConsumerRegisters>();
    BackwardConsumer<S>(a, memory, tasks, notes, group - 1).run();
  }
}

/// Starts a kernel that begins while the one before it in the stream ends, and waits itself for what that one leaves.
/// Drivers before CUDA 12.3 could not capture that: there it begins when the other has ended.
template <auto kKernel, class Argument>
cudaError_t start_early(std::int64_t blocks, int threads, int shared_bytes, cudaStream_t stream,
                        const Argument& argument) {
  constexpr int kDriver = 12030;
  int driver = 0;
  if (const cudaError_t error = cudaDriverGetVersion(&driver); error != cudaSuccess) return error;
  if (driver < kDriver) return cuda::start<kKernel>(blocks, threads, shared_bytes, stream, argument);
  if (shared_bytes > 0) {
    const cudaError_t error = cudaFuncSetAttribute(kKernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes);
    if (error != cudaSuccess) return error;
  }
  cudaLaunchAttribute early{};
  early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  early.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(blocks));
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.dynamicSmemBytes = static_cast<std::size_t>(shared_bytes);
  config.stream = stream;
  config.attrs = &early;
  config.numAttrs = 1;
  void* arguments[] = {const_cast<Argument*>(&argument)};
  return cudaLaunchKernelExC(&config, reinterpret_cast<const void*>(kKernel), arguments);
}

/// Whether lists and calls with options have a kernel of these columns.
template <int kColumns>
inline constexpr bool kHasOptions = kColumns == 64 || kColumns == 128 || kColumns == 256;

/// Head dims between those instantiated run with columns of zeros, which are in no tensor. Lists have two, calls with
/// options three.
template <class Body>
cudaError_t with_columns(const PartsLaunch& launch, Body&& body) {
  const bool few = launch.lists || launch.extras != BackwardExtras::none || launch.taken != KeysTaken::all;
  const int columns = launch.base.tensors.columns;
  if (few && columns <= 128) return columns <= 64 ? body.template operator()<64>() : body.template operator()<128>();
  if (columns <= 48) return body.template operator()<48>();
  if (columns <= 64) return body.template operator()<64>();
  if (columns <= 96) return body.template operator()<96>();
  if (columns <= 128) return body.template operator()<128>();
  if (columns <= 192 && !few) return body.template operator()<192>();
  return body.template operator()<256>();
}

template <class T>
cudaError_t start_backward(const BackwardLaunch& launch, cudaStream_t stream) {
  const auto start_shape = [&]<class S>() {
    return start_early<&backward<S>>(launch.blocks, S::kThreads, BackwardMemory<S>::kBytes, stream, launch);
  };
  const auto start = [&]<int kColumns, bool kLists, bool kMerges>() {
    const auto start_extras = [&]<BackwardExtras kChosen>() {
      if constexpr (!kHasOptions<kColumns>) return cudaErrorInvalidValue;
      else return start_shape.template operator()<BackwardShape<T, kColumns, kLists, kMerges, true, kChosen>>();
    };
    if (launch.parts.extras == BackwardExtras::some) return start_extras.template operator()<BackwardExtras::some>();
    if (launch.parts.extras == BackwardExtras::dropout)
      return start_extras.template operator()<BackwardExtras::dropout>();
    if constexpr (kLists && kMerges) {
      return cudaErrorInvalidValue;  // these have options
    } else {
      using S = BackwardShape<T, kColumns, kLists, kMerges>;
      if constexpr (S::kClosesApart) {
        if (launch.totals) return start_shape.template operator()<BackwardShape<T, kColumns, kLists, kMerges, true>>();
      }
      return start_shape.template operator()<S>();
    }
  };
  return with_columns(launch.parts, [&]<int kColumns>() {
    if (launch.parts.lists) {
      if constexpr (!kHasOptions<kColumns>) return cudaErrorInvalidValue;
      else if (launch.parts.base.schedule.merges) return start.template operator()<kColumns, true, true>();
      else if constexpr (kColumns <= kWidestStaged) return start.template operator()<kColumns, true, false>();
      else return cudaErrorInvalidValue;
    }
    if (launch.parts.base.schedule.merges) return start.template operator()<kColumns, false, true>();
    return start.template operator()<kColumns, false, false>();
  });
}
template <class T>
cudaError_t start_prepare(const PartsLaunch& launch, cudaStream_t stream) {
  return with_columns(launch, [&]<int kColumns>() {
    const std::int64_t blocks = static_cast<std::int64_t>(launch.list_blocks) + launch.items + launch.fill_items;
    if (blocks == 0) return cudaSuccess;
    return cuda::start<&prepare<BackwardShape<T, kColumns>>>(blocks, kPartsThreads, 0, stream, launch);
  });
}
template <class T>
cudaError_t start_convert(const PartsLaunch& launch, cudaStream_t stream) {
  return with_columns(launch, [&]<int kColumns>() {
    using S = BackwardShape<T, kColumns>;
    const std::int64_t blocks =
        std::int64_t{launch.base.schedule.merges ? launch.fill_items * kQuarters : launch.items} +
        key_blocks<S>(launch);
    if (blocks == 0) return cudaSuccess;
    if (launch.base.schedule.merges) return start_early<&convert_rows<S>>(blocks, kPartsThreads, 0, stream, launch);
    return start_early<&convert_tiles<S>>(blocks, kPartsThreads, 0, stream, launch);
  });
}

template <class T>
cudaError_t start_order(const PartsLaunch& launch, unsigned blocks, cudaStream_t stream) {
  return with_columns(launch, [&]<int kColumns>() {
    if constexpr (!kHasOptions<kColumns>) return cudaErrorInvalidValue;
    else return cuda::start<&order_lists<BackwardShape<T, kColumns>>>(blocks, kPartsThreads, 0, stream, launch);
  });
}

template <class T>
cudaError_t start_split(const PartsLaunch& launch, bool finish, cudaStream_t stream) {
  if (finish) return cuda::start<&split_keys<T, true>>(launch.base.schedule.items, kPartsThreads, 0, stream, launch);
  return cuda::start<&split_keys<T, false>>(launch.base.schedule.items, kPartsThreads, 0, stream, launch);
}

}  // namespace longspan::hopper
