// The CUDA engine as the rest of the library sees it. cuda.cpp is the engine, no_cuda.cpp stands in for it in builds
// without CUDA; nothing here includes a CUDA header.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "kernels/kernel.h"

namespace longspan::cuda {

/// Fastest first; whether this machine has a GPU for them is for can_run to say.
std::span<const Kernel* const> kernels();

struct DeviceFacts {
  std::string name;
  int compute = 0;  // 90 for compute capability 9.0
  int multiprocessors = 0;
  int shared_bytes = 0;  // most that one block may use
  std::size_t memory_bytes = 0;
};

/// The GPUs of this machine; empty where there is none, or no driver, and why_none then says so.
const std::vector<DeviceFacts>& devices();
const std::string& why_none();

/// Zeroes a strided tensor on its device.
void fill_zero(const TensorView& view, void* stream);

}  // namespace longspan::cuda
