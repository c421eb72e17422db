// Rings for Python: shards, communicators (native ones, or any Python object with the same methods), and the two
// passes.
#include "longspan/ring.h"

#include <nanobind/nanobind.h>
#include <nanobind/operators.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <memory>
#include <unordered_map>

#include "arrays.h"
#include "bindings.h"
#include "longspan/error.h"
#include "refusal.h"
#include "signal_check.h"

namespace longspan::python {
namespace {

using namespace nb::literals;

std::chrono::milliseconds milliseconds(double seconds) {
  return std::chrono::milliseconds(static_cast<std::int64_t>(seconds * 1000));
}

/// The memory of a message as Python sees it while its exchange goes on; counts who looks at it.
struct MessageMemory {
  void* data = nullptr;
  std::size_t bytes = 0;
  bool read_only = false;
  int views = 0;

  static int get(PyObject* self, Py_buffer* view, int flags) {
    auto& memory = *nb::inst_ptr<MessageMemory>(self);
    if (memory.data == nullptr) {
      PyErr_SetString(PyExc_BufferError, "the exchange that this memory belonged to is over");
      return -1;
    }
    const auto bytes = static_cast<Py_ssize_t>(memory.bytes);
    if (PyBuffer_FillInfo(view, self, memory.data, bytes, memory.read_only, flags) != 0) return -1;
    ++memory.views;
    return 0;
  }
  static void release(PyObject* self, Py_buffer*) { --nb::inst_ptr<MessageMemory>(self)->views; }
};
PyType_Slot message_memory_slots[] = {{Py_bf_getbuffer, reinterpret_cast<void*>(&MessageMemory::get)},
                                      {Py_bf_releasebuffer, reinterpret_cast<void*>(&MessageMemory::release)},
                                      {0, nullptr}};

/// A Python object as a transport: rank, size, begin(sends, receives), wait(seconds), abort(), and perhaps takes_gpu.
/// Messages are pairs (peer, memory): a memoryview, or on a GPU an object with __cuda_array_interface__.
class PythonCommunicator final : public Communicator {
 public:
  explicit PythonCommunicator(nb::object target)
      : target_(std::move(target)),
        rank_(nb::cast<int>(target_.attr("rank"))),
        size_(nb::cast<int>(target_.attr("size"))),
        takes_gpu_(nb::cast<bool>(nb::bool_(nb::getattr(target_, "takes_gpu", nb::bool_(false))))) {}
  ~PythonCommunicator() override {
    nb::gil_scoped_acquire lock;
    handed_out_.clear();
    target_.reset();
  }

  int rank() const override { return rank_; }
  int size() const override { return size_; }
  bool keeps_buffers() const override { return true; }
  bool takes(Device device) const override { return takes_gpu_ || Communicator::takes(device); }

  void begin(std::span<const SendBuffer> sends, std::span<const ReceiveBuffer> receives) override {
    nb::gil_scoped_acquire lock;
    nb::list to, from;
    for (const SendBuffer& send : sends)
      to.append(nb::make_tuple(send.peer, memory(const_cast<void*>(send.data), send.bytes, send.device, true)));
    for (const ReceiveBuffer& receive : receives)
      from.append(nb::make_tuple(receive.peer, memory(receive.data, receive.bytes, receive.device, false)));
    call("begin", to, from);
  }

  void wait(Deadline deadline) override {
    nb::gil_scoped_acquire lock;
    const double seconds = std::chrono::duration<double>(deadline - std::chrono::steady_clock::now()).count();
    call("wait", seconds);
    if (!take_back()) {
      PyGC_Collect();
      if (!take_back())
        throw CommError("the transport still holds an array over a message's memory after wait(): drop it, or copy");
    }
  }

  void abort() noexcept override {
    nb::gil_scoped_acquire lock;
    try {
      target_.attr("abort")();
    } catch (const std::exception&) {
      // It is being given up; whatever else is wrong with it does not matter any more.
    }
    take_back();
    handed_out_.clear();
  }

 private:
  struct HandedOut {
    nb::object seen, memory;  // what the transport was given, and the MessageMemory behind it, if any
  };

