// Runs one case through kernels and compares every output with what the reference expects.
#pragma once

#include <array>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "check/cases.h"

namespace longspan::cli {

inline constexpr std::array<std::string_view, 5> kQuantities = {"out", "lse", "dq", "dk", "dv"};

/// How one kernel did on one case.
struct CaseResult {
  std::string kernel;
  std::array<double, kQuantities.size()> largest_error{};
  std::array<double, kQuantities.size()> over_tolerance{};
  double rms_over_model = 0;
  bool ok = true;
  std::string problem;  ///< what was wrong, if not ok
};

/// Runs the case on a device through every kernel that can run its forward (and backward, where it has that); an empty
/// `only` means all of them. No results: no kernel can.
std::vector<CaseResult> run_case(const CheckCase& one, Device device, std::string_view only);

}  // namespace longspan::cli
