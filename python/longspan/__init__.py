"""Exact attention over very long sequences: dense, dilated, LongNet and block-sparse patterns.

    import longspan
    out = longspan.attention(q, k, v, longspan.dilated([2048, 4096, 8192], [1, 2, 4]), causal=True)

Arrays are NumPy arrays or anything with DLPack; torch tensors go to the operators of longspan.torch, with gradients.
longspan.torch has the drop-in modules, longspan.torchscale makes torchscale and GigaPath use Longspan.
"""

from __future__ import annotations

from ._named import name_arguments

name_arguments()  # before anything else takes functions of the compiled module

from . import device_memory, host_memory, plan_cache
from ._communicator import Communicator
from ._errors import (
    Cancelled,
    CommError,
    CudaError,
    Error,
    InvalidArgument,
    LongspanWarning,
    OutOfMemory,
    Unsupported,
)
from ._longspan import (
    Attention,
    BlockMask,
    BlockPattern,
    Options,
    Pattern,
    Plan,
    Ring,
    RingHalo,
    Shards,
    local_ring,
    nccl_id,
    nccl_ring,
    num_threads,
    set_num_threads,
)
from ._longspan import commit as _commit
from ._longspan import version as _version
from ._operator import attention, attention_backward
from ._inspect import adaptive_mask, attention_blocks, attention_received
from ._patterns import (
    adaptive,
    bigbird,
    block_sparse,
    dense,
    dilated,
    dilated_sparse,
    draw,
    global_local,
    hierarchical,
    info,
    kernels,
    local_window,
    longformer,
    longnet,
    plan,
    random_blocks,
    strided,
)

__version__: str = _version()
__commit__: str = _commit()

__all__ = [
    "Attention",
    "BlockMask",
    "BlockPattern",
    "Cancelled",
    "CommError",
    "Communicator",
    "CudaError",
    "Error",
    "InvalidArgument",
    "LongspanWarning",
    "Options",
    "OutOfMemory",
    "Pattern",
    "Plan",
    "Ring",
    "RingHalo",
    "Shards",
    "Unsupported",
    "adaptive",
    "adaptive_mask",
    "attention",
    "attention_backward",
    "attention_blocks",
    "attention_received",
    "bigbird",
    "block_sparse",
    "dense",
    "device_memory",
    "dilated",
    "dilated_sparse",
    "draw",
    "global_local",
    "hierarchical",
    "host_memory",
    "info",
    "kernels",
    "local_ring",
    "nccl_id",
    "nccl_ring",
    "local_window",
    "longformer",
    "longnet",
    "num_threads",
    "plan",
    "plan_cache",
    "random_blocks",
    "set_num_threads",
    "strided",
]


def __getattr__(name: str):
    # longspan.torch is imported when first used, so that the package itself needs NumPy only.
    if name in ("torch", "torchscale"):
        import importlib

        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module 'longspan' has no attribute {name!r}")
