// Builds the tensors of a case. Rows that the call excludes hold NaN, and so do outputs before the call: neither may be
// read.
#include "check/run.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <optional>

#include "interrupt.h"
#include "longspan/error.h"
#include "longspan/reference.h"
#include "longspan/threads.h"
#include "random.h"
#include "tensor.h"
#include "util/philox.h"

namespace longspan::cli {
namespace {

/// All bits set is NaN in every floating-point type.
void fill_nan(const Tensor& tensor) { std::memset(tensor.data(), 0xFF, tensor.bytes()); }

void fill_row_nan(const TensorView& view, std::int64_t entry, std::int64_t row) {
  for (std::int64_t head = 0; head < view.heads(); ++head) {
    std::memset(static_cast<std::byte*>(view.data) + view.offset(entry, row, head) * size_of(view.dtype), 0xFF,
                static_cast<std::size_t>(view.columns() * size_of(view.dtype)));
  }
}

/// Tensors and call data of a case.
class CaseData {
 public:
  explicit CaseData(const CheckCase& one)
      : one_(one),
        rows_(one.query_rows()),
        q("q", one.dtype, one.layout, one.batch, rows_, one.heads, one.head_dim),
        k(keys("k")),
        v(keys("v")),
        dout("dout", one.dtype, one.layout, one.batch, rows_, one.heads, one.head_dim),
        dlse_(Tensor::lse("dlse", one.batch, rows_, one.heads)) {
    std::uint32_t stream = 0;
    for (const Tensor* input : {&q, &k, &v, &dout, &dlse_}) {
      fill_normal(input->data(), input->view().dtype, input->elements(), one.seed, stream++);
    }
    call.cancel = &interrupted();
    call.dropout_seed = one.seed;
    call.query_ranges = one.query_ranges;
    if (!one.lengths.empty()) call.lengths = ConstTensorView::per_batch(one.lengths.data(), DType::i64, one.batch);
    if (one.dlse) call.dlse = dlse_.view();
    if (one.alibi) {
      for (std::int64_t head = 0; head < one.heads; ++head) slopes_.push_back(0.03f * static_cast<float>(head + 1));
      call.alibi_slopes = ConstTensorView::per_head(slopes_.data(), one.heads);
    }
    if (one.key_mask) {
      mask_.resize(static_cast<std::size_t>(one.batch * one.tokens) + 1);
      for (std::size_t i = 0; i < mask_.size(); ++i)
        mask_[i] = philox4x32(one.seed, {static_cast<std::uint32_t>(i), 0, 0, 99})[0] % 4 != 0;
      call.key_mask = ConstTensorView::mask(mask_.data(), one.batch, one.tokens);
    }
    poison();
    make_pieces();
  }

  std::span<const RowRange> ranges() const {
    return one_.query_ranges.empty() ? std::span(&whole_, 1) : std::span(one_.query_ranges);
  }
  /// With pieces the rows are found there only.
  ConstTensorView k_argument() const { return without_data(k); }
  ConstTensorView v_argument() const { return without_data(v); }

 private:
  Tensor keys(std::string_view name) const {
    return {name, one_.dtype, one_.layout, one_.batch, one_.tokens, one_.kv_heads, one_.head_dim};
  }

  ConstTensorView without_data(const Tensor& tensor) const {
    ConstTensorView view = tensor.view();
    if (!pieces_.empty()) view.data = nullptr;
    return view;
  }

  void poison() {
    for (std::int64_t entry = 0; entry < one_.batch; ++entry) {
      const std::int64_t length = one_.lengths.empty() ? one_.tokens : one_.lengths[static_cast<std::size_t>(entry)];
      for (std::int64_t row = 0; row < one_.tokens; ++row) {
        const bool masked = one_.key_mask && mask_[static_cast<std::size_t>(entry * one_.tokens + row)] == 0;
        if (row < length && !masked) continue;
        fill_row_nan(k.view(), entry, row);
        fill_row_nan(v.view(), entry, row);
      }
      std::int64_t row = 0;
      for (const RowRange& range : ranges()) {
        for (std::int64_t i = 0; i < range.count; ++i, ++row) {
          if (range.start + i < length) continue;
          fill_row_nan(q.view(), entry, row);
          fill_row_nan(dout.view(), entry, row);
        }
      }
    }
  }

