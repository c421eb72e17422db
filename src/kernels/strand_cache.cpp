#include "kernels/strand_cache.h"

#include <cstring>

#include "kernels/cuda/cuda.h"

namespace longspan {

void append_token(const StrandCache& cache, const TokenRows& key, const TokenRows& value, Device device, void* stream) {
  if (device.type == DeviceType::cuda) return cuda::append_token(cache, key, value, device.index, stream);
  const std::int64_t all = units_of(cache) * cache.row_count * cache.row_bytes;
  for (std::int64_t unit = 0; unit < units_of(cache); ++unit) {
    const std::int64_t head = unit % cache.heads, entry = unit / (cache.branches * cache.heads);
    char* const row = cache.rows + (unit * cache.row_count + take_token(cache, unit)) * cache.row_bytes;
    const auto copy = [&](char* to, const TokenRows& from) {
      std::memcpy(to, from.data + entry * from.entry + head * from.head, static_cast<std::size_t>(cache.row_bytes));
    };
    copy(row, key);
    copy(row + all, value);
  }
}

}  // namespace longspan
