// What surrounds the main kernel of the Hopper backward: row values and zeroed sums before it, sums to dq after it.
#pragma once

#include "kernels/hopper/backward_order.cuh"

namespace longspan::hopper {

/// Threads that read a row, eight columns each: a power of two.
constexpr int lanes_of_row(int blocks) { return blocks == 3 ? 32 : blocks * 8; }

/// Eight numbers of 16 bits as floats.
template <class T>
struct Eight {
  alignas(16) T elements[8];
  __device__ __forceinline__ void load(const T* source) {
    *reinterpret_cast<uint4*>(elements) = __ldg(reinterpret_cast<const uint4*>(source));
  }
  __device__ __forceinline__ float dot(const Eight& other) const {
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < 8; ++i) sum = fmaf(cuda::as_float(elements[i]), cuda::as_float(other.elements[i]), sum);
    return sum;
  }
};

/// Queries of an item's strand, and the first row of its tile of 64 in row values and sums.
struct QueryTile {
  int rows;
  std::int64_t q_row, row;
  int stride;
  __device__ __forceinline__ QueryTile(const PartsLaunch& a, const cuda::Item& item) {
    const cuda::StrandRows strand =
        a.base.schedule.branches[item.branch].strand(item.head, item.segment, a.base.tensors.length(item.entry));
    const cuda::StrandQueries queries = a.base.schedule.ranges[item.range].of(strand);
    const int before = item.tile * kSumTileRows;
    rows = min(kSumTileRows, queries.count - before);
    stride = strand.stride;
    q_row = queries.q_row + static_cast<std::int64_t>(before) * stride;
    row = a.row(item) + before;
  }
};

/// Zeros to rows that no branch covers, of dq and, where nobody else writes them, of dk and dv.
template <class T>
__device__ __forceinline__ void zero_uncovered(const PartsLaunch& a, const cuda::Item& item) {
  constexpr int kWarps = kPartsThreads / kWarpThreads;
  for (int block = threadIdx.x / kWarpThreads; block < cuda::kFillRows / kWarpThreads; block += kWarps) {
    const unsigned uncovered = cuda::uncovered_rows(a.base, item, block);
    if (uncovered == 0) continue;
    const std::int64_t row =
        a.base.schedule.ranges[item.range].first_row + item.tile * cuda::kFillRows + block * kWarpThreads;
    if (!a.base.schedule.merges) cuda::zero_rows<T>(a.base, a.base.gradients.dq, item.entry, row, item.head, uncovered);
    if (a.zero_keys) {
      cuda::zero_rows<T>(a.base, a.base.gradients.dk, item.entry, row, item.head, uncovered);
      cuda::zero_rows<T>(a.base, a.base.gradients.dv, item.entry, row, item.head, uncovered);
    }
  }
}

/// Zeros to the sums of rows that branches share.
__device__ __forceinline__ void zero_merged(const PartsLaunch& a, const cuda::Item& item) {
  const cuda::DeviceRange& range = a.base.schedule.ranges[item.range];
  const int first = item.tile * cuda::kFillRows, rows = min(cuda::kFillRows, range.count - first);
  float4* const sums = reinterpret_cast<float4*>(a.merged_row(item.entry, item.head, range.first_row + first));
#pragma unroll 4
  for (int i = threadIdx.x; i < rows * (a.sum_columns / 4); i += kPartsThreads)
    sums[i] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
}

