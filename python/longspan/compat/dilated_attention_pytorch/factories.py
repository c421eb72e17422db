"""The fork's factories and registries, and its constants about the machine."""

from __future__ import annotations

import functools
import logging
from dataclasses import fields
from typing import Any

import torch
from torch import nn

from ... import torch as longspan_torch
from ..._errors import invalid
from . import configs

logger = logging.getLogger("dilated_attention_pytorch")

HAS_SDPA = HAS_SDPA_KERNEL = True
#: Not used here, whether installed or not.
HAS_FLASH_ATTN = HAS_FLASH_ATTN_3 = HAS_XFORMERS = HAS_DEEPSPEED = HAS_FAIRSCALE = HAS_APEX = False
FLASH_ATTN_VERSION = XFORMERS_VERSION = DEEPSPEED_VERSION = FAIRSCALE_VERSION = APEX_VERSION = None
TORCH_VERSION = torch.__version__

#: Part of a device's name -> what the fork calls it.
_GPU_NAMES = {"h100": "h100", "a100": "a100", "v100": "v100", "mi300": "amd_instinct", "mi250": "amd_instinct",
              "rtx 40": "rtx_40xx", "rtx 30": "rtx_30xx"}  # fmt: skip


@functools.cache
def detect_gpu_type() -> str:
    if not torch.cuda.is_available():
        return "cpu"
    name = torch.cuda.get_device_name().lower()
    return next((kind for part, kind in _GPU_NAMES.items() if part in name), "generic_cuda")


class _Lazily(str):
    """The type of GPU, looked up when it is asked for."""

    def __str__(self) -> str:
        return detect_gpu_type()

    def __eq__(self, other: object) -> bool:
        return str(self) == other

    __hash__ = str.__hash__
    __repr__ = __str__


GPU_TYPE = _Lazily()


def get_current_optimal_settings() -> dict[str, Any]:
    """Nothing depends on these: kernels choose their own tiles."""
    return {"use_flash_attn": False, "use_tf32": detect_gpu_type() not in ("cpu", "v100"), "block_size": 128,
            "max_seq_len": 1 << 30}  # fmt: skip


class _Settings(dict):  # type: ignore[type-arg]
    __getitem__ = lambda self, key: get_current_optimal_settings()[key]  # noqa: E731
    get = lambda self, key, default=None: get_current_optimal_settings().get(key, default)  # noqa: E731


CURRENT_OPTIMAL_SETTINGS = _Settings()

_ATTENTION_REGISTRY: dict[str, type] = {}
_MULTIHEAD_REGISTRY: dict[str, type] = {}

#: type -> (attention, multihead, config), names of the package.
_TYPES = {
    "standard": ("DilatedAttention", "MultiheadDilatedAttention", "DilatedAttentionConfig"),
    "improved": ("ImprovedDilatedAttention", "ImprovedMultiheadDilatedAttention", "DilatedAttentionConfig"),
    "ring": ("RingDilatedAttention", "RingDistributedDilatedAttention", "RingAttentionConfig"),
    "ring_distributed": ("RingDilatedAttention", "RingDistributedDilatedAttention", "RingAttentionConfig"),
    "distributed": ("DistributedImprovedDilatedAttention", "DistributedImprovedMultiheadDilatedAttention",
                    "DilatedAttentionConfig"),
    "improved_distributed": ("DistributedImprovedDilatedAttention", "DistributedImprovedMultiheadDilatedAttention",
                             "DilatedAttentionConfig"),
    "block_sparse_ring": ("BlockSparseRingDilatedAttention", "BlockSparseRingMultiheadDilatedAttention",
                          "SparseAttentionConfig"),
    "block_sparse_ring_distributed": ("BlockSparseRingDistributedDilatedAttention",
                                      "BlockSparseRingMultiheadDilatedAttention", "SparseAttentionConfig"),
}  # fmt: skip


def _named(name: str) -> Any:
    from . import find

    return find(name)


@functools.cache
def _ensure_implementations_registered() -> None:
    for kind, (attention, multihead, _) in _TYPES.items():
        _ATTENTION_REGISTRY.setdefault(kind, _named(attention))
        _MULTIHEAD_REGISTRY.setdefault(f"multihead_{kind}", _named(multihead))


def register_attention(name: str, cls: type) -> None:
    _ATTENTION_REGISTRY[name] = cls


def register_multihead_attention(name: str, cls: type) -> None:
    _MULTIHEAD_REGISTRY[name] = cls


def _select_best_attention_type() -> str:
    """One type on every machine, so that weights load anywhere."""
    return "improved"