  void make_pieces() {
    if (one_.cuts.empty()) return;
    const auto part = [&](const Tensor& tensor, std::int64_t begin, std::int64_t end) {
      ConstTensorView view = tensor.view();
      view.data = static_cast<const std::byte*>(view.data) + view.offset(0, begin, 0) * size_of(view.dtype);
      view.sizes[1] = end - begin;
      return view;
    };
    std::int64_t begin = 0;
    for (std::size_t i = 0; i <= one_.cuts.size(); ++i) {
      const std::int64_t end = i < one_.cuts.size() ? one_.cuts[i] : one_.tokens;
      pieces_.push_back({begin, 1, part(k, begin, end), part(v, begin, end)});
      begin = end;
    }
    call.pieces = pieces_;
  }

  const CheckCase& one_;
  const std::int64_t rows_;
  const RowRange whole_{0, one_.tokens};
  std::vector<float> slopes_;
  std::vector<std::uint8_t> mask_;
  std::vector<KeyPiece> pieces_;

 public:
  Tensor q, k, v, dout;
  Call call;

 private:
  Tensor dlse_;
};

bool draws_blocks(const CheckCase& one) {
  const auto& branches = one.pattern.branches();
  return std::any_of(branches.begin(), branches.end(), [&](const Branch& branch) {
    return branch.mask && branch.mask->depends_on_length(one.options.causal);
  });
}

/// The inputs of a case where a kernel runs: as they are on the CPU, copies of them on a GPU.
class PlacedInputs {
 public:
  PlacedInputs(const CheckCase& one, const CaseData& data, Device device)
      : device_(device),
        q(place(data.q.view())),
        k(data.k_argument()),
        v(data.v_argument()),
        dout(place(data.dout.view())),
        call(data.call) {
    call.key_mask = place(data.call.key_mask);
    call.alibi_slopes = place(data.call.alibi_slopes);
    call.dlse = place(data.call.dlse);
    // Else they stay on the host, which GPUs take, too, and must where blocks are drawn for each length.
    if (one.seed % 2 == 0 && !draws_blocks(one)) call.lengths = place(data.call.lengths);
    const ConstTensorView whole_k = place(data.k.view()), whole_v = place(data.v.view());
    if (data.call.pieces.empty()) {
      k = whole_k;
      v = whole_v;
    }
    k.device = v.device = device;
    const auto part = [](ConstTensorView view, const Tensor& of, const ConstTensorView& placed) {
      view.data = static_cast<const std::byte*>(placed.data) +
                  (static_cast<const std::byte*>(view.data) - static_cast<const std::byte*>(of.data()));
      view.device = placed.device;
      return view;
    };
    for (const KeyPiece& piece : data.call.pieces) {
      pieces_.push_back({piece.first, piece.step, part(piece.k, data.k, whole_k), part(piece.v, data.v, whole_v)});
    }
    call.pieces = pieces_;
  }
  PlacedInputs(const PlacedInputs&) = delete;
  PlacedInputs& operator=(const PlacedInputs&) = delete;

 private:
  ConstTensorView place(const ConstTensorView& view) {
    if (device_.type == DeviceType::cpu || !view.given()) return view;
    return copies_.emplace_back(Tensor::copy_of("an input", view, device_)).view();
  }

  Device device_;
  std::vector<Tensor> copies_;
  std::vector<KeyPiece> pieces_;

