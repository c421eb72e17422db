// The demo's report: one HTML file with SVG pictures, readable in light and dark, from phones to wide screens, offline.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "longspan/plan.h"

namespace longspan::cli {

/// One compared quantity (out, lse, dq, dk, dv).
struct ReportCheck {
  std::string name;
  double rows = 0;           ///< rows of (head, position) compared
  double largest_error = 0;  ///< absolute
  double worst_ratio = 0;    ///< largest error / tolerance over the rows
  bool ok = false;
};

struct ReportPass {
  std::string name;  ///< forward, backward
  std::string kernel;
  double seconds = 0;
  double gflops = 0;
};

struct Report {
  const Plan* plan = nullptr;
  bool verified = false;
  std::vector<ReportPass> passes;
  std::vector<ReportCheck> checks;
  double peak_gflops = 0;
  double extra_bytes = 0;
  double dense_bytes = 0;
  std::string machine;
  int threads = 1;
  std::string command;  ///< repeats this run
  std::string version;
};

/// Cells of the summary table, shared by the terminal and the page.
std::vector<std::pair<std::string, std::string>> summary_rows(const Report& report);

std::string render_report(const Report& report);

}  // namespace longspan::cli
