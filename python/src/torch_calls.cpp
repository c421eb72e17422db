// Calls of the operator on torch tensors in plain eager mode: from tensors to the kernel's launch without Python in
// between, as far as the exchange API and a few of torch's own functions go.
#include <nanobind/nanobind.h>
#include <nanobind/stl/array.h>
#include <nanobind/stl/string.h>

#include <array>
#include <vector>

#include "arrays.h"
#include "bindings.h"
#include "cache_memory.h"
#include "call.h"
#include "exchange.h"
#include "longspan/attention.h"
#include "longspan/error.h"
#include "signal_check.h"

namespace longspan::python {
namespace {

using namespace nb::literals;

/// What it needs of torch, handed over by longspan.torch.operator.
struct TorchParts {
  nb::object tensor_types;      // tuple of the classes that are plain
  nb::object observers;         // functions; one that returns true wants to see operators
  nb::object autocast_enabled;  // (device type) -> bool
  nb::object grad_enabled;
  nb::object empty_like;             // in the same strides
  nb::object contiguous_empty_like;  // costs torch a third more
  nb::object empty_f32;              // (like, shape)
  nb::object empty_f64;
};

/// How a call on torch tensors runs. Numbers, not objects of an enum: they are compared in every call.
enum Route : int { kDispatcher = 0, kDirect = 1, kRecording = 2 };

/// A tensor and how it is read: as it is, or a copy where the head dimension is not contiguous, as kernels need it.
struct Rows {
  Rows(Arrays& arrays, nb::handle given, const char* name)
      : tensor(nb::borrow(given)), view(arrays.input(tensor, name, Role::bnhd)) {
    if (view.strides[3] == 1 || view.columns() <= 1) return;
    tensor = tensor.attr("contiguous")();
    view = arrays.input(tensor, name, Role::bnhd);
  }
  nb::object tensor;
  ConstTensorView view;
};

class TorchCalls {
 public:
  TorchCalls(nb::handle capsule, TorchParts parts) : parts_(std::move(parts)), table_(ExchangeTable::of(capsule)) {
    if (!table_) throw Unsupported("this exchange API has no version known here");
    for (nb::handle type : parts_.tensor_types) types_.push_back(type.ptr());
    for (nb::handle observer : parts_.observers) observers_.push_back(observer);
  }

  /// Through the dispatcher, past it, or past it with gradients to record.
  int route(nb::handle query, nb::handle key, nb::handle value) const {
    nb::dlpack::dltensor first;
    const std::array<nb::handle, 3> tensors = {query, key, value};
    for (std::size_t i = 0; i < tensors.size(); ++i) {
      nb::dlpack::dltensor read;
      if (!is_plain(tensors[i])) return kDispatcher;
      if (table_->read(tensors[i].ptr(), &read) != 0) {  // meta tensors, sparse ones
        PyErr_Clear();
        return kDispatcher;
      }
      if (!Arrays::takes(read)) return kDispatcher;
      if (i == 0) first = read;
    }
    for (nb::handle observer : observers_) {
      if (is_true(observer())) return kDispatcher;
    }
    const bool on_gpu = first.device.device_type == nb::device::cuda::value;
    if (is_true(parts_.autocast_enabled(on_gpu ? cuda_ : cpu_))) return kDispatcher;
    if (!is_true(parts_.grad_enabled())) return kDirect;
    for (nb::handle tensor : tensors) {
      if (is_true(nb::steal(PyObject_GetAttr(tensor.ptr(), requires_grad_.ptr())))) return kRecording;
    }
    return kDirect;
  }

  nb::tuple forward(const Attention& attention, nb::handle query, nb::handle key, nb::handle value, bool with_lse,
                    nb::handle lengths, nb::handle key_mask, nb::handle alibi_slopes,
                    const std::optional<Ranges>& query_ranges, std::uint64_t seed, std::uint64_t seed_pointer) const {
    Arrays arrays(table_);
    const Rows q(arrays, query, "q"), k(arrays, key, "k"), v(arrays, value, "v");
    const nb::object out = empty_like(q.tensor, q.view), lse = with_lse ? empty_lse(query, q.view) : nb::none();
    const TensorView out_view = arrays.output(out, "out", Role::bnhd), lse_view = arrays.output(lse, "lse", Role::lse);
    run(arrays, q.view.device, {lengths, key_mask, alibi_slopes, query_ranges, seed, seed_pointer},
        [&](Call& call) { attention.forward(q.view, k.view, v.view, out_view, lse_view, call); });
    return nb::make_tuple(out, lse);
  }

