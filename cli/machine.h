// What `info` and the report say about this machine.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "longspan/plan.h"

namespace longspan::cli {

/// "Intel(R) Xeon(R), 2 CPUs, 8.0 GiB".
std::string machine_summary();
/// Instruction sets that matter to kernels and that this CPU has, oldest first.
std::vector<std::string> instruction_sets();
/// The same from the kernel's words for them, as /proc/cpuinfo lists what the CPU has and processes may use.
std::vector<std::string> instruction_sets_of(std::string_view flags);
/// Physical memory in bytes.
double memory_bytes();

/// Throws Unsupported, naming --device and what is missing, unless this build and machine have the device.
void require_device(Device device);
/// Why no kernel runs a pass of a plan. Where a GPU was asked for and none is there, that alone: one line.
std::string why_no_kernel(const Plan& plan, Pass pass);
/// "16 threads" on the CPU, "NVIDIA H200 (compute capability 9.0, 139 GiB)" on a GPU.
std::string device_summary(Device device);

}  // namespace longspan::cli
