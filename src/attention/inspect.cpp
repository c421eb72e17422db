// Inspection on top of the operator: what a key receives is the gradient of v for a gradient of ones, and a block's
// probabilities are exp(score - lse).
#include "longspan/inspect.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "attention/call_masks.h"
#include "attention/check.h"
#include "device/scratch.h"
#include "kernels/cuda/cuda.h"
#include "kernels/kernel.h"
#include "kernels/plain/rows.h"
#include "longspan/error.h"
#include "longspan/threads.h"
#include "plan/query_rows.h"
#include "util/dispatch.h"
#include "util/parallel.h"

namespace longspan {
namespace {

/// A contiguous float32 tensor where a call's tensors are, or a copy of one, with the heads of keys repeated for every
/// query head if `heads` asks for it.
class FloatTensor {
 public:
  FloatTensor(Device device, void* stream, std::int64_t batch, std::int64_t rows, std::int64_t heads,
              std::int64_t columns)
      : tensor_(device, stream, DType::f32, batch, rows, heads, columns) {}
  FloatTensor(const ConstTensorView& source, std::int64_t heads, void* stream)
      : FloatTensor(source.device, stream, source.batch(), source.rows(), heads, source.columns()) {
    if (source.device.type != DeviceType::cpu) {
      cuda::to_float(source, view(), stream);
      return;
    }
    dispatch_storage(source.dtype, [&]<class Storage>() {
      for (std::int64_t entry = 0; entry < source.batch(); ++entry) {
        for (std::int64_t row = 0; row < source.rows(); ++row) {
          for (std::int64_t head = 0; head < heads; ++head) {
            const Storage* const from = source.at<Storage>(entry, row, head / (heads / source.heads()));
            float* const to = view().at<float>(entry, row, head);
            for (std::int64_t column = 0; column < source.columns(); ++column)
              to[column] = static_cast<float>(to_float(from[column]));
          }
        }
      }
    });
  }
  const TensorView& view() const { return tensor_.view(); }
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

/// Blocks of one (entry, head, block row) while they are made.
struct BlockRowValues {
  std::vector<std::int32_t> columns;
  std::vector<float> values;
};

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
  throw InvalidArgument(
      "pattern", fmt::format("pattern '{}' is not adaptive: its masks do not depend on data; use adaptive(density)",
                             attention.pattern().to_string()));
}

void attention_received(const Attention& attention, const ConstTensorView& q, const ConstTensorView& k,
                        const TensorView& received, const Call& call) {
  check_inspection(q, k, call);
  const std::int64_t batch = q.batch(), heads = q.heads(), tokens = k.rows(), columns = q.columns();
  if (received.dtype != DType::f32 || received.sizes != std::array<std::int64_t, 4>{batch, tokens, heads, 1}) {
    throw InvalidArgument(
        "received", fmt::format("received is {} of [{} entries, {} rows, {} heads]: give f32 of [{}, {}, {}]",
                                name_of(received.dtype), received.batch(), received.rows(), received.heads(), batch,
                                tokens, heads));
  }
  if (received.device != q.device) {
    throw InvalidArgument("received", fmt::format("received is on {}, q on {}: put them on one device",
                                                  to_string(received.device), to_string(q.device)));
  }
  const Attention weights = weights_only(attention);
  const Device device = q.device;
  const FloatTensor queries(q, heads, call.stream), keys(k, heads, call.stream);
  const auto like = [&](std::int64_t rows, std::int64_t of_heads, std::int64_t width) {
    return FloatTensor(device, call.stream, batch, rows, of_heads, width);
  };
  const FloatTensor out = like(q.rows(), heads, columns), dq = like(q.rows(), heads, columns),
                    dk = like(tokens, heads, columns), dv = like(tokens, heads, columns),
                    lse = like(q.rows(), heads, 1);
  FloatTensor ones = like(q.rows(), heads, columns);
  ones.fill_one(call.stream);
  const TensorView lse_view = TensorView::lse(lse.view().data, batch, q.rows(), heads, device);
  weights.forward(queries.view(), keys.view(), keys.view(), out.view(), lse_view, call);
  weights.backward(queries.view(), keys.view(), keys.view(), out.view(), lse_view, ones.view(), dq.view(), dk.view(),
                   dv.view(), call);
  TensorView first = dv.view();
  first.sizes[3] = 1;
  if (device.type != DeviceType::cpu) return cuda::to_float(first, received, call.stream);
  for (std::int64_t entry = 0; entry < batch; ++entry) {
    for (std::int64_t row = 0; row < tokens; ++row) {
      for (std::int64_t head = 0; head < heads; ++head)
        *received.at<float>(entry, row, head) = *first.at<float>(entry, row, head);
    }
  }
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
  const FloatTensor queries(q, heads, nullptr), keys(k, k.heads(), nullptr),
      out(q.device, nullptr, batch, rows, heads, q.columns());
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
  if (block_size < 1)
    throw InvalidArgument("block_size", fmt::format("block_size is {}: give 1 or more tokens", block_size));
  const std::int64_t size = block_size, blocks = (k.rows() + size - 1) / size;

  // Query rows of each block row: a list, since ranges may come in any order.
  struct QueryRow {
    std::int64_t row, position;
  };
  std::vector<std::vector<QueryRow>> members(static_cast<std::size_t>(blocks));
  PositionCursor cursor(ranges, 0);
  for (std::int64_t row = 0; row < rows; ++row) {
    const std::int64_t position = cursor.next();
    members[static_cast<std::size_t>(position / size)].push_back({row, position});
  }
  const ForwardArguments arguments{plan,        call, ranges, queries.view(), keys.view(),
                                   keys.view(), {},   {},     threads,        nullptr};
  const plain::Rows<float> pairs(arguments);
  std::vector<BlockRowValues> made(static_cast<std::size_t>(batch * heads * blocks));
  std::vector<std::vector<std::int32_t>> places(static_cast<std::size_t>(threads),
                                                std::vector<std::int32_t>(static_cast<std::size_t>(blocks), -1));
  parallel_for(threads, batch * heads * blocks, {call.cancel}, [&](int worker, std::int64_t item) {
    const std::int64_t block_row = item % blocks, head = item / blocks % heads, entry = item / blocks / heads;
    auto& place = places[static_cast<std::size_t>(worker)];
    BlockRowValues& target = made[static_cast<std::size_t>(item)];
    for (const QueryRow& member : members[static_cast<std::size_t>(block_row)]) {
      const std::int64_t row = member.row, position = member.position;
      const float base = *lse_view.at<float>(entry, row, head);
      if (base == -std::numeric_limits<float>::infinity()) continue;
      const float* const query = queries.view().at<float>(entry, row, head);
      for (std::size_t branch = 0; branch < plan.branches().size(); ++branch) {
        plain::RowInBranch found;
        if (!pairs.find(branch, entry, head, position, found)) continue;
        const auto add = [&](std::int64_t index, const std::byte* key_row, const std::byte*) {
          const std::int64_t key = found.strand.start + index * found.strand.stride, column = key / size;
          std::int32_t& at = place[static_cast<std::size_t>(column)];
          if (at < 0) {
            at = static_cast<std::int32_t>(target.columns.size());
            target.columns.push_back(static_cast<std::int32_t>(column));
            target.values.resize(target.values.size() + static_cast<std::size_t>(size * size));
          }
          target.values[static_cast<std::size_t>((at * size + position % size) * size + key % size)] +=
              std::exp(pairs.score(query, key_row, head, position, found, index) - base);
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
    for (const std::int32_t column : target.columns) place[static_cast<std::size_t>(column)] = -1;
  });

  AttentionBlocks result;
  result.block_size = block_size;
  result.offsets.push_back(0);
  for (std::size_t item = 0; item < made.size(); ++item) {
    BlockRowValues& source = made[item];
    std::vector<std::size_t> order(source.columns.size());
    for (std::size_t i = 0; i < order.size(); ++i) order[i] = i;
    std::sort(order.begin(), order.end(),
              [&](std::size_t a, std::size_t b) { return source.columns[a] < source.columns[b]; });
    for (const std::size_t i : order) {
      result.rows.push_back(static_cast<std::int32_t>(static_cast<std::int64_t>(item) % blocks));
      result.columns.push_back(source.columns[i]);
      const auto from = source.values.begin() + static_cast<std::ptrdiff_t>(i) * size * size;
      result.values.insert(result.values.end(), from, from + size * size);
    }
    source = {};
    if (static_cast<std::int64_t>(item) % blocks == blocks - 1)
      result.offsets.push_back(static_cast<std::int64_t>(result.rows.size()));
  }
  return result;
}

}  // namespace longspan
