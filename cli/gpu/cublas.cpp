// cuBLAS through dlopen: four functions of its C interface, whose types and numbers are stable across versions.
#include <cuda_runtime_api.h>
#include <dlfcn.h>

#include "device/error.h"
#include "gpu/peak.h"

namespace longspan::cli {
namespace {

using Create = int (*)(void** handle);
using Destroy = int (*)(void* handle);
using Multiply = int (*)(void* handle, int transpose_a, int transpose_b, int m, int n, int k, const void* alpha,
                         const void* a, int type_a, int lda, const void* b, int type_b, int ldb, const void* beta,
                         void* c, int type_c, int ldc, int compute, int algorithm);

constexpr int kFloat32 = 0, kFloat16 = 2, kBFloat16 = 14;  // CUDA_R_32F, CUDA_R_16F, CUDA_R_16BF
constexpr int kComputeFloat32 = 68;                        // CUBLAS_COMPUTE_32F
constexpr int kDefaultAlgorithm = -1;

template <class Function>
Function find(void* library, const char* name) {
  return reinterpret_cast<Function>(dlsym(library, name));
}

}  // namespace

std::unique_ptr<MatrixProduct> MatrixProduct::make(DType dtype) {
  std::unique_ptr<MatrixProduct> product(new MatrixProduct);
  for (const char* name : {"libcublas.so.13", "libcublas.so.12", "libcublas.so"}) {
    product->library_ = dlopen(name, RTLD_NOW | RTLD_LOCAL);
    if (!product->library_) continue;
    product->name_ = fmt::format("cuBLAS ({})", name);
    break;
  }
  if (!product->library_) return nullptr;
  const auto create = find<Create>(product->library_, "cublasCreate_v2");
  if (!create || !find<Multiply>(product->library_, "cublasGemmEx") || create(&product->handle_) != 0) return nullptr;
  product->type_ = dtype == DType::bf16 ? kBFloat16 : dtype == DType::f16 ? kFloat16 : kFloat32;
  return product;
}

MatrixProduct::~MatrixProduct() {
  if (handle_) {
    if (const auto destroy = find<Destroy>(library_, "cublasDestroy_v2")) destroy(handle_);
  }
  // The library stays loaded: it registers handlers with the driver that outlive it badly.
}

void MatrixProduct::multiply(std::int64_t side, const void* a, const void* b, void* c) const {
  const float one = 1, zero = 0;
  const int n = static_cast<int>(side);
  const int status = find<Multiply>(library_, "cublasGemmEx")(handle_, 0, 0, n, n, n, &one, a, type_, n, b, type_, n,
                                                              &zero, c, type_, n, kComputeFloat32, kDefaultAlgorithm);
  if (status != 0) throw CudaError(fmt::format("cublasGemmEx of {} failed with status {}", name_, status));
}

}  // namespace longspan::cli