  nb::object memory(void* data, std::size_t bytes, Device device, bool read_only) {
    if (device.type == DeviceType::cpu) {
      const nb::object memory = nb::cast(MessageMemory{data, bytes, read_only});
      handed_out_.push_back({nb::steal(PyMemoryView_FromObject(memory.ptr())), memory});
      return handed_out_.back().seen;
    }
    nb::dict interface;
    interface["shape"] = nb::make_tuple(bytes);
    interface["typestr"] = "|u1";
    interface["data"] = nb::make_tuple(reinterpret_cast<std::uintptr_t>(data), false);
    interface["version"] = 3;
    nb::object memory = nb::module_::import_("types").attr("SimpleNamespace")();
    memory.attr("__cuda_array_interface__") = interface;
    handed_out_.push_back({memory, {}});
    return memory;
  }
  /// The memory of an exchange is no business of the transport any more: using it raises. False where it holds arrays
  /// over some of it.
  bool take_back() noexcept {
    const auto is_free = [](const HandedOut& one) {
      try {
        if (!one.memory) {
          nb::delattr(one.seen, "__cuda_array_interface__");
          return true;
        }
        one.seen.attr("release")();
      } catch (const nb::python_error&) {
        return false;
      }
      auto& memory = *nb::inst_ptr<MessageMemory>(one.memory);
      memory.data = nullptr;  // no further views
      return memory.views == 0;
    };
    std::erase_if(handed_out_, is_free);
    return handed_out_.empty();
  }
  /// Errors of the transport become the last line of what Python says about them; what is no error passes.
  template <class... Args>
  void call(const char* method, Args&&... arguments) {
    try {
      target_.attr(method)(std::forward<Args>(arguments)...);
    } catch (nb::python_error& error) {
      if (!error.matches(PyExc_Exception)) throw Interrupted(std::move(error));
      const nb::str text(error.value());
      const nb::object bytes = nb::steal(PyUnicode_AsEncodedString(text.ptr(), "utf-8", "backslashreplace"));
      const std::string reason(PyBytes_AsString(bytes.ptr()), static_cast<std::size_t>(PyBytes_Size(bytes.ptr())));
      throw CommError(reason.empty() ? nb::cast<std::string>(error.type().attr("__name__")) : reason);
    }
  }

