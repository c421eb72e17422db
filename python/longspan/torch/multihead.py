"""Drop-ins for MultiheadDilatedAttention and ImprovedMultiheadDilatedAttention: projections around the one operator."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from .._errors import invalid
from .._named import flag, refused
from .dilated import DilatedAttention, ImprovedDilatedAttention
from .options import at_least_zero, autocast_once, boolean_padding, check_dropout, hooked, inner_norm
from .options import integer, key_mask, made_from, surely, warn_once
from .projected import EAGER_DEVICES, FEWEST_ROWS, projected_attention

_PLAIN_TENSORS = (Tensor, nn.Parameter)


@dataclass
class Heads:
    embed_dim: int
    num_heads: int


@dataclass
class _RatesFirst:
    dilation_rates: Sequence[int]
    segment_lengths: Sequence[int]


@dataclass
class Layers:
    dropout: float = 0.0
    bias: bool = True
    layer_norm: bool = True
    layer_norm_eps: float = 1e-5
    gamma_init: float = 1.0
    device: Any = None
    dtype: torch.dtype | None = None


@dataclass
class MultiheadArguments(Layers, _RatesFirst, Heads):
    """What the multihead classes take, dilation_rates before segment_lengths."""


@dataclass
class PlainArguments(MultiheadArguments):
    op: Any = None


@dataclass
class ImprovedArguments(MultiheadArguments):
    use_tf32: bool = True


class _Multihead(nn.Module):
    """What both multihead classes share: checks, projections, the attention, the norm before the output projection
    (MAGNETO), and a forward that takes the calls of both older packages."""

    #: Linear layers for query, key and value: one each, or one whose rows are all three in that order.
    _PROJECTIONS: tuple[str, ...] = ("q_proj", "k_proj", "v_proj")

    def __init__(self, arguments: Any) -> None:
        """arguments: a MultiheadArguments, or one with the lists in the other order."""
        super().__init__()
        #: Whether tensors are [batch, tokens, embed_dim]; False: [tokens, batch, embed_dim], as layers of torch that were made
        #: without batch_first pass them.
        self.batch_first = True
        embed_dim, num_heads = integer("embed_dim", arguments.embed_dim), integer("num_heads", arguments.num_heads)
        if embed_dim < 1 or num_heads < 1 or embed_dim % num_heads != 0:
            raise invalid(
                "embed_dim", f"is {embed_dim}, num_heads is {num_heads}: embed_dim must be a multiple of num_heads"
            )
        self.embed_dim = embed_dim
        self.num_heads = num_heads
        self.head_dim = embed_dim // num_heads
        self.gamma_init = at_least_zero("gamma_init", arguments.gamma_init)
        dropout = check_dropout("dropout", arguments.dropout)
        self.attention = DilatedAttention(
            arguments.segment_lengths, arguments.dilation_rates, attention_dropout=dropout
        )  # fmt: skip
        groups = len(self.attention.segment_lengths)
        if num_heads < groups:
            raise invalid(
                "num_heads", f"is {num_heads}, segment_lengths has {groups} entries: give at least one head for each"
            )
        bias, placement = flag("bias", arguments.bias), {"device": arguments.device, "dtype": arguments.dtype}
        self._make_projections(bias, placement)
        epsilon, norm = at_least_zero("layer_norm_eps", arguments.layer_norm_eps), flag("layer_norm", arguments.layer_norm)
        self.norm = nn.LayerNorm(embed_dim, eps=epsilon, **placement) if norm else None
        self.out_proj = nn.Linear(embed_dim, embed_dim, bias=bias, **placement)
        self._reset_parameters()

    def _make_projections(self, bias: bool, placement: dict[str, Any]) -> None:
        each = 3 // len(self._PROJECTIONS)
        for name in self._PROJECTIONS:
            setattr(self, name, nn.Linear(self.embed_dim, each * self.embed_dim, bias=bias, **placement))

    def _layers(self) -> list[nn.Linear]:
        return [getattr(self, name) for name in self._PROJECTIONS]

    def _projection_weights(self) -> tuple[Tensor, Tensor, Tensor]:
        layers = self._layers()
        return tuple(part for layer in layers for part in layer.weight.chunk(3 // len(layers)))

    def _projection_biases(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        layers = self._layers()
        if layers[0].bias is None:
            return None, None, None
        return tuple(part for layer in layers for part in layer.bias.chunk(3 // len(layers)))

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        """Takes one fused projection for three, and three for one."""
        three, one = ("q_proj", "k_proj", "v_proj"), "qkv_proj"
        for kind in ("weight", "bias"):
            parts = [f"{prefix}{name}.{kind}" for name in three]
            whole = f"{prefix}{one}.{kind}"
            if one in self._PROJECTIONS and all(part in state_dict for part in parts):
                state_dict[whole] = torch.cat([state_dict.pop(part) for part in parts])
            elif one not in self._PROJECTIONS and whole in state_dict:
                state_dict.update(zip(parts, state_dict.pop(whole).chunk(3)))
        super()._load_from_state_dict(state_dict, prefix, *rest)

    # torch's transformer layers ask these of self_attn in evaluation, where they have a kernel of their own for dense
    # attention. The second says that it is not to be used; the others are what it would read.
    _qkv_same_embed_dim = False

    @property
    def in_proj_weight(self) -> Tensor:
        """Rows of query, key and value projections, in that order."""
        return torch.cat(self._projection_weights())

    @property
    def in_proj_bias(self) -> Tensor:
        biases = self._projection_biases()
        return self.out_proj.weight.new_zeros(3 * self.embed_dim) if biases[0] is None else torch.cat(biases)

    def _project(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        raise NotImplementedError

    def _runs_together(self, query: Tensor, key: Tensor, value: Tensor) -> bool:
        """Whether projections and attention may be one call: it pays, and nobody's own layers or hooks are among them."""
        fewest = FEWEST_ROWS.get(query.device.type)
        if fewest is None or key is not value or query.dtype is torch.float64:
            return False
        if query.device.type not in EAGER_DEVICES and not torch.compiler.is_compiling():
            return False
        if not surely(query.shape[0] * query.shape[1] >= fewest):
            return False
        if type(self.attention) not in (DilatedAttention, ImprovedDilatedAttention) or hooked(self.attention):
            return False
        layers = self._layers()
        return all(
            type(layer) is nn.Linear and type(layer.weight) in _PLAIN_TENSORS and not hooked(layer)
            and (layer.bias is None) == (layers[0].bias is None)
            for layer in layers
        )  # fmt: skip

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
            raise invalid(name, f"has shape {list(tensor.shape)}: give [batch, tokens, embed_dim = {self.embed_dim}]")
        if tensor.shape != like.shape:
            raise invalid(name, f"has shape {list(tensor.shape)}, query has {list(like.shape)}: they must be equal")
        if tensor.device != like.device:
            raise invalid(name, f"is on {tensor.device}, query is on {like.device}: move them to one device")
        if type(self.out_proj) is not nn.Linear:
            return  # somebody's own layer: it may take other types
        weight = self.out_proj.weight
        if tensor.device != weight.device:
            raise invalid(name, f"is on {tensor.device}, the module is on {weight.device}: move one of them")
        if tensor.dtype != weight.dtype and not torch.is_autocast_enabled(tensor.device.type):
            raise invalid(
                name, f"is {tensor.dtype}, the module is {weight.dtype}: convert one of them, or use torch.autocast"
            )

    def forward(
        self, query: Tensor, key: Tensor | None = None, value: Tensor | None = None,
        key_padding_mask: Tensor | bool | None = None, need_weights: bool = False, attn_mask: Tensor | None = None,
        is_causal: bool = False, average_attn_weights: bool = True,
    ) -> tuple[Tensor, None]:  # fmt: skip
        """Tensors [batch, tokens, embed_dim] (but see batch_first); key and value default to query. Returns (out, None).

        key_padding_mask [batch, tokens]: true, or -inf, where a key is padding (as in nn.MultiheadAttention). attn_mask
        [batch, 1, 1, tokens]: true where a key may be attended (as in scaled_dot_product_attention); or, with is_causal, the
        causal mask [tokens, tokens]. A boolean in fourth place is is_causal, as in forward(query, key, value, is_causal).
        Weights are never returned. A nested tensor may be query, key and value at once.
        """
        if isinstance(key_padding_mask, bool):
            key_padding_mask, is_causal = None, key_padding_mask
        if need_weights:
            warn_once("need_weights", f"{type(self).__name__}: need_weights has no effect, weights are never formed")
        key = query if key is None else key
        value = query if value is None else value
        for name, tensor in (("query", query), ("key", key), ("value", value)):
            if not isinstance(tensor, Tensor):
                raise refused(name, tensor, "a torch tensor")
        if is_causal is not True and is_causal is not False:
            is_causal = flag("is_causal", is_causal)
        if query.is_nested:
            return self._forward_nested(query, key, value, is_causal), None
        if not self.batch_first:
            same_key, same_value = key is query, value is key
            query = query.transpose(0, 1)
            key = query if same_key else key.transpose(0, 1)
            value = key if same_value else value.transpose(0, 1)
        for name, tensor in (("query", query), ("key", key), ("value", value)):
            self._check(name, tensor, query)
        batch, tokens, _ = query.shape

        square = isinstance(attn_mask, Tensor) and attn_mask.dim() in (2, 3) and attn_mask.shape[-2:] == (tokens, tokens)
        if is_causal and square:
            attn_mask = None  # torch's layers say the same twice
        mask = key_mask("attn_mask", attn_mask, batch, tokens, two_dimensional=False)
        padding = key_mask("key_padding_mask", boolean_padding(key_padding_mask), batch, tokens)
        if padding is not None:
            mask = ~padding if mask is None else mask & ~padding

        if self._runs_together(query, key, value):
            out = projected_attention(
                query, key, self._projection_weights(), self._projection_biases(), self.attention, self.num_heads, is_causal, mask
            )
        else:
            split = (batch, tokens, self.num_heads, self.head_dim)
            projected = (x.view(split) for x in self._project(query, key, value))
            out = self.attention(*projected, is_causal=is_causal, attention_mask=mask)
        out = self._finish(out.reshape(batch, tokens, self.embed_dim))
        return out if self.batch_first else out.transpose(0, 1), None

    def _forward_nested(self, query: Tensor, key: Tensor, value: Tensor, is_causal: bool) -> Tensor:
        if key is not query or value is not query or not self.batch_first:
            raise invalid("query", "is nested: give the same tensor as key and value, batch first")
        lengths = torch.tensor([len(one) for one in query.unbind()], device=query.device)
        padded = torch.nested.to_padded_tensor(query, 0.0)
        padding = torch.arange(padded.shape[1], device=query.device) >= lengths[:, None]
        out, _ = self.forward(padded, key_padding_mask=padding, is_causal=is_causal)
        rows = [one[:length] for one, length in zip(out, lengths.tolist())]
        return torch.nested.as_nested_tensor(rows, layout=query.layout)

    def _finish(self, out: Tensor) -> Tensor:
        return self.out_proj(out if self.norm is None else inner_norm(self.norm, out))

    def extra_repr(self) -> str:
        return f"embed_dim={self.embed_dim}, num_heads={self.num_heads}"


