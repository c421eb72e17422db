// Python arrays as tensor views: None, anything nanobind can import (NumPy, DLPack), or the tuple
// (pointer, dtype, device type, device index, shape, strides) that the torch operators and bfloat16 arrays use.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <vector>

#include "exchange.h"
#include "longspan/tensor_view.h"

namespace longspan::python {

namespace nb = nanobind;

/// How the dimensions of an array map to (batch, row, head, column).
enum class Role { bnhd, bhnd, lse, key_mask, lengths, alibi_slopes };

/// Turns arrays into views and keeps what they point to alive. Destroy with the interpreter lock held.
class Arrays {
 public:
  /// With a table all arrays are tensors of its class, or None, or tuples.
  explicit Arrays(const ExchangeTable* table = nullptr) : table_(table) {}
  /// Whether a tensor's device and element type are known here.
  static bool takes(const nb::dlpack::dltensor& tensor);

  ConstTensorView input(nb::handle array, const char* name, Role role);
  TensorView output(nb::handle array, const char* name, Role role);

 private:
  TensorView view(nb::handle array, const char* name, Role role, bool writable);
  const ExchangeTable* table_;
  std::vector<nb::ndarray<nb::ro>> inputs_;
  std::vector<nb::ndarray<>> outputs_;
};

}  // namespace longspan::python