def _get_config_class(attention_type: str) -> type:
    return getattr(configs, _TYPES.get(attention_type, ("", "", "DilatedAttentionConfig"))[2])


def _registered(registry: dict[str, type], attention_type: str, prefix: str) -> tuple[str, type]:
    _ensure_implementations_registered()
    kind = _select_best_attention_type() if attention_type == "auto" else attention_type
    if prefix + kind not in registry:
        known = ", ".join(name.removeprefix(prefix) for name in registry)
        raise invalid("attention_type", f"is {attention_type!r}: Unknown attention type; there are {known or 'none'}")
    return kind, registry[prefix + kind]


def _is_ours(kind: type) -> bool:
    return hasattr(kind, "_returns")


def _fitting(kind: Any, arguments: dict[str, Any]) -> dict[str, Any]:
    """What a class of this package takes of what factories and configs hand over; renames the one that differs."""
    names = set(kind.__init__.__signature__.parameters)
    if "attention_dropout" in names and "dropout" in arguments:
        arguments = {**arguments, "attention_dropout": arguments.pop("dropout")}
    if "sparsity_ratio" in arguments and "sparsity_ratio" not in names and "sparse_config" in names:
        known = {item.name for item in fields(longspan_torch.SparsePatternConfig)}
        config = {name: arguments.pop(name) for name in list(arguments) if name in known}
        arguments.setdefault("sparse_config", longspan_torch.SparsePatternConfig(**config))
    unknown = {"multihead_config", "attention_config", "enable_adaptive", "min_sparsity", "max_sparsity"}
    return {name: value for name, value in arguments.items() if name in names or name not in unknown | _config_fields()}


@functools.cache
def _config_fields() -> frozenset[str]:
    kinds = (configs.DilatedAttentionConfig, configs.RingAttentionConfig, configs.SparseAttentionConfig, configs.MultiheadConfig)
    return frozenset(item.name for kind in kinds for item in fields(kind))


def _given(config: Any) -> dict[str, Any]:
    return {} if config is None else {item.name: getattr(config, item.name) for item in fields(config)}


def _with_pool_flags(module: Any, lengths: Any, arguments: dict[str, Any]) -> nn.Module:
    """The flags that the fork's factories set where nothing was said, for code that reads them back."""
    if hasattr(module, "enable_memory_pool") and "enable_memory_pool" not in arguments:
        module.enable_memory_pool, module.lightweight_pool = max(lengths) >= 4096, max(lengths) < 8192
    return module


def create_dilated_attention(
    attention_type: str = "auto", segment_lengths: Any = None, dilation_rates: Any = None, **arguments: Any
) -> nn.Module:
    """An attention module. A class that users registered gets the config object of its type."""
    name, kind = _registered(_ATTENTION_REGISTRY, attention_type, "")
    lists = {"segment_lengths": segment_lengths or [2048, 4096, 8192], "dilation_rates": dilation_rates or [1, 2, 4]}
    if _is_ours(kind):
        made = kind(**_fitting(kind, {**lists, **arguments}))
        return _with_pool_flags(made, lists["segment_lengths"], arguments)
    return kind(configs.of_fields(_get_config_class(name), {**lists, **arguments}))


def create_multihead_dilated_attention(
    attention_type: str = "auto", embed_dim: int = 768, num_heads: int = 12, segment_lengths: Any = None,
    dilation_rates: Any = None, *, multihead_config: Any = None, attention_config: Any = None, **arguments: Any,
) -> nn.Module:  # fmt: skip
    """A multihead module. Fields of the configs hold where the call says nothing else."""
    name, kind = _registered(_MULTIHEAD_REGISTRY, attention_type, "multihead_")
    merged = {**_given(multihead_config), **_given(attention_config), **arguments}
    for key, value, default in (("embed_dim", embed_dim, 768), ("num_heads", num_heads, 12)):
        merged[key] = merged.get(key, default) if value == default else value
    for key, given, usual in (
        ("segment_lengths", segment_lengths, [2048, 4096, 8192]), ("dilation_rates", dilation_rates, [1, 2, 4]),
    ):  # fmt: skip
        merged[key] = given or merged.get(key) or usual
    if _is_ours(kind):
        return kind(**_fitting(kind, merged))
    return kind(configs.of_fields(configs.MultiheadConfig, merged), configs.of_fields(_get_config_class(name), merged))