  /// Takes a token into a cache's memory and attends to it: (out, lse or None), with a row of out for each branch. None
  /// where the tensors are not the next token's, or the dispatcher has to see the call; nothing has been done then.
  nb::object step(const Attention& attention, const CacheMemory& memory, nb::handle query, nb::handle key,
                  nb::handle value, bool with_lse) const {
    if (route(query, key, value) == kDispatcher || !has_four(query) || !has_four(key) || !has_four(value))
      return nb::none();
    Arrays arrays(table_);
    const Rows k(arrays, key, "k"), v(arrays, value, "v");
    ConstTensorView q = arrays.input(query, "q", Role::bnhd);
    if (!memory.takes(k.view) || !memory.takes(v.view) || !memory.takes(q)) return nb::none();
    nb::object rows = nb::borrow(query);
    if (memory.cache.branches > 1) rows = rows.attr("expand")(-1, memory.cache.branches, -1, -1);
    rows = rows.attr("contiguous")();
    const nb::object out = parts_.empty_like(rows);
    const nb::object lse =
        with_lse ? (q.dtype == DType::f64 ? parts_.empty_f64 : parts_.empty_f32)(rows, rows.attr("shape")[nb::slice(3)])
                 : nb::none();
    q = arrays.input(rows, "q", Role::bnhd);
    TensorView out_view = arrays.output(out, "out", Role::bnhd), lse_view = arrays.output(lse, "lse", Role::lse);
    const std::int64_t units = memory.units(), columns = q.columns();
    q.sizes = out_view.sizes = {units, 1, 1, columns};
    q.strides = out_view.strides = {columns, columns, columns, 1};
    if (with_lse) lse_view.sizes = {units, 1, 1, 1}, lse_view.strides = {1, 1, 1, 1};
    const RowRange first{0, 1};
    Call call;
    call.lengths = memory.lengths();
    call.query_ranges = {&first, 1};
    SignalCheck signals;
    call.progress = [&signals](double) { return signals(); };
    run(memory.device, call, signals, [&] {
      memory.append(k.view, v.view, call.stream);
      attention.forward(q, memory.attended(0), memory.attended(1), out_view, lse_view, call);
    });
    return nb::make_tuple(out, lse);
  }

  nb::tuple backward(const Attention& attention, nb::handle grad_out, nb::handle grad_lse, nb::handle query,
                     nb::handle key, nb::handle value, nb::handle out, nb::handle lse, nb::handle lengths,
                     nb::handle key_mask, nb::handle alibi_slopes, const std::optional<Ranges>& query_ranges,
                     std::uint64_t seed, std::uint64_t seed_pointer) const {
    Arrays arrays(table_);
    // Autograd hands over expanded scalars as grad_out, for example from sum().
    const Rows q(arrays, query, "q"), k(arrays, key, "k"), v(arrays, value, "v"), o(arrays, out, "out"),
        dout(arrays, grad_out, "dout");
    const ConstTensorView l = arrays.input(lse, "lse", Role::lse), dlse = arrays.input(grad_lse, "dlse", Role::lse);
    const nb::object dq = empty_like(q.tensor, q.view), dk = empty_like(k.tensor, k.view),
                     dv = empty_like(v.tensor, v.view);
    const auto output = [&](nb::handle tensor, const char* name) { return arrays.output(tensor, name, Role::bnhd); };
    const TensorView dq_view = output(dq, "dq"), dk_view = output(dk, "dk"), dv_view = output(dv, "dv");
    run(arrays, q.view.device, {lengths, key_mask, alibi_slopes, query_ranges, seed, seed_pointer}, [&](Call& call) {
      call.dlse = dlse;
      attention.backward(q.view, k.view, v.view, o.view, l, dout.view, dq_view, dk_view, dv_view, call);
    });
    return nb::make_tuple(dq, dk, dv);
  }

 private:
  static bool is_true(const nb::object& object) {
    const int answer = object.is_valid() ? PyObject_IsTrue(object.ptr()) : -1;
    if (answer < 0) throw nb::python_error();
    return answer == 1;
  }
  bool is_plain(nb::handle tensor) const {
    for (PyObject* type : types_) {
      if (reinterpret_cast<PyObject*>(Py_TYPE(tensor.ptr())) == type) return true;
    }
    return false;
  }
  bool has_four(nb::handle tensor) const {
    nb::dlpack::dltensor read;
    return table_->read(tensor.ptr(), &read) == 0 && read.ndim == 4;
  }
  nb::object empty_like(nb::handle tensor, const ConstTensorView& view) const {
    std::int64_t step = 1;
    for (std::size_t d = view.sizes.size(); d-- > 0; step *= view.sizes[d]) {
      if (view.strides[d] != step) return parts_.contiguous_empty_like(tensor);
    }
    return parts_.empty_like(tensor);
  }
  nb::object empty_lse(nb::handle query, const ConstTensorView& q) const {
    const nb::tuple shape = nb::make_tuple(q.batch(), q.heads(), q.rows());
    return (q.dtype == DType::f64 ? parts_.empty_f64 : parts_.empty_f32)(query, shape);
  }
  /// Workspace and stream are torch's. Its memory may go back when the call returns: torch lends it again to later work
  /// of the same stream only.
  template <class Work>
  void run(Device device, Call& call, SignalCheck& signals, Work&& work) const {
    ExchangeMemory memory(*table_, device);
    call.stream = memory.current_stream();
    if (device.type == DeviceType::cuda)
      call.allocate = [&memory](std::size_t bytes) { return memory.allocate(bytes); };
    signals.run(work);
  }
  template <class Work>
  void run(Arrays& arrays, Device device, const CallArguments& arguments, Work&& work) const {
    SignalCheck signals;
    OwnedCall owned(arrays, arguments, signals);
    run(device, owned.call, signals, [&] { work(owned.call); });
  }

