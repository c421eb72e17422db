// longspan._longspan: the compiled half of the Python package.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include "bindings.h"
#include "longspan/longspan.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace {

nb::dict plan_cache_statistics() {
  const longspan::PlanCacheStatistics statistics = longspan::plan_cache::statistics();
  nb::dict result;
  result["hits"] = statistics.hits;
  result["misses"] = statistics.misses;
  result["evictions"] = statistics.evictions;
  result["entries"] = statistics.entries;
  result["bytes"] = statistics.bytes;
  result["limit_bytes"] = statistics.limit_bytes;
  return result;
}

nb::dict describe(const longspan::MemoryStatistics& statistics) {
  nb::dict result;
  result["allocations"] = statistics.allocations;
  result["reserved_bytes"] = statistics.reserved_bytes;
  result["used_bytes"] = statistics.used_bytes;
  result["peak_used_bytes"] = statistics.peak_used_bytes;
  result["limit_bytes"] = statistics.limit_bytes;
  return result;
}

nb::list gpus() {
  nb::list result;
  for (const longspan::GpuFacts& facts : longspan::gpus()) {
    nb::dict gpu;
    gpu["name"] = facts.name;
    gpu["compute_capability"] = nb::make_tuple(facts.compute / 10, facts.compute % 10);
    gpu["multiprocessors"] = facts.multiprocessors;
    gpu["memory_bytes"] = facts.memory_bytes;
    result.append(gpu);
  }
  return result;
}

}  // namespace

NB_MODULE(_longspan, module) {
  module.doc() = "The compiled half of longspan; use the package's own functions.";
  // torch keeps registered operators, and with them our objects, until after nanobind looks for leaks.
  nb::set_leak_warnings(false);
  longspan::python::bind_errors();
  longspan::python::bind_blocks(module);
  longspan::python::bind_patterns(module);
  longspan::python::bind_attention(module);
  longspan::python::bind_torch_calls(module);
  longspan::python::bind_ring(module);
  longspan::python::bind_inspection(module);

  module.def("version", [] { return std::string(longspan::version()); });
  module.def("commit", [] { return std::string(longspan::commit()); });
  module.def("num_threads", &longspan::num_threads, "Threads that one call may use.");
  module.def("set_num_threads", &longspan::set_num_threads, "threads"_a, "0 restores the default.");

  module.def("plan_cache_statistics", &plan_cache_statistics, nb::sig("def plan_cache_statistics() -> dict[str, int]"));
  module.def("clear_plan_cache", &longspan::plan_cache::clear);
  module.def("set_plan_cache_limit", &longspan::plan_cache::set_limit_bytes, "limit"_a);
  module.def(
      "memory_statistics", [] { return describe(longspan::host_memory::statistics()); },
      nb::sig("def memory_statistics() -> dict[str, int]"));
  module.def("reset_memory_peak", &longspan::host_memory::reset_peak);
  module.def("trim_memory", &longspan::host_memory::trim);
  module.def("set_memory_limit", &longspan::host_memory::set_limit_bytes, "limit"_a);

  module.def("gpus", &gpus, nb::sig("def gpus() -> list[dict[str, object]]"), "The GPUs of this machine.");
  module.def("why_no_gpu", &longspan::why_no_gpu, "Why gpus() is empty; empty where it is not.");
  module.def(
      "device_memory_statistics", [](int device) { return describe(longspan::device_memory::statistics(device)); },
      "device"_a = 0, nb::sig("def device_memory_statistics(device: int = 0) -> dict[str, int]"));
  module.def("reset_device_memory_peak", &longspan::device_memory::reset_peak, "device"_a = 0);
  module.def("trim_device_memory", &longspan::device_memory::trim, "device"_a = 0);
  module.def("set_device_memory_limit", &longspan::device_memory::set_limit_bytes, "device"_a, "limit"_a);
}
