// A thread for 16 bytes of a row; where rows go and come from is in tables that were made with the plan.
#include "comm/gpu/packed_rows.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>

#include "device/run_kernel.cuh"

namespace longspan::gpu {
namespace {

using cuda::run_kernel;

constexpr int kThreads = 256, kWarp = 32, kSealBlocks = 16;
constexpr int kZeros = -1;

unsigned blocks_for(std::int64_t threads) { return static_cast<unsigned>((threads + kThreads - 1) / kThreads); }

__device__ __forceinline__ std::int64_t flat_thread() {
  return static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x;
}

/// A row of a message, by the number of its pair; V if `value`.
__device__ __forceinline__ char* message_row(const DeviceMessages& all, std::int64_t pair, std::int64_t entry,
                                             std::int64_t batch, bool value, int row_bytes) {
  int low = 0, high = all.count - 1;
  while (low < high) {
    const int middle = (low + high + 1) / 2;
    if (all.list[middle].first_pair <= pair) low = middle;
    else high = middle - 1;
  }
  const DeviceMessage& message = all.list[low];
  return message.payload + (((value ? batch : 0) + entry) * message.pairs + pair - message.first_pair) *
                               static_cast<std::int64_t>(row_bytes);
}
__device__ __forceinline__ const char* own_row(const StridedRows& rows, int pair, std::int64_t entry, int kv_heads) {
  const int row = pair / kv_heads;
  return rows.data + entry * rows.batch + row * rows.row + (pair - row * kv_heads) * rows.head;
}

template <bool kSend>
__global__ void __launch_bounds__(kThreads)
    copy_rows(DeviceMessages messages, const int* sources, std::int64_t count, RankRows rows) {
  const int units = rows.row_bytes / 16;
  const std::int64_t flat = flat_thread(), item = flat / units, entry = item / count, row = item - entry * count;
  if (entry >= rows.batch) return;
  const std::int64_t offset = (flat - item * units) * 16;
  const int source = sources[row];
#pragma unroll
  for (int which = 0; which < 2; ++which) {
    const StridedRows& own = which ? rows.v : rows.k;
    uint4 words = make_uint4(0, 0, 0, 0);
    const char* from = nullptr;
    if (source >= 0) from = own_row(own, source, entry, rows.kv_heads);
    else if (!kSend && source != kZeros)
      from = message_row(messages, -2 - source, entry, rows.batch, which, rows.row_bytes);
    if (from) words = *reinterpret_cast<const uint4*>(from + offset);
    char* const to = kSend ? message_row(messages, row, entry, rows.batch, which, rows.row_bytes)
                           : (which ? rows.packed_v : rows.packed_k) + item * rows.row_bytes;
    *reinterpret_cast<uint4*>(to + offset) = words;
  }
}

__device__ __forceinline__ void add(float4& sum, const float4& more) {
  sum.x += more.x, sum.y += more.y, sum.z += more.z, sum.w += more.w;
}

template <bool kReturn>
__global__ void __launch_bounds__(kThreads) add_rows(DeviceMessages messages, DeviceSums lists, RankSums sums) {
  const int units = sums.columns / 4;
  const std::int64_t flat = flat_thread(), item = flat / units, entry = item / lists.count;
  if (entry >= sums.batch) return;
  const std::int64_t i = item - entry * lists.count, column = (flat - item * units) * 4;
  const std::int64_t packed = sums.batch * sums.kv_heads * sums.rows + entry * sums.packed_rows;
  const int target = lists.targets[i], bytes = sums.columns * 4, own_row_of = target / sums.kv_heads;
  const std::int64_t own = (entry * sums.kv_heads + target - own_row_of * sums.kv_heads) * sums.rows + own_row_of;
#pragma unroll
  for (int which = 0; which < 2; ++which) {
    float* const base = which ? sums.dv : sums.dk;
    float4* const to = reinterpret_cast<float4*>(
        kReturn ? reinterpret_cast<float*>(message_row(messages, target, entry, sums.batch, which, bytes)) + column
                : base + own * sums.columns + column);
    float4 sum = kReturn ? make_float4(0, 0, 0, 0) : *to;
    for (int s = lists.first[i]; s < lists.first[i + 1]; ++s) {
      const int source = lists.sources[s];
      const float* const from =
          source >= 0
              ? base + (packed + source) * sums.columns
              : reinterpret_cast<const float*>(message_row(messages, -2 - source, entry, sums.batch, which, bytes));
      add(sum, *reinterpret_cast<const float4*>(from + column));
    }
    *to = sum;
  }
}

__device__ __forceinline__ void store(__half* target, float value) { *target = __float2half(value); }
__device__ __forceinline__ void store(__nv_bfloat16* target, float value) { *target = __float2bfloat16(value); }

/// Eight columns of a row of the tensors, from the sums of one head after the other.
template <class T>
__global__ void __launch_bounds__(kThreads) finish_rows(RankSums sums, StridedRows dk, StridedRows dv) {
  const int units = sums.columns / 8;
  const std::int64_t flat = flat_thread(), item = flat / units;
  const std::int64_t row = item % sums.rows, by_head = item / sums.rows;
  const std::int64_t entry = by_head / sums.kv_heads, head = by_head - entry * sums.kv_heads;
  if (entry >= sums.batch) return;
  const std::int64_t column = (flat - item * units) * 8;
#pragma unroll
  for (int which = 0; which < 2; ++which) {
    const float4* const from =
        reinterpret_cast<const float4*>((which ? sums.dv : sums.dk) + item * sums.columns + column);
    const float4 low = from[0], high = from[1];
    alignas(16) T eight[8];
    const float values[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
    for (int i = 0; i < 8; ++i) store(eight + i, values[i]);
    const StridedRows& to = which ? dv : dk;
    *reinterpret_cast<uint4*>(to.data + entry * to.batch + row * to.row + head * to.head + column * 2) =
        *reinterpret_cast<const uint4*>(eight);
  }
}

/// As MessageHeader lies in memory.
struct Header {
  std::uint64_t magic, digest, step;
  int source, target;
  std::uint64_t bytes, checksum, unused[2];
};
static_assert(sizeof(Header) == 64);

/// Some blocks for each message sum up its rows, as the checksum of gpu_rows.cu does; the last of them has the header.
template <bool kCheck>
__global__ void __launch_bounds__(kThreads)
    seal_messages(DeviceMessages messages, HeaderRules rules, SealScratch scratch, HeaderFault* fault) {
  const int m = blockIdx.x / kSealBlocks, part = blockIdx.x % kSealBlocks;
  const DeviceMessage& message = messages.list[m];
  if (rules.checksums) {
    const auto* const words = reinterpret_cast<const unsigned long long*>(message.payload);
    unsigned long long own = 0;
    for (std::size_t i = static_cast<std::size_t>(part) * kThreads + threadIdx.x; i < message.bytes / 8;
         i += kThreads * kSealBlocks) {
      const unsigned long long word = (words[i] ^ i * 0x9E3779B97F4A7C15u) * 0xBF58476D1CE4E5B9u;
      own += (word ^ word >> 31) * 0x94D049BB133111EBu;
    }
    for (int distance = kWarp / 2; distance > 0; distance /= 2) own += __shfl_xor_sync(~0u, own, distance);
    if (threadIdx.x % kWarp == 0) atomicAdd(scratch.sums + m, own);
  }
  __threadfence();
  __syncthreads();
  if (threadIdx.x != 0 || atomicAdd(scratch.blocks + m, 1u) != kSealBlocks - 1) return;
  __threadfence();
  scratch.blocks[m] = 0;
  const std::uint64_t sum = atomicExch(scratch.sums + m, 0ull);
  auto* const header = reinterpret_cast<Header*>(message.payload - sizeof(Header));
  if constexpr (!kCheck) {
    *header = {rules.magic, rules.digest, rules.step, rules.rank, message.peer, message.bytes, sum, {}};
  } else {
    const auto expect = [&](HeaderFault::Kind kind, std::uint64_t found, std::uint64_t expected) {
      volatile HeaderFault* const told = fault;
      if (found == expected || told->kind != HeaderFault::none) return;
      told->peer = message.peer, told->at_step = rules.step, told->found = found;
      __threadfence_system();
      told->kind = kind;
    };
    const bool ours = header->source == message.peer && header->target == rules.rank;
    expect(HeaderFault::magic, ours ? header->magic : 0, rules.magic);
    expect(HeaderFault::digest, header->digest, rules.digest);
    expect(HeaderFault::step, header->step, rules.step);
    expect(HeaderFault::bytes, header->bytes, message.bytes);
    if (rules.checksums) expect(HeaderFault::checksum, header->checksum, sum);
  }
}

}  // namespace

cudaError_t start_send(const DeviceMessages& to, const int* sources, std::int64_t pairs, const RankRows& rows,
                       cudaStream_t stream) {
  if (pairs == 0) return cudaSuccess;
  const unsigned count = blocks_for(pairs * rows.batch * (rows.row_bytes / 16));
  return run_kernel(copy_rows<true>, count, kThreads, 0, stream, to, sources, pairs, rows);
}

cudaError_t start_pack(const DeviceMessages& received, const int* sources, const RankRows& rows, cudaStream_t stream) {
  if (rows.packed_rows == 0) return cudaSuccess;
  const unsigned count = blocks_for(rows.packed_rows * rows.batch * (rows.row_bytes / 16));
  return run_kernel(copy_rows<false>, count, kThreads, 0, stream, received, sources, rows.packed_rows, rows);
}

cudaError_t start_return(const DeviceMessages& to, const DeviceSums& returned, const RankSums& sums,
                         cudaStream_t stream) {
  if (returned.count == 0) return cudaSuccess;
  const unsigned count = blocks_for(returned.count * sums.batch * (sums.columns / 4));
  return run_kernel(add_rows<true>, count, kThreads, 0, stream, to, returned, sums);
}

cudaError_t start_collect(const DeviceMessages& from, const DeviceSums& own, const RankSums& sums,
                          cudaStream_t stream) {
  if (own.count == 0) return cudaSuccess;
  const unsigned count = blocks_for(own.count * sums.batch * (sums.columns / 4));
  return run_kernel(add_rows<false>, count, kThreads, 0, stream, from, own, sums);
}

cudaError_t start_finish(const RankSums& sums, DType dtype, const StridedRows& dk, const StridedRows& dv,
                         cudaStream_t stream) {
  const std::int64_t threads = sums.batch * sums.kv_heads * sums.rows * (sums.columns / 8);
  if (threads == 0) return cudaSuccess;
  const auto run = [&](auto* kernel) {
    return run_kernel(kernel, blocks_for(threads), kThreads, 0, stream, sums, dk, dv);
  };
  return dtype == DType::bf16 ? run(finish_rows<__nv_bfloat16>) : run(finish_rows<__half>);
}

cudaError_t start_seal(const DeviceMessages& messages, const HeaderRules& rules, const SealScratch& scratch,
                       cudaStream_t stream) {
  if (messages.count == 0) return cudaSuccess;
  return run_kernel(seal_messages<false>, static_cast<unsigned>(messages.count * kSealBlocks), kThreads, 0, stream,
                    messages, rules, scratch, static_cast<HeaderFault*>(nullptr));
}

cudaError_t start_check(const DeviceMessages& messages, const HeaderRules& rules, const SealScratch& scratch,
                        HeaderFault* fault, cudaStream_t stream) {
  if (messages.count == 0) return cudaSuccess;
  return run_kernel(seal_messages<true>, static_cast<unsigned>(messages.count * kSealBlocks), kThreads, 0, stream,
                    messages, rules, scratch, fault);
}

}  // namespace longspan::gpu
