// DLPack's C exchange API (DLPack 1.3; torch 2.11 has it): a table of functions in a capsule on a tensor class, by
// which its tensors are read, memory is allocated and streams are found in nanoseconds, without Python objects between.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <cstddef>
#include <cstdint>
#include <string>

#include "longspan/tensor_view.h"

namespace longspan::python {

namespace nb = nanobind;

/// The table, in the memory layout that DLPack prescribes for major version 1.
struct ExchangeTable {
  struct Version {
    std::uint32_t major, minor;
  };
  /// A tensor that owns its memory until it is deleted.
  struct Managed {
    Version version;
    void* context;
    void (*deleter)(Managed* self);
    std::uint64_t flags;
    nb::dlpack::dltensor tensor;
  };
  using Report = void (*)(void* context, const char* kind, const char* message);

  Version version;
  const ExchangeTable* previous;
  int (*allocate)(nb::dlpack::dltensor* prototype, Managed** made, void* context, Report report);
  int (*own)(void* object, Managed** made);
  int (*wrap)(Managed* tensor, void** object);
  int (*read)(void* object, nb::dlpack::dltensor* tensor);  // borrowed; -1 with a Python error; may be null
  int (*current_stream)(std::int32_t device_type, std::int32_t device_index, void** stream);

  /// What a capsule holds, or null if its version is not known here.
  static const ExchangeTable* of(nb::handle capsule);
};

/// Workspace from the allocator of the tensors' own package, on its current stream; given back with this object.
class ExchangeMemory {
 public:
  ExchangeMemory(const ExchangeTable& table, Device device) : table_(table), device_(device) {}
  ~ExchangeMemory();
  ExchangeMemory(const ExchangeMemory&) = delete;
  ExchangeMemory& operator=(const ExchangeMemory&) = delete;

  /// Throws OutOfMemory with the package's own words. Needs no interpreter lock.
  void* allocate(std::size_t bytes);
  /// The stream on which the package runs work on the device now; null for the CPU.
  void* current_stream() const;

 private:
  const ExchangeTable& table_;
  Device device_;
  ExchangeTable::Managed* memory_ = nullptr;
};

}  // namespace longspan::python
