// The demo's report: one HTML file with SVG pictures, readable in light and dark, from phones to wide screens, offline.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "longspan/plan.h"
#include "peak.h"
#include "verify.h"

namespace longspan::cli {

struct ReportPass {
  std::string name;  ///< forward, backward
  std::string kernel;
  double seconds = 0;
  double gflops = 0;
  Peak peak;  ///< of the instructions that the kernel uses
};

/// The step on one device.
struct ReportRun {
  std::string device;   ///< cpu, cuda:0
  std::string summary;  ///< 16 threads, NVIDIA H200 (...)
  bool verified = false;
  std::vector<ReportPass> passes;
  std::vector<RowCheck> checks;
  double extra_bytes = 0;
};

struct Report {
  const Plan* plan = nullptr;
  std::vector<ReportRun> runs;  ///< one for each device, at least one
  double dense_bytes = 0;
  std::string machine;
  std::string command;  ///< repeats this run
  std::string version;

  bool verified() const;
};

/// Cells of the summary table, shared by the terminal and the page.
std::vector<std::pair<std::string, std::string>> summary_rows(const Report& report);

std::string render_report(const Report& report);

}  // namespace longspan::cli
