// Matrix products of small tiles held in registers.
//   Everything is counted in 32-bit units: a unit is one float, or two neighbouring bfloat16 of the inner dimension.
//   c [kRows][kVectors * kLanes] += a (one unit broadcast) * b (vectors of units); kTransposed reads a by columns.
//   Each element of c is one chain of multiply-adds in the order of the inner dimension, so its bits do not depend on
//   the tile it is computed in.
#pragma once

#include "kernels/cpu/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace longspan::cpu {
namespace HWY_NAMESPACE {
namespace {

/// Tiles that fill the registers: 24 accumulators of 32 registers, or 12 of 16.
constexpr bool kManyRegisters = HWY_MAX_BYTES == 64 || HWY_ARCH_ARM_A64;
constexpr int kTileRows = 6;
constexpr int kTileVectors = kManyRegisters ? 4 : 2;
constexpr int kScoreRows = kManyRegisters ? 8 : 6;  // backward: panels of 3 vectors divide by 6 keys
constexpr int kScoreVectors = kManyRegisters ? 3 : 2;

struct FloatProducts {
  static constexpr int kPerUnit = 1;
  static HWY_INLINE V mad(V sum, V a, V b) { return hn::MulAdd(a, b, sum); }
};

template <class Products, bool kTransposed, int kRows, int kVectors>
HWY_INLINE void multiply(Held (&c)[kRows][kVectors], const float* HWY_RESTRICT a, std::int64_t a_stride,
                         const float* HWY_RESTRICT b, std::int64_t b_stride, int depth) {
  for (int inner = 0; inner < depth; ++inner) {
    Held columns[kVectors];
    HWY_UNROLL(8)
    for (int vector = 0; vector < kVectors; ++vector) columns[vector] = load(b + inner * b_stride + vector * kLanes);
    HWY_UNROLL(8)
    for (int row = 0; row < kRows; ++row) {
      const V unit = broadcast(kTransposed ? a[inner * a_stride + row] : a[row * a_stride + inner]);
      HWY_UNROLL(8)
      for (int vector = 0; vector < kVectors; ++vector)
        c[row][vector] = Products::mad(c[row][vector], unit, columns[vector]);
    }
  }
}

/// c = a * b.
template <class Products, int kRows, int kVectors>
HWY_NOINLINE void product(const float* a, std::int64_t a_stride, const float* b, std::int64_t b_stride, int depth,
                          float* c, std::int64_t c_stride) {
  Held tile[kRows][kVectors];
  HWY_UNROLL(8)
  for (int row = 0; row < kRows; ++row) {
    HWY_UNROLL(8)
    for (int vector = 0; vector < kVectors; ++vector) tile[row][vector] = hn::Zero(kFloat);
  }
  multiply<Products, false>(tile, a, a_stride, b, b_stride, depth);
  HWY_UNROLL(8)
  for (int row = 0; row < kRows; ++row) {
    HWY_UNROLL(8)
    for (int vector = 0; vector < kVectors; ++vector) store(tile[row][vector], c + row * c_stride + vector * kLanes);
  }
}

/// The first `vectors` (1 .. kVectors) vectors only: ragged and diagonal tiles cost what they contain.
template <class Products, int kRows, int kVectors>
HWY_INLINE void product_some(int vectors, const float* a, std::int64_t a_stride, const float* b, std::int64_t b_stride,
                             int depth, float* c, std::int64_t c_stride) {
  if (vectors >= kVectors) product<Products, kRows, kVectors>(a, a_stride, b, b_stride, depth, c, c_stride);
  else if constexpr (kVectors > 1) {
    product_some<Products, kRows, kVectors - 1>(vectors, a, a_stride, b, b_stride, depth, c, c_stride);
  }
}

/// c = row_factors * c + a * b; without row_factors they are 1.
template <class Products, bool kTransposed, bool kFactors, int kRows, int kVectors>
HWY_NOINLINE void accumulate(const float* a, std::int64_t a_stride, const float* b, std::int64_t b_stride, int depth,
                             float* c, std::int64_t c_stride, const float* row_factors) {
  Held tile[kRows][kVectors];
  HWY_UNROLL(8)
  for (int row = 0; row < kRows; ++row) {
    HWY_UNROLL(8)
    for (int vector = 0; vector < kVectors; ++vector) {
      tile[row][vector] = load(c + row * c_stride + vector * kLanes);
      if constexpr (kFactors) tile[row][vector] = hn::Mul(tile[row][vector], broadcast(row_factors[row]));
    }
  }
  multiply<Products, kTransposed>(tile, a, a_stride, b, b_stride, depth);
  HWY_UNROLL(8)
  for (int row = 0; row < kRows; ++row) {
    HWY_UNROLL(8)
    for (int vector = 0; vector < kVectors; ++vector) store(tile[row][vector], c + row * c_stride + vector * kLanes);
  }
}

template <class Products, bool kTransposed, bool kFactors, int kRows, int kVectors>
HWY_INLINE void accumulate_some(int vectors, const float* a, std::int64_t a_stride, const float* b,
                                std::int64_t b_stride, int depth, float* c, std::int64_t c_stride,
                                const float* row_factors) {
  if (vectors >= kVectors) {
    accumulate<Products, kTransposed, kFactors, kRows, kVectors>(a, a_stride, b, b_stride, depth, c, c_stride,
                                                                 row_factors);
  } else if constexpr (kVectors > 1) {
    accumulate_some<Products, kTransposed, kFactors, kRows, kVectors - 1>(vectors, a, a_stride, b, b_stride, depth, c,
                                                                          c_stride, row_factors);
  }
}

/// The same over all `columns` (whole vectors), cut into tiles of as equal width as possible.
template <class Products, bool kTransposed, bool kFactors, int kRows>
HWY_INLINE void accumulate_columns(std::int64_t columns, const float* a, std::int64_t a_stride, const float* b,
                                   std::int64_t b_stride, int depth, float* c, std::int64_t c_stride,
                                   const float* row_factors) {
  int vectors = static_cast<int>(columns / kLanes);
  for (int tiles = (vectors + kTileVectors - 1) / kTileVectors; tiles > 0; --tiles) {
    const int width = (vectors + tiles - 1) / tiles;
    accumulate_some<Products, kTransposed, kFactors, kRows, kTileVectors>(width, a, a_stride, b, b_stride, depth, c,
                                                                          c_stride, row_factors);
    b += width * kLanes;
    c += width * kLanes;
    vectors -= width;
  }
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace longspan::cpu
HWY_AFTER_NAMESPACE();
