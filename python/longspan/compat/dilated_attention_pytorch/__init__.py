"""dilated-attention-pytorch under its own names: fkodom's package and its large fork, over longspan.torch.

    from longspan.compat import dilated_attention_pytorch

    dilated_attention_pytorch.install()            # users' `import dilated_attention_pytorch` is Longspan from here on
    dilated_attention_pytorch.install("fkodom")    # where the two differ: modules, and multihead classes return (out, None)

Names can also be imported from here, without install(). `python -m longspan.compat` prints what arguments become.
"""

from __future__ import annotations

import functools
import importlib
import sys
from types import ModuleType
from typing import Any

from ..._named import choice
from .table import CLASSES, FKODOM, NAMES, Row, inner_modules

PACKAGE = "dilated_attention_pytorch"
__version__ = "0.2.0"


@functools.cache
def _object(row: Row) -> Any:
    if row.signature:
        return importlib.import_module(".build", __name__).make(row)
    where, _, name = row.ours.rpartition(".")
    home = importlib.import_module(f".{where}" if where else "...torch", __name__)
    return getattr(home, name)


def find(name: str) -> Any:
    """The object of a name of the fork's `__init__`, or of one of its modules where only that has it."""
    name = {"RingDilatedAttention": "RingDilatedAttentionV2Collective"}.get(name, name)
    rows = [row for row in (*CLASSES, *NAMES) if row.name == name]
    rows.sort(key=lambda row: row.modules[0] in inner_modules() and "core.factory" not in row.modules)
    if name == "RingAttentionConfig":
        rows = [row for row in rows if "ring_dilated_attention_production" in row.modules]
    if not rows:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return _object(rows[0])


def names() -> list[str]:
    """Of the fork's `__init__`."""
    top = {row.name for row in (*CLASSES, *NAMES) if not set(row.modules) <= inner_modules()}
    factories = {"create_dilated_attention", "create_multihead_dilated_attention", "create_block_sparse_attention",
                 "create_adaptive_sparse_attention"}  # fmt: skip
    patterns = {"PatternType", "PatternConfig", "PatternOptimizer", "PatternQualityAnalyzer", "SparsePatternGenerator"}
    return sorted(top | factories | patterns | {"RingDilatedAttention"})


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return find(name)


def __dir__() -> list[str]:
    return [*names(), "install", "uninstall"]


class _Lazy(ModuleType):
    """A module whose objects are made when they are asked for."""

    def __init__(self, name: str, objects: dict[str, Any]) -> None:
        super().__init__(name, __doc__)
        self.__path__: list[str] = []  # a package, so that its modules are looked up in sys.modules
        self.__dict__["_objects"] = objects
        self.__dict__["__all__"] = [one for one in objects if not one.startswith("_")]

    def __getattr__(self, name: str) -> Any:
        objects = self.__dict__["_objects"]
        if name not in objects:
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        made = self.__dict__[name] = objects[name]()
        return made


def _modules(flavour: str) -> dict[str, dict[str, Any]]:
    """Of each module, "" for the package, its names and what makes their objects."""
    result: dict[str, dict[str, Any]] = {"": {}}
    if flavour == "fkodom":
        home = importlib.import_module("...torch", __name__)
        for module, listed in FKODOM.items():
            result[module] = {name: functools.partial(getattr, home, name) for name in listed.split()}
        return result
    for row in (*CLASSES, *NAMES):
        for module in row.modules:
            result.setdefault(module, {})[row.name] = functools.partial(_object, row)
    result[""] = {name: functools.partial(find, name) for name in names()}
    result[""]["__version__"] = lambda: __version__
    return result


_kept: dict[str, ModuleType] = {}


def install(flavour: str = "fork") -> ModuleType:
    """Puts `dilated_attention_pytorch` and its modules into sys.modules, and returns it. Modules that were there before
    come back with uninstall()."""
    choice("flavour", flavour, ("fork", "fkodom"))
    uninstall()
    for name in [name for name in sys.modules if name == PACKAGE or name.startswith(PACKAGE + ".")]:
        _kept[name] = sys.modules.pop(name)
    for module, objects in _modules(flavour).items():
        full = f"{PACKAGE}.{module}" if module else PACKAGE
        sys.modules[full] = _Lazy(full, objects)
    for full, made in list(sys.modules.items()):
        if isinstance(made, _Lazy) and "." in full:
            parent, _, name = full.rpartition(".")
            setattr(sys.modules[parent], name, made)
    return sys.modules[PACKAGE]


def uninstall() -> None:
    for full in [full for full, module in sys.modules.items() if isinstance(module, _Lazy)]:
        del sys.modules[full]
    sys.modules.update(_kept)
    _kept.clear()