/// lse and delta of each row in strand order, zeros in the sums of dq. Rows after a strand's end are zeroed too: sums
/// are in the order of registers, where they lie between rows that exist.
template <class S>
__global__ void __launch_bounds__(kPartsThreads) prepare(const __grid_constant__ PartsLaunch a) {
  using T = typename S::Element;
  constexpr int kLanes = lanes_of_row(S::kBlocks), kRowsAtOnce = kPartsThreads / kLanes,
                kPasses = kSumTileRows / kRowsAtOnce;
  allow_next();
  if (blockIdx.x < a.list_blocks) return list_places<S>(a, blockIdx.x * kPartsThreads + threadIdx.x);
  const unsigned index = blockIdx.x - a.list_blocks;
  if (index == 0 && threadIdx.x == 0) *a.ticket = 0;
  if (index == 0 && a.joined) {
    for (int i = threadIdx.x; i < kMostHalved * kWarpsOfKeys; i += kPartsThreads) a.joined[i] = 0;
  }
  const cuda::Item item = a.base.schedule.decode(index);
  if (item.branch < 0) {
    if (a.base.schedule.merges) zero_merged(a, item);
    if (!a.base.schedule.merges || a.zero_keys) zero_uncovered<T>(a, item);
    return;
  }
  const QueryTile tile(a, item);
  if (tile.rows <= 0) return;
  const int chunk = threadIdx.x % kLanes, first = threadIdx.x / kLanes;
  bool far = false;
  Eight<T> out[kPasses] = {}, dout[kPasses] = {};
#pragma unroll
  for (int pass = 0; pass < kPasses; ++pass) {
    const int local = pass * kRowsAtOnce + first;
    if (local >= tile.rows || chunk * 8 >= a.base.tensors.columns) continue;
    const std::int64_t q_row = tile.q_row + static_cast<std::int64_t>(local) * tile.stride;
    out[pass].load(reinterpret_cast<const T*>(a.base.tensors.out.data) +
                   a.base.tensors.out.offset(item.entry, q_row, item.head) + chunk * 8);
    dout[pass].load(reinterpret_cast<const T*>(a.base.gradients.dout.data) +
                    a.base.gradients.dout.offset(item.entry, q_row, item.head) + chunk * 8);
  }
  if (!a.base.schedule.merges) {
    float4* const sums = reinterpret_cast<float4*>(a.sums + tile.row * S::kBlocks * S::kSumColumns);
#pragma unroll
    for (int i = threadIdx.x; i < S::kBlocks * S::kSumTile / 4; i += kPartsThreads)
      sums[i] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  }
  const std::int64_t sums_tile = tile.row / kSumTileRows;
  if (a.turns && threadIdx.x < S::kBlocks) a.turns[sums_tile * S::kBlocks + threadIdx.x] = 0;
  if (a.key_turns && threadIdx.x < 2) a.key_turns[sums_tile * 2 + threadIdx.x] = 0;
#pragma unroll
  for (int pass = 0; pass < kPasses; ++pass) {
    const int local = pass * kRowsAtOnce + first;
    float delta = out[pass].dot(dout[pass]);
#pragma unroll
    for (int distance = kLanes / 2; distance > 0; distance /= 2) delta += __shfl_xor_sync(~0u, delta, distance);
    if (chunk != 0 || local >= tile.rows) continue;
    const std::int64_t q_row = tile.q_row + static_cast<std::int64_t>(local) * tile.stride;
    const float lse = a.base.tensors.lse.at(item.entry, q_row, item.head);
    if (a.base.gradients.dlse.data) delta -= a.base.gradients.dlse.at(item.entry, q_row, item.head);
    const bool empty = lse == -LONGSPAN_INFINITY;
    far = far || (!empty && fabsf(lse) > kPlainLse * cuda::kLn2);
    a.lse[tile.row + local] = empty ? -LONGSPAN_INFINITY : -lse * cuda::kLog2E;
    a.delta[tile.row + local] = empty ? 0.0f : -delta * a.base.gradients.dscore_scale;
  }
  far = __syncthreads_or(far);
  if (threadIdx.x == 0) a.far_lse[tile.row / kSumTileRows] = far;
}

/// Blocks that write dk and dv from their sums, after those for dq: each some rows of one head of one entry.
template <class S>
LONGSPAN_DEVICE unsigned key_row_blocks(const PartsLaunch& a) {
  constexpr int kRows = kPartsThreads / lanes_of_row(S::kBlocks);
  return (static_cast<unsigned>(a.base.tensors.tokens) + kRows - 1) / kRows;
}
template <class S>
LONGSPAN_DEVICE std::int64_t key_blocks(const PartsLaunch& a) {
  return a.finish_keys
             ? static_cast<std::int64_t>(a.base.tensors.batch) * a.base.tensors.kv_heads * key_row_blocks<S>(a)
             : 0;
}
template <class S>
__device__ __forceinline__ void convert_keys(const PartsLaunch& a, unsigned block) {
  using T = typename S::Element;
  constexpr int kLanes = lanes_of_row(S::kBlocks);
  const unsigned row_blocks = key_row_blocks<S>(a), by_head = block / row_blocks;
  const int row = static_cast<int>((block - by_head * row_blocks) * (kPartsThreads / kLanes) + threadIdx.x / kLanes);
  const int entry = static_cast<int>(by_head / a.base.tensors.kv_heads),
            head = static_cast<int>(by_head) % a.base.tensors.kv_heads;
  const int column = threadIdx.x % kLanes * 8;
  if (row < a.base.tensors.tokens && column < a.base.tensors.columns) convert_key<T>(a, entry, head, row, column);
}

