// Selection: a warp has the means of one block and head, heads side by side as they are in memory; scores of a few
// block rows with all columns live in shared memory, and a warp finds the least score that stays by bits, from the
// highest that is in question down. Lists: a warp per tile counts its entries, takes room for them, and writes them.
#include "kernels/cuda/adaptive.h"

#include <algorithm>
#include <bit>

#include "kernels/cuda/ptx.cuh"
#include "kernels/cuda/start.cuh"
#include "pattern/kept_columns.h"

namespace longspan::cuda {
namespace {

constexpr int kThreads = 256, kLanes = 32, kWarps = kThreads / kLanes;
constexpr int kChoosing = 512;               // threads that choose
constexpr int kMostRows = 32, kFewRows = 4;  // block rows that share what they read of key means
constexpr int kColumns = 2, kFour = 4;       // scores that a thread computes side by side, ranks that it reads at once
constexpr int kLoads = 4;                    // rows that a thread asks for before it adds the first

/// Shared memory is asked for up to `most_shared`, the device's most, by every call alike: a thread that asked for less
/// would take from another what that one has just asked for.
template <class... Parameters, class... Arguments>
cudaError_t launch(void (*kernel)(Parameters...), dim3 grid, int threads, int shared_bytes, int most_shared,
                   cudaStream_t stream, const Arguments&... arguments) {
  constexpr int kAlways = 48 * 1024;  // what needs no asking
  if (shared_bytes > kAlways) {
    const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, most_shared);
    if (error != cudaSuccess) return error;
  }
  return run_kernel(kernel, grid, threads, shared_bytes, stream, arguments...);
}

__device__ __forceinline__ int warp_of_block() { return static_cast<int>(threadIdx.x) / kLanes; }

struct Choice {
  double density;
  int branch, blocks, stride, shift, words;  // stride: from a column of key means to the next, and of ranks
  float* query_means;                        // [mask head][block][column]
  float* key_means;                          // [entry, kv head][column][stride]
  std::uint32_t* bits;                       // [mask head][block row][word]
};

/// Mean of the rows that lengths and key_mask leave of a block, column by column; NaN where none are left. `lanes`
/// threads share a row, 8 columns each.
template <class T>
__global__ void __launch_bounds__(kThreads, 4) block_means(const __grid_constant__ Launch a, Choice c, int lanes) {
  const int heads = a.heads + a.kv_heads, index = static_cast<int>(blockIdx.x) * kWarps + warp_of_block();
  const int block = index / heads, side = index - block * heads, entry = static_cast<int>(blockIdx.z);
  const bool queries = side < a.heads;
  const int head = queries ? side : side - a.heads;
  if (block >= c.blocks || (queries && !a.branches[c.branch].owns(head))) return;
  const int lane = static_cast<int>(threadIdx.x) % kLanes, group = lane / lanes, groups = kLanes / lanes;
  const int begin = block << c.shift, end = min(begin + (1 << c.shift), a.length(entry));
  const int own = lane % lanes * 8;
  const bool exists = own < a.columns;
  float sum[8] = {};
  int count = 0;
  const auto add = [&](int first, int last, const auto& row_of) {
    for (int position = first + group; position < last; position += kLoads * groups) {
      alignas(16) T elements[kLoads][8];
      bool valid[kLoads];
#pragma unroll
      for (int i = 0; i < kLoads; ++i) {
        const int at = position + i * groups;
        const T* const row = at < last && a.allowed(entry, at) ? row_of(at) : nullptr;
        valid[i] = row;
        if (!row || !exists) continue;
        if (a.aligned) {
#pragma unroll
          for (int word = 0; word < static_cast<int>(sizeof(T)) / 2; ++word)
            reinterpret_cast<uint4*>(elements[i])[word] = __ldg(reinterpret_cast<const uint4*>(row + own) + word);
        } else {
#pragma unroll
          for (int j = 0; j < 8; ++j) elements[i][j] = row[own + j];
        }
      }
#pragma unroll
      for (int i = 0; i < kLoads; ++i) {
        count += valid[i];
        if (!valid[i] || !exists) continue;
#pragma unroll
        for (int j = 0; j < 8; ++j) sum[j] += as_float(elements[i][j]);
      }
    }
  };
  if (queries) {
    for (int r = 0; r < a.range_count; ++r) {
      const DeviceRange& range = a.ranges[r];
      add(max(begin, range.start), min(end, range.start + range.count), [&](int position) {
        return reinterpret_cast<const T*>(a.q.data) + a.q.offset(entry, range.first_row + position - range.start, head);
      });
    }
  } else {
    add(begin, end, [&](int position) {
      const char *k_row = nullptr, *v_row = nullptr;
      a.key_row(entry, head, position, sizeof(T), k_row, v_row);
      return reinterpret_cast<const T*>(k_row);
    });
  }
  for (int offset = lanes; offset < kLanes; offset *= 2) {
    count += __shfl_xor_sync(~0u, count, offset);
#pragma unroll
    for (int j = 0; j < 8; ++j) sum[j] += __shfl_xor_sync(~0u, sum[j], offset);
  }
  if (lane >= lanes || !exists) return;
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    const float mean = sum[j] / static_cast<float>(count);
    const std::int64_t column = own + j;
    if (queries)
      c.query_means[((static_cast<std::int64_t>(entry) * a.heads + head) * c.blocks + block) * a.columns + column] =
          mean;
    else
      c.key_means[((static_cast<std::int64_t>(entry) * a.kv_heads + head) * a.columns + column) * c.stride + block] =
          mean;
  }
}

