// The parts of the Python module, each defined in a file of its own.
#pragma once

#include <nanobind/nanobind.h>

namespace longspan::python {

/// C++ errors become the classes of longspan._errors.
void bind_errors();
void bind_blocks(nanobind::module_& module);
void bind_patterns(nanobind::module_& module);
void bind_attention(nanobind::module_& module);
void bind_torch_calls(nanobind::module_& module);
void bind_ring(nanobind::module_& module);
void bind_inspection(nanobind::module_& module);

}  // namespace longspan::python
