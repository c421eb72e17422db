// The kernels over rows of messages, as the host starts them. Plain types only: nvcc stumbles over more.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "longspan/tensor_view.h"

namespace longspan::gpu {

/// A tensor [batch, row, head]; strides in bytes.
struct StridedRows {
  char* data;
  std::int64_t batch, row, head;
};

/// Part of a run of a message that lies in one range of the shard: pairs from `first_pair` on, of `heads` heads each.
struct ShardRun {
  std::int64_t first_pair;  // in the order of (row, head)
  std::int64_t offset;      // of that pair in the message, which has K of all pairs of all entries, then V
  std::int64_t shard_row, step;
  int kv_head, heads;
};

/// Runs in device memory, and how many (row, head) pairs they are together.
struct MessageRuns {
  const ShardRun* runs;
  int count;
  std::int64_t pairs, batch;
};

/// Rows of `bytes` bytes from k and v to a message; `aligned`: everything to 16 bytes.
cudaError_t start_pack(char* payload, const MessageRuns& runs, const StridedRows& k, const StridedRows& v, int bytes,
                       bool aligned, cudaStream_t stream);
/// Adds float32 rows of a message to dk and dv.
cudaError_t start_add(const float* payload, const MessageRuns& runs, const StridedRows& dk, const StridedRows& dv,
                      int columns, cudaStream_t stream);
/// Of a whole tensor.
struct RowCounts {
  std::int64_t batch, rows, heads;
  int columns;
  std::int64_t rows_of_all() const { return batch * rows * heads; }
};
/// float32 to a dtype, or a dtype to float32.
cudaError_t start_convert(DType to_dtype, const StridedRows& to, DType from_dtype, const StridedRows& from,
                          const RowCounts& counts, cudaStream_t stream);
/// Adds float32 rows to others.
cudaError_t start_sum(const StridedRows& to, const StridedRows& from, const RowCounts& counts, cudaStream_t stream);
/// Rows and their softmax denominators (lse) become those of their own keys and of others; no source: of zeros.
cudaError_t start_mix(const StridedRows& out, const StridedRows& lse, const StridedRows& more_out,
                      const StridedRows& more_lse, const RowCounts& counts, cudaStream_t stream);
/// Adds the sum of a message's bytes to *sum, or takes it away.
cudaError_t start_checksum(std::uint64_t* sum, const std::byte* data, std::size_t bytes, bool take_away,
                           cudaStream_t stream);

}  // namespace longspan::gpu
