// Pattern, Options and Plan as inspectable Python values.
#include "longspan/pattern.h"

#include <fmt/format.h>
#include <nanobind/operators.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/vector.h>

#include "bindings.h"
#include "longspan/attention.h"
#include "longspan/error.h"
#include "refusal.h"

namespace longspan::python {
namespace {

namespace nb = nanobind;
using namespace nb::literals;

PhaseRule parse_phase(const std::string& name) {
  if (name == "paper") return PhaseRule::paper;
  if (name == "torchscale") return PhaseRule::torchscale;
  throw InvalidArgument("phase", fmt::format("phase is '{}': give 'paper' or 'torchscale'", name));
}

LongSegments parse_long_segments(const std::string& name) {
  if (name == "clip") return LongSegments::clip;
  if (name == "skip") return LongSegments::skip;
  throw InvalidArgument("long_segments", fmt::format("long_segments is '{}': give 'clip' or 'skip'", name));
}

Pass parse_pass(const std::string& name) {
  if (name == "forward") return Pass::forward;
  if (name == "backward") return Pass::backward;
  throw InvalidArgument("pass", fmt::format("pass is '{}': give 'forward' or 'backward'", name));
}

nb::object optional_segment(std::int64_t segment) { return segment == kWholeSequence ? nb::none() : nb::cast(segment); }

void bind_pattern(nb::module_& module) {
  nb::class_<Pattern>(module, "Pattern", "What attends to what: branches of (segment, dilation). Immutable.")
      .def_static("dense", &Pattern::dense, "Every position sees every position.")
      .def_static("dilated", &Pattern::dilated, "segments"_a, "dilations"_a, "Dilated attention by head groups.")
      .def_static(
          "longnet",
          [](const std::vector<std::int64_t>& segments, const std::vector<std::int64_t>& dilations,
             const std::string& phase) { return Pattern::longnet(segments, dilations, parse_phase(phase)); },
          "segments"_a, "dilations"_a, nb::kw_only(), "phase"_a = "paper",
          "LongNet: every branch on all heads, mixed by one softmax.")
      .def_static("block_sparse", &Pattern::block_sparse, "mask"_a, "One branch over the whole sequence with a mask.")
      .def_static("parse", &Pattern::parse, "text"_a, "The pattern whose str() is text.")
      .def("with_pad_keys", &Pattern::with_pad_keys, "pad_keys"_a = true,
           "torchscale's zero padding attended to (not when causal).")
      .def(
          "with_long_segments",
          [](const Pattern& pattern, const std::string& policy) {
            return pattern.with_long_segments(parse_long_segments(policy));
          },
          "policy"_a, "'clip' or 'skip' segments longer than the sequence.")
      .def("with_output_scale", &Pattern::with_output_scale, "output_scale"_a)
      .def("with_mask", &Pattern::with_mask, "branch"_a, "mask"_a, "A block mask in strand coordinates for one branch.")
      .def_prop_ro(
          "branches",
          [](const Pattern& pattern) {
            nb::list list;
            for (const Branch& branch : pattern.branches()) {
              list.append(nb::make_tuple(optional_segment(branch.segment), branch.dilation));
            }
            return list;
          },
          nb::sig("def branches(self) -> list[tuple[int | None, int]]"),
          "(segment, dilation) of each branch; None is the whole sequence.")
      .def_prop_ro(
          "assignment",
          [](const Pattern& pattern) { return pattern.assignment() == HeadAssignment::groups ? "groups" : "all"; })
      .def_prop_ro(
          "phase",
          [](const Pattern& pattern) { return pattern.phase_rule() == PhaseRule::paper ? "paper" : "torchscale"; })
      .def_prop_ro(
          "long_segments",
          [](const Pattern& pattern) { return pattern.long_segments() == LongSegments::clip ? "clip" : "skip"; })
      .def_prop_ro("pad_keys", &Pattern::pad_keys)
      .def_prop_ro("output_scale", &Pattern::output_scale)
      .def(nb::self == nb::self, nb::sig("def __eq__(self, other: object, /) -> bool"))
      .def("__hash__", &Pattern::hash)
      .def("__str__", &Pattern::to_string)
      .def("__repr__", [](const Pattern& pattern) { return fmt::format("Pattern.parse('{}')", pattern.to_string()); })
      .def("__reduce__", [](const Pattern& pattern) {
        // A function of the package: nanobind's own cannot be pickled.
        return nb::make_tuple(nb::module_::import_("longspan._patterns").attr("parsed"),
                              nb::make_tuple(pattern.to_string()));
      });
}

/// What __reduce__ returns for an object that function(*arguments, **keywords) makes again.
nb::object remade(nb::handle function, const nb::tuple& arguments, const nb::dict& keywords) {
  const nb::object partial = nb::module_::import_("functools").attr("partial");
  return nb::make_tuple(partial(function, *arguments, **keywords), nb::tuple());
}

std::string python_value(const std::optional<double>& value) { return value ? fmt::format("{}", *value) : "None"; }
const char* python_value(bool value) { return value ? "True" : "False"; }

void bind_options(nb::module_& module) {
  nb::class_<Options> bound(module, "Options", "What is fixed for an Attention: part of the plan's key.");
  bound
      .def(
          "__init__",
          [](Options* self, bool causal, std::optional<double> scale, std::optional<double> output_scale,
             double dropout, bool deterministic, bool detached_mix, bool allow_tf32, std::string kernel) {
            if (dropout > 0 && dropout < kLeastDropout) {
              const std::string text = fmt::format(
                  "dropout is {}: probabilities below 1/65536 drop nothing; give 0 or more than that", dropout);
              nb::module_::import_("longspan._errors").attr("warn_once")(text, text);
            }
            new (self) Options{causal,        scale,        output_scale, dropout,
                               deterministic, detached_mix, allow_tf32,   std::move(kernel)};
          },
          nb::kw_only(), "causal"_a = false, "scale"_a = nb::none(), "output_scale"_a = nb::none(), "dropout"_a = 0.0,
          "deterministic"_a = false, "detached_mix"_a = false, "allow_tf32"_a = false, "kernel"_a = "")
      .def_ro("causal", &Options::causal)
      .def_ro("scale", &Options::scale)
      .def_ro("output_scale", &Options::output_scale)
      .def_ro("dropout", &Options::dropout)
      .def_ro("deterministic", &Options::deterministic)
      .def_ro("detached_mix", &Options::detached_mix)
      .def_ro("allow_tf32", &Options::allow_tf32)
      .def_ro("kernel", &Options::kernel)
      .def(nb::self == nb::self, nb::sig("def __eq__(self, other: object, /) -> bool"))
      .def("__repr__",
           [](const Options& options) {
             return fmt::format(
                 "Options(causal={}, scale={}, output_scale={}, dropout={}, deterministic={}, detached_mix={}, "
                 "allow_tf32={}, kernel='{}')",
                 python_value(options.causal), python_value(options.scale), python_value(options.output_scale),
                 options.dropout, python_value(options.deterministic), python_value(options.detached_mix),
                 python_value(options.allow_tf32), options.kernel);
           })
      .def("__reduce__", [](const Options& options) {
        nb::dict fields;
        fields["causal"] = options.causal;
        fields["scale"] = options.scale;
        fields["output_scale"] = options.output_scale;
        fields["dropout"] = options.dropout;
        fields["deterministic"] = options.deterministic;
        fields["detached_mix"] = options.detached_mix;
        fields["allow_tf32"] = options.allow_tf32;
        fields["kernel"] = options.kernel;
        return remade(nb::type<Options>(), nb::tuple(), fields);
      });
  bind_refusal(bound, "Options");
}

nb::dict totals(const Plan& plan) {
  const PlanTotals sums = plan.totals();
  nb::dict result;
  result["pairs"] = sums.pairs;
  result["strand_rows"] = sums.strand_rows;
  result["forward_flops"] = sums.forward_flops;
  result["backward_flops"] = sums.backward_flops;
  result["forward_bytes"] = sums.forward_bytes;
  result["backward_bytes"] = sums.backward_bytes;
  return result;
}

std::optional<std::string> kernel_name(const Plan& plan, const std::string& pass) {
  const std::string_view name = plan.kernel_name(parse_pass(pass));
  return name.empty() ? std::nullopt : std::optional(std::string(name));
}

/// One entry for each kernel of the build: (name, can it run the plan's pass, why not).
nb::list kernel_verdicts(const Plan& plan, const std::string& pass) {
  nb::list list;
  for (const KernelVerdict& verdict : plan.kernel_verdicts(parse_pass(pass)))
    list.append(nb::make_tuple(verdict.kernel, verdict.can_run, verdict.reason));
  return list;
}

void bind_plan(nb::module_& module) {
  nb::class_<Plan>(module, "Plan", "A pattern compiled for one problem. str() describes it in several lines.")
      .def_prop_ro("pattern", &Plan::pattern)
      .def_prop_ro("options", &Plan::options)
      .def_prop_ro("scale", &Plan::scale)
      .def_prop_ro("output_scale", &Plan::output_scale)
      .def_prop_ro("merges_branches", &Plan::merges_branches)
      .def_prop_ro(
          "masks",
          [](const Plan& plan) {
            nb::list list;
            for (const BranchPlan& branch : plan.branches()) {
              const bool known = branch.mask && branch.adaptive_density == 0;
              list.append(known ? nb::cast(*branch.mask) : nb::none());
            }
            return list;
          },
          nb::sig("def masks(self) -> list[BlockMask | None]"),
          "The block mask of each branch; None where there is none, or where each call chooses it.")
      .def_prop_ro("totals", &totals, nb::sig("def totals(self) -> dict[str, float]"),
                   "pairs, FLOPs and bytes when queries are all positions.")
      .def(
          "workspace_bytes",
          [](const Plan& plan, const std::string& pass) { return plan.workspace_bytes(parse_pass(pass)); },
          "pass_"_a = "forward")
      .def("kernel", &kernel_name, "pass_"_a = "forward", "Name of the kernel that runs the pass, or None.")
      .def("verdicts", &kernel_verdicts, "pass_"_a = "forward",
           nb::sig("def verdicts(self, pass_: str = 'forward') -> list[tuple[str, bool, str]]"),
           "(kernel, whether it can run the pass, why not) for every kernel, fastest first.")
      .def("__str__", &Plan::to_string)
      .def("__repr__",
           [](const Plan& plan) {
             const Problem& problem = plan.problem();
             return fmt::format("<longspan.Plan of {} tokens, {} heads of {} {}, pattern '{}', {:.4g} pairs>",
                                problem.tokens, problem.heads, problem.head_dim, name_of(problem.dtype),
                                plan.pattern().to_string(), plan.totals().pairs);
           })
      .def("__reduce__", [](const Plan& plan) {
        const Problem& problem = plan.problem();
        nb::dict fields;
        fields["options"] = plan.options();
        fields["tokens"] = problem.tokens;
        fields["query_rows"] = problem.query_rows;
        fields["batch"] = problem.batch;
        fields["heads"] = problem.heads;
        fields["kv_heads"] = problem.kv_heads;
        fields["head_dim"] = problem.head_dim;
        fields["dtype"] = std::string(name_of(problem.dtype));
        fields["device"] = to_string(problem.device);
        fields["lengths"] = problem.has_lengths;
        fields["key_mask"] = problem.has_key_mask;
        fields["alibi"] = problem.has_alibi;
        const nb::object make = nb::module_::import_("longspan._patterns").attr("plan");
        return remade(make, nb::make_tuple(plan.pattern()), fields);
      });
}

}  // namespace

void bind_patterns(nb::module_& module) {
  bind_pattern(module);
  bind_options(module);
  bind_plan(module);
}

}  // namespace longspan::python