/// Sums to dq, tile by tile, for patterns whose branches share no rows.
template <class S>
__global__ void __launch_bounds__(kPartsThreads) convert_tiles(const __grid_constant__ PartsLaunch a) {
  using T = typename S::Element;
  constexpr int kPitch = kBlockColumns + 8;  // keeps rows apart in banks, and 16-byte chunks aligned
  constexpr int kEights = S::kSumColumns / 8, kParts = kPartsThreads / kGroupThreads;
  __shared__ __align__(16) T rows[S::kBlocks][kSumTileRows][kPitch];
  await_previous();
  if (blockIdx.x >= a.items) return convert_keys<S>(a, blockIdx.x - a.items);
  const cuda::Item item = a.base.schedule.decode(blockIdx.x);
  const QueryTile tile(a, item);
  if (tile.rows <= 0) return;
  const int part = threadIdx.x / kGroupThreads, thread = threadIdx.x % kGroupThreads, lane = thread % kWarpThreads;
  const float4* const sums =
      reinterpret_cast<const float4*>(a.sums + tile.row / kSumTileRows * S::kBlocks * S::kSumTile) +
      thread / kWarpThreads * (S::kWarpSums / 4) + lane;
  const int row = thread / kWarpThreads * 16 + lane / 4;
  const float factor = a.base.gradients.sum_scale;
#pragma unroll
  for (int i = 0; i < S::kBlocks * kEights / kParts; ++i) {
    const int block = (i * kParts + part) / kEights, j = (i * kParts + part) % kEights;
    const float4 four = __ldcs(sums + block * (S::kSumTile / 4) + j * kWarpThreads);
    std::uint32_t* const place = reinterpret_cast<std::uint32_t*>(&rows[block][row][j * 8 + lane % 4 * 2]);
    place[0] = cuda::pack<T>(four.x * factor, four.y * factor);
    place[4 * kPitch] = cuda::pack<T>(four.z * factor, four.w * factor);
  }
  __syncthreads();
  constexpr int kLanes = lanes_of_row(S::kBlocks);
  const int chunk = threadIdx.x % kLanes;
  if (chunk * 8 >= a.base.tensors.columns) return;
#pragma unroll
  for (int local = threadIdx.x / kLanes; local < kSumTileRows; local += kPartsThreads / kLanes) {
    if (local >= tile.rows) break;
    const std::int64_t q_row = tile.q_row + static_cast<std::int64_t>(local) * tile.stride;
    T* const target = reinterpret_cast<T*>(a.base.gradients.dq.data) +
                      a.base.gradients.dq.offset(item.entry, q_row, item.head) + chunk * 8;
    *reinterpret_cast<uint4*>(target) = *reinterpret_cast<const uint4*>(&rows[chunk / 8][local][chunk % 8 * 8]);
  }
}

inline constexpr int kQuarters = 4,
                     kQuarterRows = cuda::kFillRows / kQuarters;  // of an item: enough blocks to fill a GPU

/// Sums to dq, row by row, where branches share them; those that no branch covers are zeros.
template <class S>
__global__ void __launch_bounds__(kPartsThreads) convert_rows(const __grid_constant__ PartsLaunch a) {
  using T = typename S::Element;
  constexpr int kLanes = lanes_of_row(S::kBlocks);
  const unsigned row_blocks = a.fill_items * kQuarters;
  await_previous();
  if (blockIdx.x >= row_blocks) return convert_keys<S>(a, blockIdx.x - row_blocks);
  const cuda::Item item = a.base.schedule.decode(a.items + blockIdx.x / kQuarters);
  const cuda::DeviceRange& range = a.base.schedule.ranges[item.range];
  const int chunk = threadIdx.x % kLanes, column = chunk * 8;
  if (column >= a.base.tensors.columns) return;
  // Columns of a thread in sums (backward_launch.h), and how far its second four are from the first.
  constexpr int kApart = S::kShared ? 4 : 8;
  const int place = S::kShared ? column : chunk / 2 * kSumBlockColumns + chunk % 2 * 4;
  const int first = item.tile * cuda::kFillRows + blockIdx.x % kQuarters * kQuarterRows;
#pragma unroll
  for (int i = threadIdx.x / kLanes; i < kQuarterRows; i += kPartsThreads / kLanes) {
    if (first + i >= range.count) break;
    const std::int64_t row = range.first_row + first + i;
    const float* const sums = a.merged_row(item.entry, item.head, row) + place;
    const float4 low = __ldcs(reinterpret_cast<const float4*>(sums)),
                 high = __ldcs(reinterpret_cast<const float4*>(sums + kApart));
    // Plus 0: zeros that strands add past their ends, in no order, may leave 0 or -0 where a sum has underflowed.
    const auto two = [&](float x, float y) {
      return cuda::pack<T>(fmaf(x, a.base.gradients.sum_scale, 0.0f), fmaf(y, a.base.gradients.sum_scale, 0.0f));
    };
    *reinterpret_cast<uint4*>(reinterpret_cast<T*>(a.base.gradients.dq.data) +
                              a.base.gradients.dq.offset(item.entry, row, item.head) + column) =
        make_uint4(two(low.x, low.y), two(low.z, low.w), two(high.x, high.y), two(high.z, high.w));
  }
}

}  // namespace longspan::hopper
