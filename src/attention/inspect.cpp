// Inspection on top of the operator: what a key receives is the gradient of v for a gradient of ones, and a block's
// probabilities are exp(score - lse).
#include "longspan/inspect.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <utility>

#include "attention/call_masks.h"
#include "attention/check.h"
#include "attention/tensors.h"
#include "device/scratch.h"
#include "kernels/kernel.h"
#include "kernels/plain/rows.h"
#include "longspan/threads.h"
#include "plan/query_rows.h"
#include "util/reject.h"

namespace longspan {
namespace {

/// A contiguous float32 tensor where a call's tensors are, or a copy of one, with the heads of keys repeated for every
/// query head if `heads` asks for it.
class FloatTensor {
 public:
  FloatTensor(const ConstTensorView& like, std::int64_t heads, std::int64_t columns, void* stream)
      : tensor_(like.device, stream, DType::f32, like.batch(), like.rows(), heads, columns) {}
  FloatTensor(const ConstTensorView& source, std::int64_t heads, void* stream)
      : FloatTensor(source, heads, source.columns(), stream) {
    copy(view(), source, stream);
  }
  const TensorView& view() const { return tensor_.view(); }
  static void copy(const TensorView& target, const ConstTensorView& source, void* stream) {
    if (source.device.type == DeviceType::cpu) convert_on_host(target, source);
    else cuda::to_float(source, target, stream);
  }
  void fill_one(void* stream) {
    if (view().device.type != DeviceType::cpu) return cuda::fill_one(view(), stream);
    std::fill_n(static_cast<float*>(view().data), tensor_.bytes() / sizeof(float), 1.0f);
  }

