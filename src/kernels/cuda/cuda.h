// The CUDA engine as the rest of the library sees it. cuda.cpp is the engine, no_cuda.cpp stands in for it in builds
// without CUDA; nothing here includes a CUDA header.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "kernels/kernel.h"
#include "longspan/machine.h"
#include "longspan/strand_cache.h"

namespace longspan::cuda {

/// Fastest first; whether this machine has a GPU for them is for can_run to say.
std::span<const Kernel* const> kernels();

using DeviceFacts = GpuFacts;

/// The GPUs of this machine; empty where there is none, or no driver, and why_none then says so.
const std::vector<DeviceFacts>& devices();
const std::string& why_none();

/// Zeroes a strided tensor on its device.
void fill_zero(const TensorView& view, void* stream);

/// A strided tensor as float32; heads of the source serve several of the target's where it has more.
void to_float(const ConstTensorView& from, const TensorView& to, void* stream);
void fill_one(const TensorView& view, void* stream);
/// A contiguous copy on the host, in `memory`; waits for the stream.
ConstTensorView download(const ConstTensorView& view, std::vector<std::byte>& memory, void* stream);
void append_token(const StrandCache& cache, const TokenRows& key, const TokenRows& value, int device, void* stream);
/// What an adaptive branch chooses for these tensors; waits for the stream.
BlockMask chosen_blocks(const Plan& plan, std::size_t branch, const ConstTensorView& q, const ConstTensorView& k,
                        const Call& call, std::span<const RowRange> ranges);

}  // namespace longspan::cuda
