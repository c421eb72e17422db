// Appends a token to the memory of a decoding cache: a warp counts one unit's token and copies its key and value.
#include <cstdint>

#include "device/run_kernel.cuh"
#include "kernels/cuda/decode.h"
#include "kernels/strand_cache.h"

namespace longspan::cuda {
namespace {

constexpr int kWarp = 32, kThreads = 128;

template <class Word>
__global__ void __launch_bounds__(kThreads)
    append(const StrandCache cache, const TokenRows key, const TokenRows value) {
  const std::int64_t unit = blockIdx.x * (kThreads / kWarp) + threadIdx.x / kWarp;
  const int lane = threadIdx.x % kWarp;
  if (unit >= units_of(cache)) return;
  std::int64_t row = lane == 0 ? take_token(cache, unit) : 0;
  row = __shfl_sync(~0u, row, 0);
  const std::int64_t head = unit % cache.heads, entry = unit / (cache.branches * cache.heads);
  Word* const keys = reinterpret_cast<Word*>(cache.rows + (unit * cache.row_count + row) * cache.row_bytes);
  Word* const values =
      keys + units_of(cache) * cache.row_count * cache.row_bytes / static_cast<std::int64_t>(sizeof(Word));
  const auto of = [&](const TokenRows& token) {
    return reinterpret_cast<const Word*>(token.data + entry * token.entry + head * token.head);
  };
  const Word *const own_key = of(key), *const own_value = of(value);
  for (int i = lane; i < cache.row_bytes / static_cast<std::int64_t>(sizeof(Word)); i += kWarp)
    keys[i] = own_key[i], values[i] = own_value[i];
}

}  // namespace

cudaError_t start_append(const StrandCache& cache, const TokenRows& key, const TokenRows& value, bool aligned,
                         cudaStream_t stream) {
  const dim3 blocks(static_cast<unsigned>((units_of(cache) + kThreads / kWarp - 1) / (kThreads / kWarp)));
  const auto kernel = aligned ? &append<uint4> : &append<std::uint16_t>;
  return run_kernel(kernel, blocks, kThreads, 0, stream, cache, key, value);
}

}  // namespace longspan::cuda
