// The arithmetic of a decoding cache, once for host and device.
#pragma once

#include "longspan/strand_cache.h"
#include "util/host_device.h"

namespace longspan {

LONGSPAN_DEVICE std::int64_t units_of(const StrandCache& cache) { return cache.entries * cache.branches * cache.heads; }

/// Counts a unit's next token; the row that its key and value go to.
LONGSPAN_DEVICE std::int64_t take_token(const StrandCache& cache, std::int64_t unit) {
  const std::int64_t each = cache.branches * cache.heads, strand = unit % each, position = cache.positions[unit]++;
  const std::int64_t offset = position % cache.strands[strand], dilation = cache.strands[each + strand];
  const bool covered = offset % dilation == cache.strands[2 * each + strand];
  const std::int64_t length = covered ? offset / dilation + 1 : 0;
  return cache.lengths[unit] = length < cache.row_count ? length : 0;
}

}  // namespace longspan
