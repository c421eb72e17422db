"""Looking at attention: probabilities of the blocks that attend, and what every key receives."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from . import _longspan
from ._errors import InvalidArgument
from ._longspan import BlockMask, Pattern
from ._operator import _call_data, _is_torch, _new, _placement, _prepared
from ._patterns import compiled


def _like(array: np.ndarray, q: Any) -> Any:
    if not _is_torch(q):
        return array
    import torch

    return torch.from_numpy(array).to(q.device)


def _float32(q: Any) -> Any:
    if not _is_torch(q):
        return np.float32
    import torch

    return torch.float32


def _run(
    function: Any, pattern: Any, causal: bool, scale: float | None, q: Any, k: Any, data: tuple, *arguments: Any
) -> Any:
    """Calls the compiled module on arrays where they are."""
    for name, array in (("q", q), ("k", k)):
        if getattr(array, "ndim", 0) != 4:
            raise InvalidArgument(f"{name} needs 4 dimensions: give [batch, tokens, heads, head_dim]", name)
    operator = compiled(pattern, causal, scale, None, 0.0, False, False, False, None)
    stream = _placement(q).get("stream", 0)
    return function(operator, _prepared("q", q), _prepared("k", k), *_call_data(*data), *arguments, stream=stream)


def attention_blocks(
    q: Any,
    k: Any,
    pattern: Pattern | str | None = None,
    *,
    causal: bool = False,
    scale: float | None = None,
    block_size: int | None = None,
    lengths: Any = None,
    key_mask: Any = None,
    alibi_slopes: Any = None,
    query_ranges: Sequence[tuple[int, int]] | None = None,
) -> dict[str, Any]:
    """The blocks of the (query, key) square that attend, with their probabilities: a dict of

    block_indices [blocks, 4]: (entry, head, block row, block column); block_values [blocks, block_size, block_size]:
    every covered query row sums to 1 over its blocks; block_size: by default that of the block mask, or 64.

    Memory grows with the pairs that attend, and they are found on the host, wherever the arrays are; attention_received
    stays linear in the tokens and runs where they are."""
    places, values, size = _run(
        _longspan.attention_blocks, pattern, causal, scale, q, k, (lengths, key_mask, alibi_slopes), query_ranges,
        block_size or 0,
    )  # fmt: skip
    return {"block_indices": _like(places, q), "block_values": _like(values, q), "block_size": size}


def attention_received(
    q: Any,
    k: Any,
    pattern: Pattern | str | None = None,
    *,
    causal: bool = False,
    scale: float | None = None,
    lengths: Any = None,
    key_mask: Any = None,
    alibi_slopes: Any = None,
    query_ranges: Sequence[tuple[int, int]] | None = None,
) -> Any:
    """The total weight every key receives from all queries, float32 [batch, heads, tokens]: what heat maps draw. Costs
    a forward and a backward where the arrays are, and memory linear in the tokens."""
    received = None
    if getattr(q, "ndim", 0) == getattr(k, "ndim", 0) == 4:  # else _run says what is wrong
        received = _new(q, (q.shape[0], q.shape[2], k.shape[1]), _float32(q))
    _run(
        _longspan.attention_received, pattern, causal, scale, q, k, (lengths, key_mask, alibi_slopes), query_ranges,
        _prepared("received", received),
    )  # fmt: skip
    return received


def adaptive_mask(
    q: Any,
    k: Any,
    pattern: Pattern | str,
    *,
    causal: bool = False,
    lengths: Any = None,
    key_mask: Any = None,
    query_ranges: Sequence[tuple[int, int]] | None = None,
) -> BlockMask:
    """The blocks an adaptive pattern chooses for these arrays: a mask of batch * heads heads, entry by entry."""
    return _run(_longspan.adaptive_mask, pattern, causal, None, q, k, (lengths, key_mask, None), query_ranges)
