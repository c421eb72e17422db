// Rejects bad input before any work, naming argument, value and fix.
#pragma once

#include "longspan/attention.h"

namespace longspan {

struct ForwardTensors {
  ConstTensorView q, k, v;
  TensorView out, lse;
};
struct BackwardTensors {
  ConstTensorView q, k, v, out, lse, dout;
  TensorView dq, dk, dv;
};

/// Everything that docs/definition.md, section 9.1, refuses in a call. Returns the problem it poses.
Problem check_forward(const ForwardTensors& tensors, const Call& call);
Problem check_backward(const Options& options, const BackwardTensors& tensors, const Call& call);

/// The same for calls that only look at q and k. `any_columns`: block means are taken of any head dim.
void check_inspection(const ConstTensorView& q, const ConstTensorView& k, const Call& call, bool any_columns = false);

/// With pieces, every row that a query attends to must be in some piece.
void check_pieces(const Plan& plan, const ConstTensorView& k, const ConstTensorView& v, const Call& call,
                  std::span<const RowRange> ranges);

/// Whether two tensors share an element; may say yes to exotic stride combinations that do not.
bool may_overlap(const ConstTensorView& a, const ConstTensorView& b);
/// Whether two indices of one tensor may name the same element.
bool may_overlap_itself(const ConstTensorView& view);

}  // namespace longspan
