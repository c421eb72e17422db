// Everything a call has beside its main tensors, from Python to longspan::Call.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/vector.h>

#include <functional>
#include <optional>
#include <utility>
#include <vector>

#include "arrays.h"
#include "longspan/attention.h"
#include "signal_check.h"

namespace longspan::python {

using Ranges = std::vector<std::pair<std::int64_t, std::int64_t>>;

/// In the order in which both passes take it.
struct CallArguments {
  nb::handle lengths, key_mask, alibi_slopes;
  const std::optional<Ranges>& query_ranges;
  std::uint64_t seed;
  std::uint64_t seed_pointer;  // of a CUDA tensor; 0 where seed holds the value
};

/// A Call whose spans and views stay valid as long as it lives.
struct OwnedCall {
  OwnedCall(Arrays& arrays, const CallArguments& arguments, SignalCheck& signals) {
    call.lengths = arrays.input(arguments.lengths, "lengths", Role::lengths);
    call.key_mask = arrays.input(arguments.key_mask, "key_mask", Role::key_mask);
    call.alibi_slopes = arrays.input(arguments.alibi_slopes, "alibi_slopes", Role::alibi_slopes);
    if (arguments.query_ranges) {
      for (const auto& [start, count] : *arguments.query_ranges) ranges.push_back({start, count});
      if (ranges.empty()) ranges.push_back({0, 0});  // an empty list means no rows, an empty span all of them
      call.query_ranges = ranges;
    }
    call.dropout_seed = arguments.seed;
    call.dropout_seed_pointer =
        reinterpret_cast<const std::uint64_t*>(static_cast<std::uintptr_t>(arguments.seed_pointer));
    call.progress = [&signals](double) { return signals(); };
  }
  OwnedCall(const OwnedCall&) = delete;
  OwnedCall& operator=(const OwnedCall&) = delete;

  std::vector<RowRange> ranges;
  Call call;
};

}  // namespace longspan::python
