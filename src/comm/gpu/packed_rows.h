// The kernels by which rows of a rank become messages and packed strands, and gradients come back. Plain types only.
#pragma once

#include "comm/gpu/gpu_rows.h"

namespace longspan::gpu {

/// A message in memory of the device: K of all entries, [batch, pairs], then V. Its header is in front of it.
struct DeviceMessage {
  char* payload;
  std::int64_t first_pair, pairs;  // of all messages in one direction
  std::uint64_t bytes;
  int peer;
};
struct DeviceMessages {
  const DeviceMessage* list;
  int count;
};

/// A rank's rows [batch, row, kv_head] and those of its packed strands [batch, row].
struct RankRows {
  StridedRows k, v;
  char *packed_k, *packed_v;
  std::int64_t batch, packed_rows;
  int kv_heads, row_bytes;  // a multiple of 16
};
/// To messages that are sent: of each pair, the rank's.
cudaError_t start_send(const DeviceMessages& to, const int* sources, std::int64_t pairs, const RankRows& rows,
                       cudaStream_t stream);
/// To packed strands: of each packed row, where it comes from (PackedPlan::sources).
cudaError_t start_pack(const DeviceMessages& received, const int* sources, const RankRows& rows, cudaStream_t stream);

/// float32 sums of dk and dv as kernels leave them: [batch, kv_heads, rows], then [batch, packed_rows].
struct RankSums {
  float *dk, *dv;
  std::int64_t batch, rows, packed_rows;
  int kv_heads, columns;
};
/// Lists of RowSums on the device.
struct DeviceSums {
  const int *targets, *first, *sources;
  std::int64_t count;
};
/// Gradients of received pairs, to messages.
cudaError_t start_return(const DeviceMessages& to, const DeviceSums& returned, const RankSums& sums,
                         cudaStream_t stream);
/// Adds packed rows and what came back to the rank's own sums.
cudaError_t start_collect(const DeviceMessages& from, const DeviceSums& own, const RankSums& sums, cudaStream_t stream);
/// The rank's sums to its tensors.
cudaError_t start_finish(const RankSums& sums, DType dtype, const StridedRows& dk, const StridedRows& dv,
                         cudaStream_t stream);

/// What a message says in front of its rows (MessageHeader), as all messages of one exchange of a rank have it.
struct HeaderRules {
  std::uint64_t magic, digest, step;
  int rank;
  bool checksums;
};
/// Places for each message: a sum, and blocks that have added to it. Zeros before and after each launch.
struct SealScratch {
  unsigned long long* sums;
  unsigned* blocks;
};
/// What is wrong with a message: the field of its header, and what it says. In host memory that the device writes.
struct HeaderFault {
  enum Kind : int { none, magic, digest, step, bytes, checksum };
  int kind, peer;
  std::uint64_t at_step, found;
};
/// Writes headers, or looks at them. A fault stays until the host has seen it.
cudaError_t start_seal(const DeviceMessages& messages, const HeaderRules& rules, const SealScratch& scratch,
                       cudaStream_t stream);
cudaError_t start_check(const DeviceMessages& messages, const HeaderRules& rules, const SealScratch& scratch,
                        HeaderFault* fault, cudaStream_t stream);

}  // namespace longspan::gpu
