// Inspection on top of the operator: what a key receives is the gradient of v for a gradient of ones, and a block's
// probabilities are exp(score - lse).
#include "longspan/inspect.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "attention/call_masks.h"
#include "kernels/plain/rows.h"
#include "longspan/error.h"
#include "longspan/threads.h"
#include "util/dispatch.h"
#include "util/parallel.h"

namespace longspan {
namespace {

/// A contiguous float32 copy on the host, with the heads of keys repeated for every query head if `heads` asks for it.
class FloatTensor {
 public:
  FloatTensor(std::int64_t batch, std::int64_t rows, std::int64_t heads, std::int64_t columns, float value = 0)
      : values_(static_cast<std::size_t>(batch * rows * heads * columns), value),
        view_(TensorView::bnhd(values_.data(), DType::f32, batch, rows, heads, columns)) {}
  FloatTensor(const ConstTensorView& source, std::int64_t heads) : FloatTensor(source.batch(), source.rows(), heads, source.columns()) {
    dispatch_storage(source.dtype, [&]<class Storage>() {
      for (std::int64_t entry = 0; entry < source.batch(); ++entry) {
        for (std::int64_t row = 0; row < source.rows(); ++row) {
          for (std::int64_t head = 0; head < heads; ++head) {
            const Storage* const from = source.at<Storage>(entry, row, head / (heads / source.heads()));
            float* const to = view_.at<float>(entry, row, head);
            for (std::int64_t column = 0; column < source.columns(); ++column) to[column] = static_cast<float>(to_float(from[column]));
          }
        }
      }
    });
  }
  FloatTensor(const FloatTensor&) = delete;
  FloatTensor& operator=(const FloatTensor&) = delete;
  const TensorView& view() const { return view_; }