  nb::object target_;
  int rank_, size_;
  bool takes_gpu_;
  std::vector<HandedOut> handed_out_;  // the memory of the exchange that is going on
};

/// Rings over one Python object share what it is in C++: they count its exchanges together, and it fails for all.
std::shared_ptr<Communicator> as_communicator(nb::handle object) {
  if (object.is_none()) return nullptr;
  std::shared_ptr<Communicator> native;
  if (nb::try_cast(object, native)) return native;
  for (const char* member : {"rank", "size", "begin", "wait", "abort"}) {
    if (!nb::hasattr(object, member))
      throw InvalidArgument("communicator", std::string("communicator is a ") + nb::type_name(object.type()).c_str() +
                                                " without '" + member +
                                                "': give what local_ring or nccl_ring returns, or a Communicator");
  }
  static auto* const known = new std::unordered_map<PyObject*, std::weak_ptr<Communicator>>;
  std::erase_if(*known, [](const auto& one) { return one.second.expired(); });
  std::weak_ptr<Communicator>& one = (*known)[object.ptr()];
  native = one.lock();
  if (!native) one = native = std::make_shared<PythonCommunicator>(nb::borrow(object));
  return native;
}

/// own and parts: (address, bytes), on the host (device -1) or a GPU.
void gather(Communicator& communicator, const std::string& what, std::pair<std::uintptr_t, std::size_t> own,
            const std::vector<std::pair<std::uintptr_t, std::size_t>>& parts, double deadline, int device,
            std::uintptr_t stream) {
  const Device place = device < 0 ? Device{} : Device{DeviceType::cuda, device};
  std::vector<ReceiveBuffer> receives;
  for (const auto& [data, bytes] : parts)
    receives.push_back({static_cast<int>(receives.size()), reinterpret_cast<void*>(data), bytes, place});
  SignalCheck signals;
  signals.run([&] {
    all_gather(communicator, what, {communicator.rank(), reinterpret_cast<void*>(own.first), own.second, place},
               receives, milliseconds(deadline), reinterpret_cast<void*>(stream));
  });
}

nb::dict describe(const RingReport& report) {
  nb::dict result;
  result["bytes_sent"] = report.bytes_sent;
  result["bytes_received"] = report.bytes_received;
  result["messages_sent"] = report.messages_sent;
  result["messages_received"] = report.messages_received;
  result["header_bytes_sent"] = report.header_bytes_sent;
  result["halo_bytes"] = report.halo_bytes;
  result["rounds"] = report.rounds;
  result["waited_seconds"] = report.waited_seconds;
  result["overlapped_seconds"] = report.overlapped_seconds;
  result["total_seconds"] = report.total_seconds;
  result["late_error"] = report.late_error;
  return result;
}

using ListedRanges = std::vector<std::pair<std::int64_t, std::int64_t>>;

ListedRanges ranges_of(const Shards& shards, int rank) {
  ListedRanges ranges;
  for (const RowRange& range : shards.ranges(rank)) ranges.push_back({range.start, range.count});
  return ranges;
}

/// The call that makes equal shards: only contiguous ones have no rank with two ranges, and zigzag is one function of
/// two numbers.
nb::tuple remade_shards(const Shards& shards) {
  const nb::object make = nb::module_::import_("longspan._named").attr("made");
  std::vector<std::int64_t> offsets{0};
  for (int rank = 0; rank < shards.ranks(); ++rank) offsets.push_back(offsets.back() + shards.rows(rank));
  if (Shards::contiguous(offsets) == shards)
    return nb::make_tuple(make, nb::make_tuple("Shards", "contiguous", offsets));
  return nb::make_tuple(make, nb::make_tuple("Shards", "zigzag", shards.tokens(), shards.ranks()));
}

struct CallData {
  Arrays arrays;
  SignalCheck signals;
  Call call;

