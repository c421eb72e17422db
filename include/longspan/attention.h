// The operator: attention over a pattern, forward and backward, on tensors that the caller owns.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string_view>

#include "longspan/export.h"
#include "longspan/pattern.h"
#include "longspan/plan.h"
#include "longspan/tensor_view.h"

namespace longspan {

/// Rows of k and v that live elsewhere: row i of the piece is position first + i * step.
struct KeyPiece {
  std::int64_t first = 0;
  std::int64_t step = 1;
  ConstTensorView k{};  ///< [B, count, heads, D]: key/value heads kv_head, kv_head + 1, ...
  ConstTensorView v{};
  std::int64_t kv_head = 0;
  /// Backward: where the gradients of these rows are added, float32 (float64 if k is), in k's shape. All pieces or none
  /// have them; dk and dv of the call are then not given. On a GPU their rows are aligned to 16 bytes.
  TensorView dk{}, dv{};
};

/// What a call did.
struct CallReport {
  std::string_view kernel{};  ///< name of the kernel that ran; empty if nothing was left to compute
};

/// Data of one call. Nothing here is part of a plan; spans and pointers must stay valid until the call (on a GPU: the
/// stream) is done with them.
struct Call {
  /// Positions of q's rows, in q's order; empty means 0 .. N-1.
  std::span<const RowRange> query_ranges{};
  /// If given, rows of k and v are found here, in the first piece that has them, and k.data and v.data may be null.
  /// Every row that a query attends to must be in some piece, unless key_mask excludes it.
  std::span<const KeyPiece> pieces{};
  /// [B] i32 or i64: entry e has lengths[e] rows. Host values are checked, device values are clamped to [0, N].
  ConstTensorView lengths{};
  /// [B, N] boolean: true where a key may be attended.
  ConstTensorView key_mask{};
  /// [H] f32: score -= slope * |i - j|.
  ConstTensorView alibi_slopes{};
  std::uint64_t dropout_seed = 0;
  /// Read instead of dropout_seed when not null; a device pointer for CUDA tensors, so that graphs can replay.
  const std::uint64_t* dropout_seed_pointer = nullptr;
  /// Backward only: gradient with respect to lse, [B, H, Nq].
  ConstTensorView dlse{};
  /// cudaStream_t for CUDA tensors.
  void* stream = nullptr;
  /// At least Plan::workspace_bytes, aligned to 64 bytes; null takes it from `allocate` or else the library's pool.
  void* workspace = nullptr;
  std::size_t workspace_size = 0;
  /// The caller's own allocator: asked once, by the calling thread, for a call that needs workspace. What it returns is
  /// aligned to 64 bytes and stays the caller's, who may reuse it when the call (on a GPU: the stream) is done with it.
  std::function<void*(std::size_t bytes)> allocate{};
  /// Polled by every long loop; once true the call throws Cancelled.
  const std::atomic<bool>* cancel = nullptr;
  /// Called from the calling thread now and then with the fraction done; returning false cancels the call.
  std::function<bool(double)> progress{};
  /// Filled in when the call returns.
  CallReport* report = nullptr;
};

/// Attention over one pattern with fixed options. Immutable: share it between threads.
class LONGSPAN_API Attention {
 public:
  explicit Attention(Pattern pattern, Options options = {});

  /// out [B, Nq, H, D] and, if given, lse [B, H, Nq] are fully overwritten. Rows without keys: out = 0, lse = -inf.
  void forward(const ConstTensorView& q, const ConstTensorView& k, const ConstTensorView& v, const TensorView& out,
               const TensorView& lse = {}, const Call& call = {}) const;

  /// Exact gradients; out and lse as forward returned them. dq, dk, dv are fully overwritten.
  void backward(const ConstTensorView& q, const ConstTensorView& k, const ConstTensorView& v,
                const ConstTensorView& out, const ConstTensorView& lse, const ConstTensorView& dout,
                const TensorView& dq, const TensorView& dk, const TensorView& dv, const Call& call = {}) const;

  /// The plan for a problem, from the cache.
  std::shared_ptr<const Plan> plan(const Problem& problem) const;
  /// The problem that a call with these tensors poses.
  static Problem problem(const ConstTensorView& q, const ConstTensorView& k, const Call& call = {});

  const Pattern& pattern() const;
  const Options& options() const;

 private:
  struct Specification;
  std::shared_ptr<const Specification> specification_;
};

}  // namespace longspan