def create_block_sparse_attention(
    sparsity_ratio: float = 0.9, pattern_type: str = "dilated_sparse", embed_dim: int = 768, num_heads: int = 12,
    **arguments: Any,
) -> nn.Module:  # fmt: skip
    """sparsity_ratio is the fraction pruned, as the fork documents it for this function; a config holds the fraction kept."""
    kind = _MULTIHEAD_REGISTRY.get("multihead_block_sparse_ring")
    ratio = sparsity_ratio if kind is not None and not _is_ours(kind) else round(1.0 - sparsity_ratio, 9)
    return create_multihead_dilated_attention(
        "block_sparse_ring", embed_dim, num_heads, sparsity_ratio=ratio, pattern_type=pattern_type, **arguments
    )


def create_adaptive_sparse_attention(
    embed_dim: int = 768, num_heads: int = 12, min_sparsity: float = 0.1, max_sparsity: float = 0.9, **arguments: Any
) -> nn.Module:
    """A multihead module whose blocks are learned: BlockSparseAdaptive between projections, max_sparsity of blocks pruned
    (min_sparsity is where a schedule of the user's would begin)."""
    _ensure_implementations_registered()
    kind: Any = _MULTIHEAD_REGISTRY.get("multihead_block_sparse_ring")
    if kind is not None and not _is_ours(kind):
        return create_multihead_dilated_attention(
            "block_sparse_ring", embed_dim, num_heads, enable_adaptive=True, min_sparsity=min_sparsity,
            max_sparsity=max_sparsity, pattern_type="learned", **arguments,
        )  # fmt: skip
    lists = [arguments.pop(name, None) or default for name, default in
             (("segment_lengths", [2048, 4096, 8192]), ("dilation_rates", [1, 2, 4]))]  # fmt: skip
    module = _named("MultiheadDilatedAttention")(embed_dim, num_heads, lists[1], lists[0], **arguments)
    config = longspan_torch.AdaptiveConfig(base_sparsity=max_sparsity)
    module.attention = create_adaptive_block_sparse(embed_dim, num_heads, lists[0], lists[1], config)
    return module


def create_adaptive_block_sparse(
    embed_dim: int, num_heads: int, segment_lengths: Any = None, dilation_rates: Any = None, adaptive_config: Any = None,
    **arguments: Any,
) -> nn.Module:  # fmt: skip
    return _named("BlockSparseAdaptive")(
        segment_lengths or [2048, 4096, 8192], dilation_rates or [1, 2, 4], num_heads, embed_dim // num_heads, adaptive_config,
        **arguments,
    )  # fmt: skip


def create_hierarchical_attention(
    embed_dim: int, num_heads: int, segment_lengths: Any = None, dilation_rates: Any = None, hierarchical_config: Any = None,
    **arguments: Any,
) -> nn.Module:  # fmt: skip
    return _named("BlockSparseHierarchical")(
        segment_lengths or [2048, 4096, 8192], dilation_rates or [1, 2, 4], hierarchical_config, num_heads=num_heads,
        head_dim=embed_dim // num_heads, **arguments,
    )  # fmt: skip


get_hierarchical_presets = configs.hierarchical_presets


def _layer(kind: Any, attention_type: str, d_model: int, nhead: int, *lists: Any, **arguments: Any) -> nn.Module:
    if attention_type not in ("auto", "standard", "improved"):
        raise invalid("attention_type", f"is {attention_type!r}: layers have DilatedAttention; give 'auto' or 'standard'")
    return kind(d_model, nhead, *lists, **arguments)


def create_encoder_layer(
    attention_type: str = "auto", d_model: int = 512, nhead: int = 8, segment_lengths: Any = (2048, 4096, 8192),
    dilation_rates: Any = (1, 2, 4), **arguments: Any,
) -> nn.Module:  # fmt: skip
    kind = longspan_torch.DilatedTransformerEncoderLayer
    return _layer(kind, attention_type, d_model, nhead, segment_lengths, dilation_rates, **arguments)


def create_decoder_layer(
    attention_type: str = "auto", d_model: int = 512, nhead: int = 8, segment_lengths: Any = (2048, 4096, 8192),
    dilation_rates: Any = (1, 2, 4), **arguments: Any,
) -> nn.Module:  # fmt: skip
    kind = longspan_torch.DilatedTransformerDecoderLayer
    return _layer(kind, attention_type, d_model, nhead, segment_lengths, dilation_rates, **arguments)


def _creator(name: str) -> Any:
    def create(*args: Any, **kwargs: Any) -> Any:
        return _named(name)(*args, **kwargs)

    return create


create_standard, create_improved = _creator("DilatedAttention"), _creator("ImprovedDilatedAttention")
create_multihead, create_improved_multihead = _creator("MultiheadDilatedAttention"), _creator("ImprovedMultiheadDilatedAttention")
create_ring = _creator("RingDilatedAttentionV2Collective")
