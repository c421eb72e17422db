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

from .block_sparse import (
    AdaptiveConfig,
    BlockSparseAdaptive,
    BlockSparseHierarchical,
    BlockSparseRingDilatedAttention,
    BlockSparseRingMultiheadDilatedAttention,
    HierarchicalConfig,
    SparsePatternConfig,
    create_block_sparse_attention,
)
from .cache import DilatedCache
from .dilated import DilatedAttention, ImprovedDilatedAttention
from .factories import create_dilated_attention, create_multihead_dilated_attention
from .longnet import (
    DilatedTransformerDecoderLayer,
    DilatedTransformerEncoderLayer,
    LongNet,
    LongNetCache,
    LongNetLM,
)
from . import flops as _flops  # registers its formulas
from .multihead import ImprovedMultiheadDilatedAttention, MultiheadDilatedAttention
from .operator import attention, attention_backward
from .ring import (
    ALIASES as _RING_ALIASES,
)
from .ring import (
    RingAdvancedDistributedDilatedAttention,
    RingAttentionConfig,
    RingDilatedAttention,
    RingDilatedAttentionProduction,
    RingMonitor,
    RingMultiheadDilatedAttention,
    RingReport,
    create_production_ring_attention,
    shard,
    unshard,
)

globals().update(_RING_ALIASES)

__all__ = [
    "AdaptiveConfig",
    "BlockSparseAdaptive",
    "BlockSparseHierarchical",
    "BlockSparseRingDilatedAttention",
    "BlockSparseRingMultiheadDilatedAttention",
    "DilatedAttention",
    "DilatedCache",
    "DilatedTransformerDecoderLayer",
    "DilatedTransformerEncoderLayer",
    "HierarchicalConfig",
    "ImprovedDilatedAttention",
    "ImprovedMultiheadDilatedAttention",
    "LongNet",
    "LongNetCache",
    "LongNetLM",
    "MultiheadDilatedAttention",
    "RingAdvancedDistributedDilatedAttention",
    "RingAttentionConfig",
    "RingDilatedAttention",
    "RingDilatedAttentionProduction",
    "RingMonitor",
    "RingMultiheadDilatedAttention",
    "RingReport",
    "attention",
    "attention_backward",
    "create_production_ring_attention",
    "shard",
    "unshard",
    *_RING_ALIASES,
    "SparsePatternConfig",
    "create_block_sparse_attention",
    "create_dilated_attention",
    "create_multihead_dilated_attention",
]