class MultiheadDilatedAttention(_Multihead):
    """Multihead dilated attention with separate projections q_proj, k_proj, v_proj, then norm and out_proj.

    Note the order of the lists: dilation_rates before segment_lengths. dropout acts on attention, in training only.
    gamma_init is the gain of value and output projection (MAGNETO). op is accepted for compatibility.
    """

    @made_from(PlainArguments)
    def __init__(self, arguments: PlainArguments) -> None:
        super().__init__(arguments)

    def _project(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        cast = autocast_once(query)
        cast_key = cast if key is query else autocast_once(key)
        cast_value = cast if value is query else cast_key if value is key else autocast_once(value)
        return self.q_proj(cast), self.k_proj(cast_key), self.v_proj(cast_value)


class ImprovedMultiheadDilatedAttention(_Multihead):
    """The same computation with one fused projection qkv_proj, whose rows are query, key and value in that order."""

    _PROJECTIONS = ("qkv_proj",)

    @made_from(ImprovedArguments)
    def __init__(self, arguments: ImprovedArguments) -> None:
        super().__init__(arguments)
        self.attention.allow_tf32 = flag("use_tf32", arguments.use_tf32)

    def _project(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        if key is query and value is query:
            return self.qkv_proj(query).chunk(3, dim=-1)  # views: the operator reads them in place
        return tuple(map(functional.linear, (query, key, value), self._projection_weights(), self._projection_biases()))
