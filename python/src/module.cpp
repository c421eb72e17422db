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

nb::dict memory_statistics() {
  const longspan::MemoryStatistics statistics = longspan::host_memory::statistics();
  nb::dict result;
  result["allocations"] = statistics.allocations;
  result["reserved_bytes"] = statistics.reserved_bytes;
  result["used_bytes"] = statistics.used_bytes;
  result["peak_used_bytes"] = statistics.peak_used_bytes;
  result["limit_bytes"] = statistics.limit_bytes;
  return result;
}

}  // namespace

NB_MODULE(_longspan, module) {
  module.doc() = "The compiled half of longspan; use the package's own functions.";
  // torch keeps registered operators, and with them our objects, until after nanobind looks for leaks.
  nb::set_leak_warnings(false);
  longspan::python::bind_errors();
  longspan::python::bind_patterns(module);
  longspan::python::bind_attention(module);

  module.def("version", [] { return std::string(longspan::version()); });
  module.def("commit", [] { return std::string(longspan::commit()); });
  module.def("num_threads", &longspan::num_threads, "Threads that one call may use.");
  module.def("set_num_threads", &longspan::set_num_threads, "threads"_a, "0 restores the default.");

  module.def("plan_cache_statistics", &plan_cache_statistics, nb::sig("def plan_cache_statistics() -> dict[str, int]"));
  module.def("clear_plan_cache", &longspan::plan_cache::clear);
  module.def("set_plan_cache_limit", &longspan::plan_cache::set_limit_bytes, "limit"_a);
  module.def("memory_statistics", &memory_statistics, nb::sig("def memory_statistics() -> dict[str, int]"));
  module.def("reset_memory_peak", &longspan::host_memory::reset_peak);
  module.def("trim_memory", &longspan::host_memory::trim);
  module.def("set_memory_limit", &longspan::host_memory::set_limit_bytes, "limit"_a);
}
