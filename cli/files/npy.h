// NumPy's .npy format: header in, header out.
#pragma once

#include <span>
#include <string>

#include "files/array.h"

namespace longspan::cli {

/// Reads and checks a header; `where` names the file in errors. Throws InvalidArgument for anything that is not a
/// complete little-endian array in C order of a type we know.
ArrayHeader read_npy_header(std::span<const std::byte> file, const std::string& where, const ReadOptions& options);

/// The bytes that precede the data, padded to a multiple of 64. bf16, which NumPy lacks, is written as void of 2 bytes,
/// the way ml_dtypes writes and reads it.
std::string npy_header(DType dtype, const std::vector<std::int64_t>& shape);

}  // namespace longspan::cli
