// What a constructor says of arguments that it cannot take.
#pragma once

#include <nanobind/nanobind.h>

#include <type_traits>

namespace longspan::python {

namespace nb = nanobind;

/// An argument that nobody gives, of an overload that is tried after all others: its default converts in nanobind's
/// second pass only.
struct Unmatched {};

/// Throws what longspan._named says of arguments that no overload of a class's constructor takes.
[[noreturn]] void refuse_arguments(const char* class_name, const nb::args& arguments, const nb::kwargs& keywords);

/// The last constructor of a class. (Functions and methods are wrapped in Python; constructors cannot be.)
template <class Bound>
void bind_refusal(Bound& bound, const char* class_name) {
  bound.def(
      "__init__",
      [class_name](nb::handle, const nb::args& arguments, Unmatched, const nb::kwargs& keywords) {
        refuse_arguments(class_name, arguments, keywords);
      },
      nb::arg("arguments"), nb::arg("_") = false, nb::arg("keywords"));
}

/// __reduce__ of what belongs to a process: a TypeError that says what to keep instead.
template <class Bound>
void bind_unpicklable(Bound& bound, const char* reason) {
  bound.def("__reduce__", [reason](nb::handle) -> nb::object { throw nb::type_error(reason); });
}

}  // namespace longspan::python

namespace nanobind::detail {

template <>
struct type_caster<longspan::python::Unmatched> {
  NB_TYPE_CASTER(longspan::python::Unmatched, const_name("object"))
  template <class Flags, class Cleanup>
  bool from_python(handle, Flags flags, Cleanup*) noexcept {
    return (flags & static_cast<Flags>(cast_flags::convert)) != 0;
  }
};

}  // namespace nanobind::detail