/// Scores as integers of the same order: NaN is 0, below everything; equal scores are equal.
__device__ __forceinline__ std::uint32_t rank_of(float score) {
  if (isnan(score)) return 0;
  const std::uint32_t word = __float_as_uint(score + 0.0f);  // -0 is 0
  return word >> 31 ? ~word : word | 0x80000000u;
}

/// The means of kRows block rows in one column, as shared memory gives them at once.
template <int kRows>
struct alignas(kRows >= 4 ? 16 : 4) RowMeans {
  float of[kRows];
};

/// The best columns of kRows block rows of one mask head, as bits.
template <int kRows>
__global__ void __launch_bounds__(kChoosing) choose_rows(const __grid_constant__ Launch a, Choice c) {
  extern __shared__ __align__(16) std::uint32_t ranks[];  // [row][stride], then means of queries [column]
  auto* const means = reinterpret_cast<RowMeans<kRows>*>(ranks + kRows * c.stride);
  const int first_row = static_cast<int>(blockIdx.x) * kRows, head = static_cast<int>(blockIdx.y),
            entry = static_cast<int>(blockIdx.z);
  if (!a.branches[c.branch].owns(head)) return;
  const int mask_head = entry * a.heads + head, length = a.length(entry);
  const int present = length == 0 ? 0 : ((length - 1) >> c.shift) + 1;
  const int rows = min(kRows, c.blocks - first_row);
  const auto candidates_of = [&](int row) {
    const int block_row = first_row + row;
    return block_row >= present ? 0 : a.causal ? block_row + 1 : present;
  };
  const int most = min(present, a.causal ? first_row + rows : present);  // candidates of the last row
  const float* const queries =
      c.query_means + (static_cast<std::int64_t>(mask_head) * c.blocks + first_row) * a.columns;
  const float* const keys =
      c.key_means +
      (static_cast<std::int64_t>(entry) * a.kv_heads + head / (a.heads / a.kv_heads)) * a.columns * c.stride;
  for (int i = static_cast<int>(threadIdx.x); i < kRows * a.columns; i += kChoosing) {
    const int row = i / a.columns, column = i % a.columns;
    means[column].of[row] = row < rows ? queries[row * a.columns + column] : 0.0f;
  }
  __syncthreads();
  // Columns that are no candidates of a row, and the diagonal, which stays in any case, rank below everything. Head
  // dims are multiples of 8: so many key means are asked for at once.
  if (first_row < present) {
    constexpr int kAhead = 8;
    for (int column = static_cast<int>(threadIdx.x) * kColumns; column < most; column += kChoosing * kColumns) {
      float sums[kRows][kColumns] = {};
#pragma unroll 1
      for (int d = 0; d < a.columns; d += kAhead) {
        float2 key[kAhead];
#pragma unroll
        for (int i = 0; i < kAhead; ++i)
          key[i] = __ldg(reinterpret_cast<const float2*>(keys + static_cast<std::int64_t>(d + i) * c.stride + column));
#pragma unroll
        for (int i = 0; i < kAhead; ++i) {
          const RowMeans<kRows> mean = means[d + i];
#pragma unroll
          for (int row = 0; row < kRows; ++row) {
            sums[row][0] = fmaf(mean.of[row], key[i].x, sums[row][0]);
            sums[row][1] = fmaf(mean.of[row], key[i].y, sums[row][1]);
          }
        }
      }
#pragma unroll
      for (int row = 0; row < kRows; ++row) {
        const auto rank = [&](int i) {
          return column + i >= candidates_of(row) || column + i == first_row + row ? 0 : rank_of(sums[row][i]);
        };
        *reinterpret_cast<uint2*>(ranks + row * c.stride + column) = make_uint2(rank(0), rank(1));
        // Vectors of ranks are read whole.
        if (column % kFour == 0 && column + kColumns >= most)
          *reinterpret_cast<uint2*>(ranks + row * c.stride + column + kColumns) = make_uint2(0, 0);
      }
    }
  }
  __syncthreads();

  const int lane = static_cast<int>(threadIdx.x) % kLanes;
  for (int row = static_cast<int>(threadIdx.x) / kLanes; row < rows; row += kChoosing / kLanes) {
    const int diagonal = first_row + row, candidates = candidates_of(row);
    // Beside the diagonal.
    const int kept = candidates == 0 ? 0 : max(1, static_cast<int>(floor(c.density * candidates + 0.5))) - 1;
    const std::uint32_t* const own = ranks + row * c.stride;
    const auto for_each_four = [&](const auto& use) {
      for (int column = lane * kFour; column < candidates; column += kLanes * kFour)
        use(*reinterpret_cast<const uint4*>(own + column));
    };
    const auto count_from = [&](std::uint32_t least) {
      int count = 0;
      for_each_four(
          [&](uint4 four) { count += (four.x >= least) + (four.y >= least) + (four.z >= least) + (four.w >= least); });
      return __reduce_add_sync(~0u, count);
    };
    // The largest rank that `kept` columns reach: between the highest of all and what as many lanes have at least one
    // of, so the bits that these two share need no search.
    std::uint32_t least = ~0u;
    if (kept > 0) {
      std::uint32_t top = 0;
      for_each_four([&](uint4 four) { top = max(top, max(max(four.x, four.y), max(four.z, four.w))); });
      const std::uint32_t highest = __reduce_max_sync(~0u, top);
      least = 0;
      for (int bit = 31; bit >= 0 && kept <= kLanes; --bit) {
        const std::uint32_t higher = least | 1u << bit;
        if (__popc(__ballot_sync(~0u, top >= higher)) >= kept) least = higher;
      }
      int bit = 31 - __clz(static_cast<int>(least ^ highest));
      if (bit >= 0) least &= ~((2u << bit) - 1);
      for (; bit >= 0; --bit) {
        const std::uint32_t higher = least | 1u << bit;
        const int count = count_from(higher);
        if (count >= kept) least = higher;
        if (count == kept) break;
      }
    }
    int ties = least == ~0u ? 0 : kept - count_from(least + 1);  // of that rank, lower columns first
    std::uint32_t* const target = c.bits + (static_cast<std::int64_t>(mask_head) * c.blocks + diagonal) * c.words;
    std::uint32_t mine = 0;
    for (int word = 0; word < c.words; ++word) {
      const int column = word * kLanes + lane;
      const bool candidate = column < candidates && column != diagonal;
      const std::uint32_t rank = candidate ? own[column] : 0;
      const unsigned equal = __ballot_sync(~0u, candidate && rank == least);
      const bool stays = (candidate && rank > least) ||
                         (candidate && rank == least && __popc(equal & ((1u << lane) - 1)) < ties) ||
                         (column < candidates && column == diagonal);
      const unsigned chosen = __ballot_sync(~0u, stays);
      ties -= min(ties, __popc(equal));
      if (word % kLanes == lane) mine = chosen;
      if ((word + 1) % kLanes == 0 || word + 1 == c.words) {
        const int at = word / kLanes * kLanes + lane;
        if (at <= word) target[at] = mine;
      }
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
  int kept;  // entries of the longest block row; block rows have their room in order
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
  const int begin = a.causal && job.by_keys ? first / kLanes : 0;
  const int end = (a.causal && !job.by_keys ? first + own_blocks - 1 : c.blocks - 1) / kLanes + 1;
  // Blocks in ascending order, as many as lanes at a time; rows of bits are looked through by words, most of which are
  // empty.
  const auto for_each = [&](const auto& use) {
    for (int words = begin; words < end; words += kLanes) {
      unsigned left = ~0u;
      if (!job.by_keys) {
        std::uint32_t any = 0;
        for (int i = 0; i < own_blocks && words + lane < c.words; ++i)
          any |= bits[static_cast<std::int64_t>(first + i) * c.words + words + lane];
        left = __ballot_sync(~0u, any != 0);
      }
      for (; left != 0; left &= left - 1) {
        const int word = words + __ffs(static_cast<int>(left)) - 1;
        if (word >= end) break;
        const int other = word * kLanes + lane;
        const unsigned found = meets(other);
        const unsigned fulls = __ballot_sync(~0u, is_full(other, found));
        use(other, found, fulls, __ballot_sync(~0u, found != 0) & ~fulls);
      }
    }
  };
  int full = 0, partial = 0;
  for_each([&](int, unsigned, unsigned fulls, unsigned partials) {
    full += __popc(fulls);
    partial += __popc(partials);
  });
  unsigned long long room = (static_cast<unsigned long long>(mask_head) * c.blocks + first) * job.kept;
  if (job.by_keys) {
    if (lane == 0) room = atomicAdd(job.room, static_cast<unsigned long long>(full + partial));
    room = __shfl_sync(~0u, room, 0);
  }
  unsigned long long next_full = room, next_partial = room + static_cast<unsigned long long>(full);
  for_each([&](int other, unsigned found, unsigned fulls, unsigned partials) {
    const unsigned before = (1u << lane) - 1;
    if (found != 0) {
      const unsigned long long place =
          fulls >> lane & 1 ? next_full + __popc(fulls & before) : next_partial + __popc(partials & before);
      job.blocks[place] = other;
      job.block_bits[place] = static_cast<std::uint16_t>(found);
    }
    next_full += __popc(fulls);
    next_partial += __popc(partials);
  });
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
          shape.stride(),
          std::countr_zero(static_cast<unsigned>(shape.block_size)),
          shape.words(),
          reinterpret_cast<float*>(workspace + places.query_means),
          reinterpret_cast<float*>(workspace + places.key_means),
          reinterpret_cast<std::uint32_t*>(workspace + places.bits)};
}

int row_bytes(int rows, int stride, int columns) { return rows * (stride + columns) * static_cast<int>(sizeof(float)); }

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
  take(key_means, static_cast<std::int64_t>(shape.kv_heads) * shape.stride() * shape.columns * 4);
  take(bits, heads * blocks * shape.words() * 4);
  take(cursors, 8 + heads * 4);
  // One place per tile of at least 64 rows, or per block, and half as many again for what is split.
  take(places, heads * (std::max<std::int64_t>(blocks * std::max(1, shape.block_size / 64), 1) * 3 / 2 + 2) *
                   static_cast<std::int64_t>(sizeof(BlockPlace)));
  take(this->blocks, shape.entries() * 4);
  take(block_bits, shape.entries() * 2);
}

