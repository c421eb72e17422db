// Random inputs by seed: the same numbers for any number of threads.
#pragma once

#include <cstdint>

#include "longspan/tensor_view.h"

namespace longspan::cli {

/// Fills `count` elements with standard normal numbers, rounded to dtype. Different streams of one seed are
/// independent. `first` is the element of the stream that goes to data[0].
void fill_normal(void* data, DType dtype, std::int64_t count, std::uint64_t seed, std::uint32_t stream,
                 std::int64_t first = 0);

}  // namespace longspan::cli
