// What options make of pairs of rows, as policies of the matrix-unit kernels: PlainPairs where there are none, and
// nothing of it is left when compiled; RuledPairs for key_mask, pieces, unaligned rows, ALiBi, dropout, deltas and
// scales that are not positive.
//   keys       one bit for each key of a tile: those that exist, that the mask allows and that some piece has. Tiles
//              whose bits are all ones are plain, those without any are not loaded.
//   ALiBi      |query - key| in float32 from the tile's first pair on, where it is exact: an addition, a product and a
//              fused multiply-add for each pair
//   dropout    a thread has whole calls of the generator, where rows are queries; where they are keys, two threads
//              share one for each of their two queries
#pragma once

#include "kernels/cuda/tile.cuh"
#include "util/philox.h"

namespace longspan::cuda {

struct PlainPairs {
  static constexpr bool kRuled = false;
  __device__ __forceinline__ PlainPairs(const Launch&, const Item&, const StrandRows&, int) {}
};

struct RuledPairs {
  static constexpr bool kRuled = true;
  const Launch& a;
  const Item item;  // copies: a reference would keep all of the kernel's numbers in memory
  const StrandRows strand;
  const int kv_head;
  bool biased;             // scores are scaled before maxima are found, else under the exponential
  bool pending = false;    // whether this thread's key of the next tile counts
  std::uint32_t words[2];  // bits of the tile whose keys were loaded last
  float slope;             // of a step of the strand, in base 2, negative
  DropoutRule dropout;

  __device__ __forceinline__ RuledPairs(const Launch& launch, const Item& of, const StrandRows& rows, int of_kv_head)
      : a(launch),
        item(of),
        strand(rows),
        kv_head(of_kv_head),
        biased(launch.rules.alibi || !(launch.rules.scale > 0)),
        slope(launch.rules.alibi
                  ? launch.rules.alibi[of.head * launch.rules.alibi_head] * -kLog2E * static_cast<float>(rows.stride)
                  : 0.0f),
        dropout(0.0, launch.rules.seed_pointer ? *launch.rules.seed_pointer : launch.rules.seed) {
    dropout.threshold = launch.rules.drop_threshold;
  }

  /// Whether a row of the strand exists, is allowed, and lies in some piece.
  __device__ __forceinline__ bool counts(int key) const {
    if (key >= strand.count) return false;
    const int position = strand.start + key * strand.stride;
    int row = 0;
    if (a.tensors.piece_count > 0 && a.tensors.find_piece(kv_head, position, row) < 0) return false;
    return a.rules.allowed(item.entry, position);
  }

  /// Bits of the tile before last and the last one that was told of.
  __device__ __forceinline__ static std::uint32_t (&bits())[2][2] {
    __shared__ std::uint32_t told[2][2];
    return told;
  }
  /// Looks up the tile of keys that begins with element `first`, of which tell() then says the bits.
  template <int kKeys, class Keys>
  __device__ __forceinline__ void ask(const Keys& keys, int first) {
    if (threadIdx.x < kKeys) pending = counts(keys.row(first + static_cast<int>(threadIdx.x)));
  }
  template <int kKeys>
  __device__ __forceinline__ void tell(int first) const {
    if (threadIdx.x >= kKeys) return;
    const std::uint32_t word = __ballot_sync(~0u, pending);
    if (threadIdx.x % kWarpThreads == 0) bits()[first / kKeys & 1][threadIdx.x / kWarpThreads] = word;
  }
  __device__ __forceinline__ bool none() const { return (words[0] | words[1]) == 0; }

  /// A tile of k, or of v after it, whose rows without a bit become 0.
  template <class Math, int kColumns, int kKeys, int kThreads, class Keys>
  __device__ __forceinline__ void load_keys(std::uint32_t tile, const Keys& keys, int first, const char* base,
                                            std::int64_t step, bool values) {
    using T = Element<Math>;
    if (!values) {
      const auto& told = bits()[first / kKeys & 1];
      words[0] = told[0];
      words[1] = kKeys > 32 ? told[1] : told[0];
    }
    const bool simple = a.tensors.piece_count == 0 && a.tensors.aligned;
    if (simple && !keys.listed && (words[0] & words[1]) == ~0u) {
      load_rows<Math, kColumns, kKeys, kThreads, false>(tile, base, step, first, strand.count, a.tensors.columns, true);
      return;
    }
    const auto load = [&](int row, int chunk, bool anywhere) {
      const bool valid = (row < 32 ? words[0] : words[1]) >> row % 32 & 1;
      const int key = keys.row(first + row);
      const char *source = base + key * step, *k_row = nullptr, *v_row = nullptr;
      if (anywhere && valid && a.tensors.piece_count > 0) {
        a.tensors.key_row(item.entry, kv_head, strand.start + key * strand.stride, sizeof(T), k_row, v_row);
        source = values ? v_row : k_row;
      }
      if (!valid) source = a.tensors.q.data;  // something to point at
      const std::uint32_t target = tile + chunk_offset<pitch_of<Math>(kColumns)>(row, chunk);
      if (anywhere) load_chunk<T, true>(target, source, chunk, valid, a.tensors.columns, a.tensors.aligned);
      else load_chunk<T, false>(target, source, chunk, valid, a.tensors.columns, true);
    };
    if (simple) for_each_chunk<Math, kColumns, kKeys, kThreads>([&](int row, int chunk) { load(row, chunk, false); });
    else for_each_chunk<Math, kColumns, kKeys, kThreads, false>([&](int row, int chunk) { load(row, chunk, true); });
  }

