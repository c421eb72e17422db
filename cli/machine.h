// What `info` and the report say about this machine.
#pragma once

#include <string>
#include <vector>

#include "longspan/tensor_view.h"

namespace longspan::cli {

/// "Intel(R) Xeon(R), 2 CPUs, 8.0 GiB".
std::string machine_summary();
/// Instruction sets that matter to kernels and that this CPU has, oldest first.
std::vector<std::string> instruction_sets();
/// Physical memory in bytes.
double memory_bytes();

/// Throws Unsupported, naming --device and what is missing, unless this build and machine have the device.
void require_device(Device device);
/// "16 threads" on the CPU, "NVIDIA H200 (compute capability 9.0, 139 GiB)" on a GPU.
std::string device_summary(Device device);

}  // namespace longspan::cli
