// The operator for libtorch programs without Python: longspan::attention and the operators around it, with the schemas
// of longspan.torch, so that what torch.export wrote runs wherever this library is loaded. attention_backward is
// registered, too, for those who keep out and lse themselves; autograd formulas are not.
#include <ATen/ATen.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/library.h>

#include <bit>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "longspan/attention.h"
#include "longspan/error.h"
#include "longspan/pattern.h"

namespace {

using at::Tensor;
using longspan::ConstTensorView;
using longspan::DType;
using longspan::TensorView;
using OptionalTensor = std::optional<Tensor>;

DType dtype_of(const Tensor& tensor) {
  switch (tensor.scalar_type()) {
    case at::kFloat:
      return DType::f32;
    case at::kBFloat16:
      return DType::bf16;
    case at::kHalf:
      return DType::f16;
    case at::kDouble:
      return DType::f64;
    case at::kInt:
      return DType::i32;
    case at::kLong:
      return DType::i64;
    case at::kBool:
      return DType::boolean;
    default:
      TORCH_CHECK_VALUE(false, "longspan takes no tensors of ", tensor.scalar_type());
  }
}

/// A tensor whose dimensions are those of `places`: 0 batch, 1 rows, 2 heads, 3 columns.
TensorView view_of(const Tensor& tensor, std::initializer_list<int> places) {
  TORCH_CHECK_VALUE(tensor.dim() == static_cast<std::int64_t>(places.size()), "longspan: a tensor has ", tensor.dim(),
                    " dimensions, not ", places.size());
  TensorView view;
  view.data = tensor.data_ptr();
  view.dtype = dtype_of(tensor);
  view.device = {tensor.is_cuda() ? longspan::DeviceType::cuda : longspan::DeviceType::cpu,
                 tensor.is_cuda() ? static_cast<int>(tensor.get_device()) : 0};
  view.sizes = {1, 1, 1, 1};
  std::int64_t dimension = 0;
  for (const int place : places) {
    view.sizes[place] = tensor.size(dimension);
    view.strides[place] = tensor.stride(dimension++);
  }
  return view;
}
TensorView bnhd(const Tensor& tensor) { return view_of(tensor, {0, 1, 2, 3}); }
TensorView bhn(const Tensor& tensor) { return view_of(tensor, {0, 2, 1}); }

/// Kernels need columns side by side.
Tensor rows_of(const Tensor& tensor) {
  return tensor.dim() == 4 && tensor.size(3) > 1 && tensor.stride(3) != 1 ? tensor.contiguous() : tensor;
}

/// What follows the tensors in every schema, in its order.
struct Settings {
  std::string pattern;
  longspan::Options options;
  OptionalTensor seed, lengths, key_mask, alibi_slopes;
  std::vector<longspan::RowRange> query_ranges;
};
constexpr std::size_t kSettings = 14;
constexpr const char* kSettingsSchema =
    "str pattern, bool causal, float? scale, float? output_scale, float dropout, Tensor? seed, Tensor? lengths, "
    "Tensor? key_mask, Tensor? alibi_slopes, SymInt[]? query_ranges, bool deterministic, bool detached_mix, "
    "bool allow_tf32, str kernel";

/// Takes the settings from the end of the stack.
Settings pop_settings(torch::jit::Stack& stack) {
  const std::vector<c10::IValue> given = torch::jit::pop(stack, kSettings);
  Settings result{
      .pattern = given[0].toStringRef(),
      .options = {.causal = given[1].toBool(),
                  .scale = given[2].toOptional<double>(),
                  .output_scale = given[3].toOptional<double>(),
                  .dropout = given[4].toDouble(),
                  .deterministic = given[10].toBool(),
                  .detached_mix = given[11].toBool(),
                  .allow_tf32 = given[12].toBool(),
                  .kernel = given[13].toStringRef()},
      .seed = given[5].toOptional<Tensor>(),
      .lengths = given[6].toOptional<Tensor>(),
      .key_mask = given[7].toOptional<Tensor>(),
      .alibi_slopes = given[8].toOptional<Tensor>(),
      .query_ranges = {},
  };
  if (given[9].isNone()) return result;
  const std::vector<std::int64_t> flat = given[9].toIntVector();
  for (std::size_t i = 0; i + 1 < flat.size(); i += 2) result.query_ranges.push_back({flat[i], flat[i + 1]});
  return result;
}

/// A call's data, and what it points at.
class Data {
 public:
  Data(const Tensor& query, const Settings& settings) {
    if (settings.lengths) call.lengths = view_of(*settings.lengths, {0});
    if (settings.key_mask) call.key_mask = view_of(*settings.key_mask, {0, 1});
    if (settings.alibi_slopes) call.alibi_slopes = view_of(*settings.alibi_slopes, {2});
    call.query_ranges = settings.query_ranges;
    if (settings.seed && settings.seed->is_cuda() && query.is_cuda())
      call.dropout_seed_pointer = static_cast<const std::uint64_t*>(settings.seed->data_ptr());
    else if (settings.seed) call.dropout_seed = std::bit_cast<std::uint64_t>(settings.seed->item<std::int64_t>());
    if (!query.is_cuda()) return;
    const c10::impl::VirtualGuardImpl guard(query.device().type());
    call.stream = guard.getStreamNativeHandle(guard.getStream(query.device()));
    call.allocate = [this, options = query.options().dtype(at::kByte)](std::size_t bytes) {
      workspace_ = at::empty({static_cast<std::int64_t>(bytes)}, options);
      return workspace_.data_ptr();
    };
  }
  Data(const Data&) = delete;

  longspan::Call call;