int most_adaptive_blocks(int shared_bytes, int columns) {
  return (shared_bytes / static_cast<int>(sizeof(float)) - columns) / kFour * kFour;
}

cudaError_t choose_adaptive(const Launch& all, const AdaptiveShape& shape, int branch, DType dtype, int shared_bytes,
                            std::byte* workspace, cudaStream_t stream) {
  if (shape.blocks == 0) return cudaSuccess;
  const Choice choice = choice_of(shape, branch, workspace);
  const int lanes = all.columns <= 64 ? 8 : all.columns <= 128 ? 16 : 32;
  const auto heads = static_cast<unsigned>(all.heads), batch = static_cast<unsigned>(all.batch);
  const dim3 means(static_cast<unsigned>((shape.blocks * (all.heads + all.kv_heads) + kWarps - 1) / kWarps), 1, batch);
  const cudaError_t error = with_storage(
      dtype, [&]<class T>() { return launch(&block_means<T>, means, kThreads, 0, 0, stream, all, choice, lanes); });
  if (error != cudaSuccess) return error;
  const auto fits = [&](int rows, int bytes) { return row_bytes(rows, shape.stride(), all.columns) <= bytes; };
  const auto run = [&]<int kRows>() {
    const dim3 grid(static_cast<unsigned>((shape.blocks + kRows - 1) / kRows), heads, batch);
    const int bytes = row_bytes(kRows, shape.stride(), all.columns);
    return launch(&choose_rows<kRows>, grid, kChoosing, bytes, shared_bytes, stream, all, choice);
  };
  if (fits(kMostRows, shared_bytes)) return run.operator()<kMostRows>();
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
  job.kept = shape.kept;
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
  cudaError_t error = cudaSuccess;
  if (of.by_keys) error = cudaMemsetAsync(job.room, 0, sizeof(*job.room) + heads * sizeof(int), stream);
  if (of.splits && error == cudaSuccess)  // no place is an item yet
    error = cudaMemsetAsync(job.places, 0xFF, heads * static_cast<std::size_t>(job.place_count) * sizeof(BlockPlace),
                            stream);
  if (error != cudaSuccess || job.groups == 0) return error;
  const dim3 grid(static_cast<unsigned>((job.groups + kWarps - 1) / kWarps), static_cast<unsigned>(all.heads),
                  static_cast<unsigned>(all.batch));
  return launch(&list_tiles, grid, kThreads, 0, 0, stream, all, job);
}

}  // namespace longspan::cuda
