"""What compiled functions say of arguments that they cannot take: the argument, its value and what to give instead.

nanobind lists C++ signatures there. Functions and methods of the compiled module are wrapped, so that their refusals are
ours; constructors cannot be, so they call `refusal` themselves.
"""

from __future__ import annotations

import ast
import difflib
import functools
import inspect
import operator
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from . import _longspan
from ._errors import InvalidArgument, invalid

Function = TypeVar("Function", bound=Callable[..., Any])

# Classes whose objects never change: compiled graphs may hold them.
_VALUES = ("BlockMask", "BlockPattern", "Pattern", "Options", "Plan")
_OPERATORS = ("__str__", "__eq__", "__or__", "__and__", "__sub__")
_NOT_TAKEN = "incompatible function arguments"


def shown(value: object) -> str:
    """A value in a message: short, and arrays by their type and shape."""
    shape = getattr(value, "shape", None)
    if shape is not None and not isinstance(value, type):
        return f"{type(value).__name__} {list(shape) if isinstance(shape, tuple) else shape}"
    try:
        text = repr(value)
    except Exception:
        return type(value).__name__
    return text if len(text) <= 80 else f"{text[:60]}... ({type(value).__name__})"


def refused(name: str, value: object, wanted: str) -> InvalidArgument:
    return invalid(name, f"is {shown(value)}: give {wanted}")


def suggestion(name: str, known: Sequence[str]) -> str:
    """ "; did you mean 'x'?", or nothing."""
    close = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {close[0]!r}?" if close else ""


@functools.cache
def _signature(owner: str, name: str) -> inspect.Signature:
    """Of a function of the module, or of a method of its class without self. nanobind keeps it as text."""
    function = inspect.unwrap(getattr(getattr(_longspan, owner) if owner else _longspan, name))
    text = re.sub(r"\b(longspan\.)?_longspan\.|collections\.abc\.", "", function.__nb_signature__[0][0])
    text = re.sub(r"= \\\d+", "= None", re.sub(r"ndarray\[[^]]*\]", "ndarray", text))
    made: dict[str, Any] = {}
    exec(f"from __future__ import annotations\n{text}: ...", made)
    signature = inspect.signature(made[name])
    return signature.replace(parameters=[one for one in signature.parameters.values() if one.name != "self"])


def flag(name: str, value: Any) -> bool:
    """True and False, as they are or as 0 and 1 of any type."""
    if not isinstance(value, (bool, int, np.bool_)) or value not in (0, 1):
        raise refused(name, value, "True or False")
    return bool(value)


def choice(name: str, value: Any, known: Sequence[str]) -> str:
    """One of a few words."""
    if not isinstance(value, str) or value not in known:
        words = [repr(word) for word in known]
        raise refused(name, value, " or ".join([", ".join(words[:-1]), words[-1]]))
    return value


def is_number(value: object) -> bool:
    return not isinstance(value, (str, bytes)) and hasattr(value, "__float__") and not getattr(value, "shape", ())


def _is_whole(value: object) -> bool:
    try:
        return -(2**63) <= operator.index(value) < 2**64  # type: ignore[arg-type]
    except (TypeError, ValueError):  # arrays of several numbers raise either
        return False


def _is_text(value: object) -> bool:
    return isinstance(value, str) and not any("\ud800" <= letter <= "\udfff" for letter in value)


_PLAIN: dict[str, tuple[Callable[[Any], bool], str]] = {
    "int": (_is_whole, "a whole number of 64 bits"), "float": (is_number, "a number"),
    "bool": (lambda value: isinstance(value, bool), "True or False"), "str": (_is_text, "text"),
    "bytes": (lambda value: isinstance(value, bytes), "bytes"),
    "object": (lambda value: value is not None, "an array"),
}  # fmt: skip
_LISTS = {
    "Sequence[int]": "a list of whole numbers",
    "Sequence[tuple[int, int]]": "a list of pairs of whole numbers",
    "Sequence[Sequence[int]]": "a list of lists of whole numbers",
}


