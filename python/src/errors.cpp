// C++ errors become the Python classes of longspan._errors, which also carry the built-in types users catch.
#include "longspan/error.h"

#include <nanobind/stl/string.h>

#include <cstring>
#include <exception>

#include "bindings.h"
#include "refusal.h"

namespace longspan::python {
namespace {

namespace nb = nanobind;

void raise(const char* class_name, const std::exception& error, const std::string* argument = nullptr) {
  nb::object type = nb::module_::import_("longspan._errors").attr(class_name);
  // What comes from outside (names of files, arguments) need not be UTF-8.
  const nb::object text = nb::steal(
      PyUnicode_DecodeUTF8(error.what(), static_cast<Py_ssize_t>(std::strlen(error.what())), "backslashreplace"));
  nb::object value = type(text);
  if (argument != nullptr) value.attr("argument") = nb::cast(*argument);
  PyErr_SetObject(type.ptr(), value.ptr());
}

void translate(const std::exception_ptr& pointer, void*) {
  try {
    std::rethrow_exception(pointer);
  } catch (const InvalidArgument& error) {
    raise("InvalidArgument", error, &error.argument());
  } catch (const Unsupported& error) {
    raise("Unsupported", error);
  } catch (const OutOfMemory& error) {
    raise("OutOfMemory", error);
  } catch (const CommError& error) {
    raise("CommError", error);
  } catch (const CudaError& error) {
    raise("CudaError", error);
  } catch (const Cancelled& error) {
    raise("Cancelled", error);
  } catch (const Error& error) {
    raise("Error", error);
  }
}

}  // namespace

void refuse_arguments(const char* class_name, const nb::args& arguments, const nb::kwargs& keywords) {
  const nb::object error =
      nb::module_::import_("longspan._named").attr("refusal")(class_name, "__init__", arguments, keywords);
  PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(error.ptr())), error.ptr());
  throw nb::python_error();
}

void bind_errors() { nb::register_exception_translator(translate); }

}  // namespace longspan::python
