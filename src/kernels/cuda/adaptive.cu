// Selection: a block has its means by one thread block; scores of a few block rows with all columns live in shared
// memory, and a warp finds the least score that stays by bits, from the highest down. Lists: a warp per tile counts its
// entries, takes room for them, and writes them.
#include "kernels/cuda/adaptive.h"

#include <algorithm>
#include <bit>

#include "kernels/cuda/ptx.cuh"
#include "kernels/cuda/start.cuh"
#include "pattern/kept_columns.h"

namespace longspan::cuda {
namespace {

constexpr int kThreads = 256, kLanes = 32, kWarps = kThreads / kLanes;
constexpr int kMostRows = 16, kFewRows = 4;  // block rows that share what they read of key means

/// Shared memory is asked for up to `most_shared`, the device's most, by every call alike: a thread that asked for less
/// would take from another what that one has just asked for.
template <class... Parameters, class... Arguments>
cudaError_t launch(void (*kernel)(Parameters...), dim3 grid, int shared_bytes, int most_shared, cudaStream_t stream,
                   const Arguments&... arguments) {
  constexpr int kAlways = 48 * 1024;  // what needs no asking
  if (shared_bytes > kAlways) {
    const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, most_shared);
    if (error != cudaSuccess) return error;
  }
  kernel<<<grid, kThreads, static_cast<std::size_t>(shared_bytes), stream>>>(arguments...);
  return cudaGetLastError();
}

struct Choice {
  double density;
  int branch, blocks, shift, words;
  float* query_means;   // [mask head][block][column]
  float* key_means;     // [entry, kv head][column][block]
  std::uint32_t* bits;  // [mask head][block row][word]
};

/// Mean of the rows that lengths and key_mask leave of a block, column by column; NaN where none are left.
template <class T>
__global__ void __launch_bounds__(kThreads) block_means(const __grid_constant__ Launch a, Choice c, int lanes) {
  __shared__ float sums[kThreads][8];
  __shared__ int counts[kThreads];
  const int block = static_cast<int>(blockIdx.x), entry = static_cast<int>(blockIdx.z);
  const bool queries = static_cast<int>(blockIdx.y) < a.heads;
  const int head = queries ? static_cast<int>(blockIdx.y) : static_cast<int>(blockIdx.y) - a.heads;
  const int chunk = static_cast<int>(threadIdx.x) % lanes, group = static_cast<int>(threadIdx.x) / lanes,
            groups = kThreads / lanes;
  const int begin = block << c.shift, end = min(begin + (1 << c.shift), a.length(entry));
  if (queries && !a.branches[c.branch].owns(head)) return;
  for (int first_column = 0; first_column < a.columns; first_column += lanes * 8) {
    float sum[8] = {};
    int count = 0;
    const int own = first_column + chunk * 8;
    const auto add = [&](const T* row) {
      ++count;
      if (own >= a.columns) return;
      alignas(16) T elements[8];
      if (a.aligned)
        for (int i = 0; i < static_cast<int>(sizeof(T)) / 2; ++i)
          reinterpret_cast<uint4*>(elements)[i] = reinterpret_cast<const uint4*>(row + own)[i];
      else
        for (int i = 0; i < 8; ++i) elements[i] = row[own + i];
#pragma unroll
      for (int i = 0; i < 8; ++i) sum[i] += as_float(elements[i]);
    };
    if (queries) {
      for (int r = 0; r < a.range_count; ++r) {
        const DeviceRange& range = a.ranges[r];
        const int first = max(begin, range.start), last = min(end, range.start + range.count);
        for (int position = first + group; position < last; position += groups) {
          if (!a.allowed(entry, position)) continue;
          add(reinterpret_cast<const T*>(a.q.data) + a.q.offset(entry, range.first_row + position - range.start, head));
        }
      }
    } else {
      for (int position = begin + group; position < end; position += groups) {
        if (!a.allowed(entry, position)) continue;
        const char *k_row = nullptr, *v_row = nullptr;
        a.key_row(entry, head, position, sizeof(T), k_row, v_row);
        if (k_row) add(reinterpret_cast<const T*>(k_row));
      }
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) sums[threadIdx.x][i] = sum[i];
    counts[threadIdx.x] = count;
    __syncthreads();
    for (int local = static_cast<int>(threadIdx.x); local < min(lanes * 8, a.columns - first_column);
         local += kThreads) {
      float total = 0.0f;
      int rows = 0;
      for (int g = 0; g < groups; ++g) {
        total += sums[g * lanes + local / 8][local % 8];
        rows += counts[g * lanes];
      }
      const float mean = total / static_cast<float>(rows);
      const std::int64_t column = first_column + local;
      if (queries)
        c.query_means[((static_cast<std::int64_t>(entry) * a.heads + head) * c.blocks + block) * a.columns + column] =
            mean;
      else
        c.key_means[((static_cast<std::int64_t>(entry) * a.kv_heads + head) * a.columns + column) * c.blocks + block] =
            mean;
    }
    __syncthreads();
  }
}

/// Scores as integers of the same order: NaN is 0, below everything; equal scores are equal.
__device__ __forceinline__ std::uint32_t rank_of(float score) {
  if (isnan(score)) return 0;
  const std::uint32_t word = __float_as_uint(score + 0.0f);  // -0 is 0
  return word >> 31 ? ~word : word | 0x80000000u;
}

/// The best columns of kRows block rows of one mask head, as bits.
template <int kRows>
__global__ void __launch_bounds__(kThreads) choose_rows(const __grid_constant__ Launch a, Choice c) {
  extern __shared__ std::uint32_t ranks[];  // [row][blocks], then means of queries [column][row]
  float* const means = reinterpret_cast<float*>(ranks + kRows * c.blocks);
  const int first_row = static_cast<int>(blockIdx.x) * kRows, head = static_cast<int>(blockIdx.y),
            entry = static_cast<int>(blockIdx.z);
  if (!a.branches[c.branch].owns(head)) return;
  const int mask_head = entry * a.heads + head, length = a.length(entry);
  const int present = length == 0 ? 0 : ((length - 1) >> c.shift) + 1;
  const int rows = min(kRows, c.blocks - first_row);
  const int most = min(present, a.causal ? first_row + rows : present);  // candidates of the last row
  const float* const queries =
      c.query_means + (static_cast<std::int64_t>(mask_head) * c.blocks + first_row) * a.columns;
  const float* const keys =
      c.key_means +
      (static_cast<std::int64_t>(entry) * a.kv_heads + head / (a.heads / a.kv_heads)) * a.columns * c.blocks;
  for (int i = static_cast<int>(threadIdx.x); i < kRows * a.columns; i += kThreads) {
    const int row = i / a.columns, column = i % a.columns;
    means[column * kRows + row] = row < rows ? queries[row * a.columns + column] : 0.0f;
  }
  __syncthreads();
  if (first_row < present) {
    for (int column = static_cast<int>(threadIdx.x); column < most; column += kThreads) {
      float sums[kRows] = {};
#pragma unroll 4
      for (int d = 0; d < a.columns; ++d) {
        const float key = keys[static_cast<std::int64_t>(d) * c.blocks + column];
#pragma unroll
        for (int row = 0; row < kRows; ++row) sums[row] = fmaf(means[d * kRows + row], key, sums[row]);
      }
#pragma unroll
      for (int row = 0; row < kRows; ++row)
        ranks[row * c.blocks + column] = column == first_row + row ? ~0u : rank_of(sums[row]);
    }
  }
  __syncthreads();

  const int lane = static_cast<int>(threadIdx.x) % kLanes;
  for (int row = static_cast<int>(threadIdx.x) / kLanes; row < rows; row += kWarps) {
    const int block_row = first_row + row;
    const int candidates = block_row >= present ? 0 : a.causal ? block_row + 1 : present;
    const int kept = candidates == 0 ? 0 : max(1, static_cast<int>(floor(c.density * candidates + 0.5)));
    const std::uint32_t* const own = ranks + row * c.blocks;
    const auto count_from = [&](std::uint32_t least) {
      int count = 0;
      for (int column = lane; column < candidates; column += kLanes) count += own[column] >= least;
      return __reduce_add_sync(~0u, count);
    };
    // The largest rank that `kept` columns reach.
    std::uint32_t least = 0;
    for (int bit = 31; bit >= 0 && kept < candidates; --bit) {
      const std::uint32_t higher = least | 1u << bit;
      const int count = count_from(higher);
      if (count >= kept) least = higher;
      if (count == kept) break;
    }
    int ties = kept - (least == ~0u ? 0 : count_from(least + 1));  // of that rank, lower columns first
    std::uint32_t* const target = c.bits + (static_cast<std::int64_t>(mask_head) * c.blocks + block_row) * c.words;
    for (int word = 0; word < c.words; ++word) {
      const int column = word * kLanes + lane;
      const std::uint32_t rank = column < candidates ? own[column] : 0;
      const unsigned equal = __ballot_sync(~0u, column < candidates && rank == least);
      const bool stays =
          column < candidates && (rank > least || (rank == least && __popc(equal & ((1u << lane) - 1)) < ties));
      const unsigned chosen = __ballot_sync(~0u, stays);
      ties -= min(ties, __popc(equal));
      if (lane == 0) target[word] = chosen;
    }
  }
}

struct ListJob {
  Choice c;
  BlockPlace* places;  // [mask head][place_count]
  std::int32_t* blocks;
  std::uint16_t* block_bits;
  unsigned long long* room;  // entries taken
  int* extra;                // [mask head]: places taken beyond one per tile
  int place_count, group, groups, repeats, most;
  bool by_keys;
};

/// One warp per tile, or per tiles that share a list.
__global__ void __launch_bounds__(kThreads) list_tiles(const __grid_constant__ Launch a, ListJob job) {
  const Choice& c = job.c;
  const int lane = static_cast<int>(threadIdx.x) % kLanes;
  const int index = static_cast<int>(blockIdx.x) * kWarps + static_cast<int>(threadIdx.x) / kLanes;
  const int head = static_cast<int>(blockIdx.y), entry = static_cast<int>(blockIdx.z);
  if (index >= job.groups || !a.branches[c.branch].owns(head)) return;
  const int mask_head = entry * a.heads + head, first = index * job.group,
            own_blocks = min(job.group, c.blocks - first);
  const unsigned all = (1u << own_blocks) - 1;
  const std::uint32_t* const bits = c.bits + static_cast<std::int64_t>(mask_head) * c.blocks * c.words;
  // Which of the tile's blocks meet block `other`.
  const auto meets = [&](int other) -> unsigned {
    if (other >= c.blocks) return 0;
    if (job.by_keys) return bits[static_cast<std::int64_t>(other) * c.words + first / 32] >> (first % 32) & all;
    unsigned found = 0;
    for (int i = 0; i < own_blocks; ++i)
      found |= (bits[static_cast<std::int64_t>(first + i) * c.words + other / 32] >> (other % 32) & 1u) << i;
    return found;
  };
  const auto is_full = [&](int other, unsigned found) {
    return found == all && (!a.causal || (job.by_keys ? other >= first + own_blocks : other < first));
  };
  const int begin = a.causal && job.by_keys ? first / kLanes * kLanes : 0;
  const int end = a.causal && !job.by_keys ? first + own_blocks : c.blocks;
  int full = 0, partial = 0;
  for (int other = begin + lane; other - lane < end; other += kLanes) {
    const unsigned found = meets(other);
    full += __popc(__ballot_sync(~0u, is_full(other, found)));
    partial += __popc(__ballot_sync(~0u, found != 0 && !is_full(other, found)));
  }
  unsigned long long room = 0;
  if (lane == 0) room = atomicAdd(job.room, static_cast<unsigned long long>(full + partial));
  room = __shfl_sync(~0u, room, 0);
  unsigned long long next_full = room, next_partial = room + static_cast<unsigned long long>(full);
  for (int other = begin + lane; other - lane < end; other += kLanes) {
    const unsigned found = meets(other), before = (1u << lane) - 1;
    const unsigned fulls = __ballot_sync(~0u, is_full(other, found));
    const unsigned partials = __ballot_sync(~0u, found != 0 && !is_full(other, found));
    if (found != 0) {
      const unsigned long long place =
          fulls >> lane & 1 ? next_full + __popc(fulls & before) : next_partial + __popc(partials & before);
      job.blocks[place] = other;
      job.block_bits[place] = static_cast<std::uint16_t>(found);
    }
    next_full += __popc(fulls);
    next_partial += __popc(partials);
  }
  if (lane != 0) return;
  BlockPlace* const places = job.places + static_cast<std::int64_t>(mask_head) * job.place_count;
  const int count = full + partial;
  for (int repeat = 0; repeat < job.repeats; ++repeat) {
    const int tile = index * job.repeats + repeat;
    int target = tile;
    for (int part = 0; part == 0 || part < count; part += job.most) {
      const int here = min(job.most, count - part);
      places[target] = {static_cast<std::int64_t>(room) + part, max(0, min(full - part, here)), here, tile};
      if (part + job.most < count) target = job.groups * job.repeats + atomicAdd(job.extra + mask_head, 1);
    }
  }
}

Choice choice_of(const AdaptiveShape& shape, int branch, std::byte* workspace) {
  const AdaptivePlaces places(shape);
  return {shape.density,
          branch,
          shape.blocks,
          std::countr_zero(static_cast<unsigned>(shape.block_size)),
          shape.words(),
          reinterpret_cast<float*>(workspace + places.query_means),
          reinterpret_cast<float*>(workspace + places.key_means),
          reinterpret_cast<std::uint32_t*>(workspace + places.bits)};
}

int row_bytes(int rows, int blocks, int columns) { return rows * (blocks + columns) * static_cast<int>(sizeof(float)); }

}  // namespace