def _judge(text: str) -> tuple[Callable[[Any], bool], str]:
    """Whether a value may be what an annotation says, and that in words."""
    if text.endswith(" | None"):
        fits, wanted = _judge(text.removesuffix(" | None"))
        return lambda value: value is None or fits(value), f"{wanted}, or None"
    if text in _PLAIN:
        return _PLAIN[text]
    if text.startswith(("Sequence[", "tuple[")):
        inner = ast.parse(text, mode="eval").body.slice  # type: ignore[attr-defined]
        parts = inner.elts if isinstance(inner, ast.Tuple) else [inner]
        one, _ = _judge(ast.unparse(parts[0]))
        count = len(parts) if isinstance(inner, ast.Tuple) else None

        def fits_all(value: Any) -> bool:
            try:
                items = list(value)
            except (TypeError, ValueError):
                return False
            if isinstance(value, (str, bytes, Mapping)) or (count is not None and len(items) != count):
                return False
            return all(map(one, items))

        return fits_all, _LISTS.get(text, "a list")
    if text == "ndarray":
        return lambda value: getattr(getattr(value, "dtype", None), "name", "") == "bool", "a NumPy array of booleans"
    kind = getattr(_longspan, text, object)
    also = ", a BlockMask" if text == "BlockPattern" else ""
    return lambda value: isinstance(value, (kind, _longspan.BlockMask) if also else kind), f"a longspan.{text}{also}"


def refusal(owner: str, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Exception:
    """The error for arguments that owner.name did not take; args without self."""
    shown_name = owner if name == "__init__" else name
    signature = _signature(owner, name)
    for keyword in kwargs:
        if keyword not in signature.parameters:
            known = list(signature.parameters)
            hint = suggestion(keyword, known) or f"; it has {', '.join(known) or 'none'}"
            return TypeError(f"{shown_name}() has no argument {keyword!r}{hint}")
    try:
        bound = signature.bind(*args, **kwargs)
    except TypeError as error:
        return TypeError(f"{shown_name}(): {error}")
    out_of_range = None
    for argument, value in bound.arguments.items():
        fits, wanted = _judge(signature.parameters[argument].annotation)
        if not fits(value):
            return refused(argument, value, wanted)
        if out_of_range is None and _is_whole(value) and not isinstance(value, bool):
            if not 0 <= operator.index(value) < 2**31:
                out_of_range = refused(argument, value, "a number within range")
    given = ", ".join(f"{argument}={shown(value)}" for argument, value in bound.arguments.items())
    return out_of_range or TypeError(f"{shown_name}(): no such combination of arguments: {given}")


def named(owner: str, name: str, function: Callable[..., Any], skipped: int) -> Callable[..., Any]:
    """The function with refusals of ours. skipped: 1 where its first argument is self."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except TypeError as error:
            if _NOT_TAKEN not in str(error):
                raise
            raise refusal(owner, name, args[skipped:], kwargs) from None

    call.__module__, call.__qualname__ = _longspan.__name__, f"{owner}.{name}".lstrip(".")
    return constant(call) if owner in _VALUES else call


def _compiling() -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and torch.compiler.is_compiling()


class _Results:
    """What constant functions returned while a graph was traced: attributes, so that the compiler knows where they are."""


_results = _Results()


def constant(function: Function) -> Function:
    """Makes the function's result a constant of graphs that torch.compile traces, as
    torch.compiler.assume_constant_result does; but without importing torch, and for functions of what others returned."""

    def evaluated(*args: Any, **kwargs: Any) -> str:
        name = f"result_{len(vars(_results))}"
        setattr(_results, name, function(*args, **kwargs))
        return name

    evaluated._dynamo_marked_constant = True  # type: ignore[attr-defined]

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if _compiling():
            return getattr(_results, evaluated(*args, **kwargs))
        return function(*args, **kwargs)

    return call  # type: ignore[return-value]


def name_arguments() -> None:
    """Wraps every function and method of the compiled module."""
    for name, member in list(vars(_longspan).items()):
        if isinstance(member, type):
            for attribute, method in [] if name == "TorchCalls" else list(vars(member).items()):
                kind = type(method).__name__
                public = not attribute.startswith("_") or (name in _VALUES and attribute in _OPERATORS)
                if public and kind == "property" and name in _VALUES:
                    getter = constant(lambda self, get=method.fget: get(self))
                    setattr(member, attribute, property(getter, doc=method.__doc__))
                if not public or kind not in ("nb_func", "nb_method"):
                    continue
                wrapper = named(name, attribute, method, 1 if kind == "nb_method" else 0)
                setattr(member, attribute, wrapper if kind == "nb_method" else staticmethod(wrapper))
        elif type(member).__name__ == "nb_func":
            setattr(_longspan, name, named("", name, member, 0))


def made(class_name: str, method: str, *arguments: Any) -> Any:
    """What pickles of the compiled classes call, whose own methods have no names that pickle knows."""
    return getattr(getattr(_longspan, class_name), method)(*arguments)