  CallData(nb::handle lengths, nb::handle key_mask, nb::handle alibi_slopes, std::uint64_t seed, std::uint64_t stream,
           nb::handle stop)
      : signals(stop) {
    call.lengths = arrays.input(lengths, "lengths", Role::lengths);
    call.key_mask = arrays.input(key_mask, "key_mask", Role::key_mask);
    call.alibi_slopes = arrays.input(alibi_slopes, "alibi_slopes", Role::alibi_slopes);
    call.dropout_seed = seed;
    call.stream = reinterpret_cast<void*>(static_cast<std::uintptr_t>(stream));
    call.progress = [this](double) { return signals(); };
  }
  CallData(const CallData&) = delete;
  CallData& operator=(const CallData&) = delete;
};

void forward(Ring& ring, nb::handle q, nb::handle k, nb::handle v, nb::handle out, nb::handle lse, nb::handle lengths,
             nb::handle key_mask, nb::handle alibi_slopes, std::uint64_t seed, std::uint64_t stream, RingHalo* keep,
             nb::handle stop) {
  CallData data(lengths, key_mask, alibi_slopes, seed, stream, stop);
  const ConstTensorView q_view = data.arrays.input(q, "q", Role::bnhd), k_view = data.arrays.input(k, "k", Role::bnhd),
                        v_view = data.arrays.input(v, "v", Role::bnhd);
  const TensorView out_view = data.arrays.output(out, "out", Role::bnhd),
                   lse_view = data.arrays.output(lse, "lse", Role::lse);
  data.signals.run([&] { ring.forward(q_view, k_view, v_view, out_view, lse_view, data.call, keep); });
}

void backward(Ring& ring, nb::handle q, nb::handle k, nb::handle v, nb::handle out, nb::handle lse, nb::handle dout,
              nb::handle dlse, nb::handle dq, nb::handle dk, nb::handle dv, nb::handle lengths, nb::handle key_mask,
              nb::handle alibi_slopes, std::uint64_t seed, std::uint64_t stream, RingHalo* kept, nb::handle stop) {
  CallData data(lengths, key_mask, alibi_slopes, seed, stream, stop);
  const auto input = [&](nb::handle array, const char* name) { return data.arrays.input(array, name, Role::bnhd); };
  const auto output = [&](nb::handle array, const char* name) { return data.arrays.output(array, name, Role::bnhd); };
  const ConstTensorView q_view = input(q, "q"), k_view = input(k, "k"), v_view = input(v, "v"),
                        out_view = input(out, "out"), dout_view = input(dout, "dout"),
                        lse_view = data.arrays.input(lse, "lse", Role::lse);
  const TensorView dq_view = output(dq, "dq"), dk_view = output(dk, "dk"), dv_view = output(dv, "dv");
  data.call.dlse = data.arrays.input(dlse, "dlse", Role::lse);
  data.signals.run([&] {
    ring.backward(q_view, k_view, v_view, out_view, lse_view, dout_view, dq_view, dk_view, dv_view, data.call, kept);
  });
}

/// The rows of a rank with one range.
template <class View>
View rows_of(const Ring& ring, View view) {
  const std::span<const RowRange> ranges = ring.shards().ranges(ring.rank());
  const RowRange range = ranges.empty() ? RowRange{} : ranges[0];
  view.data = static_cast<char*>(const_cast<void*>(static_cast<const void*>(view.data))) +
              range.start * view.strides[1] * size_of(view.dtype);
  view.sizes[1] = range.count;
  return view;
}

/// The calls of local ranks on their rows of whole tensors: run(calls) says whether it could.
template <class RankCall, class Fill, class Run>
bool run_together(const std::vector<Ring*>& rings, CallData& data, Fill&& fill, Run&& run) {
  std::vector<RankCall> calls;
  for (std::size_t rank = 0; rank < rings.size(); ++rank) {
    if (rings[rank]->shards().ranges(rings[rank]->rank()).size() > 1) return false;
    RankCall& call = calls.emplace_back();
    call.ring = rings[rank];
    call.call = data.call;
    fill(call, rank);
  }
  bool done = false;
  data.signals.run([&] { done = run(calls); });
  return done;
}

bool forward_together(const std::vector<Ring*>& rings, nb::handle q, nb::handle k, nb::handle v, nb::handle out,
                      nb::handle lse, nb::handle key_mask, std::uint64_t seed, std::uint64_t stream,
                      const std::vector<RingHalo*>& keep) {
  CallData data(nb::none(), key_mask, nb::none(), seed, stream, nb::none());
  RingForward whole;
  whole.q = data.arrays.input(q, "q", Role::bnhd);
  whole.k = data.arrays.input(k, "k", Role::bnhd);
  whole.v = data.arrays.input(v, "v", Role::bnhd);
  whole.out = data.arrays.output(out, "out", Role::bnhd);
  whole.lse = data.arrays.output(lse, "lse", Role::lse);
  return run_together<RingForward>(
      rings, data,
      [&](RingForward& call, std::size_t rank) {
        for (const auto view : {&RingForward::q, &RingForward::k, &RingForward::v})
          call.*view = rows_of(*call.ring, whole.*view);
        for (const auto view : {&RingForward::out, &RingForward::lse}) call.*view = rows_of(*call.ring, whole.*view);
        call.keep = keep.empty() ? nullptr : keep[rank];
      },
      Ring::forward_together);
}

bool backward_together(const std::vector<Ring*>& rings, nb::handle q, nb::handle k, nb::handle v, nb::handle out,
                       nb::handle lse, nb::handle dout, nb::handle dq, nb::handle dk, nb::handle dv,
                       nb::handle key_mask, std::uint64_t seed, std::uint64_t stream,
                       const std::vector<RingHalo*>& kept) {
  CallData data(nb::none(), key_mask, nb::none(), seed, stream, nb::none());
  RingBackward whole;
  whole.q = data.arrays.input(q, "q", Role::bnhd);
  whole.k = data.arrays.input(k, "k", Role::bnhd);
  whole.v = data.arrays.input(v, "v", Role::bnhd);
  whole.out = data.arrays.input(out, "out", Role::bnhd);
  whole.lse = data.arrays.input(lse, "lse", Role::lse);
  whole.dout = data.arrays.input(dout, "dout", Role::bnhd);
  whole.dq = data.arrays.output(dq, "dq", Role::bnhd);
  whole.dk = data.arrays.output(dk, "dk", Role::bnhd);
  whole.dv = data.arrays.output(dv, "dv", Role::bnhd);
  return run_together<RingBackward>(
      rings, data,
      [&](RingBackward& call, std::size_t rank) {
        for (const auto view : {&RingBackward::q, &RingBackward::k, &RingBackward::v, &RingBackward::out,
                                &RingBackward::lse, &RingBackward::dout})
          call.*view = rows_of(*call.ring, whole.*view);
        for (const auto view : {&RingBackward::dq, &RingBackward::dk, &RingBackward::dv})
          call.*view = rows_of(*call.ring, whole.*view);
        call.kept = kept.empty() ? nullptr : kept[rank];
      },
      Ring::backward_together);
}

}  // namespace

void bind_ring(nb::module_& module) {
  nb::class_<Shards>(module, "Shards", "Which positions each rank of a ring owns.")
      .def_static(
          "contiguous", [](const std::vector<std::int64_t>& offsets) { return Shards::contiguous(offsets); },
          "offsets"_a, "Rank p owns offsets[p] to offsets[p + 1] - 1.")
      .def_static("even", &Shards::even, "tokens"_a, "ranks"_a, "Contiguous, lengths differing by at most one.")
      .def_static("zigzag", &Shards::zigzag, "tokens"_a, "ranks"_a,
                  "Two chunks for each rank: equal shares of causal work.")
      .def_prop_ro("ranks", &Shards::ranks)
      .def_prop_ro("tokens", &Shards::tokens)
      .def("rows", &Shards::rows, "rank"_a)
      .def("ranges", &ranges_of, "rank"_a, "[(start, count), ...]")
      .def(nb::self == nb::self, nb::sig("def __eq__(self, other: object, /) -> bool"))
      .def("__hash__", [](const Shards& shards) { return nb::hash(nb::make_tuple(shards.tokens(), shards.ranks())); })
      .def("__repr__",
           [](const Shards& shards) {
             return "<longspan.Shards of " + std::to_string(shards.tokens()) + " tokens over " +
                    std::to_string(shards.ranks()) + " ranks>";
           })
      .def("__reduce__", &remade_shards);

  nb::class_<MessageMemory>(module, "MessageMemory", nb::type_slots(message_memory_slots),
                            "Memory of a message, while it travels.");
  nb::class_<Communicator> native(module, "NativeCommunicator",
                                  "One rank's end of a ring whose transport is compiled.");
  native.def_prop_ro("rank", &Communicator::rank)
      .def_prop_ro("size", &Communicator::size)
      .def_prop_ro("failure", &Communicator::failure, "Why it is unusable; empty while it is not.");
  bind_unpicklable(native, "a communicator belongs to its process: pickle shards and options, and make it again");
  module.def("native_communicator", &as_communicator, "communicator"_a,
             "What a communicator written in Python is to rings; all rings over it share it.");
  module.def("all_gather", &gather, "communicator"_a, "what"_a, "own"_a, "parts"_a, "deadline"_a, "device"_a = -1,
             "stream"_a = 0, "Every rank's memory on every rank; own and parts are (address, bytes).");
  module.def(
      "local_ring", [](int ranks) { return local_ring(ranks); }, "ranks"_a,
      "Ranks of this process, one for each calling thread.");

  module.def(
      "nccl_id",
      [] {
        const NcclId id = nccl_id();
        return nb::bytes(id.data(), id.size());
      },
      "What the ranks of one NCCL ring have in common; made by one of them and given to the others.");
  module.def(
      "nccl_ring",
      [](const nb::bytes& id, int rank, int size, int device, double deadline) {
        NcclId common;
        if (id.size() != common.size())
          throw InvalidArgument("id", "id has " + std::to_string(id.size()) + " bytes: give what nccl_id() returned");
        std::copy_n(id.c_str(), common.size(), common.begin());
        const nb::gil_scoped_release unlocked;
        return nccl_ring(common, rank, size, device, milliseconds(deadline));
      },
      "id"_a, "rank"_a, "size"_a, "device"_a, "deadline"_a = 60.0,
      "This rank's end of a ring over NCCL; every rank calls it at the same time, with a GPU of its own.");

  nb::class_<RingHalo> halo(module, "RingHalo", "Remote rows that a forward keeps for its backward.");
  halo.def(nb::init<>()).def_prop_ro("bytes", &RingHalo::bytes).def("clear", &RingHalo::clear);
  bind_unpicklable(halo, "a RingHalo belongs to one forward of its process: call the forward again");
  bind_refusal(halo, "RingHalo");

  nb::class_<Ring> bound(module, "Ring", "One rank of a ring: attention on its own rows of the sequence.");
  bound
      .def(
          "__init__",
          [](Ring* ring, const Attention& attention, nb::handle communicator, const Shards& shards, double deadline,
             std::size_t halo_limit_bytes, bool checksums) {
            if (!(deadline > 0 && deadline < 1e9))
              throw InvalidArgument("deadline", "deadline is " + std::to_string(deadline) + ": give seconds above 0");
            RingOptions options;
            options.deadline = milliseconds(deadline);
            options.halo_limit_bytes = halo_limit_bytes;
            options.checksums = checksums;
            new (ring) Ring(attention, as_communicator(communicator), shards, options);
          },
          "attention"_a, "communicator"_a.none(), "shards"_a, "deadline"_a = 60.0, "halo_limit_bytes"_a = 0,
          "checksums"_a = true)
      .def("forward", &forward, "q"_a, "k"_a, "v"_a, "out"_a, "lse"_a = nb::none(), "lengths"_a = nb::none(),
           "key_mask"_a = nb::none(), "alibi_slopes"_a = nb::none(), "seed"_a = 0, "stream"_a = 0,
           "keep"_a = nb::none(), "stop"_a = nb::none(),
           "Fills out and, if given, lse. stop: an event that cancels it.")
      .def("backward", &backward, "q"_a, "k"_a, "v"_a, "out"_a, "lse"_a, "dout"_a, "dlse"_a.none(), "dq"_a, "dk"_a,
           "dv"_a, "lengths"_a = nb::none(), "key_mask"_a = nb::none(), "alibi_slopes"_a = nb::none(), "seed"_a = 0,
           "stream"_a = 0, "kept"_a = nb::none(), "stop"_a = nb::none(), "Fills dq, dk and dv.")
      .def(
          "check",
          [](Ring& ring, double deadline) {
            const nb::gil_scoped_release unlocked;
            ring.check(milliseconds(deadline));
          },
          "deadline"_a = 60.0, "Waits for the GPU and raises CommError where messages of earlier calls arrived wrong.")
      .def_prop_ro("rank", &Ring::rank)
      .def(
          "report", [](const Ring& ring) { return describe(ring.report()); },
          nb::sig("def report(self) -> dict[str, typing.Any]"), "What the last call did.");
  bind_unpicklable(bound, "a Ring has a communicator, which belongs to its process: pickle its attention and shards");
  bind_refusal(bound, "Ring");
  module.def("ring_forward_together", &forward_together, "rings"_a, "q"_a, "k"_a, "v"_a, "out"_a, "lse"_a,
             "key_mask"_a.none(), "seed"_a, "stream"_a, "keep"_a,
             "Ring.forward of all ranks of a local ring on a GPU; False, with nothing done, where they need threads.");
  module.def("ring_backward_together", &backward_together, "rings"_a, "q"_a, "k"_a, "v"_a, "out"_a, "lse"_a, "dout"_a,
             "dq"_a, "dk"_a, "dv"_a, "key_mask"_a.none(), "seed"_a, "stream"_a, "kept"_a, "The same of Ring.backward.");
}

}  // namespace longspan::python
