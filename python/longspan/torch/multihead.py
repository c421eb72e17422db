"""Drop-ins for MultiheadDilatedAttention and ImprovedMultiheadDilatedAttention: projections around the one operator."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from .._errors import InvalidArgument
from .dilated import DilatedAttention
from .options import autocast_once, check_dropout, inner_norm, integer, key_mask, warn_once


class _Multihead(nn.Module):
    """What both multihead classes share: checks, the attention, the norm before the output projection (MAGNETO), and
    a forward that takes the calls of both older packages. Subclasses make the query, key and value projections."""

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dilation_rates: Sequence[int],
        segment_lengths: Sequence[int],
        dropout: float,
        bias: bool,
        layer_norm: bool,
        layer_norm_eps: float,
        gamma_init: float,
        placement: dict[str, Any],
        pool_arguments: dict[str, Any],
    ) -> None:
        super().__init__()
        embed_dim, num_heads = integer("embed_dim", embed_dim), integer("num_heads", num_heads)
        if embed_dim < 1 or num_heads < 1 or embed_dim % num_heads != 0:
            raise InvalidArgument(
                f"embed_dim is {embed_dim}, num_heads is {num_heads}: embed_dim must be a multiple of num_heads",
                "embed_dim",
            )
        self.embed_dim = embed_dim
        self.num_heads = num_heads
        self.head_dim = embed_dim // num_heads
        self.gamma_init = gamma_init
        self.attention = DilatedAttention(
            segment_lengths, dilation_rates, attention_dropout=check_dropout("dropout", dropout), **pool_arguments
        )
        groups = len(self.attention.segment_lengths)
        if num_heads < groups:
            raise InvalidArgument(
                f"num_heads is {num_heads}, segment_lengths has {groups} entries: give at least one head for each",
                "num_heads",
            )
        self._make_projections(bias, placement)
        self.norm = nn.LayerNorm(embed_dim, eps=layer_norm_eps, **placement) if layer_norm else None
        self.out_proj = nn.Linear(embed_dim, embed_dim, bias=bias, **placement)
        self._reset_parameters()

    def _make_projections(self, bias: bool, placement: dict[str, Any]) -> None:
        raise NotImplementedError

    def _projection_weights(self) -> tuple[Tensor, Tensor, Tensor]:
        raise NotImplementedError

    def _project(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        raise NotImplementedError

    def _reset_parameters(self) -> None:
        query_weight, key_weight, value_weight = self._projection_weights()
        nn.init.xavier_normal_(query_weight)
        nn.init.xavier_normal_(key_weight)
        nn.init.xavier_normal_(value_weight, gain=self.gamma_init)
        nn.init.xavier_normal_(self.out_proj.weight, gain=self.gamma_init)
        for module in self.children():
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)

    def _check(self, name: str, tensor: Tensor, like: Tensor) -> None:
        if tensor.dim() != 3 or tensor.shape[2] != self.embed_dim:
            raise InvalidArgument(
                f"{name} has shape {list(tensor.shape)}: give [batch, tokens, embed_dim = {self.embed_dim}]", name
            )
        if tensor.shape != like.shape:
            raise InvalidArgument(
                f"{name} has shape {list(tensor.shape)}, query has {list(like.shape)}: they must be equal", name
            )
        if tensor.device != like.device:
            raise InvalidArgument(
                f"{name} is on {tensor.device}, query is on {like.device}: move them to one device", name
            )
        if type(self.out_proj) is not nn.Linear:
            return  # somebody's own layer: it may take other types
        weight = self.out_proj.weight
        if tensor.device != weight.device:
            raise InvalidArgument(
                f"{name} is on {tensor.device}, the module is on {weight.device}: move one of them", name
            )
        if tensor.dtype != weight.dtype and not torch.is_autocast_enabled(tensor.device.type):
            raise InvalidArgument(
                f"{name} is {tensor.dtype}, the module is {weight.dtype}: convert one of them, or use torch.autocast",
                name,
            )

    def forward(
        self,
        query: Tensor,
        key: Tensor | None = None,
        value: Tensor | None = None,
        key_padding_mask: Tensor | bool | None = None,
        need_weights: bool = False,
        attn_mask: Tensor | None = None,
        is_causal: bool = False,
        average_attn_weights: bool = True,
    ) -> tuple[Tensor, None]:
        """Tensors [batch, tokens, embed_dim]; key and value default to query. Returns (out, None).

        key_padding_mask [batch, tokens]: true where a key is padding (as in nn.MultiheadAttention). attn_mask
        [batch, 1, 1, tokens]: true where a key may be attended (as in scaled_dot_product_attention). A boolean in
        fourth place is is_causal, as in forward(query, key, value, is_causal). Weights are never returned.
        """
        if isinstance(key_padding_mask, bool):
            key_padding_mask, is_causal = None, key_padding_mask
        if need_weights:
            warn_once("need_weights", f"{type(self).__name__}: need_weights has no effect, weights are never formed")
        key = query if key is None else key
        value = query if value is None else value
        for name, tensor in (("query", query), ("key", key), ("value", value)):
            self._check(name, tensor, query)
        batch, tokens, _ = query.shape

        mask = key_mask("attn_mask", attn_mask, batch, tokens, two_dimensional=False)
        padding = key_mask("key_padding_mask", key_padding_mask, batch, tokens)
        if padding is not None:
            mask = ~padding if mask is None else mask & ~padding

        split = (batch, tokens, self.num_heads, self.head_dim)
        projected = (x.view(split) for x in self._project(query, key, value))
        out = self.attention(*projected, is_causal=is_causal, attention_mask=mask)
        return self._finish(out.reshape(batch, tokens, self.embed_dim)), None

    def _finish(self, out: Tensor) -> Tensor:
        return self.out_proj(out if self.norm is None else inner_norm(self.norm, out))

    def extra_repr(self) -> str:
        return f"embed_dim={self.embed_dim}, num_heads={self.num_heads}"


class MultiheadDilatedAttention(_Multihead):
    """Multihead dilated attention with separate projections q_proj, k_proj, v_proj, then norm and out_proj.

    Note the order of the lists: dilation_rates before segment_lengths. dropout acts on attention, in training only.
    gamma_init is the gain of value and output projection (MAGNETO). op is accepted for compatibility.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dilation_rates: Sequence[int],
        segment_lengths: Sequence[int],
        dropout: float = 0.0,
        bias: bool = True,
        layer_norm: bool = True,
        layer_norm_eps: float = 1e-5,
        gamma_init: float = 1.0,
        device: Any = None,
        dtype: torch.dtype | None = None,
        op: Any = None,
        **pool_arguments: Any,
    ) -> None:
        super().__init__(
            embed_dim, num_heads, dilation_rates, segment_lengths, dropout, bias, layer_norm, layer_norm_eps,
            gamma_init, {"device": device, "dtype": dtype}, pool_arguments,
        )  # fmt: skip

    def _make_projections(self, bias: bool, placement: dict[str, Any]) -> None:
        self.q_proj = nn.Linear(self.embed_dim, self.embed_dim, bias=bias, **placement)
        self.k_proj = nn.Linear(self.embed_dim, self.embed_dim, bias=bias, **placement)
        self.v_proj = nn.Linear(self.embed_dim, self.embed_dim, bias=bias, **placement)

    def _projection_weights(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.q_proj.weight, self.k_proj.weight, self.v_proj.weight

    def _project(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        query, key, value = autocast_once(query, key, value)
        return self.q_proj(query), self.k_proj(key), self.v_proj(value)


class ImprovedMultiheadDilatedAttention(_Multihead):
    """The same computation with one fused projection qkv_proj, whose rows are query, key and value in that order."""

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dilation_rates: Sequence[int],
        segment_lengths: Sequence[int],
        dropout: float = 0.0,
        bias: bool = True,
        layer_norm: bool = True,
        layer_norm_eps: float = 1e-5,
        gamma_init: float = 1.0,
        device: Any = None,
        dtype: torch.dtype | None = None,
        use_tf32: bool = True,
        **pool_arguments: Any,
    ) -> None:
        super().__init__(
            embed_dim, num_heads, dilation_rates, segment_lengths, dropout, bias, layer_norm, layer_norm_eps,
            gamma_init, {"device": device, "dtype": dtype}, pool_arguments,
        )  # fmt: skip
        self.attention.allow_tf32 = bool(use_tf32)

    def _make_projections(self, bias: bool, placement: dict[str, Any]) -> None:
        self.qkv_proj = nn.Linear(self.embed_dim, 3 * self.embed_dim, bias=bias, **placement)

    def _projection_weights(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.qkv_proj.weight.chunk(3)

    def _project(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        if key is query and value is query:
            return self.qkv_proj(query).chunk(3, dim=-1)  # views: the operator reads them in place
        biases = (None,) * 3 if self.qkv_proj.bias is None else self.qkv_proj.bias.chunk(3)
        weights = self.qkv_proj.weight.chunk(3)
        return tuple(map(functional.linear, (query, key, value), weights, biases))
