// longspan doctor: whether everything that this machine has is in use, what would mend what is not, and a few seconds
// of every kernel against the reference.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <array>
#include <cstdlib>
#include <filesystem>
#include <map>
#include <memory>
#include <string>

#include "check/cases.h"
#include "check/run.h"
#include "command.h"
#include "console.h"
#include "gpu/gpu.h"
#include "json.h"
#include "longspan/error.h"
#include "longspan/machine.h"
#include "longspan/threads.h"
#include "longspan/version.h"
#include "machine.h"
#include "text.h"
#include "timing.h"

namespace longspan::cli {
namespace {

constexpr double kSelfTestSeconds = 3;  // of each device
constexpr int kOldestGpu = 80;

/// What is known of one thing. A problem has a line that mends it; a remark does not make the machine ill.
struct Finding {
  enum class Kind { fine, remark, problem } kind = Kind::fine;
  std::string what, text, mend;
};
using Kind = Finding::Kind;

Finding find_processor() {
  Finding finding{Kind::fine, "processor", machine_summary(), ""};
  const std::vector<std::string> sets = instruction_sets();
  if (!sets.empty()) finding.text += fmt::format(" ({})", fmt::join(sets, " "));
  return finding;
}

Finding find_threads() {
  if (num_threads() >= cpu().usable)
    return {Kind::fine, "threads", fmt::format("{}, as many as the process may use", num_threads()), ""};
  return {Kind::remark, "threads",
          fmt::format("{} of the {} CPUs that the process may use", num_threads(), cpu().usable),
          "unset OMP_NUM_THREADS, or give --threads"};
}

std::shared_ptr<const Plan> usual_plan(Device device) {
  return Attention(Pattern::dense())
      .plan({.dtype = DType::bf16, .device = device, .tokens = 4096, .heads = 8, .kv_heads = 8, .head_dim = 64});
}

/// Which kernel calls take on the CPU where nothing is asked for.
Finding find_kernel() {
  const std::string name(usual_plan({})->kernel_name(Pass::forward));
  if (const char* forced = std::getenv("LONGSPAN_FORCE_KERNEL"); forced && *forced)
    return {Kind::remark, "kernel", fmt::format("LONGSPAN_FORCE_KERNEL={} forces one", printable(forced)),
            "unset LONGSPAN_FORCE_KERNEL"};
  if (name == "plain")
    return {Kind::remark, "kernel", "plain: this processor has none of the instruction sets that the fast ones use",
            "run it where there is SSE4.2, AVX2 or NEON"};
  return {Kind::fine, "kernel", fmt::format("{} runs bfloat16 on the CPU", name), ""};
}

/// A GPU of NVIDIA's is there, whether or not its driver works.
bool has_nvidia_hardware() {
  std::error_code ignored;
  return std::filesystem::exists("/proc/driver/nvidia/version", ignored) ||
         std::filesystem::exists("/dev/nvidiactl", ignored) || std::filesystem::exists("/dev/dxg", ignored);
}

std::vector<Finding> find_gpus() {
  std::vector<Finding> findings;
  const std::vector<std::string> kernels = kernel_names();
  const bool has_engine = std::ranges::find(kernels, "cuda-mma") != kernels.end();
  if (gpus().empty()) {
    if (!has_nvidia_hardware()) return {{Kind::fine, "GPU", "none", ""}};
    if (!has_engine)
      return {{Kind::problem, "GPU", "there is one, but this build has no GPU kernels",
               "pip install longspan instead of longspan-cpu, or configure with -DLONGSPAN_CUDA=ON"}};
    return {{Kind::problem, "GPU", why_no_gpu(), "update the driver (nvidia-smi shows its version); the CPU is used"}};
  }
  for (int index = 0; index < static_cast<int>(gpus().size()); ++index) {
    const Device device{DeviceType::cuda, index};
    if (gpus()[static_cast<std::size_t>(index)].compute >= kOldestGpu)
      findings.push_back({Kind::fine, to_string(device), device_summary(device), ""});
    else
      findings.push_back({Kind::remark, to_string(device), device_summary(device) + " is older than Ampere",
                          "the kernels need compute capability 8.0; use --device cpu"});
  }
  findings.push_back({Kind::fine, "driver", gpu_driver(), ""});
  return findings;
}

struct SelfTest {
  int cases = 0;
  std::string problem, repeat;  // of the first case that failed
};

/// Every kernel of a device on cases of `longspan check`, until the time is over and each dtype was met.
std::map<std::string, SelfTest> test_kernels(Device device) {
  constexpr std::size_t kStride = 37, kAtLeast = 6;  // neighbours in the grid are alike
  const std::vector<CheckCase> grid = check_grid();
  std::map<std::string, SelfTest> tests;
  const Stopwatch watch;
  Progress progress(fmt::format("testing the kernels of {}", to_string(device)));
  for (std::size_t i = 0; i < grid.size() && (i < kAtLeast || watch.seconds() < kSelfTestSeconds); ++i) {
    progress.update(watch.seconds() / kSelfTestSeconds);
    const std::size_t index = i * kStride % grid.size();
    for (const CaseResult& result : run_case(grid[index], device, "")) {
      SelfTest& test = tests[result.kernel];
      ++test.cases;
      if (result.ok || !test.problem.empty()) continue;
      test.problem = result.problem;
      test.repeat =
          fmt::format("longspan check --case {} --kernel {} --device {}", index, result.kernel, to_string(device));
    }
  }
  return tests;
}

std::vector<Finding> find_kernels(Device device) {
  std::vector<Finding> findings;
  std::map<std::string, SelfTest> tests;
  try {
    tests = test_kernels(device);
  } catch (const Cancelled&) {
    throw;
  } catch (const std::exception& error) {
    return {{Kind::problem, to_string(device), fmt::format("the self-test stopped: {}", error.what()),
             fmt::format("longspan check --device {} says which kernel", to_string(device))}};
  }
  for (const auto& [name, can_run, reason] : usual_plan(device)->kernel_verdicts(Pass::forward)) {  // fastest first
    const auto found = tests.find(name);
    if (found == tests.end()) {
      if (name.starts_with("cpu-") == (device.type == DeviceType::cpu) && !can_run)
        findings.push_back({Kind::fine, name, "not here: " + reason, ""});
      continue;
    }
    const auto& [cases, problem, repeat] = found->second;
    if (problem.empty()) findings.push_back({Kind::fine, name, fmt::format("{} cases agree with float64", cases), ""});
    else findings.push_back({Kind::problem, name, "is wrong: " + problem, "please report it with: " + repeat});
  }
  return findings;
}

Json describe(const std::vector<Finding>& findings) {
  constexpr std::array<const char*, 3> kKinds = {"fine", "remark", "problem"};
  Json list = Json::array();
  for (const auto& [kind, what, text, mend] : findings)
    list.push_back({{"what", what}, {"kind", kKinds[static_cast<std::size_t>(kind)]}, {"text", text}, {"mend", mend}});
  return list;
}

void print_finding(const Finding& finding) {
  const bool fine = finding.kind == Kind::fine;
  const std::string mark = fine ? good("ok") : finding.kind == Kind::remark ? bold("note") : bad("PROBLEM");
  print_text(fmt::format("{:<17}{}  {}\n", finding.what, mark, finding.text));
  if (!finding.mend.empty()) print_text(fmt::format("{:<17}    -> {}\n", "", finding.mend));
}

int run(bool json) {
  std::vector<Finding> findings = {find_processor(), find_threads(), find_kernel()};
  const auto add = [&](const std::vector<Finding>& more) { findings.insert(findings.end(), more.begin(), more.end()); };
  add(find_gpus());
  if (!json) {
    print("{} {} ({})\n", bold("longspan"), version(), commit());
    std::ranges::for_each(findings, print_finding);
  }
  const std::size_t printed = findings.size();
  add(find_kernels({}));
  for (int index = 0; index < static_cast<int>(gpus().size()); ++index) {
    if (gpus()[static_cast<std::size_t>(index)].compute >= kOldestGpu) add(find_kernels({DeviceType::cuda, index}));
  }
  const auto problems = std::ranges::count(findings, Kind::problem, &Finding::kind);
  if (json) {
    print_json({{"ok", problems == 0}, {"version", version()}, {"commit", commit()}, {"findings", describe(findings)}});
  } else {
    std::for_each(findings.begin() + static_cast<std::ptrdiff_t>(printed), findings.end(), print_finding);
    if (problems == 0) print("\n{}\n", good("all is well"));
    else print("\n{}\n", bad(fmt::format("{} problem{}", problems, problems == 1 ? "" : "s")));
  }
  return problems == 0 ? kSuccess : kOverTolerance;
}

}  // namespace

Command add_doctor(CLI::App& app) {
  CLI::App* parser =
      app.add_subcommand("doctor", "Say what this machine lacks, and test every kernel for three seconds");
  parser->footer("\nExit code 0: all is well; 1: something is not, and the line below it says what to do.");
  const auto json = std::make_shared<bool>(false);
  parser->add_flag("--json", *json, "Machine-readable output");
  return {parser, [json] { return run(*json); }};
}

}  // namespace longspan::cli
