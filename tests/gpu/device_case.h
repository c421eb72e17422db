// The cases of the CPU's suite on a GPU: inputs are made and compared on the host, everything between is on the device.
#pragma once

#include <cuda_runtime_api.h>

#include <map>
#include <memory>

#include "kernels/cuda/cuda.h"
#include "support/case.h"

namespace longspan::testing {

inline constexpr Device kGpu{DeviceType::cuda, 0};

/// Skips aloud where there is no GPU.
#define LONGSPAN_NEEDS_GPU() \
  if (cuda::devices().empty()) GTEST_SKIP() << "no GPU: " << cuda::why_none()

inline void expect_success(cudaError_t status) { ASSERT_EQ(status, cudaSuccess) << cudaGetErrorString(status); }

/// Copies and fills return before they are done, and streams that tests make do not wait for them.
inline void settle() { cudaStreamSynchronize(nullptr); }

class DeviceBuffer {
 public:
  DeviceBuffer() = default;
  explicit DeviceBuffer(std::size_t bytes, int fill = -1) {
    void* memory = nullptr;
    if (cudaMalloc(&memory, bytes + 256) != cudaSuccess) throw OutOfMemory("a test's tensor");
    data_ = {static_cast<std::byte*>(memory), [](std::byte* pointer) { cudaFree(pointer); }};
    if (fill >= 0) cudaMemset(memory, fill, bytes + 256);
    settle();
  }
  std::byte* data() const { return data_.get(); }

 private:
  std::shared_ptr<std::byte> data_;
};

/// A copy of a host tensor with its layout, gaps included; NaN patterns travel with it.
class DeviceTensor {
 public:
  DeviceTensor() = default;
  explicit DeviceTensor(const ConstTensorView& host) : view_(host) {
    bytes_ = size_of(host.dtype);
    for (int d = 0; d < 4; ++d)
      bytes_ += std::max<std::int64_t>(host.sizes[d] - 1, 0) * host.strides[d] * size_of(host.dtype);
    buffer_ = DeviceBuffer(static_cast<std::size_t>(bytes_));
    cudaMemcpy(buffer_.data(), host.data, static_cast<std::size_t>(bytes_), cudaMemcpyHostToDevice);
    settle();
    view_.data = buffer_.data();
    view_.device = kGpu;
  }
  ConstTensorView view() const { return view_; }
  TensorView output() const {
    return {const_cast<void*>(view_.data), view_.dtype, view_.device, view_.sizes, view_.strides};
  }
  void poison() const {
    cudaMemset(buffer_.data(), 0xFF, static_cast<std::size_t>(bytes_));
    settle();
  }
  void upload(const Tensor& host) const {
    cudaMemcpy(buffer_.data(), host.view().data, static_cast<std::size_t>(bytes_), cudaMemcpyHostToDevice);
    settle();
  }
  void download(Tensor& host) const {
    cudaMemcpy(host.view().data, view_.data, static_cast<std::size_t>(bytes_), cudaMemcpyDeviceToHost);
  }

 private:
  DeviceBuffer buffer_;
  ConstTensorView view_;
  std::int64_t bytes_ = 0;
};

/// A Case with its inputs and poisoned outputs on the GPU.
class DeviceCase {
 public:
  explicit DeviceCase(const Case& host)
      : host_(host), q(host.q.view()), k(host.k.view()), v(host.v.view()), dout(host.dout.view()) {
    const Shape& s = host.shape;
    results.out = Tensor(host.dtype, s.batch, host.rows, s.heads, s.head_dim, host.layout);
    results.lse = Tensor::lse(host.dtype, s.batch, host.rows, s.heads);
    results.dq = results.out;
    results.dk = Tensor(host.dtype, s.batch, s.tokens, s.kv_heads, s.head_dim, host.layout);
    results.dv = results.dk;
    out = DeviceTensor(std::as_const(results.out).view());
    lse = DeviceTensor(std::as_const(results.lse).view());
    dq = DeviceTensor(std::as_const(results.dq).view());
    dk = DeviceTensor(std::as_const(results.dk).view());
    dv = DeviceTensor(std::as_const(results.dv).view());
    const Call data = host.call();
    for (const ConstTensorView* view : {&data.lengths, &data.key_mask, &data.alibi_slopes, &data.dlse}) {
      if (view->given()) data_.emplace(view->data, DeviceTensor(*view));
    }
    for (const KeyPiece& piece : host.pieces) {
      const auto upload = [&](const ConstTensorView& view) {
        return data_.emplace(view.data, DeviceTensor(view)).first->second.view();
      };
      pieces_.push_back({piece.first, piece.step, upload(piece.k), upload(piece.v)});
    }
  }