 private:
  Tensor workspace_;
};

/// Errors of the library as torch's own: users catch c10::ValueError and c10::Error.
template <class Work>
void told(Work&& work) {
  try {
    work();
  } catch (const longspan::InvalidArgument& error) {
    TORCH_CHECK_VALUE(false, error.what());
  } catch (const longspan::OutOfMemory& error) {
    TORCH_CHECK_WITH(OutOfMemoryError, false, error.what());
  } catch (const longspan::Error& error) {
    TORCH_CHECK(false, error.what());
  }
}

std::tuple<Tensor, Tensor> run_forward(const Tensor& query, const Tensor& key, const Tensor& value,
                                       const Settings& settings) {
  const c10::DeviceGuard device(query.device());
  const Tensor q = rows_of(query), k = rows_of(key), v = rows_of(value);
  const Tensor out = at::empty_like(q, at::MemoryFormat::Contiguous);
  const Tensor lse = at::empty({q.size(0), q.size(2), q.size(1)},
                               q.options().dtype(q.scalar_type() == at::kDouble ? at::kDouble : at::kFloat));
  told([&] {
    const Data data(q, settings);
    longspan::Attention(longspan::Pattern::parse(settings.pattern), settings.options)
        .forward(bnhd(q), bnhd(k), bnhd(v), bnhd(out), bhn(lse), data.call);
  });
  return {out, lse};
}

void attention(const c10::OperatorHandle&, torch::jit::Stack* stack) {
  const Settings settings = pop_settings(*stack);
  Tensor query, key, value;
  torch::jit::pop(*stack, query, key, value);
  auto [out, lse] = run_forward(query, key, value, settings);
  torch::jit::push(*stack, std::move(out), std::move(lse));
}

/// [batch, tokens, heads, 3, head_dim]; or of query alone, and `keys` of key and value.
void stacked_attention(const c10::OperatorHandle&, torch::jit::Stack* stack) {
  const Settings settings = pop_settings(*stack);
  const OptionalTensor keys = torch::jit::pop(*stack).toOptional<Tensor>();
  const Tensor stacked = torch::jit::pop(*stack).toTensor();
  const Tensor& rest = keys ? *keys : stacked;
  const std::int64_t key = keys ? 0 : 1;
  auto [out, lse] = run_forward(stacked.select(3, 0), rest.select(3, key), rest.select(3, key + 1), settings);
  torch::jit::push(*stack, std::move(out), std::move(lse));
}

void attention_backward(const c10::OperatorHandle&, torch::jit::Stack* stack) {
  const Settings settings = pop_settings(*stack);
  const std::vector<c10::IValue> given = torch::jit::pop(*stack, 7);
  std::vector<Tensor> rows;
  for (const std::size_t i : {2, 3, 4, 5, 0}) rows.push_back(rows_of(given[i].toTensor()));
  const Tensor &q = rows[0], &k = rows[1], &v = rows[2], &out = rows[3], &grad_out = rows[4], lse = given[6].toTensor();
  const OptionalTensor grad_lse = given[1].toOptional<Tensor>();
  const c10::DeviceGuard device(q.device());
  std::vector<Tensor> grads;
  for (std::size_t i = 0; i < 3; ++i) grads.push_back(at::empty_like(rows[i], at::MemoryFormat::Contiguous));
  told([&] {
    Data data(q, settings);
    if (grad_lse) data.call.dlse = bhn(*grad_lse);
    longspan::Attention(longspan::Pattern::parse(settings.pattern), settings.options)
        .backward(bnhd(q), bnhd(k), bnhd(v), bnhd(out), bhn(lse), bnhd(grad_out), bnhd(grads[0]), bnhd(grads[1]),
                  bnhd(grads[2]), data.call);
  });
  for (const Tensor& grad : grads) torch::jit::push(*stack, grad);
}

/// Linear layers of head groups that read every step-th row; `strands`: columns, first row and step of each block of
/// outputs.
Tensor strand_linear(const Tensor& x, const Tensor& weight, std::int64_t, at::IntArrayRef strands) {
  const Tensor result = at::empty({x.size(0), weight.size(0)}, x.options());
  std::int64_t column = 0;
  for (std::size_t i = 0; i + 2 < strands.size(); i += 3) {
    const std::int64_t end = column + strands[i], row = strands[i + 1], step = strands[i + 2];
    Tensor target = result.slice(1, column, end).slice(0, row, std::nullopt, step);
    at::mm_out(target, x.slice(0, row, std::nullopt, step), weight.slice(0, column, end).t());
    column = end;
  }
  return result;
}

}  // namespace

TORCH_LIBRARY(longspan, library) {
  const auto define = [&](const std::string& tensors, const char* results) {
    library.def((tensors + ", " + kSettingsSchema + ") -> " + results).c_str());
  };
  define("attention(Tensor query, Tensor key, Tensor value", "(Tensor, Tensor)");
  define(
      "attention_backward(Tensor grad_out, Tensor? grad_lse, Tensor query, Tensor key, Tensor value, Tensor out, "
      "Tensor lse",
      "(Tensor, Tensor, Tensor)");
  define("stacked_attention(Tensor stacked, Tensor? keys", "(Tensor, Tensor)");
  library.def("strand_linear(Tensor x, Tensor weight, int features, int[] strands) -> Tensor");
  for (const c10::DispatchKey key : {c10::DispatchKey::CPU, c10::DispatchKey::CUDA}) {
    using torch::CppFunction;
    library.impl("attention", torch::dispatch(key, CppFunction::makeFromBoxedFunction<&attention>()));
    library.impl("attention_backward", torch::dispatch(key, CppFunction::makeFromBoxedFunction<&attention_backward>()));
    library.impl("stacked_attention", torch::dispatch(key, CppFunction::makeFromBoxedFunction<&stacked_attention>()));
    library.impl("strand_linear", torch::dispatch(key, TORCH_FN(strand_linear)));
  }
}
