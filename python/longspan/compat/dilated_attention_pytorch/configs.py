"""The fork's config objects: dataclasses whose fields are checked when they are made."""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any

import torch

from ... import torch as longspan_torch
from ..._errors import invalid
from ..._named import choice
from ...torch.ring_calls import DEADLINE
from .validation import ValidationMixin


def _positive(config: Any, *names: str, least: float = 0, strictly: bool = True) -> None:
    for name in names:
        value = getattr(config, name)
        if value is not None and (value < least or (strictly and value == least)):
            wanted = "must be positive" if strictly else "must be non-negative"
            raise invalid(name, f"is {value}: {name} {wanted}, got {value}")


def _fraction(config: Any, *names: str, one: bool = False) -> None:
    for name in names:
        value = getattr(config, name)
        if value is not None and not (0 < value < 1 or (one and value == 1)):
            raise invalid(name, f"is {value}: {name} must be between 0 and 1")


def _place(config: Any) -> None:
    config.device = torch.device(config.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    config.dtype = config.dtype or torch.float32


@dataclass
class DilatedAttentionConfig(ValidationMixin):
    segment_lengths: list[int]
    dilation_rates: list[int]
    dropout: float = 0.0
    use_tf32: bool = True
    device: Any = None
    dtype: Any = None

    def __post_init__(self) -> None:
        self.validate_segment_dilation_match(self.segment_lengths, self.dilation_rates)
        self.validate_positive_values(self.segment_lengths, "segment_lengths")
        self.validate_positive_values(self.dilation_rates, "dilation_rates")
        self.validate_dropout_prob(self.dropout)
        _place(self)

    @property
    def num_groups(self) -> int:
        return len(self.segment_lengths)

    @property
    def max_segment_length(self) -> int:
        return max(self.segment_lengths)


@dataclass
class MultiheadConfig(ValidationMixin):
    embed_dim: int
    num_heads: int
    bias: bool = True
    layer_norm: bool = True
    layer_norm_eps: float = 1e-5
    gamma_init: float = 1.0
    device: Any = None
    dtype: Any = None

    def __post_init__(self) -> None:
        _positive(self, "embed_dim", "num_heads", "layer_norm_eps", "gamma_init")
        self.head_dim = self.validate_head_dim(self.embed_dim, self.num_heads)
        _place(self)


@dataclass
class RingAttentionConfig(DilatedAttentionConfig):
    """core.RingAttentionConfig, of the factories; that of RingDilatedAttentionProduction is another one."""

    block_size: int = 1024
    ring_size: int | None = None
    use_checkpointing: bool = True
    use_memory_pool: bool = True
    max_cached_buffers: int = 50

    def __post_init__(self) -> None:
        super().__post_init__()
        _positive(self, "block_size", "ring_size")
        _positive(self, "max_cached_buffers", strictly=False)


_SPARSE_TYPES = ("dilated_sparse", "local_window", "global_local", "axial", "random", "learned", "hybrid")


@dataclass
class SparseAttentionConfig(DilatedAttentionConfig):
    pattern_type: str = "dilated_sparse"
    sparsity_ratio: float = 0.25
    block_size: int = 128
    enable_adaptive: bool = False
    min_sparsity: float = 0.1
    max_sparsity: float = 0.9

    def __post_init__(self) -> None:
        super().__post_init__()
        choice("pattern_type", self.pattern_type, _SPARSE_TYPES)
        _fraction(self, "sparsity_ratio", "min_sparsity", "max_sparsity")
        if self.min_sparsity >= self.max_sparsity:
            raise invalid("min_sparsity", f"({self.min_sparsity}) must be less than max_sparsity ({self.max_sparsity})")
        _positive(self, "block_size")


@dataclass
class DistributedConfig:
    world_size: int | None = None
    rank: int | None = None
    backend: str = "nccl"
    sequence_parallel: bool = False
    model_parallel: bool = False
    pipeline_parallel: bool = False
    gradient_checkpointing: bool = False
    communication_optimization: bool = True
    bucket_size_mb: int = 25
    enable_async_communication: bool = True
    gradient_compression_ratio: float | None = None
    zero_stage: int = 0

    def __post_init__(self) -> None:
        choice("backend", self.backend, ("nccl", "gloo", "mpi"))
        _positive(self, "world_size", "bucket_size_mb")
        _positive(self, "rank", strictly=False)
        if self.rank is not None and self.world_size is not None and self.rank >= self.world_size:
            raise invalid("rank", f"({self.rank}) must be less than world_size ({self.world_size})")
        _fraction(self, "gradient_compression_ratio", one=True)
        if self.zero_stage not in (0, 1, 2, 3):
            raise invalid("zero_stage", f"is {self.zero_stage}: give 0, 1, 2 or 3")


@dataclass
class MemoryPoolConfig:
    hot_cache_size: int = 50
    hot_cache_threshold: int = 10
    allow_buffer_slicing: bool = True
    cleanup_threshold_mb: int = 100
    max_pool_size_mb: int = 1024
    enable_statistics: bool = True
    device: Any = None

    def __post_init__(self) -> None:
        _positive(self, "hot_cache_size", "hot_cache_threshold", "cleanup_threshold_mb", "max_pool_size_mb")
        self.device = torch.device(self.device or ("cuda" if torch.cuda.is_available() else "cpu"))


class ConfigError(ValueError, AssertionError):
    """What the fork asserts: both kinds of handlers catch it."""


@dataclass
class ProductionRingConfig:
    """The arguments of RingDilatedAttentionProduction; deadline, process_group and monitor are Longspan's."""

    segment_lengths: list[int]
    dilation_rates: list[int]
    dropout: float = 0.0
    ring_size: int | None = None
    use_gradient_checkpointing: bool = True
    use_memory_pool: bool = True
    memory_pool_size: int = 10
    enable_error_recovery: bool = True
    mixed_precision: bool = True
    log_memory_usage: bool = False
    attention_scale: float | None = None
    deadline: float = DEADLINE
    process_group: Any = None
    monitor: Callable[[Any], None] | None = None

    def __post_init__(self) -> None:
        try:
            ValidationMixin.validate_segment_dilation_match(self.segment_lengths, self.dilation_rates)
            ValidationMixin.validate_positive_values(self.segment_lengths, "segment_lengths")
            ValidationMixin.validate_positive_values(self.dilation_rates, "dilation_rates")
        except ValueError as error:
            raise ConfigError(str(error)) from None


ProductionRingConfig.__name__ = ProductionRingConfig.__qualname__ = "RingAttentionConfig"


class DistributedSparsePattern(enum.Enum):
    HIERARCHICAL = "hierarchical"
    NODE_LOCAL = "node_local"
    BANDWIDTH_AWARE = "bandwidth_aware"
    ADAPTIVE_LOAD_BALANCED = "adaptive_load_balanced"


@dataclass
class DistributedSparseConfig:
    """Its pattern is one of blocks over the whole sequence, so that all ranks and one device agree; what sets fractions
    for nodes or compresses gradients has nothing to act on."""

    pattern_type: DistributedSparsePattern = DistributedSparsePattern.HIERARCHICAL
    sparsity_ratio: float = 0.25
    block_size: int = 128
    local_sparsity: float = 0.4
    global_sparsity: float = 0.1
    inter_node_sparsity: float = 0.05
    compression_ratio: float = 0.1
    load_balance_threshold: float = 0.15
    adaptive_sparsity_rate: float = 0.05
    enable_async_communication: bool = True
    enable_gradient_compression: bool = True
    enable_load_balancing: bool = True


@dataclass
class TransformerLayerConfig:
    d_model: int
    nhead: int
    segment_lengths: Any
    dilation_rates: Any
    dim_feedforward: int = 2048
    dropout: float = 0.1
    activation: Any = "relu"
    layer_norm_eps: float = 1e-5
    gamma_init: float = 1.0
    attention_type: str = "auto"
    device: Any = None
    dtype: Any = None


class PatternType(enum.Enum):
    LOCAL_WINDOW = "local_window"
    DILATED_SPARSE = "dilated_sparse"
    GLOBAL_LOCAL = "global_local"
    STRIDED = "strided"
    RANDOM = "random"
    LEARNED = "learned"
    HIERARCHICAL = "hierarchical"
    CONTENT_ADAPTIVE = "content_adaptive"


@dataclass
class PatternConfig:
    pattern_type: PatternType = PatternType.DILATED_SPARSE
    sparsity_ratio: float = 0.25
    block_size: int = 128
    local_window_size: int = 512
    global_tokens: int = 64
    dilation_rates: list[int] = field(default_factory=lambda: [1, 2, 4, 8])
    stride: int = 4
    random_seed: int | None = None
    quality_threshold: float = 0.95
    enable_caching: bool = True
    enable_compression: bool = False


def of_fields(kind: type, arguments: dict[str, Any]) -> Any:
    """A config of those arguments that are its fields."""
    names = {item.name for item in fields(kind)}
    return kind(**{name: value for name, value in arguments.items() if name in names})


def hierarchical_presets() -> dict[str, longspan_torch.HierarchicalConfig]:
    """Levels for common needs: few or many distances, long reach, fine detail."""
    levels = {
        "standard": [(64, 256), (256, 1024), (1024, -1)],
        "fine_grained": [(32, 128), (128, 512), (512, 2048), (2048, -1)],
        "long_range": [(64, 512), (512, 4096), (4096, -1)],
        "ultra_sparse": [(128, 128), (1024, 1024), (8192, -1)],
    }
    return {
        name: longspan_torch.HierarchicalConfig([{"stride": stride, "window_size": window} for stride, window in each])
        for name, each in levels.items()
    }
