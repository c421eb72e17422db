// What Attention::forward and backward run, with a question that only the library itself may answer: whether the pieces
// of a call have all keys.
#pragma once

#include "longspan/attention.h"

namespace longspan {

/// With `some`, keys that no piece has are left out, as if masked. GPU kernels do so by themselves; the CPU's leave out
/// what key_mask excludes, so there pieces have all keys that it does not.
enum class KeysGiven { all, some };

void run_forward(const Attention& attention, const ConstTensorView& q, const ConstTensorView& k,
                 const ConstTensorView& v, const TensorView& out, const TensorView& lse, const Call& call,
                 KeysGiven given);
void run_backward(const Attention& attention, const ConstTensorView& q, const ConstTensorView& k,
                  const ConstTensorView& v, const ConstTensorView& out, const ConstTensorView& lse,
                  const ConstTensorView& dout, const TensorView& dq, const TensorView& dk, const TensorView& dv,
                  const Call& call, KeysGiven given);

}  // namespace longspan