  Call call() const {
    Call call = host_.call();
    for (ConstTensorView* view : {&call.lengths, &call.key_mask, &call.alibi_slopes, &call.dlse}) {
      if (view->given()) *view = data_.at(view->data).view();
    }
    call.pieces = pieces_;
    return call;
  }

  void forward(const Attention& attention, const Call& call) const {
    attention.forward(q.view(), k.view(), v.view(), out.output(), lse.output(), call);
  }
  void backward(const Attention& attention, const Call& call) const {
    attention.backward(q.view(), k.view(), v.view(), out.view(), lse.view(), dout.view(), dq.output(), dk.output(),
                       dv.output(), call);
  }

  const Results& download() {
    expect_success(cudaDeviceSynchronize());
    out.download(results.out);
    lse.download(results.lse);
    dq.download(results.dq);
    dk.download(results.dk);
    dv.download(results.dv);
    return results;
  }

  Problem problem() const { return Attention::problem(q.view(), k.view(), call()); }

 private:
  const Case& host_;
  std::map<const void*, DeviceTensor> data_;
  std::vector<KeyPiece> pieces_;

 public:
  DeviceTensor q, k, v, dout, out, lse, dq, dk, dv;
  Results results;
};

inline std::vector<std::string> gpu_kernels_for(const Case& c, bool gradients = true) {
  std::vector<std::string> names;
  Problem problem = Attention::problem(c.q.view(), c.k.view(), c.call());
  problem.device = kGpu;
  const Plan plan(c.pattern, c.options, problem);
  for (const Kernel* kernel : cuda::kernels()) {
    if (kernel->can_run(plan, Pass::forward).ok && (!gradients || kernel->can_run(plan, Pass::backward).ok))
      names.emplace_back(kernel->name);
  }
  return names;
}

/// Every output of every GPU kernel that can run this within tolerance of the reference. A kernel that only has the
/// forward is compared there, and so is one that refuses the tensors of the backward, which cuda-simt may not.
inline void expect_gpu_matches(const Case& c) {
  const reference::Expectation want = c.expected(true);
  const auto forward_only = gpu_kernels_for(c, false);
  ASSERT_FALSE(forward_only.empty()) << "no GPU kernel runs " << c.pattern.to_string();
  const auto both = gpu_kernels_for(c, true);
  for (const std::string& kernel : forward_only) {
    Options options = c.options;
    options.kernel = kernel;
    const Attention attention(c.pattern, options);
    DeviceCase device(c);
    const Call call = device.call();
    bool gradients = std::find(both.begin(), both.end(), kernel) != both.end();
    device.forward(attention, call);
    try {
      if (gradients) device.backward(attention, call);
    } catch (const Unsupported& error) {
      EXPECT_TRUE(kernel != "cuda-simt" && std::string_view(error.what()).starts_with("no kernel takes these tensors"))
          << kernel << " " << error.what();
      gradients = false;
    }
    const Results& got = device.download();
    const auto check = [&](const char* name, const Tensor& actual, const reference::ExpectedTensor& tensor) {
      const auto comparison = reference::compare(actual.view(), tensor);
      EXPECT_LE(comparison.over_tolerance, 1) << kernel << " " << name << " " << comparison.worst << "\n"
                                              << c.pattern.to_string();
      EXPECT_LE(comparison.rms_over_model, 2) << kernel << " " << name << "\n" << c.pattern.to_string();
    };
    check("out", got.out, want.out);
    check("lse", got.lse, want.lse);
    if (!gradients) continue;
    check("dq", got.dq, want.dq);
    check("dk", got.dk, want.dk);
    check("dv", got.dv, want.dv);
  }
}

}  // namespace longspan::testing
