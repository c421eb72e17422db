// The checks behind Attention::forward and backward.
#include "attention/check.h"

#include <fmt/format.h>

#include <cmath>
#include <limits>

#include "attention/tensors.h"
#include "plan/branch.h"
#include "plan/key_rows.h"
#include "util/reject.h"

namespace longspan {
namespace {

std::string shape_of(const ConstTensorView& view) { return fmt::format("[{}]", fmt::join(view.sizes, ", ")); }

/// Sizes, pointer, alignment and last stride of one tensor.
void check_tensor(std::string_view name, const ConstTensorView& view, bool may_be_null = false) {
  double elements = 1, reach = 0;
  for (int d = 0; d < 4; ++d) {
    if (view.sizes[d] < 0) reject(name, "{} has shape {}: sizes are not negative", name, shape_of(view));
    elements *= static_cast<double>(view.sizes[d]);
    reach += std::abs(static_cast<double>(view.strides[d])) * static_cast<double>(view.sizes[d]);
  }
  constexpr double kMost = 9.0e18 / 8;  // elements that 64-bit byte offsets can address
  if (elements > kMost || reach > kMost)
    reject(name, "{} has shape {} and strides [{}]: it is larger than 64-bit offsets can address", name, shape_of(view),
           fmt::join(view.strides, ", "));
  if (elements == 0) return;
  if (!view.data) {
    if (may_be_null) return;
    reject(name, "{} has a null pointer and shape {}: pass the address of its first element", name, shape_of(view));
  }
  if (reinterpret_cast<std::uintptr_t>(view.data) % static_cast<std::uintptr_t>(size_of(view.dtype)) != 0)
    reject(name, "{} is at {}, which is not a multiple of {}: align it to its element type {}", name, view.data,
           size_of(view.dtype), name_of(view.dtype));
  if (view.columns() > 1 && view.strides[3] != 1) {
    reject(name, "{} has a last stride of {}: the head dimension must be contiguous; make a contiguous copy", name,
           view.strides[3]);
  }
}

void check_same(std::string_view name, const ConstTensorView& view, const ConstTensorView& like,
                std::string_view like_name) {
  if (view.sizes != like.sizes)
    reject(name, "{} has shape {}, {} has {}: they must be equal", name, shape_of(view), like_name, shape_of(like));
}

void check_dtype_device(std::string_view name, const ConstTensorView& view, DType dtype, const ConstTensorView& q) {
  if (view.dtype != dtype)
    reject(name, "{} has dtype {}, q has {}: {} must be {}", name, name_of(view.dtype), name_of(q.dtype), name,
           name_of(dtype));
  if (view.device != q.device)
    reject(name, "{} is on {}, q is on {}: move them to one device", name, to_string(view.device), to_string(q.device));
}

/// A tensor of a dtype, in the shape of another one.
void check_like(std::string_view name, const ConstTensorView& view, DType dtype, const ConstTensorView& q,
                const ConstTensorView& like, std::string_view like_name) {
  check_tensor(name, view);
  check_dtype_device(name, view, dtype, q);
  check_same(name, view, like, like_name);
}

struct Named {
  std::string_view name;
  ConstTensorView view;
};

/// Outputs are written while inputs are still read, and each element by one thread.
void check_outputs(std::span<const Named> outputs, std::span<const Named> inputs) {
  for (std::size_t i = 0; i < outputs.size(); ++i) {
    const Named& output = outputs[i];
    if (may_overlap_itself(output.view)) {
      reject(output.name,
             "{} has strides [{}] that visit an element twice: outputs need memory of their own for every element",
             output.name, fmt::join(output.view.strides, ", "));
    }
    for (const Named& input : inputs) {
      if (may_overlap(output.view, input.view)) {
        reject(output.name, "{} overlaps {}: outputs must not share memory with inputs; allocate a tensor of its own",
               output.name, input.name);
      }
    }
    for (std::size_t j = i + 1; j < outputs.size(); ++j) {
      if (may_overlap(output.view, outputs[j].view)) {
        reject(output.name, "{} overlaps {}: outputs must not share memory; allocate a tensor for each", output.name,
               outputs[j].name);
      }
    }
  }
}

int alignment_of(std::initializer_list<ConstTensorView> tensors) {
  std::uint64_t bits = 128;
  for (const ConstTensorView& tensor : tensors) {
    bits |= reinterpret_cast<std::uintptr_t>(tensor.data);
    for (int d = 0; d < 3; ++d) {
      if (tensor.sizes[d] > 1) bits |= static_cast<std::uint64_t>(tensor.strides[d] * size_of(tensor.dtype));
    }
  }
  return static_cast<int>(bits & (~bits + 1));
}

constexpr std::int64_t kMostColumns = 256;

void check_shapes(const ConstTensorView& q, const ConstTensorView& k, const ConstTensorView& v, const Call& call,
                  std::int64_t most_columns = kMostColumns) {
  const bool pieces = !call.pieces.empty();
  check_tensor("q", q);
  check_tensor("k", k, pieces);
  check_tensor("v", v, pieces);
  if (q.dtype == DType::i32 || q.dtype == DType::i64 || q.dtype == DType::boolean)
    reject("q", "q has dtype {}: attention runs on f32, bf16, f16 and f64", name_of(q.dtype));
  check_dtype_device("k", k, q.dtype, q);
  check_dtype_device("v", v, q.dtype, q);
  check_same("v", v, k, "k");
  if (q.columns() < 1 || q.columns() > most_columns)
    reject("q", "head_dim {} of q: head dims from 1 to {} are supported", q.columns(), most_columns);
  if (k.columns() != q.columns())
    reject("k", "k has head_dim {}, q has {}: they must be equal", k.columns(), q.columns());
  if (k.batch() != q.batch()) reject("k", "k has batch {}, q has {}: they must be equal", k.batch(), q.batch());
  if (q.heads() < 1) reject("q", "q has {} heads: at least one is needed", q.heads());
  if (k.heads() < 1 || q.heads() % k.heads() != 0)
    reject("k", "k has {} heads, q has {}: the number of query heads must be a multiple of the key/value heads",
           k.heads(), q.heads());
  std::int64_t rows = 0;
  if (call.query_ranges.empty()) {
    rows = k.rows();
  } else {
    for (const RowRange& range : call.query_ranges) {
      if (range.start < 0 || range.count < 0 || range.start > k.rows() || range.count > k.rows() - range.start)
        reject("query_ranges", "query range (start {}, count {}) leaves the sequence: k has rows 0 to {}", range.start,
               range.count, k.rows() - 1);
      // Ranges may repeat positions, so their sum is only bounded by q itself.
      if (rows > q.rows() - range.count) rows = -1;
      if (rows < 0) break;
      rows += range.count;
    }
  }
  if (rows != q.rows()) {
    if (call.query_ranges.empty())
      reject("q", "q has {} rows, k has {}: pass query_ranges to say which positions the rows of q are", q.rows(),
             k.rows());
    reject("query_ranges", "query_ranges do not add up to the {} rows of q", q.rows());
  }
}

void check_call(const ConstTensorView& q, const ConstTensorView& k, const Call& call) {
  const std::int64_t batch = q.batch(), tokens = k.rows();
  if (call.lengths.given()) {
    const ConstTensorView& lengths = call.lengths;
    check_tensor("lengths", lengths);
    if (lengths.dtype != DType::i32 && lengths.dtype != DType::i64)
      reject("lengths", "lengths has dtype {}: use i32 or i64", name_of(lengths.dtype));
    if (lengths.sizes != std::array<std::int64_t, 4>{batch, 1, 1, 1})
      reject("lengths", "lengths has shape {}: give one length for each of the {} batch entries", shape_of(lengths),
             batch);
    if (lengths.device.type == DeviceType::cpu) {
      for (std::int64_t entry = 0; entry < batch; ++entry) {
        const std::int64_t value = length_of(lengths, entry);
        if (value < 0 || value > tokens)
          reject("lengths", "lengths[{}] is {}: lengths are from 0 to the {} rows of k", entry, value, tokens);
      }
    } else if (lengths.device != q.device)
      reject("lengths", "lengths is on {}, q is on {}: move them to one device", to_string(lengths.device),
             to_string(q.device));
  }
  if (call.key_mask.given()) {
    check_tensor("key_mask", call.key_mask);
    check_dtype_device("key_mask", call.key_mask, DType::boolean, q);
    if (call.key_mask.sizes != std::array<std::int64_t, 4>{batch, tokens, 1, 1})
      reject("key_mask", "key_mask has shape {}: give [batch, tokens] = [{}, {}]", shape_of(call.key_mask), batch,
             tokens);
  }
  if (call.alibi_slopes.given()) {
    check_tensor("alibi_slopes", call.alibi_slopes);
    check_dtype_device("alibi_slopes", call.alibi_slopes, DType::f32, q);
    if (call.alibi_slopes.sizes != std::array<std::int64_t, 4>{1, 1, q.heads(), 1})
      reject("alibi_slopes", "alibi_slopes has shape {}: give one slope for each of the {} heads",
             shape_of(call.alibi_slopes), q.heads());
  }
  for (std::size_t i = 0; i < call.pieces.size(); ++i) {
    const KeyPiece& piece = call.pieces[i];
    const std::string name = fmt::format("pieces[{}]", i);
    check_like(name, piece.k, q.dtype, q, piece.k, "");
    check_like(name, piece.v, q.dtype, q, piece.k, "its k");
    if (piece.k.batch() != batch || piece.k.columns() != q.columns())
      reject(name, "{} has shape {}: give [{}, rows, heads, {}]", name, shape_of(piece.k), batch, q.columns());
    if (piece.kv_head < 0 || piece.k.heads() > k.heads() || piece.kv_head > k.heads() - piece.k.heads())
      reject(name, "{} has {} heads from head {} on: k has {}", name, piece.k.heads(), piece.kv_head, k.heads());
    if (piece.step < 1) reject(name, "{} has step {}: steps are at least 1", name, piece.step);
    const std::int64_t rows = piece.k.rows();
    if (piece.first < 0 || (rows > 0 && (piece.first >= tokens || (tokens - 1 - piece.first) / piece.step < rows - 1)))
      reject(name, "{} (first {}, step {}, {} rows) leaves the sequence of {} positions", name, piece.first, piece.step,
             rows, tokens);
  }
  if (call.workspace && reinterpret_cast<std::uintptr_t>(call.workspace) % 64 != 0)
    reject("workspace", "workspace is at {}: align it to 64 bytes", call.workspace);
}

Problem make_problem(const ConstTensorView& q, const ConstTensorView& k, const Call& call,
                     std::initializer_list<ConstTensorView> tensors) {
  Problem problem;
  problem.dtype = q.dtype;
  problem.device = q.device;
  problem.batch = q.batch();
  problem.tokens = k.rows();
  problem.query_rows = q.rows();
  problem.heads = q.heads();
  problem.kv_heads = k.heads();
  problem.head_dim = q.columns();
  problem.alignment = alignment_of(tensors);
  problem.has_lengths = call.lengths.given();
  problem.has_key_mask = call.key_mask.given();
  problem.has_alibi = call.alibi_slopes.given();
  problem.has_pieces = !call.pieces.empty();
  problem.has_piece_gradients = problem.has_pieces && call.pieces[0].dk.given();
  return problem;
}

void check_lse(std::string_view name, const ConstTensorView& lse, const ConstTensorView& q) {
  check_tensor(name, lse);
  check_dtype_device(name, lse, sum_dtype(q.dtype), q);
  if (lse.sizes != std::array<std::int64_t, 4>{q.batch(), q.rows(), q.heads(), 1})
    reject(name, "{} is [batch, rows, heads] = [{}, {}, {}]: q needs [{}, {}, {}]", name, lse.sizes[0], lse.sizes[1],
           lse.sizes[2], q.batch(), q.rows(), q.heads());
}

/// Looks for the keys that the queries of a range attend to.
class PieceCheck {
 public:
  PieceCheck(const Plan& plan, const ConstTensorView& k, const ConstTensorView& v, const Call& call)
      : plan_(plan),
        rows_(k, v, call.pieces),
        // Lengths on a GPU are not read here: pieces must then hold what full entries attend to.
        lengths_(on_host(call.lengths)),
        mask_(on_host(call.key_mask)) {}