 private:
  std::vector<float> values_;
  TensorView view_;
};

void check_inputs(const ConstTensorView& q, const ConstTensorView& k, const Call& call) {
  if (q.device.type != DeviceType::cpu || k.device.type != DeviceType::cpu) {
    throw InvalidArgument("q", fmt::format("q is on {}, k on {}: attention is inspected on the host; copy them", to_string(q.device), to_string(k.device)));
  }
  if (!call.pieces.empty()) throw InvalidArgument("pieces", "pieces are given: inspection takes k as one tensor");
  if (k.heads() < 1 || q.heads() % k.heads() != 0) {
    throw InvalidArgument("k", fmt::format("k has {} heads, q has {}: q's must be a multiple", k.heads(), q.heads()));
  }
}

/// The same attention without what does not concern weights.
Attention weights_only(const Attention& attention) {
  Options options = attention.options();
  options.dropout = 0;
  options.output_scale = 1.0;
  options.detached_mix = false;
  return Attention(attention.pattern(), options);
}

std::span<const RowRange> ranges_of(const Call& call, const RowRange& whole) {
  return call.query_ranges.empty() ? std::span<const RowRange>(&whole, 1) : call.query_ranges;
}

/// Blocks of one (entry, head, block row) while they are made.
struct BlockRowValues {
  std::vector<std::int32_t> columns;
  std::vector<float> values;
};

}  // namespace

BlockMask adaptive_mask(const Attention& attention, const ConstTensorView& q, const ConstTensorView& k, const Call& call) {
  if (k.device.type != DeviceType::cpu) {
    throw Unsupported(fmt::format("adaptive masks are made on the CPU; k is on {}", to_string(k.device)));
  }
  const auto plan = attention.plan(Attention::problem(q, k, call));
  for (std::size_t branch = 0; branch < plan->branches().size(); ++branch) {
    if (plan->branches()[branch].adaptive_density == 0) continue;
    const RowRange whole{0, plan->problem().tokens};
    return choose_blocks(*plan, branch, q, k, call, ranges_of(call, whole), num_threads());
  }
  throw InvalidArgument("pattern", fmt::format("pattern '{}' is not adaptive: its masks do not depend on data", attention.pattern().to_string()));
}

void attention_received(const Attention& attention, const ConstTensorView& q, const ConstTensorView& k, const TensorView& received,
                        const Call& call) {
  check_inputs(q, k, call);
  const std::int64_t batch = q.batch(), heads = q.heads(), tokens = k.rows(), columns = q.columns();
  if (received.dtype != DType::f32 || received.sizes != std::array<std::int64_t, 4>{batch, tokens, heads, 1}) {
    throw InvalidArgument("received", fmt::format("received is {} of [{} entries, {} rows, {} heads]: give f32 of [{}, {}, {}]",
                                                  name_of(received.dtype), received.batch(), received.rows(), received.heads(), batch, tokens, heads));
  }
  const Attention weights = weights_only(attention);
  const FloatTensor queries(q, heads), keys(k, heads), out(batch, q.rows(), heads, columns), ones(batch, q.rows(), heads, columns, 1.0f);
  const FloatTensor dq(batch, q.rows(), heads, columns), dk(batch, tokens, heads, columns), dv(batch, tokens, heads, columns);
  std::vector<float> lse(static_cast<std::size_t>(batch * heads * q.rows()));
  const TensorView lse_view = TensorView::lse(lse.data(), batch, q.rows(), heads);
  weights.forward(queries.view(), keys.view(), keys.view(), out.view(), lse_view, call);
  weights.backward(queries.view(), keys.view(), keys.view(), out.view(), lse_view, ones.view(), dq.view(), dk.view(), dv.view(), call);
  for (std::int64_t entry = 0; entry < batch; ++entry) {
    for (std::int64_t row = 0; row < tokens; ++row) {
      for (std::int64_t head = 0; head < heads; ++head) *received.at<float>(entry, row, head) = *dv.view().at<float>(entry, row, head);
    }
  }
}

AttentionBlocks attention_blocks(const Attention& attention, const ConstTensorView& q, const ConstTensorView& k, const Call& call,
                                 int block_size) {
  check_inputs(q, k, call);
  const Attention weights = weights_only(attention);
  const std::int64_t batch = q.batch(), heads = q.heads(), rows = q.rows();
  const FloatTensor queries(q, heads), keys(k, k.heads()), out(batch, rows, heads, q.columns());
  std::vector<float> lse(static_cast<std::size_t>(batch * heads * rows));
  const TensorView lse_view = TensorView::lse(lse.data(), batch, rows, heads);
  weights.forward(queries.view(), keys.view(), keys.view(), out.view(), lse_view, call);

  const auto cached = weights.plan(Attention::problem(queries.view(), keys.view(), call));
  const RowRange whole{0, k.rows()};
  const auto ranges = ranges_of(call, whole);
  const int threads = num_threads();
  const CallPlan own(*cached, queries.view(), keys.view(), call, ranges, threads);
  const Plan& plan = *own;
  if (block_size == 0) block_size = plan.branches().size() == 1 && plan.branches()[0].mask ? plan.branches()[0].mask->block_size() : kDefaultBlockSize;
  if (block_size < 1) throw InvalidArgument("block_size", fmt::format("block_size is {}: give 1 or more tokens", block_size));
  const std::int64_t size = block_size, blocks = (k.rows() + size - 1) / size;

  // Query rows of each block row: a list, since ranges may come in any order.
  std::vector<std::vector<std::pair<std::int64_t, std::int64_t>>> members(static_cast<std::size_t>(blocks));
  PositionCursor cursor(ranges, 0);
  for (std::int64_t row = 0; row < rows; ++row) {
    const std::int64_t position = cursor.next();
    members[static_cast<std::size_t>(position / size)].emplace_back(row, position);
  }
  const ForwardArguments arguments{plan, call, ranges, queries.view(), keys.view(), keys.view(), {}, {}, threads, nullptr};
  const plain::Rows<float> pairs(arguments);
  std::vector<BlockRowValues> made(static_cast<std::size_t>(batch * heads * blocks));
  std::vector<std::vector<std::int32_t>> places(static_cast<std::size_t>(threads), std::vector<std::int32_t>(static_cast<std::size_t>(blocks), -1));
  parallel_for(threads, batch * heads * blocks, {call.cancel}, [&](int worker, std::int64_t item) {
    const std::int64_t block_row = item % blocks, head = item / blocks % heads, entry = item / blocks / heads;
    auto& place = places[static_cast<std::size_t>(worker)];
    BlockRowValues& target = made[static_cast<std::size_t>(item)];
    for (const auto& [row, position] : members[static_cast<std::size_t>(block_row)]) {
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
        for (const std::int64_t block : mask.row(found.branch->mask_head(entry, head), found.own_index / mask.block_size())) {
          pairs.for_each_key(found, entry, head, block * mask.block_size(), std::min((block + 1) * mask.block_size(), found.end), add);
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
    std::sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) { return source.columns[a] < source.columns[b]; });
    for (const std::size_t i : order) {
      result.rows.push_back(static_cast<std::int32_t>(static_cast<std::int64_t>(item) % blocks));
      result.columns.push_back(source.columns[i]);
      const auto from = source.values.begin() + static_cast<std::ptrdiff_t>(i) * size * size;
      result.values.insert(result.values.end(), from, from + size * size);
    }
    source = {};
    if (static_cast<std::int64_t>(item) % blocks == blocks - 1) result.offsets.push_back(static_cast<std::int64_t>(result.rows.size()));
  }
  return result;
}

}  // namespace longspan
