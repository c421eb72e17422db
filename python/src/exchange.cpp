// DLPack's C exchange API; see exchange.h.
#include "exchange.h"

#include <fmt/format.h>

#include "longspan/error.h"

namespace longspan::python {
namespace {

constexpr std::uint32_t kKnownMajor = 1;

std::int32_t dlpack_type(Device device) {
  return device.type == DeviceType::cuda ? nb::device::cuda::value : nb::device::cpu::value;
}

}  // namespace

const ExchangeTable* ExchangeTable::of(nb::handle capsule) {
  const auto* table = static_cast<const ExchangeTable*>(PyCapsule_GetPointer(capsule.ptr(), "dlpack_exchange_api"));
  if (!table) throw nb::python_error();
  while (table && table->version.major != kKnownMajor) table = table->previous;
  return table && table->read ? table : nullptr;
}

ExchangeMemory::~ExchangeMemory() {
  if (memory_) memory_->deleter(memory_);
}

void* ExchangeMemory::allocate(std::size_t bytes) {
  std::int64_t size = static_cast<std::int64_t>(bytes);
  nb::dlpack::dltensor prototype;
  prototype.device = {dlpack_type(device_), device_.index};
  prototype.ndim = 1;
  prototype.dtype = {static_cast<std::uint8_t>(nb::dlpack::dtype_code::UInt), 8, 1};
  prototype.shape = &size;
  std::string why;
  const auto report = [](void* context, const char*, const char* message) {
    *static_cast<std::string*>(context) = message;
  };
  if (table_.allocate(&prototype, &memory_, &why, report) != 0) {
    memory_ = nullptr;
    throw OutOfMemory(fmt::format("workspace of {} bytes on {}: {}", bytes, to_string(device_), why));
  }
  return static_cast<std::byte*>(memory_->tensor.data) + memory_->tensor.byte_offset;
}

void* ExchangeMemory::current_stream() const {
  if (device_.type != DeviceType::cuda) return nullptr;
  void* stream = nullptr;
  if (table_.current_stream(dlpack_type(device_), device_.index, &stream) != 0) throw nb::python_error();
  return stream;
}

}  // namespace longspan::python