  void check(const BranchPlan& branch, std::span<const RowRange> ranges) const {
    // Where neither lengths nor masks tell entries apart, one stands for all.
    const bool entries_differ = lengths_.given() || mask_.given() || branch.mask_entry_stride > 0;
    for (std::int64_t entry = 0; entry < (entries_differ ? plan_.problem().batch : 1); ++entry) {
      const std::int64_t length = rows_of_entry(lengths_, entry, plan_.problem().tokens);
      if (length == 0 || !branch.active(length)) continue;
      for (const RowRange& range : ranges) {
        if (range.count == 0 || range.start >= length) continue;
        const std::int64_t last_row = std::min(range.start + range.count, length) - 1;
        for (std::int64_t head = branch.head_begin; head < branch.head_begin + branch.head_count; ++head) {
          for (std::int64_t segment = range.start / branch.segment; segment <= last_row / branch.segment; ++segment)
            check_strand(branch, entry, head, branch.strand(head, segment, length), range);
        }
      }
    }
  }

 private:
  static ConstTensorView on_host(const ConstTensorView& view) {
    return view.device.type == DeviceType::cpu ? view : ConstTensorView{};
  }

  void check_strand(const BranchPlan& branch, std::int64_t entry, std::int64_t head, const Strand& strand,
                    const RowRange& range) const {
    const QueryRun queries = query_run(strand, range);
    if (queries.count == 0) return;
    const bool causal = plan_.options().causal;
    // Adaptive masks are chosen from all keys.
    if (branch.adaptive_density > 0)
      return check_keys(entry, head, strand, 0, causal ? queries.begin + queries.count : strand.count, range,
                        "may choose");
    for_each_attended(branch, entry, entry + 1, head, strand, queries, causal,
                      [&](std::int64_t first, std::int64_t last) {
                        check_keys(entry, head, strand, first, last, range, "attends to");
                      });
  }

