"""FLOPs of the operators for torch.utils.flop_counter, as plans count them: two for each multiplication of a pair that
attends. Lengths and key masks are data, which a count of shapes does not know."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils.flop_counter import register_flop_formula

from .._arguments import Settings
from .._errors import InvalidArgument
from .._patterns import compiled

_ops = torch.ops.longspan
Shape = Sequence[int]


def _pairs_flops(backward: bool, query: Shape, key: Shape, values: Sequence[Any]) -> int:
    """query [batch, rows, heads, head_dim], key [batch, tokens, kv_heads, head_dim]; values: those of Settings."""
    settings = Settings(*values)
    operator = compiled(settings.pattern, **settings.options)
    batch, rows, heads, head_dim = query
    tokens = key[1]

    def total(length: int) -> float:
        if length == 0:
            return 0.0
        plan = operator.plan(tokens=length, heads=heads, head_dim=head_dim, batch=batch, kv_heads=key[2])
        return plan.totals["backward_flops" if backward else "forward_flops"]

    ranges = settings.query_ranges
    if ranges is None:
        return int(total(tokens))
    # Causal rows up to a position attend to what is before it, whatever follows.
    if settings.causal and "long=skip" not in settings.pattern:
        try:
            return int(sum(total(first + count) - total(first) for first, count in zip(ranges[::2], ranges[1::2])))
        except InvalidArgument:  # a mask made for one length
            pass
    return int(total(tokens) * rows / max(tokens, 1))


def _attention(query: Shape, key: Shape, value: Shape, *settings: Any, out_shape: Any = None) -> int:
    return _pairs_flops(False, query, key, settings)


def _attention_backward(
    grad_out: Shape, grad_lse: Any, query: Shape, key: Shape, value: Shape, out: Shape, lse: Shape, *settings: Any,
    out_shape: Any = None,
) -> int:  # fmt: skip
    return _pairs_flops(True, query, key, settings)


def _query_and_key(stacked: Shape, keys: Shape | None) -> tuple[Shape, Shape]:
    """Of [batch, tokens, heads, parts, head_dim]."""
    query = [*stacked[:3], stacked[4]]
    return query, query if keys is None else [*keys[:3], keys[4]]


def _stacked_attention(stacked: Shape, keys: Shape | None, *settings: Any, out_shape: Any = None) -> int:
    return _pairs_flops(False, *_query_and_key(stacked, keys), settings)


def _stacked_attention_backward(
    grad_out: Shape, stacked: Shape, keys: Shape | None, out: Shape, lse: Shape, *settings: Any, out_shape: Any = None
) -> int:
    return _pairs_flops(True, *_query_and_key(stacked, keys), settings)


def _product_flops(rows: int, features: int, strands: Sequence[int]) -> int:
    """Of one matrix product; strands as strand_linear has them."""
    blocks = zip(strands[::3], strands[1::3], strands[2::3])
    return sum(2 * columns * features * max(0, -(-(rows - row) // step)) for columns, row, step in blocks)


def _strand_linear(x: Shape, weight: Shape, features: int, strands: Sequence[int], out_shape: Any = None) -> int:
    return _product_flops(x[0], features, strands)


def _strand_linear_backward(
    grad: Shape, x: Shape | None, weight: Shape | None, features: int, strands: Sequence[int], out_shape: Any = None
) -> int:
    return ((x is not None) + (weight is not None)) * _product_flops(grad[0], features, strands)


for _formula in (
    _attention, _attention_backward, _stacked_attention, _stacked_attention_backward, _strand_linear,
    _strand_linear_backward,
):  # fmt: skip
    register_flop_formula(getattr(_ops, _formula.__name__[1:]))(_formula)
