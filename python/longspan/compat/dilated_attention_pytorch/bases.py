"""Base classes for attention modules of users' own, as the fork has them."""

from __future__ import annotations

import abc
import threading
from collections import OrderedDict
from typing import Any

from torch import Tensor, nn

from .configs import DilatedAttentionConfig, MultiheadConfig
from .validation import ValidationMixin


class BaseDilatedAttention(nn.Module, ValidationMixin, abc.ABC):
    """Holds a DilatedAttentionConfig and its fields. A subclass has forward. The attention classes count as subclasses."""

    num_groups: int

    def __init__(self, config: DilatedAttentionConfig) -> None:
        super().__init__()
        self.config = config
        for name in ("segment_lengths", "dilation_rates", "dropout", "device", "dtype", "num_groups"):
            setattr(self, name, getattr(config, name))
        self.dropout_layer = nn.Dropout(config.dropout)
        self._max_cache_size = 100
        self._cache_lock = threading.RLock()
        self._head_groups_cache: OrderedDict[int, Any] = OrderedDict()

    @abc.abstractmethod
    def forward(self, q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False, attention_mask: Any = None) -> Tensor: ...

    def _get_head_groups(self, num_heads: int) -> tuple[list[int], list[tuple[int, int]]]:
        """Heads of each branch, and where they are: the first H % G branches have one more."""
        with self._cache_lock:
            if num_heads not in self._head_groups_cache:
                few, more = divmod(num_heads, self.num_groups)
                sizes = [few + (index < more) for index in range(self.num_groups)]
                ends = [sum(sizes[: index + 1]) for index in range(len(sizes))]
                self._head_groups_cache[num_heads] = (sizes, [(end - size, end) for size, end in zip(sizes, ends)])
                while len(self._head_groups_cache) > self._max_cache_size:
                    self._head_groups_cache.popitem(last=False)
            return self._head_groups_cache[num_heads]

    def _validate_forward_inputs(self, q: Tensor, k: Tensor, v: Tensor, attention_mask: Any = None) -> None:
        for name, tensor in (("query", q), ("key", k), ("value", v)):
            self.validate_tensor_shape(tensor, 4, name)
        self.validate_tensor_shapes_match([q, k, v], ["query", "key", "value"], [0, 1, 3])
        self.validate_num_heads(q.shape[2], self.num_groups)

    def clear_cache(self, force: bool = False) -> None:
        self._head_groups_cache.clear()

    def get_memory_info(self) -> dict[str, Any]:
        return {"cache_size": len(self._head_groups_cache), "memory_complexity": "O(n) for sequence length n"}

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_cache_lock": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _cache_lock=threading.RLock())


class BaseMultiheadDilatedAttention(nn.Module, ValidationMixin, abc.ABC):
    """Holds both configs, the attention module and projections that a subclass makes, out_proj, q_ln and k_ln."""

    embed_dim: int
    bias: bool
    device: Any
    dtype: Any

    def __init__(self, multihead_config: MultiheadConfig, attention_config: DilatedAttentionConfig) -> None:
        super().__init__()
        self.multihead_config, self.attention_config = multihead_config, attention_config
        for name in ("embed_dim", "num_heads", "head_dim", "bias", "device", "dtype"):
            setattr(self, name, getattr(multihead_config, name))
        placement: dict[str, Any] = {"device": self.device, "dtype": self.dtype}
        self.attention = self._create_attention_module()
        self._init_qkv_projections(placement)
        self.out_proj = nn.Linear(self.embed_dim, self.embed_dim, bias=self.bias, **placement)
        norms = [
            nn.LayerNorm(self.embed_dim, multihead_config.layer_norm_eps, **placement) if multihead_config.layer_norm else None
            for _ in range(2)
        ]
        self.q_ln, self.k_ln = norms
        self._reset_parameters()

    @abc.abstractmethod
    def _create_attention_module(self) -> nn.Module: ...

    @abc.abstractmethod
    def _init_qkv_projections(self, factory_kwargs: dict[str, Any]) -> None: ...

    @abc.abstractmethod
    def forward(self, query: Tensor, key: Any = None, value: Any = None, **arguments: Any) -> Any: ...

    def _reset_parameters(self) -> None:
        for name in ("qkv_proj", "q_proj", "k_proj", "v_proj", "out_proj"):
            layer = getattr(self, name, None)
            if layer is not None:
                nn.init.xavier_normal_(layer.weight, gain=self.multihead_config.gamma_init)
                if layer.bias is not None:
                    nn.init.zeros_(layer.bias)
