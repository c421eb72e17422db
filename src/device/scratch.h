// Memory of a call on the device that computes, from the library's pools.
#pragma once

#include "device/device_pool.h"
#include "longspan/tensor_view.h"
#include "memory/host_pool.h"

namespace longspan {

/// Lent until it ends; contents unspecified. Nothing is taken for 0 bytes.
class Scratch {
 public:
  Scratch(Device device, void* stream, std::size_t bytes)
      : host_(device.type == DeviceType::cpu ? bytes : 0),
        device_(device.index, stream, device.type == DeviceType::cuda ? bytes : 0) {}
  std::byte* data() const { return device_.data() ? device_.data() : host_.data(); }

 private:
  HostLease host_;
  DeviceLease device_;
};

/// A contiguous [batch, rows, heads, columns] of it.
class ScratchTensor {
 public:
  ScratchTensor(Device device, void* stream, DType dtype, std::int64_t batch, std::int64_t rows, std::int64_t heads,
                std::int64_t columns)
      : bytes_(static_cast<std::size_t>(batch * rows * heads * columns * size_of(dtype))),
        memory_(device, stream, bytes_),
        view_(TensorView::bnhd(memory_.data(), dtype, batch, rows, heads, columns, device)) {}
  /// In the shape of another tensor, on its device.
  ScratchTensor(const ConstTensorView& like, DType dtype, void* stream = nullptr)
      : ScratchTensor(like.device, stream, dtype, like.batch(), like.rows(), like.heads(), like.columns()) {}
  const TensorView& view() const { return view_; }
  std::size_t bytes() const { return bytes_; }

 private:
  std::size_t bytes_;
  Scratch memory_;
  TensorView view_;
};

}  // namespace longspan
