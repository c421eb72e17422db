"""Longspan for PyTorch: the operator with gradients, and drop-in modules for the classes people have.

    from longspan.torch import MultiheadDilatedAttention      # was: from dilated_attention_pytorch import ...

Needs torch 2.4 or later, the first with torch.library.register_autograd, register_fake and opcheck.
"""

from __future__ import annotations

OLDEST_TORCH = (2, 4)

try:
    import torch as _torch
except ModuleNotFoundError as error:
    if error.name != "torch":
        raise
    raise ModuleNotFoundError(
        "longspan.torch needs PyTorch 2.4 or later, which is not installed: pip install 'longspan[torch]'", name="torch"
    ) from None

if tuple(int(part) for part in _torch.__version__.split("+")[0].split(".")[:2]) < OLDEST_TORCH:
    raise ImportError(
        f"longspan.torch needs PyTorch 2.4 or later (torch.library.register_autograd), found {_torch.__version__}: "
        "pip install --upgrade torch"
    )

from . import block_sparse as _block_sparse
from . import flops as _flops  # registers its formulas
from . import longnet as _longnet
from . import ring as _ring
from .block_sparse import *
from .cache import DilatedCache
from .dilated import DilatedAttention, ImprovedDilatedAttention
from .factories import create_dilated_attention, create_multihead_dilated_attention
from .gradients import reduce_behind_rings
from .longnet import *
from .multihead import ImprovedMultiheadDilatedAttention, MultiheadDilatedAttention
from .operator import attention, attention_backward
from .ring import *

__all__ = [
    "DilatedAttention", "DilatedCache", "ImprovedDilatedAttention", "ImprovedMultiheadDilatedAttention",
    "MultiheadDilatedAttention", "attention", "attention_backward", "create_dilated_attention",
    "create_multihead_dilated_attention", "reduce_behind_rings",
]  # fmt: skip
__all__ += _block_sparse.__all__
__all__ += _longnet.__all__
__all__ += _ring.__all__