AdaptiveShape adaptive_shape(const Plan& plan, const BranchPlan& branch) {
  const Problem& problem = plan.problem();
  const auto blocks = static_cast<int>(branch.mask->blocks());
  return {branch.adaptive_density,
          branch.mask->block_size(),
          blocks,
          blocks == 0 ? 0 : static_cast<int>(kept_columns(branch.adaptive_density, blocks)),
          static_cast<int>(problem.batch * problem.heads),
          static_cast<int>(problem.batch * problem.kv_heads),
          static_cast<int>(problem.head_dim)};
}

AdaptivePlaces::AdaptivePlaces(const AdaptiveShape& shape) {
  total = 0;
  const auto take = [&](std::size_t& offset, std::int64_t bytes) {
    offset = total;
    total += (static_cast<std::size_t>(bytes) + 255) / 256 * 256;
  };
  const std::int64_t heads = shape.mask_heads, blocks = shape.blocks;
  take(query_means, heads * blocks * shape.columns * 4);
  take(key_means, shape.kv_heads * blocks * shape.columns * 4);
  take(bits, heads * blocks * shape.words() * 4);
  take(cursors, 8 + heads * 4);
  // One place per tile of at least 64 rows, or per block, and half as many again for what is split.
  take(places, heads * (std::max<std::int64_t>(blocks * std::max(1, shape.block_size / 64), 1) * 3 / 2 + 2) *
                   static_cast<std::int64_t>(sizeof(BlockPlace)));
  take(this->blocks, shape.entries() * 4);
  take(block_bits, shape.entries() * 2);
}

