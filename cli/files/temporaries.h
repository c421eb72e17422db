// Names of unfinished files, for ends of the process that run no destructors.
#pragma once

#include <string>

namespace longspan::cli {

/// Until forget_temporary(), remove_temporaries() removes this file. A few names have room; more are not remembered.
void remember_temporary(const std::string& path) noexcept;
void forget_temporary(const std::string& path) noexcept;
/// Callable from a signal handler.
void remove_temporaries() noexcept;

}  // namespace longspan::cli
