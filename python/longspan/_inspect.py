"""Looking at attention: probabilities of the blocks that attend, and what every key receives."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from . import _longspan
from ._errors import InvalidArgument
from ._longspan import BlockMask, Pattern
from ._operator import _call_data, _is_torch, _prepared
from ._patterns import compiled


def _on_host(array: Any) -> Any:
    """Inspection computes on the host; CUDA tensors are copied."""
    return array.detach().cpu() if _is_torch(array) else array


def _like(array: np.ndarray, q: Any) -> Any:
    if not _is_torch(q):
        return array
    import torch

    return torch.from_numpy(array).to(q.device)


def _run(
    function: Any, pattern: Any, causal: bool, scale: float | None, q: Any, k: Any, data: tuple, *arguments: Any
) -> Any:
    """Calls the compiled module with everything on the host, which lives as long as the call."""
    for name, array in (("q", q), ("k", k)):
        if getattr(array, "ndim", 0) != 4:
            raise InvalidArgument(f"{name} needs 4 dimensions: give [batch, tokens, heads, head_dim]", name)
    held = [_on_host(array) for array in (q, k, *data)]
    operator = compiled(pattern, causal, scale, None, 0.0, False, False, False, None)
    return function(operator, _prepared("q", held[0]), _prepared("k", held[1]), *_call_data(*held[2:]), *arguments)


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

    Memory grows with the pairs that attend; attention_received stays linear in the tokens."""
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
    a forward and a backward, and memory linear in the tokens."""
    sums = _run(
        _longspan.attention_received, pattern, causal, scale, q, k, (lengths, key_mask, alibi_slopes), query_ranges
    )
    return _like(sums, q)


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
