"""The factories of the older packages: attention modules by the name of their type, from one table."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from .._errors import InvalidArgument, invalid
from .._named import choice
from .block_sparse import BlockSparseRingDilatedAttention, BlockSparseRingMultiheadDilatedAttention
from .dilated import DilatedAttention, ImprovedDilatedAttention
from .multihead import ImprovedMultiheadDilatedAttention, MultiheadDilatedAttention
from .ring import RingAdvancedDistributedDilatedAttention, RingDilatedAttention, RingMultiheadDilatedAttention

#: type -> (attention, multihead). auto does not look at the machine: weights saved on one load on any other.
TYPES: dict[str, tuple[type[nn.Module], type[nn.Module]]] = {
    "auto": (ImprovedDilatedAttention, ImprovedMultiheadDilatedAttention),
    "standard": (DilatedAttention, MultiheadDilatedAttention),
    "improved": (ImprovedDilatedAttention, ImprovedMultiheadDilatedAttention),
    "ring": (RingDilatedAttention, RingMultiheadDilatedAttention),
    "distributed": (RingDilatedAttention, RingMultiheadDilatedAttention),
    "improved_distributed": (RingDilatedAttention, RingAdvancedDistributedDilatedAttention),
    "block_sparse": (BlockSparseRingDilatedAttention, BlockSparseRingMultiheadDilatedAttention),
    "block_sparse_ring": (BlockSparseRingDilatedAttention, BlockSparseRingMultiheadDilatedAttention),
}  # fmt: skip


def _classes(attention_type: str) -> tuple[type[nn.Module], type[nn.Module]]:
    return TYPES[choice("attention_type", attention_type, list(TYPES))]


def _fields(name: str, config: Any) -> dict[str, Any]:
    """What a config says: a mapping, a dataclass or any object with attributes. Fields that are None say nothing."""
    if config is None:
        return {}
    if isinstance(config, Mapping):
        given = dict(config)
    elif dataclasses.is_dataclass(config) and not isinstance(config, type):
        given = {item.name: getattr(config, item.name) for item in dataclasses.fields(config)}
    elif hasattr(config, "__dict__") and not isinstance(config, type):
        given = {key: value for key, value in vars(config).items() if not key.startswith("_")}
    else:
        raise invalid(name, f"is {config!r}: give a dict or an object with attributes")
    return {key: value for key, value in given.items() if value is not None}


def _merged(configs: dict[str, Any], defaults: dict[str, Any], arguments: dict[str, Any]) -> dict[str, Any]:
    """Named defaults, then the configs' fields, then what the call itself adds. Two configs may not disagree."""
    result: dict[str, Any] = {}
    for name, config in configs.items():
        for key, value in _fields(name, config).items():
            if key in result and result[key] != value:
                raise InvalidArgument(f"{name} has {key} = {value!r}, another config {result[key]!r}: give it once", key)
            result[key] = value
    return {**defaults, **result, **arguments}


def _make(kind: type[nn.Module], arguments: dict[str, Any]) -> nn.Module:
    if issubclass(kind, DilatedAttention) and not issubclass(kind, ImprovedDilatedAttention) and "dropout" in arguments:
        arguments["attention_dropout"] = arguments.pop("dropout")  # the one class that calls it so
    return kind(**arguments)


def create_dilated_attention(
    attention_type: str = "auto", segment_lengths: Sequence[int] = (2048, 4096, 8192),
    dilation_rates: Sequence[int] = (1, 2, 4), *, attention_config: Any = None, **arguments: Any,
) -> nn.Module:  # fmt: skip
    """An attention module over [b, n, h, d]. arguments, and the fields of attention_config, are those of the class."""
    kind, _ = _classes(attention_type)
    defaults = {"segment_lengths": segment_lengths, "dilation_rates": dilation_rates}
    return _make(kind, _merged({"attention_config": attention_config}, defaults, arguments))


def create_multihead_dilated_attention(
    attention_type: str = "auto", embed_dim: int = 768, num_heads: int = 12,
    segment_lengths: Sequence[int] = (2048, 4096, 8192), dilation_rates: Sequence[int] = (1, 2, 4), *,
    multihead_config: Any = None, attention_config: Any = None, **arguments: Any,
) -> nn.Module:  # fmt: skip
    """A multihead module over [b, n, embed_dim], which returns (out, None). Fields of the configs replace the four
    arguments above; other arguments are those of the class."""
    _, kind = _classes(attention_type)
    defaults = {
        "embed_dim": embed_dim, "num_heads": num_heads, "segment_lengths": segment_lengths,
        "dilation_rates": dilation_rates,
    }  # fmt: skip
    configs = {"multihead_config": multihead_config, "attention_config": attention_config}
    return _make(kind, _merged(configs, defaults, arguments))
