"""RingDilatedAttentionProduction: the ring from a config whose fields act."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ... import host_memory, plan_cache
from ... import torch as longspan_torch
from ..._errors import invalid
from ...torch.options import finite
from .build import Compatible
from .caches import MemoryPool
from .configs import ProductionRingConfig
from .table import Row

ROW = Row(
    "RingDilatedAttentionProduction", ("ring_dilated_attention_production",), "RingDilatedAttention",
    "segment_lengths, dilation_rates, dropout=0.0, ring_size=None, use_gradient_checkpointing=True, use_memory_pool=True, "
    "memory_pool_size=10, enable_error_recovery=True, mixed_precision=True, log_memory_usage=False, attention_scale=None, "
    "deadline=60.0, process_group=None, monitor=None",
    {"use_gradient_checkpointing": "use_checkpointing"},
)  # fmt: skip


class RingDilatedAttentionProduction(Compatible, longspan_torch.RingDilatedAttention):
    """RingDilatedAttention from a RingAttentionConfig. `python -m longspan.compat RingDilatedAttentionProduction` says what
    each field does."""

    def __init__(self, config: ProductionRingConfig) -> None:
        if not isinstance(config, ProductionRingConfig):
            raise invalid("config", f"is {config!r}: give a RingAttentionConfig of ring_dilated_attention_production")
        longspan_torch.RingDilatedAttention.__init__(
            self, config.segment_lengths, config.dilation_rates, config.dropout, config.ring_size,
            config.use_gradient_checkpointing, config.process_group, config.deadline, monitor=config.monitor,
        )  # fmt: skip
        self.config = config
        self._recovers, self._logs = config.enable_error_recovery, config.log_memory_usage
        if config.attention_scale is not None:
            self.attention.softmax_scale = finite("attention_scale", config.attention_scale)
        if config.mixed_precision:
            self._half = torch.float16
        #: Buffers for the caller's own use; Longspan's calls take theirs from a pool that memory_pool_size bounds, too.
        self.memory_pool = MemoryPool(config.memory_pool_size) if config.use_memory_pool else None
        self._calls, self._allocated = 0, host_memory.statistics()["allocations"]

    @property
    def dtype(self) -> torch.dtype:
        return torch.float16 if self._half and torch.cuda.is_available() else torch.float32

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        result = super().forward(*args, **kwargs)
        if torch.compiler.is_compiling():
            return result
        self._calls += 1
        idle = 0 if self.memory_pool is None else self.config.memory_pool_size << 20
        if host_memory.statistics()["reserved_bytes"] > idle:
            host_memory.trim()
        return result

    def get_memory_stats(self) -> dict[str, Any]:
        """memory_pool: of CPU workspace since this module was made (allocations from the system, calls that needed none).
        cached_indices, cached_masks: plans of the process, which hold both as arithmetic."""
        workspace, plans = host_memory.statistics(), plan_cache.statistics()["entries"]
        allocations = workspace["allocations"] - self._allocated
        reuses = max(0, self._calls - allocations)
        pool = {"allocations": allocations, "reuses": reuses, "reuse_rate": reuses / max(1, self._calls),
                "pooled_buffers": int(workspace["reserved_bytes"] > 0)}  # fmt: skip
        pool = {} if self.memory_pool is None else pool
        return {**self.get_memory_info(), "memory_pool": pool, "cached_indices": plans, "cached_masks": plans}

    def clear_caches(self) -> None:
        self.clear_cache()
        plan_cache.clear()
        if self.memory_pool is not None:
            self.memory_pool.clear()


def create_production_ring_attention(
    segment_lengths: list[int], dilation_rates: list[int], **fields: Any
) -> RingDilatedAttentionProduction:
    return RingDilatedAttentionProduction(ProductionRingConfig(segment_lengths, dilation_rates, **fields))
