// The one list of kernels, and the one place that chooses among them.
#include <cstdlib>
#include <vector>

#include "kernels/cpu/cpu_kernels.h"
#include "kernels/cuda/cuda.h"
#include "kernels/kernel.h"
#include "kernels/plain/plain.h"
#include "kernels/reference/reference.h"

namespace longspan {
namespace {

/// Fastest first; the reference is last, since it is only the fastest where nothing else runs (float64).
const std::vector<const Kernel*>& kernels() {
  static const std::vector<const Kernel*> list = [] {
    std::vector<const Kernel*> all(cuda::kernels().begin(), cuda::kernels().end());
    all.insert(all.end(), cpu_kernels().begin(), cpu_kernels().end());
    all.insert(all.end(), {&kPlainKernel, &kReferenceKernel});
    return all;
  }();
  return list;
}

/// "avx2" names cpu-avx2 too, so that LONGSPAN_FORCE_KERNEL=avx2 reads well.
bool named(const Kernel& kernel, std::string_view name) {
  if (kernel.name == name) return true;
  const std::size_t dash = kernel.name.find('-');
  return dash != std::string_view::npos && kernel.name.substr(dash + 1) == name;
}

}  // namespace

std::span<const Kernel* const> all_kernels() { return kernels(); }

std::vector<const Kernel*> select_kernels(const Plan& plan, Pass pass, std::string& why) {
  std::string_view wanted = plan.options().kernel;
  if (wanted.empty()) {
    if (const char* forced = std::getenv("LONGSPAN_FORCE_KERNEL")) wanted = forced;
  }
  const std::string_view pass_name = pass == Pass::forward ? "forward" : "backward";
  why = wanted.empty() ? fmt::format("no kernel can run this {}:", pass_name)
                       : fmt::format("kernel '{}' cannot run this {}:", wanted, pass_name);
  std::vector<const Kernel*> selected;
  bool known = false;
  for (const Kernel* kernel : all_kernels()) {
    if (!wanted.empty() && !named(*kernel, wanted)) continue;
    known = true;
    const bool refused = plan.problem().is_share && !kernel->takes_packed;
    const Verdict verdict = refused ? no("takes no packed strands of a ring") : kernel->can_run(plan, pass);
    if (verdict.ok) {
      selected.push_back(kernel);
      if (kernel->takes_all(pass) || !wanted.empty()) break;
      continue;
    }
    why += fmt::format(" {} {};", kernel->name, verdict.reason);
  }
  if (!selected.empty()) {
    why.clear();
    return selected;
  }
  if (!known) {
    why = fmt::format("kernel '{}' is unknown: this build has", wanted);
    for (const Kernel* kernel : all_kernels()) why += fmt::format(" {},", kernel->name);
  }
  why.pop_back();
  return selected;
}

}  // namespace longspan
