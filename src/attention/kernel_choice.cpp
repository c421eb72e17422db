// What a plan says of kernels.
#include "attention/kernel_choice.h"

#include <algorithm>

#include "longspan/threads.h"

namespace longspan {

KernelChoice::KernelChoice(const Plan& plan) {
  std::string why_no_lists;
  for (const BranchPlan& branch : plan.branches()) {
    if (branch.mask && why_no_lists.empty()) why_no_lists = branch.mask->why_no_lists();
  }
  for (const Pass pass : {Pass::forward, Pass::backward}) {
    const int index = static_cast<int>(pass);
    if (why_no_lists.empty()) kernels[index] = select_kernels(plan, pass, refusals[index]);
    else refusals[index] = why_no_lists;
  }
}

std::string_view Plan::kernel_name(Pass pass) const {
  const auto choice = KernelChoice::of(*this);
  return choice->of(pass).empty() ? std::string_view() : choice->of(pass).front()->name;
}

std::string Plan::why_no_kernel(Pass pass) const { return KernelChoice::of(*this)->why_none(pass); }

std::vector<KernelVerdict> Plan::kernel_verdicts(Pass pass) const {
  std::vector<KernelVerdict> verdicts;
  for (const Kernel* kernel : all_kernels()) {
    Verdict verdict = kernel->can_run(*this, pass);
    verdicts.push_back({std::string(kernel->name), verdict.ok, std::move(verdict.reason)});
  }
  return verdicts;
}

std::size_t Plan::workspace_bytes(Pass pass) const {
  const auto choice = KernelChoice::of(*this);
  std::size_t most = 0;
  for (const Kernel* kernel : choice->of(pass))
    most = std::max(most, kernel->workspace_bytes(*this, pass, num_threads()));
  return most;
}

std::size_t Plan::bytes() const {
  std::size_t bytes = sizeof(Plan) + options_.kernel.size() + branches_.size() * (sizeof(BranchPlan) + sizeof(Branch));
  for (const BranchPlan& branch : branches_) bytes += branch.mask ? branch.mask->bytes() : 0;
  if (choice_) bytes += sizeof(KernelChoice) + choice_->refusals[0].size() + choice_->refusals[1].size();
  return bytes;
}

}  // namespace longspan