 public:
  ConstTensorView q, k, v, dout;
  Call call;
};

CaseResult run_kernel(const CheckCase& one, const PlacedInputs& inputs, Device device, const std::string& kernel,
                      bool gradients, const reference::Expectation& expected) {
  CaseResult result;
  result.kernel = kernel;
  Options options = one.options;
  options.kernel = kernel;
  const Attention attention(one.pattern, options);
  const std::int64_t rows = one.query_rows();
  const auto like = [&](std::string_view name, std::int64_t count, std::int64_t heads) {
    return Tensor(name, one.dtype, one.layout, one.batch, count, heads, one.head_dim);
  };
  std::array<Tensor, kQuantities.size()> actual;  // in the order of kQuantities
  actual[0] = like("out", rows, one.heads);
  actual[1] = Tensor::lse("lse", one.batch, rows, one.heads, one.dtype == DType::f64 ? DType::f64 : DType::f32);
  actual[2] = like("dq", rows, one.heads);
  actual[3] = like("dk", one.tokens, one.kv_heads);
  actual[4] = like("dv", one.tokens, one.kv_heads);
  std::array<Tensor, kQuantities.size()> copies;
  std::array<TensorView, kQuantities.size()> views;
  for (std::size_t i = 0; i < actual.size(); ++i) {
    fill_nan(actual[i]);
    if (device.type == DeviceType::cuda) copies[i] = actual[i].on(device);
    views[i] = device.type == DeviceType::cuda ? copies[i].view() : actual[i].view();
  }
  const auto& [out, lse, dq, dk, dv] = views;
  Call forward_call = inputs.call;
  forward_call.dlse = {};
  attention.forward(inputs.q, inputs.k, inputs.v, out, lse, forward_call);
  if (gradients) {
    attention.backward(inputs.q, inputs.k, inputs.v, out, lse, inputs.dout, dq, dk, dv, inputs.call);
  }
  if (device.type == DeviceType::cuda) {
    for (std::size_t i = 0; i < actual.size(); ++i) actual[i].copy_from(copies[i]);
  }

  const reference::ExpectedTensor* wanted[] = {&expected.out, &expected.lse, &expected.dq, &expected.dk, &expected.dv};
  for (std::size_t i = 0; i < (gradients ? kQuantities.size() : 2); ++i) {
    const reference::Comparison comparison = reference::compare(actual[i].view(), *wanted[i]);
    result.largest_error[i] = comparison.largest_error;
    result.over_tolerance[i] = comparison.over_tolerance;
    result.rms_over_model = std::max(result.rms_over_model, comparison.rms_over_model);
    if (comparison.ok() || !result.ok) continue;
    result.ok = false;
    result.problem = fmt::format(
        "{}: {}", kQuantities[i],
        comparison.over_tolerance > 1
            ? comparison.worst
            : fmt::format("root mean square error is {:.2f} times the rounded model's", comparison.rms_over_model));
  }
  return result;
}

/// What a kernel computes of a case: both passes, the forward alone, or nothing, by what it takes of the call's tensors
/// and ranges. It says so before any work.
std::optional<CaseResult> run_accepted(const CheckCase& one, const PlacedInputs& inputs, Device device,
                                       const std::string& kernel, bool gradients,
                                       const reference::Expectation& expected) {
  try {
    return run_kernel(one, inputs, device, kernel, gradients, expected);
  } catch (const Unsupported&) {
    if (gradients) return run_accepted(one, inputs, device, kernel, false, expected);
    return std::nullopt;
  }
}

}  // namespace

std::vector<CaseResult> run_case(const CheckCase& one, Device device, std::string_view only) {
  const CaseData data(one);
  const Attention attention(one.pattern, one.options);
  Problem there = Attention::problem(data.q.view(), data.k_argument(), data.call);
  there.device = device;
  const auto plan = attention.plan(there);
  const std::vector<KernelVerdict> forward = plan->kernel_verdicts(Pass::forward),
                                   backward = plan->kernel_verdicts(Pass::backward);
  const auto runs = [&](const KernelVerdict& kernel) {
    return kernel.can_run && (only.empty() || kernel.kernel == only);
  };
  if (std::none_of(forward.begin(), forward.end(), runs)) return {};
  const reference::Expectation expected =
      reference::expected(attention, data.q.view(), data.k_argument(), data.v_argument(), data.dout.view(), data.call);
  const PlacedInputs inputs(one, data, device);
  std::vector<CaseResult> results;
  for (std::size_t i = 0; i < forward.size(); ++i) {
    if (!runs(forward[i])) continue;
    stop_if_interrupted();
    try {
      if (auto result = run_accepted(one, inputs, device, forward[i].kernel, backward[i].can_run, expected))
        results.push_back(std::move(*result));
    } catch (const Cancelled&) {
      throw;
    } catch (const OutOfMemory&) {  // says nothing about the kernel
      throw;
    } catch (const Error& error) {  // a kernel that said it could run must run
      CaseResult result;
      result.kernel = forward[i].kernel;
      result.ok = false;
      result.problem = fmt::format("threw: {}", error.what());
      results.push_back(std::move(result));
    }
  }
  return results;
}

}  // namespace longspan::cli
