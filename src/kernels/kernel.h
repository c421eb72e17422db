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

/// The keys of a rank of a ring, on a GPU: k and v of the call are its own rows, in the order of its queries. Strands
/// that are not one run of them are packed, one after the other, with zeros behind each.
struct PackedStrands {
  ConstTensorView k, v;  // [batch, rows, 1, columns]
  /// Of each query range in turn, for each branch: {segment, first row of each head's strand} twice, on the device.
  /// Segments that are not named (-1) and heads of row -1 are in place.
  const int* places = nullptr;
  std::size_t range_places = 0;
  /// Backward: float32 sums that the kernel adds to, [batch, kv_heads, rows] of own rows and then [batch, rows] of
  /// packed ones. The call's dk and dv are not written.
  float *dk_sum = nullptr, *dv_sum = nullptr;
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
  std::int64_t share_of = 0;          // a ring's rank: query rows of the whole problem
  const PackedStrands* packed = nullptr;
  int first_branch = 0;  // what dropout counts the plan's first branch as
};

struct BackwardArguments {
  const Plan& plan;
  const Call& call;
  std::span<const RowRange> ranges;
  ConstTensorView q, k, v, out, lse, dout;
  TensorView dq, dk, dv;
  int threads = 1;
  std::byte* workspace = nullptr;
  const PackedStrands* packed = nullptr;
};

struct Kernel {
  std::string_view name;
  Verdict (*can_run)(const Plan& plan, Pass pass);
  /// Bytes of workspace for one call with up to `threads` threads; aligned to 64 by the caller.
  std::size_t (*workspace_bytes)(const Plan& plan, Pass pass, int threads);
  void (*forward)(const ForwardArguments& arguments);
  void (*backward)(const BackwardArguments& arguments);
  bool runs_parts = false;    // whether forward takes a ForwardPart
  bool takes_packed = false;  // whether both passes take PackedStrands, and its forward then also a ForwardPart
  /// What a plan does not say: whether the kernel takes the tensors and query ranges of this call, which has no
  /// workspace yet. Null: it takes all of every plan that it can run.
  Verdict (*accepts_forward)(const ForwardArguments& arguments) = nullptr;
  Verdict (*accepts_backward)(const BackwardArguments& arguments) = nullptr;

  Verdict accepts(const ForwardArguments& a) const { return accepts_forward ? accepts_forward(a) : yes(); }
  Verdict accepts(const BackwardArguments& a) const { return accepts_backward ? accepts_backward(a) : yes(); }
  bool takes_all(Pass pass) const { return pass == Pass::forward ? !accepts_forward : !accepts_backward; }
};

/// Every kernel of this build, fastest first. The reference comes last.
std::span<const Kernel* const> all_kernels();

/// The kernels that calls of a pass are offered to, in turn: the one named by options.kernel, else by
/// LONGSPAN_FORCE_KERNEL, else all that can run, fastest first, up to one that takes all tensors. Empty, with `why`
/// filled in, when there is none.
std::vector<const Kernel*> select_kernels(const Plan& plan, Pass pass, std::string& why);

}  // namespace longspan
