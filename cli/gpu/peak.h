// What a GPU can do at best, in parts: a matrix product by cuBLAS where the machine has it, and multiply-adds on
// registers.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <memory>
#include <string>

#include "longspan/tensor_view.h"

namespace longspan::cli {

/// cuBLAS, looked up at run time: nothing links it.
class MatrixProduct {
 public:
  /// Null where no libcublas is found, or where it does not start.
  static std::unique_ptr<MatrixProduct> make(DType dtype);
  ~MatrixProduct();
  MatrixProduct(const MatrixProduct&) = delete;
  MatrixProduct& operator=(const MatrixProduct&) = delete;
  /// c = a b for square matrices on the current device, sums in float32 (never TF32).
  void multiply(std::int64_t side, const void* a, const void* b, void* c) const;
  const std::string& name() const { return name_; }

 private:
  MatrixProduct() = default;
  void* library_ = nullptr;
  void* handle_ = nullptr;
  int type_ = 0;
  std::string name_;
};

/// Numbers in [-1, 1): on zeros the card would draw less power and run faster than on data.
cudaError_t fill_uniform(void* data, DType dtype, std::int64_t count);

/// Starts `blocks` blocks of multiply-adds that touch no memory, and says how many FLOPs they make.
cudaError_t multiply_registers(DType dtype, int blocks, float* sink, double& flops);

}  // namespace longspan::cli
