// The memory of a decoding cache: of each batch entry, branch and head the rows of its strand in the current segment,
// one after the other. A unit is one of those three. To the operator units are batch entries of one head, with a length
// each.
#pragma once

#include <cstdint>

#include "longspan/export.h"
#include "longspan/tensor_view.h"

namespace longspan {

/// Pointers to the caller's memory, on the device that computes.
struct StrandCache {
  char* rows = nullptr;  ///< keys, then values: [units][row_count][columns]; nothing attends to the first row
  std::int64_t* positions = nullptr;      ///< [units]: which token a unit takes next
  std::int64_t* lengths = nullptr;        ///< [units]: rows, after the first, that the token taken last attends to
  const std::int64_t* strands = nullptr;  ///< [3][branches][heads]: segment, dilation, phase
  std::int64_t entries = 0, branches = 0, heads = 0, row_count = 0, row_bytes = 0;
};

/// One token's keys or values of each entry and head; strides in bytes.
struct TokenRows {
  const char* data = nullptr;
  std::int64_t entry = 0, head = 0;
};

/// Takes one token: keys and values go to their rows, or to the first one where they are not in the strand; positions
/// and lengths move on. On a GPU all this happens in order of the stream, so a graph that is replayed takes the next
/// token.
LONGSPAN_API void append_token(const StrandCache& cache, const TokenRows& key, const TokenRows& value, Device device,
                               void* stream = nullptr);

}  // namespace longspan
