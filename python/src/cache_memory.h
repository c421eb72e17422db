// The memory of a DilatedCache as a step of one token sees it.
#pragma once

#include "longspan/strand_cache.h"

namespace longspan::python {

/// Points to torch's tensors, which the cache keeps alive.
struct CacheMemory {
  StrandCache cache;
  DType dtype;
  Device device;

  std::int64_t units() const { return cache.entries * cache.branches * cache.heads; }
  std::int64_t columns() const { return cache.row_bytes / size_of(dtype); }
  /// Keys (0) or values (1) that units attend to.
  ConstTensorView attended(std::int64_t which) const {
    const std::int64_t first = which * units() * cache.row_count + 1;
    return {cache.rows + first * cache.row_bytes,
            dtype,
            device,
            {units(), cache.row_count - 1, 1, columns()},
            {cache.row_count * columns(), columns(), columns(), 1}};
  }
  ConstTensorView lengths() const { return {cache.lengths, DType::i64, device, {units(), 1, 1, 1}, {1, 1, 1, 1}}; }
  /// Whether these are the next token's rows of each entry and head; `rows` of queries are the cache's branches.
  bool takes(const ConstTensorView& x, std::int64_t rows = 1) const {
    return x.dtype == dtype && x.device == device &&
           x.sizes == std::array<std::int64_t, 4>{cache.entries, rows, cache.heads, columns()};
  }
  void append(const ConstTensorView& key, const ConstTensorView& value, void* stream) const {
    const auto rows = [](const ConstTensorView& x) {
      const std::int64_t size = size_of(x.dtype);
      return TokenRows{static_cast<const char*>(x.data), x.strides[0] * size, x.strides[2] * size};
    };
    append_token(cache, rows(key), rows(value), device, stream);
  }
};

}  // namespace longspan::python