  TorchParts parts_;
  const ExchangeTable* table_;
  std::vector<PyObject*> types_;
  std::vector<nb::handle> observers_;
  nb::str requires_grad_{"requires_grad"}, cpu_{"cpu"}, cuda_{"cuda"};
};

}  // namespace

void bind_torch_calls(nb::module_& module) {
  nb::class_<CacheMemory>(module, "CacheMemory", "Where a DilatedCache keeps rows; addresses of tensors that it keeps.")
      .def(
          "__init__",
          [](CacheMemory* memory, std::uintptr_t rows, std::uintptr_t positions, std::uintptr_t lengths,
             std::uintptr_t strands, std::array<std::int64_t, 5> sizes, int dtype, int device) {
            const auto [entries, branches, heads, row_count, columns] = sizes;
            const auto type = static_cast<DType>(dtype);
            const auto words = [](std::uintptr_t address) { return reinterpret_cast<std::int64_t*>(address); };
            const StrandCache cache{reinterpret_cast<char*>(rows),
                                    words(positions),
                                    words(lengths),
                                    words(strands),
                                    entries,
                                    branches,
                                    heads,
                                    row_count,
                                    columns * size_of(type)};
            const bool on_gpu = device >= 0;
            new (memory) CacheMemory{cache, type, {on_gpu ? DeviceType::cuda : DeviceType::cpu, on_gpu ? device : 0}};
          },
          "rows"_a, "positions"_a, "lengths"_a, "strands"_a, "sizes"_a, "dtype"_a, "device"_a)
      .def(
          "append",
          [](const CacheMemory& memory, nb::handle key, nb::handle value, std::uintptr_t stream) {
            Arrays arrays;
            const ConstTensorView k = arrays.input(key, "k", Role::bnhd), v = arrays.input(value, "v", Role::bnhd);
            memory.append(k, v, reinterpret_cast<void*>(stream));
          },
          "key"_a, "value"_a, "stream"_a = 0, "Takes a token; raw tensors [entries, 1, heads, columns].");
  nb::class_<TorchCalls>(module, "TorchCalls", "The operator on torch tensors, without Python between.")
      .def(
          "__init__",
          [](TorchCalls* calls, nb::handle exchange, nb::tuple types, nb::tuple observers, nb::object autocast_enabled,
             nb::object grad_enabled, nb::object empty_like, nb::object contiguous_empty_like, nb::object empty_f32,
             nb::object empty_f64) {
            new (calls)
                TorchCalls(exchange, {std::move(types), std::move(observers), std::move(autocast_enabled),
                                      std::move(grad_enabled), std::move(empty_like), std::move(contiguous_empty_like),
                                      std::move(empty_f32), std::move(empty_f64)});
          },
          nb::kw_only(), "exchange"_a, "types"_a, "observers"_a, "autocast_enabled"_a, "grad_enabled"_a, "empty_like"_a,
          "contiguous_empty_like"_a, "empty_f32"_a, "empty_f64"_a)
      .def("route", &TorchCalls::route, "query"_a.none(), "key"_a.none(), "value"_a.none(),
           "A number of longspan.torch.operator.Route.")
      .def("forward", &TorchCalls::forward, "attention"_a, "query"_a, "key"_a, "value"_a, "with_lse"_a,
           "lengths"_a = nb::none(), "key_mask"_a = nb::none(), "alibi_slopes"_a = nb::none(),
           "query_ranges"_a = nb::none(), "seed"_a = 0, "seed_pointer"_a = 0, "(out, lse or None)")
      .def("step", &TorchCalls::step, "attention"_a, "memory"_a, "query"_a.none(), "key"_a.none(), "value"_a.none(),
           "with_lse"_a, "(out, lse or None), or None where the tensors are not the next token's")
      .def("backward", &TorchCalls::backward, "attention"_a, "grad_out"_a, "grad_lse"_a.none(), "query"_a, "key"_a,
           "value"_a, "out"_a, "lse"_a, "lengths"_a = nb::none(), "key_mask"_a = nb::none(),
           "alibi_slopes"_a = nb::none(), "query_ranges"_a = nb::none(), "seed"_a = 0, "seed_pointer"_a = 0,
           "(dq, dk, dv)");
}

}  // namespace longspan::python
