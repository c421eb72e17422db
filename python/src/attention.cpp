// The operator for Python: arrays in, arrays filled, the interpreter lock released while kernels run.
#include "longspan/attention.h"

#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>

#include <optional>

#include "arrays.h"
#include "bindings.h"
#include "call.h"
#include "longspan/error.h"
#include "refusal.h"
#include "signal_check.h"

namespace longspan::python {
namespace {

using namespace nb::literals;

/// allocate: bytes -> address; None takes workspace from the library's pool.
void set_placement(Call& call, std::uint64_t stream, const nb::object& allocate) {
  call.stream = reinterpret_cast<void*>(static_cast<std::uintptr_t>(stream));
  if (allocate.is_none()) return;
  call.allocate = [&allocate](std::size_t bytes) {
    nb::gil_scoped_acquire lock;
    return reinterpret_cast<void*>(nb::cast<std::uintptr_t>(allocate(bytes)));
  };
}

Role main_role(bool heads_first) { return heads_first ? Role::bhnd : Role::bnhd; }

void forward(const Attention& attention, nb::handle q, nb::handle k, nb::handle v, nb::handle out, nb::handle lse,
             nb::handle lengths, nb::handle key_mask, nb::handle alibi_slopes,
             const std::optional<Ranges>& query_ranges, std::uint64_t seed, std::uint64_t seed_pointer,
             std::uint64_t stream, bool heads_first, const nb::object& allocate) {
  Arrays arrays;
  SignalCheck signals;
  const Role role = main_role(heads_first);
  const ConstTensorView q_view = arrays.input(q, "q", role);
  const ConstTensorView k_view = arrays.input(k, "k", role);
  const ConstTensorView v_view = arrays.input(v, "v", role);
  const TensorView out_view = arrays.output(out, "out", role);
  const TensorView lse_view = arrays.output(lse, "lse", Role::lse);
  OwnedCall owned(arrays, {lengths, key_mask, alibi_slopes, query_ranges, seed, seed_pointer}, signals);
  set_placement(owned.call, stream, allocate);
  signals.run([&] { attention.forward(q_view, k_view, v_view, out_view, lse_view, owned.call); });
}

void backward(const Attention& attention, nb::handle q, nb::handle k, nb::handle v, nb::handle out, nb::handle lse,
              nb::handle dout, nb::handle dlse, nb::handle dq, nb::handle dk, nb::handle dv, nb::handle lengths,
              nb::handle key_mask, nb::handle alibi_slopes, const std::optional<Ranges>& query_ranges,
              std::uint64_t seed, std::uint64_t seed_pointer, std::uint64_t stream, bool heads_first,
              const nb::object& allocate) {
  Arrays arrays;
  SignalCheck signals;
  const Role role = main_role(heads_first);
  const ConstTensorView q_view = arrays.input(q, "q", role);
  const ConstTensorView k_view = arrays.input(k, "k", role);
  const ConstTensorView v_view = arrays.input(v, "v", role);
  const ConstTensorView out_view = arrays.input(out, "out", role);
  const ConstTensorView lse_view = arrays.input(lse, "lse", Role::lse);
  const ConstTensorView dout_view = arrays.input(dout, "dout", role);
  const TensorView dq_view = arrays.output(dq, "dq", role);
  const TensorView dk_view = arrays.output(dk, "dk", role);
  const TensorView dv_view = arrays.output(dv, "dv", role);
  OwnedCall owned(arrays, {lengths, key_mask, alibi_slopes, query_ranges, seed, seed_pointer}, signals);
  set_placement(owned.call, stream, allocate);
  owned.call.dlse = arrays.input(dlse, "dlse", Role::lse);
  signals.run([&] {
    attention.backward(q_view, k_view, v_view, out_view, lse_view, dout_view, dq_view, dk_view, dv_view, owned.call);
  });
}

std::shared_ptr<Plan> plan(const Attention& attention, std::int64_t tokens, std::int64_t heads, std::int64_t head_dim,
                           std::int64_t batch, std::optional<std::int64_t> kv_heads,
                           std::optional<std::int64_t> query_rows, const std::string& dtype, const std::string& device,
                           bool lengths, bool key_mask, bool alibi) {
  Problem problem;
  problem.dtype = parse_dtype(dtype);
  problem.device = parse_device(device);
  problem.batch = batch;
  problem.tokens = tokens;
  problem.query_rows = query_rows.value_or(tokens);
  problem.heads = heads;
  problem.kv_heads = kv_heads.value_or(heads);
  problem.head_dim = head_dim;
  problem.has_lengths = lengths;
  problem.has_key_mask = key_mask;
  problem.has_alibi = alibi;
  return std::const_pointer_cast<Plan>(attention.plan(problem));  // Python has no const; nothing bound changes a plan
}

}  // namespace

void bind_attention(nb::module_& module) {
  nb::class_<Attention> bound(module, "Attention",
                              "Attention over one pattern with fixed options. Share it between threads.");
  bound.def(nb::init<Pattern, Options>(), "pattern"_a, "options"_a = Options{})
      .def_prop_ro("pattern", &Attention::pattern)
      .def_prop_ro("options", &Attention::options)
      .def("forward", &forward, "q"_a, "k"_a, "v"_a, "out"_a, "lse"_a = nb::none(), "lengths"_a = nb::none(),
           "key_mask"_a = nb::none(), "alibi_slopes"_a = nb::none(), "query_ranges"_a = nb::none(), "seed"_a = 0,
           "seed_pointer"_a = 0, "stream"_a = 0, "heads_first"_a = false, "allocate"_a = nb::none(),
           "Fills out and, if given, lse.")
      .def("backward", &backward, "q"_a, "k"_a, "v"_a, "out"_a, "lse"_a, "dout"_a, "dlse"_a.none(), "dq"_a, "dk"_a,
           "dv"_a, "lengths"_a = nb::none(), "key_mask"_a = nb::none(), "alibi_slopes"_a = nb::none(),
           "query_ranges"_a = nb::none(), "seed"_a = 0, "seed_pointer"_a = 0, "stream"_a = 0, "heads_first"_a = false,
           "allocate"_a = nb::none(), "Fills dq, dk and dv.")
      .def("plan", &plan, nb::kw_only(), "tokens"_a, "heads"_a, "head_dim"_a, "batch"_a = 1, "kv_heads"_a = nb::none(),
           "query_rows"_a = nb::none(), "dtype"_a = "f32", "device"_a = "cpu", "lengths"_a = false,
           "key_mask"_a = false, "alibi"_a = false, "The plan for a problem, from the cache.")
      .def("__repr__",
           [](const Attention& attention) {
             nb::object pattern = nb::cast(attention.pattern());
             nb::object options = nb::cast(attention.options());
             return nb::str(nb::str("Attention({!r}, {!r})").attr("format")(pattern, options));
           })
      .def("__reduce__", [](const Attention& attention) {
        return nb::make_tuple(nb::type<Attention>(), nb::make_tuple(attention.pattern(), attention.options()));
      });
  bind_refusal(bound, "Attention");
}

}  // namespace longspan::python