int most_adaptive_blocks(int shared_bytes, int columns) {
  return shared_bytes / static_cast<int>(sizeof(float)) - columns;
}

cudaError_t choose_adaptive(const Launch& all, const AdaptiveShape& shape, int branch, DType dtype, int shared_bytes,
                            std::byte* workspace, cudaStream_t stream) {
  if (shape.blocks == 0) return cudaSuccess;
  const Choice choice = choice_of(shape, branch, workspace);
  const int lanes = all.columns <= 64 ? 8 : all.columns <= 128 ? 16 : 32;
  const auto heads = static_cast<unsigned>(all.heads), batch = static_cast<unsigned>(all.batch);
  const dim3 means(static_cast<unsigned>(shape.blocks), heads + static_cast<unsigned>(all.kv_heads), batch);
  const cudaError_t error =
      with_storage(dtype, [&]<class T>() { return launch(&block_means<T>, means, 0, 0, stream, all, choice, lanes); });
  if (error != cudaSuccess) return error;
  const auto fits = [&](int rows, int bytes) { return row_bytes(rows, shape.blocks, all.columns) <= bytes; };
  const auto run = [&]<int kRows>() {
    const dim3 grid(static_cast<unsigned>((shape.blocks + kRows - 1) / kRows), heads, batch);
    const int bytes = row_bytes(kRows, shape.blocks, all.columns);
    return launch(&choose_rows<kRows>, grid, bytes, shared_bytes, stream, all, choice);
  };
  if (fits(kMostRows, shared_bytes / 2)) return run.operator()<kMostRows>();  // two thread blocks to a multiprocessor
  return fits(kFewRows, shared_bytes) ? run.operator()<kFewRows>() : run.operator()<1>();
}

