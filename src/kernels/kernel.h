// What a kernel is to the rest of the library: a name, a verdict on what it can run, and two functions.
#pragma once

#include <fmt/format.h>

#include <cstddef>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "longspan/attention.h"
#include "longspan/plan.h"

namespace longspan {

/// Yes, or no with the reason that `longspan info --why` prints.
struct Verdict {
  bool ok = true;
  std::string reason;
};
inline Verdict yes() { return {}; }
template <class... Args>
Verdict no(fmt::format_string<Args...> format, Args&&... args) {
  return {false, fmt::format(format, std::forward<Args>(args)...)};
}

/// Part of a forward whose keys come in two steps: each branch runs the queries in its windows (positions) only. The
/// first part begins all results, the last one ends them; between the two, workspace stays as it is. Where branches
/// share heads, a position is in a branch's windows only after it was in those of all branches before.
struct ForwardPart {
  std::span<const std::vector<RowRange>> windows;  // by branch
  bool first = true;
  bool last = true;
};

struct ForwardArguments {
  const Plan& plan;
  const Call& call;
  std::span<const RowRange> ranges;  // resolved: never empty
  ConstTensorView q, k, v;
  TensorView out, lse;  // lse may be absent: !lse.given()
  int threads = 1;      // what workspace_bytes was asked for; never use more
  std::byte* workspace = nullptr;
  const ForwardPart* part = nullptr;  // null: everything at once
};

struct BackwardArguments {
  const Plan& plan;
  const Call& call;
  std::span<const RowRange> ranges;
  ConstTensorView q, k, v, out, lse, dout;
  TensorView dq, dk, dv;
  int threads = 1;
  std::byte* workspace = nullptr;
};

struct Kernel {
  std::string_view name;
  Verdict (*can_run)(const Plan& plan, Pass pass);
  /// Bytes of workspace for one call with up to `threads` threads; aligned to 64 by the caller.
  std::size_t (*workspace_bytes)(const Plan& plan, Pass pass, int threads);
  void (*forward)(const ForwardArguments& arguments);
  void (*backward)(const BackwardArguments& arguments);
  bool runs_parts = false;  // whether forward takes a ForwardPart
};

/// Every kernel of this build, fastest first. The reference comes last.
std::span<const Kernel* const> all_kernels();

/// The kernel for a pass: the one named by options.kernel, else by LONGSPAN_FORCE_KERNEL, else the first that can run.
/// Returns nullptr and fills `why` when there is none.
const Kernel* select_kernel(const Plan& plan, Pass pass, std::string& why);

}  // namespace longspan
