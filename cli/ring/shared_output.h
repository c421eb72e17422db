// An .npy file that the ranks of a ring fill together, each its own rows.
#pragma once

#include <span>
#include <string>
#include <vector>

#include "files/output.h"
#include "problem_options.h"

namespace longspan::cli {

/// What every rank knows about the file.
struct SharedArray {
  DType dtype = DType::f32;
  Layout layout = Layout::bnhd;
  std::vector<std::int64_t> shape;  ///< as in the header: the batch may be left out
};

/// Creates the file at full size with its header: rank 0 does. The others write to `OutputFile::written_name()`.
void begin_shared_output(OutputFile& file, const SharedArray& array);

/// Writes the rows of one rank, which lie at the positions `ranges`, into the file of this name, and makes them
/// durable. Not a memory map: on a full disk a write returns an error where a map would raise SIGBUS.
void write_shared_rows(const std::string& name, const SharedArray& array, const ConstTensorView& rows,
                       std::span<const RowRange> ranges);

}  // namespace longspan::cli
