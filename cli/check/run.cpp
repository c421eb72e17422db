// Builds the tensors of a case. Rows that the call excludes hold NaN, and so do outputs before the call: neither may be
// read.
#include "check/run.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>

#include "interrupt.h"
#include "kernels/kernel.h"
#include "kernels/reference/expectation.h"
#include "longspan/error.h"
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

  BackwardArguments arguments(const Plan& plan) const {
    return {plan, call,        ranges(), q.view(), k_argument(), v_argument(),  {},
            {},   dout.view(), {},       {},       {},           num_threads(), nullptr};
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

CaseResult run_kernel(const CheckCase& one, const CaseData& data, std::string_view kernel,
                      const reference::Expectation& expected) {
  CaseResult result;
  result.kernel = kernel;
  Options options = one.options;
  options.kernel = kernel;
  const Attention attention(one.pattern, options);
  const auto output = [&](std::string_view name, std::int64_t rows, std::int64_t heads) {
    Tensor tensor(name, one.dtype, one.layout, one.batch, rows, heads, one.head_dim);
    fill_nan(tensor);
    return tensor;
  };
  const std::int64_t rows = one.query_rows();
  const Tensor out = output("out", rows, one.heads), dq = output("dq", rows, one.heads);
  const Tensor dk = output("dk", one.tokens, one.kv_heads), dv = output("dv", one.tokens, one.kv_heads);
  const Tensor lse = Tensor::lse("lse", one.batch, rows, one.heads, one.dtype == DType::f64 ? DType::f64 : DType::f32);
  fill_nan(lse);
  Call forward_call = data.call;
  forward_call.dlse = {};
  const ConstTensorView q = data.q.view(), k = data.k_argument(), v = data.v_argument();
  attention.forward(q, k, v, out.view(), lse.view(), forward_call);
  attention.backward(q, k, v, out.view(), lse.view(), data.dout.view(), dq.view(), dk.view(), dv.view(), data.call);

  const Tensor* actual[] = {&out, &lse, &dq, &dk, &dv};
  const reference::ExpectedTensor* wanted[] = {&expected.out, &expected.lse, &expected.dq, &expected.dk, &expected.dv};
  for (std::size_t i = 0; i < kQuantities.size(); ++i) {
    const reference::Comparison comparison = reference::compare(actual[i]->view(), *wanted[i]);
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

}  // namespace

std::vector<CaseResult> run_case(const CheckCase& one, std::string_view only) {
  const CaseData data(one);
  const auto plan =
      Attention(one.pattern, one.options).plan(Attention::problem(data.q.view(), data.k_argument(), data.call));
  const reference::Expectation expected = reference::expect(data.arguments(*plan));
  std::vector<CaseResult> results;
  for (const Kernel* kernel : all_kernels()) {
    stop_if_interrupted();
    if (!only.empty() && kernel->name != only) continue;
    if (!kernel->can_run(*plan, Pass::forward).ok || !kernel->can_run(*plan, Pass::backward).ok) continue;
    try {
      results.push_back(run_kernel(one, data, kernel->name, expected));
    } catch (const Cancelled&) {
      throw;
    } catch (const Error& error) {  // a kernel that said it could run must run
      CaseResult result;
      result.kernel = kernel->name;
      result.ok = false;
      result.problem = fmt::format("threw: {}", error.what());
      results.push_back(std::move(result));
    }
  }
  return results;
}

}  // namespace longspan::cli
