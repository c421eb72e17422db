// Selection: a warp has the means of one block and head, heads side by side as they are in memory; a thread block
// chooses for a few block rows (adaptive_rows.cuh) and makes their lists. Lists: a warp per tile finds entries by words
// of bits, where lanes have a word each; by keys it looks at every row.
#include "kernels/cuda/adaptive.h"

#include <algorithm>
#include <bit>

#include "kernels/cuda/adaptive_rows.cuh"
#include "kernels/cuda/start.cuh"
#include "pattern/kept_columns.h"

namespace longspan::cuda {
namespace {

constexpr int kFewRows = 4;
constexpr int kManyBlocks = 128;  // thread blocks that keep a GPU busy, so that more rows may share what they read

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

struct Choice {
  double density;
  int branch, blocks, stride, shift, words;  // stride: from a row of ranks to the next
  float* query_means;                        // [mask head][block][column]
  float* key_means;                          // [entry, kv head][block][column]
  std::uint32_t* bits;                       // [mask head][block row][word]
};

/// Mean of the rows that lengths and key_mask leave of a block, column by column; NaN where none are left. `lanes`
/// threads share a row, 8 columns each. kPlain: rows lie at even steps, aligned, and are all allowed.
template <class T, bool kPlain>
__global__ void __launch_bounds__(kThreads, 4) block_means(const __grid_constant__ Launch a, Choice c, int lanes) {
  constexpr int kVectors = static_cast<int>(sizeof(T)) / 2;  // of 8 columns
  constexpr int kLoads = (kPlain ? 8 : 4) / kVectors;        // rows that a thread asks for before it adds the first
  const int heads = a.tensors.heads + a.tensors.kv_heads,
            index = static_cast<int>(blockIdx.x) * kWarps + warp_of_block();
  const int block = index / heads, side = index - block * heads, entry = static_cast<int>(blockIdx.z);
  const bool queries = side < a.tensors.heads;
  const int head = queries ? side : side - a.tensors.heads;
  if (block >= c.blocks || (queries && !a.schedule.branches[c.branch].owns(head))) return;
  const int lane = static_cast<int>(threadIdx.x) % kLanes, group = lane / lanes, groups = kLanes / lanes;
  const int begin = block << c.shift, end = min(begin + (1 << c.shift), a.tensors.length(entry));
  const int own = lane % lanes * 8;
  const bool exists = own < a.tensors.columns;
  float sum[8] = {};
  int count = 0;
  const Rows& rows = queries ? a.tensors.q : a.tensors.k;
  for (int r = 0; r < (queries ? a.schedule.range_count : 1); ++r) {
    const DeviceRange range = queries ? a.schedule.ranges[r] : DeviceRange{0, a.tensors.tokens, 0};
    const int last = min(end, range.start + range.count);
    const T* const start =
        reinterpret_cast<const T*>(rows.data) + rows.offset(entry, range.first_row - range.start, head) + own;
    const std::int64_t step = groups * rows.row;
    const auto row_of = [&](int position) {
      if (queries || a.tensors.piece_count == 0) return start + position * rows.row;
      const char *k_row = nullptr, *v_row = nullptr;
      a.tensors.key_row(entry, head, position, sizeof(T), k_row, v_row);
      return k_row ? reinterpret_cast<const T*>(k_row) + own : nullptr;
    };
#pragma unroll 1
    for (int position = max(begin, range.start) + group; position < last; position += kLoads * groups) {
      union {
        uint4 vectors[kLoads][kVectors];
        T elements[kLoads][8];
      } loaded;
#pragma unroll
      for (int i = 0; i < kLoads; ++i) {
        const int at = position + i * groups;
        bool valid = exists && at < last && (kPlain || a.rules.allowed(entry, at));
        const T* const row = kPlain ? start + position * rows.row + i * step : valid ? row_of(at) : nullptr;
        valid = valid && (kPlain || row);
        count += valid;
        const bool vectors = kPlain || a.tensors.aligned;
#pragma unroll
        for (int v = 0; v < kVectors; ++v)
          loaded.vectors[i][v] =
              valid && vectors ? __ldg(reinterpret_cast<const uint4*>(row) + v) : make_uint4(0, 0, 0, 0);
        if constexpr (!kPlain) {
#pragma unroll
          for (int j = 0; j < 8 && valid && !vectors; ++j) loaded.elements[i][j] = row[j];
        }
      }
#pragma unroll
      for (int i = 0; i < kLoads; ++i) {
#pragma unroll
        for (int j = 0; j < 8; ++j) sum[j] += as_float(loaded.elements[i][j]);
      }
    }
  }
  for (int offset = lanes; offset < kLanes; offset *= 2) {
    count += __shfl_xor_sync(~0u, count, offset);
#pragma unroll
    for (int j = 0; j < 8; ++j) sum[j] += __shfl_xor_sync(~0u, sum[j], offset);
  }
  if (lane >= lanes || !exists) return;
  const std::int64_t place = queries
                                 ? (static_cast<std::int64_t>(entry) * a.tensors.heads + head) * c.blocks + block
                                 : (static_cast<std::int64_t>(entry) * a.tensors.kv_heads + head) * c.blocks + block;
  float* const target = (queries ? c.query_means : c.key_means) + place * a.tensors.columns + own;
#pragma unroll
  for (int j = 0; j < 8; ++j) sum[j] /= static_cast<float>(count);
  *reinterpret_cast<float4*>(target) = make_float4(sum[0], sum[1], sum[2], sum[3]);
  *reinterpret_cast<float4*>(target + 4) = make_float4(sum[4], sum[5], sum[6], sum[7]);
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
  int rows;  // that a thread block chooses for
  bool by_keys;
};

/// Lists of the tile of blocks first .. by rows. Row i of its bits is at rows + i * stride; lanes have a word each.
__device__ void list_rows(const Launch& a, const ListJob& job, const std::uint32_t* rows, int stride, int mask_head,
                          int first) {
  const Choice& c = job.c;
  const int lane = static_cast<int>(threadIdx.x) % kLanes, own_blocks = min(job.group, c.blocks - first);
  std::uint32_t any, full;
  const auto read = [&](int word) {  // blocks that some block row of the tile meets, and those that need no mask
    any = 0, full = ~0u;
    for (int i = 0; i < own_blocks && word < c.words; ++i) {
      any |= rows[i * stride + word];
      full &= rows[i * stride + word];
    }
    if (a.rules.causal && word >= first / 32) full &= word == first / 32 ? (1u << first % 32) - 1 : 0;
    full &= any;
  };
  const int words = a.rules.causal ? (first + own_blocks - 1) / 32 + 1 : c.words;
  int fulls = 0, count = 0;
  for (int base = 0; base < words; base += kLanes) {
    read(base + lane);
    fulls += __popc(full);
    count += __popc(any);
  }
  fulls = __reduce_add_sync(~0u, fulls);
  count = __reduce_add_sync(~0u, count);
  const std::int64_t room = (static_cast<std::int64_t>(mask_head) * c.blocks + first) * job.kept;
  std::int64_t next_full = room, next_partial = room + fulls;
  for (int base = 0; base < words; base += kLanes) {
    const int word = base + lane;
    read(word);
    const int own = __popc(full) | __popc(any & ~full) << 16;
    int up_to = own;  // of both kinds, this word's included
    for (int offset = 1; offset < kLanes; offset *= 2) {
      const int before = __shfl_up_sync(~0u, up_to, offset);
      if (lane >= offset) up_to += before;
    }
    std::int64_t full_place = next_full + ((up_to - own) & 0xFFFF),
                 partial_place = next_partial + ((up_to - own) >> 16);
    for (std::uint32_t left = any; left != 0; left &= left - 1) {
      const int bit = __ffs(static_cast<int>(left)) - 1;
      const std::int64_t place = full >> bit & 1 ? full_place++ : partial_place++;
      job.blocks[place] = word * 32 + bit;
      if (job.group == 1) continue;
      unsigned found = 0;
      for (int i = 0; i < own_blocks; ++i) found |= (rows[i * stride + word] >> bit & 1u) << i;
      job.block_bits[place] = static_cast<std::uint16_t>(found);
    }
    const int all = __shfl_sync(~0u, up_to, kLanes - 1);
    next_full += all & 0xFFFF;
    next_partial += all >> 16;
  }
  const int tile = first / job.group * job.repeats;
  if (lane < job.repeats)
    job.places[static_cast<std::int64_t>(mask_head) * job.place_count + tile + lane] = {room, fulls, count,
                                                                                        tile + lane};
}

/// The best columns of a few block rows of one mask head as bits, and their lists if the job has any.
template <int kTiles>
__global__ void __launch_bounds__(kTiles* kThreads) choose_rows(const __grid_constant__ Launch a, ListJob job) {
  extern __shared__ __align__(16) std::uint32_t ranks[];  // [row][stride], then means of queries, then columns of warps
  const Choice& c = job.c;
  auto* const queries = reinterpret_cast<uint4*>(ranks + job.rows * c.stride);
  const QuerySlots layout(job.rows, a.tensors.columns);
  const int warp = warp_of_block();
  int* const few = reinterpret_cast<int*>(queries + 2 * layout.parts) + warp * kLanes;
  const int head = static_cast<int>(blockIdx.y), entry = static_cast<int>(blockIdx.z);
  if (!a.schedule.branches[c.branch].owns(head)) return;
  const int length = a.tensors.length(entry), mask_head = entry * a.tensors.heads + head;
  const unsigned index = a.rules.causal ? gridDim.x - 1 - blockIdx.x : blockIdx.x;  // long rows first
  const int first_row = static_cast<int>(index) * job.rows;
  const RowsToChoose of{first_row, min(job.rows, c.blocks - first_row), length == 0 ? 0 : ((length - 1) >> c.shift) + 1,
                        a.rules.causal};
  const std::int64_t first_query = static_cast<std::int64_t>(mask_head) * c.blocks + first_row;
  const float* const means = c.query_means + first_query * a.tensors.columns;
  for (int i = static_cast<int>(threadIdx.x); i < layout.parts; i += kTiles * kThreads) {
    const int slot = i % layout.slots, step = i / layout.slots % layout.steps;
    const int row = i / layout.slots / layout.steps * kTileRows + slot / 4;
    const int column = step / 2 * kTileDepth + slot % 4 * 4 + step % 2 * 2;
    const auto pair = [&](int of_row) {
      return of_row < of.rows && column < a.tensors.columns
                 ? *reinterpret_cast<const uint2*>(means + of_row * a.tensors.columns + column)
                 : make_uint2(0, 0);
    };
    const uint2 upper = pair(row), lower = pair(row + 8);
    queries[i] = make_uint4(high_part(upper.x), high_part(lower.x), high_part(upper.y), high_part(lower.y));
    queries[i + layout.parts] = make_uint4(low_part(upper.x), low_part(lower.x), low_part(upper.y), low_part(lower.y));
  }
  __syncthreads();
  const std::int64_t kv_head =
      static_cast<std::int64_t>(entry) * a.tensors.kv_heads + head / (a.tensors.heads / a.tensors.kv_heads);
  rank_columns<kTiles>(of, queries, layout, means, c.key_means + kv_head * c.blocks * a.tensors.columns,
                       a.tensors.columns, job.rows, c.stride, ranks);
  __syncthreads();
  for (int row = warp; row < of.rows; row += kTiles * kWarps) {
    const int candidates = of.candidates(row);
    const int kept = candidates == 0 ? 0 : max(1, static_cast<int>(floor(c.density * candidates + 0.5))) - 1;
    choose_row(ranks + row * c.stride, candidates, kept, first_row + row, c.words, few,
               c.bits + (first_query + row) * c.words);
  }
  if (job.groups == 0) return;
  __syncthreads();
  for (int row = warp * job.group; row < of.rows; row += kTiles * kWarps * job.group)
    list_rows(a, job, ranks + row * c.stride, c.stride, mask_head, first_row + row);
}

/// One warp per tile, or per tiles that share a list, of bits that are chosen.
__global__ void __launch_bounds__(kThreads) list_tiles(const __grid_constant__ Launch a, ListJob job) {
  const Choice& c = job.c;
  const int lane = static_cast<int>(threadIdx.x) % kLanes;
  const int index = static_cast<int>(blockIdx.x) * kWarps + warp_of_block();
  const int head = static_cast<int>(blockIdx.y), entry = static_cast<int>(blockIdx.z);
  if (index >= job.groups || !a.schedule.branches[c.branch].owns(head)) return;
  const int mask_head = entry * a.tensors.heads + head, first = index * job.group,
            own_blocks = min(job.group, c.blocks - first);
  const std::uint32_t* const bits = c.bits + static_cast<std::int64_t>(mask_head) * c.blocks * c.words;
  if (!job.by_keys)
    return list_rows(a, job, bits + static_cast<std::int64_t>(first) * c.words, c.words, mask_head, first);
  const unsigned all = (1u << own_blocks) - 1;
  // Block rows in ascending order, as many as lanes at a time, and which of the tile's blocks each meets.
  const auto for_each = [&](const auto& use) {
    for (int base = a.rules.causal ? first / kLanes * kLanes : 0; base < c.blocks; base += kLanes) {
      const int other = base + lane;
      const unsigned found =
          other < c.blocks ? bits[static_cast<std::int64_t>(other) * c.words + first / 32] >> (first % 32) & all : 0;
      const unsigned fulls = __ballot_sync(~0u, found == all && (!a.rules.causal || other >= first + own_blocks));
      use(other, found, fulls, __ballot_sync(~0u, found != 0) & ~fulls);
    }
  };
  int full = 0, partial = 0;
  for_each([&](int, unsigned, unsigned fulls, unsigned partials) {
    full += __popc(fulls);
    partial += __popc(partials);
  });
  unsigned long long room = 0;
  if (lane == 0) room = atomicAdd(job.room, static_cast<unsigned long long>(full + partial));
  room = __shfl_sync(~0u, room, 0);
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

Choice choice_of(const AdaptiveCall& call) {
  const AdaptiveShape& shape = call.shape;
  const AdaptivePlaces places(shape);
  return {.density = shape.density,
          .branch = call.branch,
          .blocks = shape.blocks,
          .stride = shape.stride(),
          .shift = std::countr_zero(static_cast<unsigned>(shape.block_size)),
          .words = shape.words(),
          .query_means = reinterpret_cast<float*>(call.workspace + places.query_means),
          .key_means = reinterpret_cast<float*>(call.workspace + places.key_means),
          .bits = reinterpret_cast<std::uint32_t*>(call.workspace + places.bits)};
}

ListJob job_of(const AdaptiveCall& call, const ListShape& of) {
  const AdaptiveShape& shape = call.shape;
  const AdaptivePlaces places(shape);
  ListJob job;
  job.c = choice_of(call);
  job.places = reinterpret_cast<BlockPlace*>(call.workspace + places.places);
  job.blocks = reinterpret_cast<std::int32_t*>(call.workspace + places.blocks);
  job.block_bits = reinterpret_cast<std::uint16_t*>(call.workspace + places.block_bits);
  job.room = reinterpret_cast<unsigned long long*>(call.workspace + places.cursors);
  job.extra = reinterpret_cast<int*>(job.room + 1);
  job.group = std::max(1, of.tile_rows / shape.block_size);
  job.repeats = std::max(1, shape.block_size / of.tile_rows);
  job.groups = (shape.blocks + job.group - 1) / job.group;
  job.kept = shape.kept;
  job.rows = 0;
  job.by_keys = of.by_keys;
  const int tiles = job.groups * job.repeats;
  const std::int64_t entries = static_cast<std::int64_t>(shape.blocks) * shape.kept;
  job.most =
      of.splits ? static_cast<int>(longest_list(entries, job.groups, shape.block_size)) : std::max(1, shape.blocks);
  job.place_count = of.splits ? tiles * 3 / 2 + 1 : tiles;
  return job;
}

/// Shared memory of a thread block that chooses for `rows` block rows.
int choosing_bytes(int rows, int tiles, int stride, int columns) {
  return QuerySlots(rows, columns).bytes() + (rows * stride + tiles * kThreads) * static_cast<int>(sizeof(float));
}

/// Chooses the blocks into the bits of the workspace, and makes their lists where these go by block rows that one
/// thread block chooses for: then `listed`.
cudaError_t choose(const AdaptiveCall& call, ListJob job, bool& listed) {
  const Launch& all = call.all;
  const AdaptiveShape& shape = call.shape;
  const int lanes = all.tensors.columns <= 64 ? 8 : all.tensors.columns <= 128 ? 16 : 32;
  const dim3 means(
      static_cast<unsigned>((shape.blocks * (all.tensors.heads + all.tensors.kv_heads) + kWarps - 1) / kWarps), 1,
      static_cast<unsigned>(all.tensors.batch));
  const bool plain = all.tensors.aligned && !all.rules.key_mask && all.tensors.piece_count == 0;
  const cudaError_t error = with_storage(call.dtype, [&]<class T>() {
    return launch(plain ? &block_means<T, true> : &block_means<T, false>, means, kThreads, 0, 0, call.stream, all,
                  job.c, lanes);
  });
  if (error != cudaSuccess) return error;
  const auto bytes = [&](int rows, int tiles) {
    return choosing_bytes(rows, tiles, shape.stride(), all.tensors.columns);
  };
  const auto run = [&]<int kTiles>(int rows) {
    listed = !job.by_keys && job.group <= rows;
    job.rows = rows;
    if (!listed) job.groups = 0;
    const dim3 grid(static_cast<unsigned>((shape.blocks + rows - 1) / rows), static_cast<unsigned>(all.tensors.heads),
                    static_cast<unsigned>(all.tensors.batch));
    return launch(&choose_rows<kTiles>, grid, kTiles * kThreads, bytes(rows, kTiles), call.shared_bytes, call.stream,
                  all, job);
  };
  const std::int64_t rows = static_cast<std::int64_t>(shape.blocks) * shape.mask_heads;
  if (rows >= kManyBlocks * 2 * kTileRows && bytes(2 * kTileRows, 2) <= call.shared_bytes)
    return run.operator()<2>(2 * kTileRows);
  for (const int fewer : {kTileRows, kFewRows}) {
    if (bytes(fewer, 1) <= call.shared_bytes) return run.operator()<1>(fewer);
  }
  return run.operator()<1>(1);
}

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
  take(key_means, static_cast<std::int64_t>(shape.kv_heads) * blocks * shape.columns * 4);
  take(bits, heads * blocks * shape.words() * 4);
  take(cursors, 8 + heads * 4);
  // One place per tile of at least 64 rows, or per block, and half as many again for what is split.
  take(places, heads * (std::max<std::int64_t>(blocks * std::max(1, shape.block_size / 64), 1) * 3 / 2 + 2) *
                   static_cast<std::int64_t>(sizeof(BlockPlace)));
  take(this->blocks, shape.entries() * 4);
  take(block_bits, shape.entries() * 2);
}

int most_adaptive_blocks(int shared_bytes, int columns) {
  const int floats = (shared_bytes - choosing_bytes(1, 1, 0, columns)) / static_cast<int>(sizeof(float));
  return (floats - AdaptiveShape::kPadding) / kLanes * kLanes;
}

cudaError_t adaptive_lists(const AdaptiveCall& call, const ListShape& of, bool chosen, BlockLists& lists) {
  const ListJob job = job_of(call, of);
  lists = {};
  lists.places = job.places;
  lists.blocks = job.blocks;
  lists.bits = job.group > 1 ? job.block_bits : nullptr;
  lists.head_places = lists.place_count = job.place_count;
  lists.entry_places = job.place_count * call.all.tensors.heads;
  lists.shift = static_cast<std::uint8_t>(job.c.shift);
  lists.tile_shift = static_cast<std::uint8_t>(std::countr_zero(static_cast<unsigned>(of.tile_rows)));
  const std::size_t heads = static_cast<std::size_t>(call.shape.mask_heads);
  bool listed = job.groups == 0;
  cudaError_t error = cudaSuccess;
  if (!chosen && !listed) error = choose(call, job, listed);
  if (of.by_keys && error == cudaSuccess)
    error = cudaMemsetAsync(job.room, 0, sizeof(*job.room) + heads * sizeof(int), call.stream);
  if (of.splits && error == cudaSuccess)  // no place is an item yet
    error = cudaMemsetAsync(job.places, 0xFF, heads * static_cast<std::size_t>(job.place_count) * sizeof(BlockPlace),
                            call.stream);
  if (error != cudaSuccess || listed) return error;
  const dim3 grid(static_cast<unsigned>((job.groups + kWarps - 1) / kWarps),
                  static_cast<unsigned>(call.all.tensors.heads), static_cast<unsigned>(call.all.tensors.batch));
  return launch(&list_tiles, grid, kThreads, 0, 0, call.stream, call.all, job);
}

}  // namespace longspan::cuda
