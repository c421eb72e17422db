// What the instruction-set files and the drivers of the CPU engine say to each other. Nothing here is compiled per ISA.
//   A task is what one thread does at a time: some query rows of one strand (forward), some key rows (backward).
//   Query heads that read the same keys (grouped queries in the same phase) share a task: its rows are then
//   (strand row, head) pairs, heads fastest, and are called virtual rows.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <string_view>

#include "kernels/kernel.h"
#include "plan/key_rows.h"
#include "plan/query_rows.h"
#include "util/philox.h"

namespace longspan::cpu {

inline constexpr std::int64_t kMaxHeadDim = 256;
/// The error of a float32 sum grows with the number of its terms. So sums over keys (forward) and over query rows (dk
/// and dv) close after this many, and closed sums are added up apart.
inline constexpr std::int64_t kTermsPerSum = 8192;

/// Heads first, first + step, ... that share one strand.
struct HeadSet {
  std::int64_t first = 0;
  std::int64_t step = 1;
  std::int64_t count = 1;
  std::int64_t at(std::int64_t index) const { return first + index * step; }
};

struct StrandTask {
  std::int64_t entry = 0;
  std::int64_t branch = 0;
  std::int64_t kv_head = 0;
  HeadSet heads;
  Strand strand;
  std::int64_t padding = 0;
};

/// What forward and backward of one call share, read only while tasks run.
struct CallShared {
  const Plan& plan;
  const Call& call;
  std::span<const RowRange> ranges;
  ConstTensorView q, k, v;
  KeyRows keys;
  DropoutRule dropout;
  bool causal;
  bool extras;        // ALiBi, dropout or key_mask: the inner loops with those policies run
  bool non_temporal;  // results are float32 and larger than a cache: non-temporal stores write them
  float scale;        // on scores
  float keep_factor;  // of dropout
  float output_scale;

  CallShared(const Plan& plan, const Call& call, std::span<const RowRange> ranges, const ConstTensorView& q,
             const ConstTensorView& k, const ConstTensorView& v);
  std::int64_t length(std::int64_t entry) const { return rows_of_entry(call.lengths, entry, plan.problem().tokens); }
};

/// Rows of float32 that results are summed in: the output tensor itself, or scratch of the same shape.
struct FloatRows {
  float* data = nullptr;
  std::int64_t batch_stride = 0, row_stride = 0, head_stride = 0;
  float* at(std::int64_t entry, std::int64_t row, std::int64_t head) const {
    return data + entry * batch_stride + row * row_stride + head * head_stride;
  }
};

template <class View>
inline auto* row_place(const View& view, std::int64_t entry, std::int64_t row, std::int64_t head) {
  using Byte =
      std::conditional_t<std::is_const_v<std::remove_pointer_t<decltype(view.data)>>, const std::byte, std::byte>;
  return static_cast<Byte*>(view.data) + view.offset(entry, row, head) * size_of(view.dtype);
}

struct ForwardShared : CallShared {
  using CallShared::CallShared;
  TensorView out;
  TensorView lse;  // always there: the caller's or scratch
  FloatRows sums;  // where branches are mixed; data is null if a row has one branch only
  // detached_mix asks for delta = output_scale * <dout, out of this branch> instead of an output.
  ConstTensorView dout;
  FloatRows delta;
};

struct ForwardTask : StrandTask {
  QueryRun rows;                      // rows of the strand; q rows follow at the strand's stride
  const ForwardTask* next = nullptr;  // what the thread does afterwards, if that is known: prefetched meanwhile
};

struct BackwardShared : CallShared {
  using CallShared::CallShared;
  ConstTensorView out, lse, dout;
  TensorView dq, dk, dv;
  FloatRows dq_sums, dk_sums, dv_sums;  // data is null where tasks write the gradient itself
  bool add_queries = false;             // later branches add to what earlier ones wrote
  bool add_keys = false;
  FloatRows delta;  // detached_mix only
};

struct BackwardTask : StrandTask {
  std::int64_t key_begin = 0;
  std::int64_t key_end = 0;
  std::int64_t block = 0;  // this is the block-th of `blocks` tasks of the strand
  std::int64_t blocks = 1;
  // One counter per kTicketRows strand rows: tasks of one strand add to dq in the order of their keys. Null if alone.
  std::atomic<std::uint32_t>* tickets = nullptr;
  const BackwardTask* next = nullptr;  // as in the forward
};
inline constexpr std::int64_t kTicketRows = 192;

/// One instruction set (and one way of multiplying) of the engine.
struct Engine {
  std::string_view name;
  /// Null if the machine has it, else what is missing.
  const char* (*missing)();
  /// Whether products are of bfloat16 pairs, so that only bfloat16 tensors run here.
  bool bf16_products;
  /// Rows of one task times head_dim that keep a task inside a core's cache.
  std::int64_t forward_row_budget;
  std::int64_t backward_key_budget;
  /// Keys per backward task are a multiple of this.
  std::int64_t backward_key_tile;
  std::size_t (*forward_bytes)(std::int64_t head_dim, std::int64_t rows, bool masked);
  std::size_t (*backward_bytes)(std::int64_t head_dim, std::int64_t keys);
  void (*forward)(const ForwardShared& shared, const ForwardTask& task, std::byte* memory);
  void (*backward)(const BackwardShared& shared, const BackwardTask& task, std::byte* memory);
  /// target = factor * source in the tensor's dtype.
  void (*store_row)(DType dtype, void* target, const float* source, float factor, std::int64_t columns);
};

}  // namespace longspan::cpu
