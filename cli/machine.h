// What `info` and the report say about this machine.
#pragma once

#include <string>
#include <vector>

namespace longspan::cli {

/// "Intel(R) Xeon(R), 2 CPUs, 8.0 GiB".
std::string machine_summary();
/// Instruction sets that matter to kernels and that this CPU has, oldest first.
std::vector<std::string> instruction_sets();
/// Physical memory in bytes.
double memory_bytes();

}  // namespace longspan::cli
