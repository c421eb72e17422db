// Throwing errors whose messages are formatted.
#pragma once

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <string>
#include <string_view>
#include <utility>

#include "longspan/error.h"

namespace longspan {

/// Throws InvalidArgument for the argument of this name.
template <class... Args>
[[noreturn]] void reject(std::string_view argument, fmt::format_string<Args...> format, Args&&... args) {
  throw InvalidArgument(std::string(argument), fmt::format(format, std::forward<Args>(args)...));
}

/// Throws another kind of error.
template <class Error, class... Args>
[[noreturn]] void raise(fmt::format_string<Args...> format, Args&&... args) {
  throw Error(fmt::format(format, std::forward<Args>(args)...));
}

}  // namespace longspan
