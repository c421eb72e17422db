// The errors Longspan throws. All derive from longspan::Error; the library never aborts and never prints.
#pragma once

#include <stdexcept>
#include <string>

#include "longspan/export.h"

namespace longspan {

/// Base of every error thrown by the library.
class LONGSPAN_API Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// An argument is wrong. The message names it, its value and what would be valid.
class LONGSPAN_API InvalidArgument : public Error {
 public:
  InvalidArgument(std::string argument, const std::string& message) : Error(message), argument_(std::move(argument)) {}
  /// Name of the offending argument as it is spelled in the C++ API ("q", "lengths", ...).
  const std::string& argument() const { return argument_; }

 private:
  std::string argument_;
};

/// The request is meaningful, but no kernel of this build and machine can run it; the message says why.
class LONGSPAN_API Unsupported : public Error {
 public:
  using Error::Error;
};

/// Memory for workspace could not be had; the library stays usable.
class LONGSPAN_API OutOfMemory : public Error {
 public:
  using Error::Error;
};

/// A file could not be read or written (the command line and file helpers).
class LONGSPAN_API IoError : public Error {
 public:
  using Error::Error;
};

/// A rank failed, stayed silent past the deadline, or disagrees with the others.
class LONGSPAN_API CommError : public Error {
 public:
  using Error::Error;
};

/// The CUDA driver or run time reported an error.
class LONGSPAN_API CudaError : public Error {
 public:
  using Error::Error;
};

/// The call was stopped by its cancel flag or its progress hook; outputs are unspecified.
class LONGSPAN_API Cancelled : public Error {
 public:
  using Error::Error;
};

}  // namespace longspan