 private:
  ScratchTensor tensor_;
};

/// The same attention without what does not concern weights.
Attention weights_only(const Attention& attention) {
  Options options = attention.options();
  options.dropout = 0;
  options.output_scale = 1.0;
  options.detached_mix = false;
  return Attention(attention.pattern(), options);
}

}  // namespace

BlockMask adaptive_mask(const Attention& attention, const ConstTensorView& q, const ConstTensorView& k,
                        const Call& call) {
  check_inspection(q, k, call, true);
  const auto plan = attention.plan(Attention::problem(q, k, call));
  for (std::size_t branch = 0; branch < plan->branches().size(); ++branch) {
    if (plan->branches()[branch].adaptive_density == 0) continue;
    const RowRange whole{0, plan->problem().tokens};
    const auto ranges = ranges_of(call, whole);
    if (k.device.type == DeviceType::cpu) return choose_blocks(*plan, branch, q, k, call, ranges, num_threads());
    return cuda::chosen_blocks(*plan, branch, q, k, call, ranges);
  }
  reject("pattern", "pattern '{}' is not adaptive: its masks do not depend on data; use adaptive(density)",
         attention.pattern().to_string());
}

void attention_received(const Attention& attention, const ConstTensorView& q, const ConstTensorView& k,
                        const TensorView& received, const Call& call) {
  check_inspection(q, k, call);
  const std::int64_t batch = q.batch(), heads = q.heads(), tokens = k.rows(), columns = q.columns();
  if (received.dtype != DType::f32 || received.sizes != std::array<std::int64_t, 4>{batch, tokens, heads, 1})
    reject("received", "received is {} of [{} entries, {} rows, {} heads]: give f32 of [{}, {}, {}]",
           name_of(received.dtype), received.batch(), received.rows(), received.heads(), batch, tokens, heads);
  if (received.device != q.device)
    reject("received", "received is on {}, q on {}: put them on one device", to_string(received.device),
           to_string(q.device));
  const Attention weights = weights_only(attention);
  const FloatTensor queries(q, heads, call.stream), keys(k, heads, call.stream);
  const auto like = [&](const ConstTensorView& view, std::int64_t width) {
    return FloatTensor(view, heads, width, call.stream);
  };
  const FloatTensor out = like(q, columns), dq = like(q, columns), dk = like(k, columns), dv = like(k, columns),
                    lse = like(q, 1);
  FloatTensor ones = like(q, columns);
  ones.fill_one(call.stream);
  const TensorView lse_view = TensorView::lse(lse.view().data, batch, q.rows(), heads, q.device);
  weights.forward(queries.view(), keys.view(), keys.view(), out.view(), lse_view, call);
  weights.backward(queries.view(), keys.view(), keys.view(), out.view(), lse_view, ones.view(), dq.view(), dk.view(),
                   dv.view(), call);
  TensorView first = dv.view();
  first.sizes[3] = 1;
  FloatTensor::copy(received, first, call.stream);
}

namespace {

/// Blocks of tensors on a GPU: found on the host, where they go, for the masks that the GPU would choose.
AttentionBlocks blocks_by_way_of_host(const Attention& attention, const ConstTensorView& q, const ConstTensorView& k,
                                      const Call& call, int block_size) {
  std::vector<std::byte> memory[5];
  Call host_call;
  host_call.query_ranges = call.query_ranges;
  host_call.cancel = call.cancel;
  const auto copy = [&](const ConstTensorView& view, std::vector<std::byte>& to) {
    return view.given() && view.device.type != DeviceType::cpu ? cuda::download(view, to, call.stream) : view;
  };
  const ConstTensorView host_q = copy(q, memory[0]), host_k = copy(k, memory[1]);
  host_call.lengths = copy(call.lengths, memory[2]);
  host_call.key_mask = copy(call.key_mask, memory[3]);
  host_call.alibi_slopes = copy(call.alibi_slopes, memory[4]);
  Pattern pattern = attention.pattern();
  const auto plan = attention.plan(Attention::problem(q, k, call));
  for (std::size_t branch = 0; branch < plan->branches().size(); ++branch) {
    if (plan->branches()[branch].adaptive_density == 0) continue;
    const RowRange whole{0, plan->problem().tokens};
    pattern = pattern.with_mask(branch, cuda::chosen_blocks(*plan, branch, q, k, call, ranges_of(call, whole)));
  }
  return attention_blocks(Attention(pattern, attention.options()), host_q, host_k, host_call, block_size);
}

}  // namespace

AttentionBlocks attention_blocks(const Attention& attention, const ConstTensorView& q, const ConstTensorView& k,
                                 const Call& call, int block_size) {
  check_inspection(q, k, call);
  const Attention weights = weights_only(attention);
  if (q.device.type != DeviceType::cpu) return blocks_by_way_of_host(weights, q, k, call, block_size);
  const std::int64_t batch = q.batch(), heads = q.heads(), rows = q.rows();
  const FloatTensor queries(q, heads, nullptr), keys(k, k.heads(), nullptr), out(q, heads, q.columns(), nullptr);
  std::vector<float> lse(static_cast<std::size_t>(batch * heads * rows));
  const TensorView lse_view = TensorView::lse(lse.data(), batch, rows, heads);
  weights.forward(queries.view(), keys.view(), keys.view(), out.view(), lse_view, call);

  const auto cached = weights.plan(Attention::problem(queries.view(), keys.view(), call));
  const RowRange whole{0, k.rows()};
  const auto ranges = ranges_of(call, whole);
  const int threads = num_threads();
  CallPlan own(*cached, call);
  own.choose(queries.view(), keys.view(), call, ranges, threads);
  const Plan& plan = *own;
  if (block_size == 0)
    block_size = plan.branches().size() == 1 && plan.branches()[0].mask ? plan.branches()[0].mask->block_size()
                                                                        : kDefaultBlockSize;
  if (block_size < 1) reject("block_size", "block_size is {}: give 1 or more tokens", block_size);
  const std::int64_t size = block_size, blocks = (k.rows() + size - 1) / size;

  // Query rows and positions of each block row: a list, since ranges may come in any order.
  std::vector<std::vector<std::pair<std::int64_t, std::int64_t>>> members(static_cast<std::size_t>(blocks));
  PositionCursor cursor(ranges, 0);
  for (std::int64_t row = 0; row < rows; ++row) {
    const std::int64_t position = cursor.next();
    members[static_cast<std::size_t>(position / size)].emplace_back(row, position);
  }
  const ForwardArguments arguments{plan,        call, ranges, queries.view(), keys.view(),
                                   keys.view(), {},   {},     threads,        nullptr};
  const plain::Rows<float> pairs(arguments);
  std::vector<std::map<std::int32_t, std::vector<float>>> made(static_cast<std::size_t>(batch * heads * blocks));
  parallel_for(threads, batch * heads * blocks, {call.cancel}, [&](int, std::int64_t item) {
    const std::int64_t block_row = item % blocks, head = item / blocks % heads, entry = item / blocks / heads;
    auto& target = made[static_cast<std::size_t>(item)];
    std::int64_t last_column = -1;
    float* values = nullptr;  // of the last column
    for (const auto& [row, position] : members[static_cast<std::size_t>(block_row)]) {
      const float base = *lse_view.at<float>(entry, row, head);
      if (base == -std::numeric_limits<float>::infinity()) continue;
      const float* const query = queries.view().at<float>(entry, row, head);
      const std::int64_t at = position;
      for (std::size_t branch = 0; branch < plan.branches().size(); ++branch) {
        plain::RowInBranch found;
        if (!pairs.find(branch, entry, head, at, found)) continue;
        const auto add = [&](std::int64_t index, const std::byte* key_row, const std::byte*) {
          const std::int64_t key = found.strand.start + index * found.strand.stride, column = key / size;
          if (std::exchange(last_column, column) != column) {
            auto& block = target[static_cast<std::int32_t>(column)];
            block.resize(static_cast<std::size_t>(size * size));
            values = block.data();
          }
          values[at % size * size + key % size] += std::exp(pairs.score(query, key_row, head, at, found, index) - base);
        };
        if (!found.branch->mask) {
          pairs.for_each_key(found, entry, head, 0, found.end, add);
          continue;
        }
        const BlockMask& mask = *found.branch->mask;
        for (const std::int64_t block :
             mask.row(found.branch->mask_head(entry, head), found.own_index / mask.block_size())) {
          pairs.for_each_key(found, entry, head, block * mask.block_size(),
                             std::min((block + 1) * mask.block_size(), found.end), add);
        }
      }
    }
  });

  AttentionBlocks result;
  result.block_size = block_size;
  result.offsets.push_back(0);
  for (std::size_t item = 0; item < made.size(); ++item) {
    const std::int64_t block_row = static_cast<std::int64_t>(item) % blocks;
    for (const auto& [column, values] : std::exchange(made[item], {})) {
      result.rows.push_back(static_cast<std::int32_t>(block_row));
      result.columns.push_back(column);
      result.values.insert(result.values.end(), values.begin(), values.end());
    }
    if (block_row == blocks - 1) result.offsets.push_back(static_cast<std::int64_t>(result.rows.size()));
  }
  return result;
}

}  // namespace longspan
