// Packing: strided rows of any storage become the two layouts that products read. Dilation, pieces, excluded rows and
// dtype vanish here, because rows arrive as pointers.
//   panels  [keys / kPanel][depth][kPanel]   units, transposed: b of the score products
//   rows    [keys][columns]                  floats: b of the output products, a of the score products
#pragma once

#include "kernels/cpu/dropout-inl.h"
#include "kernels/cpu/products-inl.h"

HWY_BEFORE_NAMESPACE();
namespace longspan::cpu {
namespace HWY_NAMESPACE {
namespace {

/// What excluded and missing rows point to.
alignas(64) constexpr float kZeroRow[kMaxHeadDim + 16] = {};
inline const std::byte* zero_row() { return reinterpret_cast<const std::byte*>(kZeroRow); }

/// Lane i of the result's block b is unit `unit + i` of rows[4 * b]; kCount lanes.
template <int kCount, class Tag>
HWY_INLINE hn::Vec<Tag> load_blocks(Tag tag, const float* const* rows, std::int64_t unit) {
  if constexpr (kCount == 4) {
    return hn::LoadU(tag, rows[0] + unit);
  } else {
    const hn::Half<Tag> half;
    return hn::Combine(tag, load_blocks<kCount / 2>(half, rows + kCount / 2, unit),
                       load_blocks<kCount / 2>(half, rows, unit));
  }
}

/// Units unit .. unit + 3 of kLanes rows become four vectors, one per unit.
HWY_INLINE void transpose_quad(const float* const* rows, std::int64_t unit, float* target, std::int64_t stride) {
  const hn::Repartition<std::uint64_t, FloatTag> pair;
  const V r0 = load_blocks<kLanes>(kFloat, rows, unit), r1 = load_blocks<kLanes>(kFloat, rows + 1, unit);
  const V r2 = load_blocks<kLanes>(kFloat, rows + 2, unit), r3 = load_blocks<kLanes>(kFloat, rows + 3, unit);
  const auto low01 = hn::BitCast(pair, hn::InterleaveLower(r0, r1));
  const auto low23 = hn::BitCast(pair, hn::InterleaveLower(r2, r3));
  const auto high01 = hn::BitCast(pair, hn::InterleaveUpper(kFloat, r0, r1));
  const auto high23 = hn::BitCast(pair, hn::InterleaveUpper(kFloat, r2, r3));
  store(hn::BitCast(kFloat, hn::InterleaveLower(low01, low23)), target);
  store(hn::BitCast(kFloat, hn::InterleaveUpper(pair, low01, low23)), target + stride);
  store(hn::BitCast(kFloat, hn::InterleaveLower(high01, high23)), target + 2 * stride);
  store(hn::BitCast(kFloat, hn::InterleaveUpper(pair, high01, high23)), target + 3 * stride);
}

template <bool kToWrite = false>
HWY_INLINE void prefetch_row(const std::byte* row, std::int64_t bytes) {
  for (std::int64_t offset = 0; offset < bytes; offset += 64) __builtin_prefetch(row + offset, kToWrite);
}
/// For rows that are needed after many products: the first-level cache belongs to those.
HWY_INLINE void prefetch_early(const std::byte* row, std::int64_t bytes) {
  for (std::int64_t offset = 0; offset < bytes; offset += 64) __builtin_prefetch(row + offset, 0, 2);
}

/// rows[i] as floats, zero beyond the columns.
HWY_INLINE void widen_any(DType dtype, float* target, const std::byte* row, float factor, std::int64_t columns,
                          std::int64_t padded) {
  if (dtype == DType::f32) widen_row(target, reinterpret_cast<const float*>(row), factor, columns, padded);
  else if (dtype == DType::bf16) widen_row(target, reinterpret_cast<const BFloat16*>(row), factor, columns, padded);
  else widen_row(target, reinterpret_cast<const Float16*>(row), factor, columns, padded);
}

/// Panels of kPanel keys from `rows`, an array that is filled with zero_row() up to a whole panel.
/// `scratch` holds kLanes rows of `depth` units. `depth` is a multiple of 4; `direct` says that rows are units already.
template <int kPanel, class Widen>
HWY_INLINE void pack_panels_with(float* target, const std::byte* const* rows, std::int64_t keys, std::int64_t depth,
                                 bool direct, float* scratch, std::int64_t row_bytes, Widen widen) {
  for (std::int64_t key = 0; key < round_up(keys, kPanel); key += kLanes) {
    const float* group[kLanes];
    for (int lane = 0; lane < kLanes; ++lane) {
      if (direct) {
        group[lane] = reinterpret_cast<const float*>(rows[key + lane]);
      } else {
        widen(scratch + lane * depth, rows[key + lane]);
        group[lane] = scratch + lane * depth;
      }
    }
    float* const columns = target + key / kPanel * kPanel * depth + key % kPanel;
    // The next rows are prefetched a few at a time: many at once wait for each other.
    std::int64_t next = key + kLanes;
    for (std::int64_t unit = 0; unit < depth; unit += 4) {
      transpose_quad(group, unit, columns + unit * kPanel, kPanel);
      for (const std::int64_t end = std::min(keys, key + kLanes + (unit + 4) * kLanes / depth); next < end; ++next)
        prefetch_row(rows[next], row_bytes);
    }
  }
}

struct WidenRow {
  DType dtype;
  std::int64_t columns, padded;
  HWY_INLINE void operator()(float* target, const std::byte* row) const {
    widen_any(dtype, target, row, 1.0f, columns, padded);
  }
};

/// Layouts of float products. `depth` and `columns` are what head_dim is padded to.
struct FloatLayout {
  using Products = FloatProducts;
  static constexpr int kExpDegree = 5;
  static constexpr int kKeyMultiple = 1;  // keys per unit of the output products' inner dimension
  DType dtype;
  std::int64_t head_dim;
  std::int64_t depth;    // units of a score product, rounded to what packing writes
  std::int64_t columns;  // floats of an output row
  float score_factor;    // what turns products into base-2 exponents
  float query_factor;    // on packed queries; where it is the scale, products are exponents already