  /// Eight rows of a sequence from element x on, relative to those from element `first` on; -(x - first) for a range.
  template <class Sequence>
  __device__ __forceinline__ static float shift(const Sequence& of, int first, int x) {
    return of.listed ? static_cast<float>(of.row(first) - of.row(x)) : static_cast<float>(first - x);
  }
  /// scores * factor + bias, relative to `bases`: rows are queries own .. and columns keys, or the other way round.
  template <int kRowTiles, int kBlocks, class Sequence>
  __device__ __forceinline__ void add_bias(float (&scores)[kRowTiles][kBlocks][4], float factor, int own,
                                           const Sequence& columns, int first) const {
    const int begin = columns.row(first) + static_cast<int>(threadIdx.x) % 4 * 2;
#pragma unroll
    for (int n = 0; n < kBlocks; ++n) {
      const float moved = shift(columns, first, first + n * 8);
#pragma unroll
      for (int m = 0; m < kRowTiles; ++m)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float distance =
              static_cast<float>(own + 16 * m + i / 2 * 8 - begin) + moved - static_cast<float>(i % 2);
          scores[m][n][i] = fmaf(scores[m][n][i], factor, slope * fabsf(distance));
        }
    }
  }

  /// Columns are keys: `masked` for those without a bit.
  template <int kRowTiles, int kBlocks>
  __device__ __forceinline__ void mask_keys(float (&scores)[kRowTiles][kBlocks][4], float masked) const {
#pragma unroll
    for (int w = 0; w < kBlocks / 4; ++w) {
      if (words[w] == ~0u) continue;
      const std::uint32_t own = words[w] >> threadIdx.x % 4 * 2;
#pragma unroll
      for (int x = 0; x < 8; ++x) {
        if (own >> (x / 2 * 8 + x % 2) & 1) continue;
#pragma unroll
        for (int m = 0; m < kRowTiles; ++m)
          scores[m][4 * w + x / 2][x % 2] = scores[m][4 * w + x / 2][2 + x % 2] = masked;
      }
    }
  }

  __device__ __forceinline__ PhiloxBlock draw(int query, int counter) const {
    return dropout.words(strand.start + query * strand.stride, counter, item.branch * a.tensors.heads + item.head,
                         item.entry);
  }
  __device__ __forceinline__ bool keeps(std::uint32_t word, int half) const {
    return (half ? word : word << 16) >= dropout.threshold << 16;
  }
  /// Rows are queries own, own + 8, ..., columns keys: calls body(m, n, i, whether a pair is kept).
  template <int kRowTiles, int kBlocks, class Keys, class Body>
  __device__ __forceinline__ void for_each_kept(int own, const Keys& keys, int first, Body&& body) const {
    const int pair = threadIdx.x % 4;
#pragma unroll
    for (int group = 0; group < kBlocks / 4; ++group) {
      const int begin = keys.row(first + group * 32), middle = keys.row(first + group * 32 + 16);
#pragma unroll
      for (int m = 0; m < kRowTiles; ++m)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int query = own + 16 * m + 8 * half;
          PhiloxBlock drawn = draw(query, begin / 32 * 4 + pair);
          if (keys.listed && (begin % 32 != 0 || middle != begin + 16)) {  // blocks of 16 rows
            const PhiloxBlock second = draw(query, middle / 32 * 4 + pair);
            drawn = {begin % 32 ? drawn[2] : drawn[0], begin % 32 ? drawn[3] : drawn[1],
                     middle % 32 ? second[2] : second[0], middle % 32 ? second[3] : second[1]};
          }
#pragma unroll
          for (int n = 0; n < 4; ++n)
#pragma unroll
            for (int i = 0; i < 2; ++i) body(m, group * 4 + n, 2 * half + i, keeps(drawn[n], i));
        }
    }
  }
  /// Rows are keys own, own + 8, ..., which begin at a multiple of their number; columns are queries. The thread whose
  /// keys are the other ones of the same pairs draws for the other query.
  template <int kRowTiles, int kBlocks, class Queries, class Body>
  __device__ __forceinline__ void for_each_kept_transposed(int own, const Queries& queries, int first,
                                                           Body&& body) const {
    const int lane = threadIdx.x % kWarpThreads, odd = lane / 4 % 2;
    const int counter = own / 32 * 4 + lane / 8;
    const unsigned mine = odd ? 0x7632 : 0x5410, others = odd ? 0x5410 : 0x7632;
#pragma unroll
    for (int n = 0; n < kBlocks; ++n) {
      const int query = queries.row(first + n * 8) + lane % 4 * 2 + odd;
      const PhiloxBlock drawn = draw(query, counter);
      std::uint32_t kept[2][2];  // of a query: halves of its words in the order of keys
#pragma unroll
      for (int w = 0; w < 2; ++w) {
        const std::uint32_t here = __byte_perm(drawn[2 * w], drawn[2 * w + 1], mine);
        const std::uint32_t there = __shfl_xor_sync(~0u, __byte_perm(drawn[2 * w], drawn[2 * w + 1], others), 4);
        kept[0][w] = odd ? there : here;
        kept[1][w] = odd ? here : there;
      }
#pragma unroll
      for (int m = 0; m < kRowTiles; ++m)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const std::uint32_t word = kRowTiles == 2 ? kept[i % 2][m] : own & 16 ? kept[i % 2][1] : kept[i % 2][0];
          body(m, n, i, keeps(word, i / 2));
        }
    }
  }
};

template <bool kRuled>
using PairsOf = std::conditional_t<kRuled, RuledPairs, PlainPairs>;

}  // namespace longspan::cuda
