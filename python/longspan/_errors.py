"""The errors Longspan raises: each is a longspan.Error and also the built-in type that users already catch."""

from __future__ import annotations

import re
import sys
import warnings
from collections.abc import Mapping

__all__ = [
    "Cancelled", "CommError", "CudaError", "Error", "InvalidArgument", "LongspanWarning", "OutOfMemory",
    "Unsupported",
]  # fmt: skip


class Error(Exception):
    """Base of every error of the library."""


class InvalidArgument(Error, ValueError):
    """An argument is wrong; the message names it, its value and what would be valid."""

    #: Name of the offending argument, where it is known.
    argument: str | None = None

    def __init__(self, message: str = "", argument: str | None = None) -> None:
        super().__init__(message)
        if argument is not None:
            self.argument = argument

    def __reduce__(self):
        return type(self), (str(self), self.argument)


def invalid(argument: str, text: str) -> InvalidArgument:
    """Of an argument: its name, and what is wrong with it."""
    return InvalidArgument(f"{argument} {text}", argument)


class Unsupported(Error, NotImplementedError):
    """The request is meaningful, but nothing in this build and machine can run it. Also a RuntimeError."""


class OutOfMemory(Error, MemoryError):
    """Memory could not be had; the process stays usable."""


class CommError(Error, RuntimeError):
    """A rank failed, stayed silent past the deadline, or disagrees with the others."""


class CudaError(Error, RuntimeError):
    """The CUDA driver or run time reported an error."""


class Cancelled(Error):
    """The call was stopped; outputs are unspecified. Ctrl-C raises KeyboardInterrupt instead."""


class LongspanWarning(UserWarning):
    """Something was accepted but has no effect, or is probably not meant."""


_warned: set[str] = set()
_PACKAGE = __name__.partition(".")[0]


def warn_once(key: str, message: str) -> None:
    """One warning per process for each key, at the caller's line outside of this package (and of torch's calls)."""
    if key in _warned:
        return
    _warned.add(key)
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in (_PACKAGE, "torch"):
        level, frame = level + 1, frame.f_back
    warnings.warn(message, LongspanWarning, stacklevel=level)


def renamed(error: InvalidArgument, names: Mapping[str, str]) -> InvalidArgument:
    """The same error in the caller's words: whole words of the message that are keys of names are replaced."""
    pattern = re.compile(r"\b(" + "|".join(map(re.escape, names)) + r")\b(?! range)")
    message = pattern.sub(lambda match: names[match.group()], str(error))
    return InvalidArgument(message, names.get(error.argument or "", error.argument))
