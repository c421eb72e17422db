"""Exact attention over very long sequences: dense, dilated, LongNet and block-sparse patterns.

    import longspan
    out = longspan.attention(q, k, v, longspan.dilated([2048, 4096, 8192], [1, 2, 4]), causal=True)

Arrays are NumPy arrays or anything with DLPack; torch tensors go to the operators of longspan.torch, with gradients.
longspan.torch has the drop-in modules, longspan.torchscale makes torchscale and GigaPath use Longspan.
"""

from __future__ import annotations

from ._named import name_arguments

name_arguments()  # before anything else takes functions of the compiled module

from . import _errors, _inspect, _operator, _patterns, device_memory, host_memory, plan_cache
from ._communicator import Communicator
from ._errors import *
from ._inspect import *
from ._longspan import Attention, BlockMask, BlockPattern, Options, Pattern, Plan, Ring, RingHalo, Shards
from ._longspan import commit as _commit
from ._longspan import local_ring, nccl_id, nccl_ring, num_threads, set_num_threads
from ._longspan import version as _version
from ._operator import *
from ._patterns import *

__version__: str = _version()
__commit__: str = _commit()

__all__ = [
    "Attention", "BlockMask", "BlockPattern", "Communicator", "Options", "Pattern", "Plan", "Ring", "RingHalo", "Shards",
    "device_memory", "host_memory", "local_ring", "nccl_id", "nccl_ring", "num_threads", "plan_cache", "set_num_threads",
]  # fmt: skip
__all__ += _errors.__all__
__all__ += _inspect.__all__
__all__ += _operator.__all__
__all__ += _patterns.__all__


def __getattr__(name: str):
    # longspan.torch is imported when first used, so that the package itself needs NumPy only.
    if name in ("torch", "torchscale"):
        import importlib

        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module 'longspan' has no attribute {name!r}")