  FloatLayout(DType type, std::int64_t dim, float scale)
      : dtype(type),
        head_dim(dim),
        depth(round_up(dim, 4)),
        columns(round_up(dim, kLanes)),
        score_factor(kFused ? 1.0f : std::abs(scale) * kLog2e),
        query_factor(kFused      ? scale * kLog2e
                     : scale < 0 ? -1.0f
                                 : 1.0f) {}

  std::int64_t row_bytes() const { return head_dim * size_of(dtype); }
  std::int64_t query_stride() const { return depth; }
  static std::int64_t value_floats(std::int64_t keys, std::int64_t columns) { return keys * columns; }
  /// Where key `key` begins among packed values.
  std::int64_t value_offset(std::int64_t key) const { return key * columns; }

  template <int kPanel>
  HWY_NOINLINE void pack_panels(float* target, const std::byte* const* rows, std::int64_t keys, float* scratch) const {
    pack_panels_with<kPanel>(target, rows, keys, depth, dtype == DType::f32 && head_dim % 4 == 0, scratch, row_bytes(),
                             WidenRow{dtype, head_dim, depth});
  }
  /// A row of queries (or of dout, with factor 1) for the score products.
  void pack_query(float* target, const std::byte* row, float factor) const {
    widen_any(dtype, target, row, factor, head_dim, depth);
  }
  template <bool kKeep>
  static V weights(const float* scores, float* weights, std::int64_t limit, std::int64_t end, float factor, float base,
                   const std::uint16_t* keep, V sums);
  /// What is missing of dk when packed queries carry query_factor.
  static float key_gradient_factor(float scale) { return kFused ? kLn2 : std::abs(scale); }
  /// A tile of queries (or of dout) for the backward: rows serve as a of the score products and as b of dk and dv.
  std::int64_t product_depth() const { return head_dim; }
  std::int64_t query_stride_backward() const { return columns; }
  HWY_NOINLINE void pack_queries(float* target, float*, const std::byte* const* rows, std::int64_t count, float factor,
                                 float*) const {
    for (std::int64_t row = 0; row < count; ++row)
      widen_any(dtype, target + row * columns, rows[row], factor, head_dim, columns);
  }
  HWY_NOINLINE void pack_values(float* target, const std::byte* const* rows, std::int64_t keys) const {
    for (std::int64_t key = 0; key < keys; ++key) {
      if (key + 8 < keys) prefetch_row(rows[key + 8], row_bytes());
      widen_any(dtype, target + key * columns, rows[key], 1.0f, head_dim, columns);
    }
  }
};

/// weights = exp2((scores - base) * factor) for keys below limit, 0 up to end; their sum (before dropout) joins `sums`.
template <bool kKeep>
HWY_INLINE V FloatLayout::weights(const float* scores, float* weights, std::int64_t limit, std::int64_t end,
                                  float factor, float base, const std::uint16_t* keep, V sums) {
  const V scale = broadcast(factor), largest = broadcast(base), shift = broadcast(-base * factor);
  std::int64_t key = 0;
  for (; key + kLanes <= limit; key += kLanes) {
    V weight = exp2<kExpDegree>(exponent(load(scores + key), largest, shift, scale));
    sums = hn::Add(sums, weight);
    if constexpr (kKeep) weight = hn::And(weight, load_keep(keep + key));
    store(weight, weights + key);
  }
  if (key < limit) {
    V weight = exp2<kExpDegree>(exponent(load(scores + key), largest, shift, scale));
    weight = hn::IfThenElseZero(hn::FirstN(kFloat, static_cast<std::size_t>(limit - key)), weight);
    sums = hn::Add(sums, weight);
    if constexpr (kKeep) weight = hn::And(weight, load_keep(keep + key));
    store(weight, weights + key);
    key += kLanes;
  }
  for (; key < end; key += kLanes) store(hn::Zero(kFloat), weights + key);
  return sums;
}

/// Pointers to rows [begin, begin + count) of a strand, zero_row() for those that no piece has, and for the rest up to
/// `padded`.
inline void point_to_rows(const CallShared& shared, const StrandTask& task, std::int64_t begin, std::int64_t count,
                          std::int64_t padded, const std::byte** k_rows, const std::byte** v_rows) {
  for (std::int64_t index = 0; index < count;) {
    const RowRun run = shared.keys.run(task.entry, task.kv_head, task.strand, begin + index, count - index);
    if (run.count == 0) {
      k_rows[index] = v_rows[index] = zero_row();
      ++index;
      continue;
    }
    for (std::int64_t i = 0; i < run.count; ++i, ++index) {
      k_rows[index] = run.k + i * run.k_stride;
      v_rows[index] = run.v + i * run.v_stride;
    }
  }
  for (std::int64_t index = count; index < padded; ++index) k_rows[index] = v_rows[index] = zero_row();
}

/// Keys of strand rows begin .. end on their way to the cache; those of pieces are left to the moment they are packed.
inline void prefetch_keys(const CallShared& shared, const StrandTask& task, std::int64_t begin, std::int64_t end) {
  if (!shared.call.pieces.empty()) return;
  const std::int64_t bytes = shared.k.columns() * size_of(shared.k.dtype);
  for (std::int64_t index = begin; index < std::min(end, task.strand.count); ++index) {
    const std::int64_t position = task.strand.start + index * task.strand.stride;
    prefetch_early(row_place(shared.k, task.entry, position, task.kv_head), bytes);
    prefetch_early(row_place(shared.v, task.entry, position, task.kv_head), bytes);
  }
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace longspan::cpu
HWY_AFTER_NAMESPACE();
