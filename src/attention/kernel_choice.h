// Which kernels calls of a plan are offered to, and which one takes a call.
#pragma once

#include <string>
#include <vector>

#include "kernels/kernel.h"
#include "util/reject.h"

namespace longspan {

struct KernelChoice {
  std::vector<const Kernel*> kernels[2];  // of each pass, in turn; all but the last may refuse tensors
  std::string refusals[2];                // why there is none

  explicit KernelChoice(const Plan& plan);
  /// Keeps the choice with the plan, so that calls find it.
  static void keep(Plan& plan) { plan.choice_ = std::make_shared<const KernelChoice>(plan); }
  static std::shared_ptr<const KernelChoice> of(const Plan& plan) {
    return plan.choice_ ? plan.choice_ : std::make_shared<const KernelChoice>(plan);
  }

  const std::vector<const Kernel*>& of(Pass pass) const { return kernels[static_cast<int>(pass)]; }
  const std::string& why_none(Pass pass) const { return refusals[static_cast<int>(pass)]; }
  /// Throws Unsupported, saying what each kernel refused, where none can run the pass.
  void require(Pass pass) const {
    if (of(pass).empty()) throw Unsupported(why_none(pass));
  }
  /// The first kernel that takes a call. Throws Unsupported with what each one refused.
  template <class Arguments>
  const Kernel& taking(Pass pass, const Arguments& arguments) const {
    require(pass);
    std::string refused;
    for (const Kernel* kernel : of(pass)) {
      const Verdict verdict = kernel->accepts(arguments);
      if (verdict.ok) return *kernel;
      refused += fmt::format("{} {} {}", refused.empty() ? "" : ";", kernel->name, verdict.reason);
    }
    raise<Unsupported>("no kernel takes these tensors:{}", refused);
  }
};

}  // namespace longspan
