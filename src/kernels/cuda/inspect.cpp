// What looking at attention needs of a GPU: float32 copies, copies to the host, and the blocks that an adaptive pattern
// chose.
#include <bit>

#include "device/device_pool.h"
#include "device/error.h"
#include "kernels/cuda/adaptive.h"
#include "kernels/cuda/call.h"
#include "kernels/cuda/cuda.h"
#include "kernels/cuda/kernels.h"
#include "kernels/cuda/prepare.h"

namespace longspan::cuda {
void to_float(const ConstTensorView& from, const TensorView& to, void* stream) {
  const DeviceGuard guard(to.device.index);
  check(copy_as_float(from, to, static_cast<cudaStream_t>(stream)), "copying a tensor as float32");
}

void fill_one(const TensorView& view, void* stream) {
  const DeviceGuard guard(view.device.index);
  const DeviceLease lease(view.device.index, stream, sizeof(float));
  static constexpr float kOne = 1.0f;
  check(cudaMemcpyAsync(lease.data(), &kOne, sizeof(kOne), cudaMemcpyHostToDevice, static_cast<cudaStream_t>(stream)),
        "filling a tensor");
  to_float({lease.data(), DType::f32, view.device, {1, 1, 1, 1}, {0, 0, 0, 0}}, view, stream);
}

ConstTensorView download(const ConstTensorView& view, std::vector<std::byte>& memory, void* stream) {
  const DeviceGuard guard(view.device.index);
  ConstTensorView host =
      ConstTensorView::bnhd(nullptr, view.dtype, view.batch(), view.rows(), view.heads(), view.columns());
  memory.resize(static_cast<std::size_t>(
      std::max<std::int64_t>(1, view.batch() * view.rows() * view.heads() * view.columns() * size_of(view.dtype))));
  host.data = memory.data();
  const DeviceLease lease(view.device.index, stream, memory.size());
  const TensorView packed{lease.data(), view.dtype, view.device, host.sizes, host.strides};
  const auto on = static_cast<cudaStream_t>(stream);
  check(copy_elements(view, packed, on), "copying a tensor to the host");
  check(cudaMemcpyAsync(memory.data(), lease.data(), memory.size(), cudaMemcpyDeviceToHost, on),
        "copying a tensor to the host");
  check(cudaStreamSynchronize(on), "copying a tensor to the host");
  return host;
}

BlockMask chosen_blocks(const Plan& plan, std::size_t branch, const ConstTensorView& q, const ConstTensorView& k,
                        const Call& call, std::span<const RowRange> ranges) {
  if (const Verdict verdict = fits(plan); !verdict.ok)
    throw Unsupported(fmt::format("adaptive blocks: the GPU engine {}", verdict.reason));
  const AdaptiveShape shape = adaptive_shape(plan, plan.branches()[branch]);
  if (shape.mask_heads == 0) return *plan.branches()[branch].mask;  // no entries: what keeps nothing
  const int device = plan.problem().device.index;
  const DeviceGuard guard(device);
  const DeviceLease lease(device, call.stream, layout(plan, Pass::forward, false).total);
  const ForwardArguments arguments{.plan = plan,
                                   .call = call,
                                   .ranges = ranges,
                                   .q = q,
                                   .k = k,
                                   .v = k,
                                   .out = {},
                                   .lse = {},
                                   .workspace = lease.data()};
  check_pointers(arguments);
  for_each_launch(arguments, {}, false, [](Launch&) {});
  const std::byte* chosen = layout(plan, Pass::forward, false, lease.data()).adaptive;
  for (std::size_t b = 0; b < branch; ++b) {
    if (plan.branches()[b].adaptive_density > 0)
      chosen += AdaptivePlaces(adaptive_shape(plan, plan.branches()[b])).total;
  }
  std::vector<std::uint32_t> bits(static_cast<std::size_t>(shape.mask_heads) * static_cast<std::size_t>(shape.blocks) *
                                  static_cast<std::size_t>(shape.words()));
  const auto stream = static_cast<cudaStream_t>(call.stream);
  check(cudaMemcpyAsync(bits.data(), chosen + AdaptivePlaces(shape).bits, bits.size() * sizeof(bits[0]),
                        cudaMemcpyDeviceToHost, stream),
        "copying chosen blocks to the host");
  check(cudaStreamSynchronize(stream), "copying chosen blocks to the host");
  const BranchPlan& own = plan.branches()[branch];
  std::vector<std::int64_t> offsets = {0};
  std::vector<std::int32_t> columns;
  for (std::int64_t row = 0; row < static_cast<std::int64_t>(shape.mask_heads) * shape.blocks; ++row) {
    const bool owned = own.owns(row / shape.blocks % plan.problem().heads);  // bits of others were not written
    for (int word = 0; owned && word < shape.words(); ++word) {
      for (std::uint32_t left = bits[static_cast<std::size_t>(row * shape.words() + word)]; left; left &= left - 1)
        columns.push_back(word * 32 + std::countr_zero(left));
    }
    offsets.push_back(static_cast<std::int64_t>(columns.size()));
  }
  return BlockMask::from_lists(shape.block_size, shape.mask_heads, shape.blocks, std::move(offsets),
                               std::move(columns));
}

}  // namespace longspan::cuda