  /// Rows [first, last) of a strand, which a query in `range` uses.
  void check_keys(std::int64_t entry, std::int64_t head, const Strand& strand, std::int64_t first, std::int64_t last,
                  const RowRange& range, const char* uses) const {
    const std::int64_t kv_head = head / (plan_.problem().heads / plan_.problem().kv_heads);
    for (std::int64_t index = first; index < last;) {
      const RowRun run = rows_.run(entry, kv_head, strand, index, last - index);
      const std::int64_t position = strand.start + index * strand.stride;
      if (run.count == 0 && key_allowed(mask_, entry, position))
        reject("pieces", "no piece holds position {}, which a query in range (start {}, count {}) {}", position,
               range.start, range.count, uses);
      index += std::max<std::int64_t>(run.count, 1);
    }
  }

  const Plan& plan_;
  KeyRows rows_;
  ConstTensorView lengths_, mask_;
};

/// All pieces have gradients of the right type and memory of their own, or none has any.
void check_piece_gradients(const ConstTensorView& q, const Call& call) {
  for (std::size_t i = 0; i < call.pieces.size(); ++i) {
    const KeyPiece& piece = call.pieces[i];
    for (const auto& [part, view] : {std::pair<const char*, const TensorView&>{"dk", piece.dk}, {"dv", piece.dv}}) {
      const std::string name = fmt::format("pieces[{}].{}", i, part);
      if (view.given() != call.pieces[0].dk.given())
        reject(name, "{} is {}: give gradients in all pieces or in none", name, view.given() ? "given" : "missing");
      if (!view.given()) continue;
      check_like(name, view, sum_dtype(q.dtype), q, piece.k, "its k");
      if (may_overlap_itself(view))
        reject(name, "{} has strides [{}] that visit an element twice", name, fmt::join(view.strides, ", "));
    }
  }
}

}  // namespace

Problem check_forward(const ForwardTensors& tensors, const Call& call) {
  const auto& [q, k, v, out, lse] = tensors;
  check_shapes(q, k, v, call);
  check_like("out", out, q.dtype, q, q, "q");
  if (lse.given()) check_lse("lse", lse, q);
  check_call(q, k, call);
  const Named outputs[] = {{"out", out}, {"lse", lse}};
  const Named inputs[] = {
      {"q", q}, {"k", k}, {"v", v}, {"key_mask", call.key_mask}, {"alibi_slopes", call.alibi_slopes}};
  check_outputs(outputs, inputs);
  return make_problem(q, k, call, {q, k, v, out});
}

void check_inspection(const ConstTensorView& q, const ConstTensorView& k, const Call& call, bool any_columns) {
  if (!call.pieces.empty()) reject("pieces", "pieces are given: inspection takes k as one tensor; drop them");
  check_shapes(q, k, k, call, any_columns ? std::numeric_limits<std::int64_t>::max() : kMostColumns);
  check_call(q, k, call);
}

Problem check_backward(const Options& options, const BackwardTensors& tensors, const Call& call) {
  const auto& [q, k, v, out, lse, dout, dq, dk, dv] = tensors;
  check_shapes(q, k, v, call);
  for (const Named& tensor : {Named{"out", out}, {"dout", dout}, {"dq", dq}})
    check_like(tensor.name, tensor.view, q.dtype, q, q, "q");
  const bool in_pieces = !call.pieces.empty() && call.pieces[0].dk.given();
  for (const Named& tensor : {Named{"dk", dk}, {"dv", dv}}) {
    if (!in_pieces) check_like(tensor.name, tensor.view, q.dtype, q, k, "k");
    else if (tensor.view.given())
      reject(tensor.name, "{} is given and so are gradients in pieces: give one of the two", tensor.name);
  }
  if (!lse.given()) reject("lse", "lse is missing: backward needs the lse that forward returned");
  check_lse("lse", lse, q);
  check_call(q, k, call);
  check_piece_gradients(q, call);
  if (call.dlse.given()) {
    if (options.detached_mix) {
      reject("dlse", "dlse with detached_mix: weights held constant have no gradient through lse; drop one of the two");
    }
    check_lse("dlse", call.dlse, q);
  }
  const Named outputs[] = {{"dq", dq}, {"dk", dk}, {"dv", dv}};
  const Named inputs[] = {{"q", q},
                          {"k", k},
                          {"v", v},
                          {"out", out},
                          {"lse", lse},
                          {"dout", dout},
                          {"dlse", call.dlse},
                          {"key_mask", call.key_mask},
                          {"alibi_slopes", call.alibi_slopes}};
  check_outputs(outputs, inputs);
  return make_problem(q, k, call, {q, k, v, out, dout, dq, dk, dv});
}

void check_pieces(const Plan& plan, const ConstTensorView& k, const ConstTensorView& v, const Call& call,
                  std::span<const RowRange> ranges) {
  if (plan.problem().batch == 0) return;
  const PieceCheck pieces(plan, k, v, call);
  for (const BranchPlan& branch : plan.branches()) pieces.check(branch, ranges);
}

Problem Attention::problem(const ConstTensorView& q, const ConstTensorView& k, const Call& call) {
  return make_problem(q, k, call, {q, k});
}

}  // namespace longspan
