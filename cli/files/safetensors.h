// The safetensors format: a JSON table of contents in front of the tensors' bytes.
#pragma once

#include <span>
#include <string>

#include "files/array.h"

namespace longspan::cli {

/// Finds tensor `name` in a file; `where` names the file in errors. Throws InvalidArgument unless the header is
/// complete and the tensor's shape, type and offsets agree with each other and with the file.
ArrayHeader read_safetensors_header(std::span<const std::byte> file, const std::string& where, const std::string& name,
                                    const ReadOptions& options);

struct NamedArray {
  std::string name;
  DType dtype = DType::f32;
  std::vector<std::int64_t> shape;
};

/// Throws InvalidArgument unless a file may hold a tensor of this name. `location` is what the user wrote.
void check_tensor_name(const std::string& name, const std::string& location);

/// The bytes that precede the data of these tensors, which follow in this order without gaps.
std::string safetensors_header(const std::vector<NamedArray>& arrays);

}  // namespace longspan::cli