cudaError_t adaptive_lists(const Launch& all, const AdaptiveShape& shape, int branch, const ListShape& of,
                           std::byte* workspace, cudaStream_t stream, BlockLists& lists) {
  const AdaptivePlaces places(shape);
  ListJob job;
  job.c = choice_of(shape, branch, workspace);
  job.places = reinterpret_cast<BlockPlace*>(workspace + places.places);
  job.blocks = reinterpret_cast<std::int32_t*>(workspace + places.blocks);
  job.block_bits = reinterpret_cast<std::uint16_t*>(workspace + places.block_bits);
  job.room = reinterpret_cast<unsigned long long*>(workspace + places.cursors);
  job.extra = reinterpret_cast<int*>(job.room + 1);
  job.group = std::max(1, of.tile_rows / shape.block_size);
  job.repeats = std::max(1, shape.block_size / of.tile_rows);
  job.groups = (shape.blocks + job.group - 1) / job.group;
  job.by_keys = of.by_keys;
  const int tiles = job.groups * job.repeats;
  const std::int64_t entries = static_cast<std::int64_t>(shape.blocks) * shape.kept;
  job.most =
      of.splits ? static_cast<int>(longest_list(entries, job.groups, shape.block_size)) : std::max(1, shape.blocks);
  job.place_count = of.splits ? tiles * 3 / 2 + 1 : tiles;
  lists = {};
  lists.places = job.places;
  lists.blocks = job.blocks;
  lists.bits = job.group > 1 ? job.block_bits : nullptr;
  lists.head_places = lists.place_count = job.place_count;
  lists.entry_places = job.place_count * all.heads;
  lists.shift = static_cast<std::uint8_t>(job.c.shift);
  lists.tile_shift = static_cast<std::uint8_t>(std::countr_zero(static_cast<unsigned>(of.tile_rows)));
  const std::size_t heads = static_cast<std::size_t>(shape.mask_heads);
  cudaError_t error = cudaMemsetAsync(job.room, 0, sizeof(*job.room) + heads * sizeof(int), stream);
  if (error == cudaSuccess)  // no place is an item yet
    error = cudaMemsetAsync(job.places, 0xFF, heads * static_cast<std::size_t>(job.place_count) * sizeof(BlockPlace),
                            stream);
  if (error != cudaSuccess || job.groups == 0) return error;
  const dim3 grid(static_cast<unsigned>((job.groups + kWarps - 1) / kWarps), static_cast<unsigned>(all.heads),
                  static_cast<unsigned>(all.batch));
  return launch(&list_tiles, grid, 0, 0, stream, all, job);
}

}  // namespace longspan::cuda
