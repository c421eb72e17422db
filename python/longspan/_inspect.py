"""Looking at attention: probabilities of the blocks that attend, and what every key receives."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from . import _longspan
from ._diagnosis import diagnosed
from ._errors import InvalidArgument
from ._longspan import BlockMask, BlockPattern, Pattern
from ._operator import Array, call_data, check_arrays, is_torch, new_array, placement, prepared, rows_of
from ._patterns import compiled

__all__ = ["adaptive_mask", "attention_blocks", "attention_received"]


def _like(array: np.ndarray, q: Any) -> Any:
    if not is_torch(q):
        return array
    import torch

    return torch.from_numpy(array).to(q.device)


def _float32(q: Any) -> Any:
    if not is_torch(q):
        return np.float32
    import torch

    return torch.float32


def _run(function: Any, q: Any, k: Any, pattern: Any, more: tuple = (), **arguments: Any) -> Any:
    """Calls the compiled module on arrays where they are."""
    names = ("lengths", "key_mask", "alibi_slopes")
    try:
        check_arrays(False, q=q, k=k)
        operator = compiled(pattern, causal=arguments["causal"], scale=arguments.get("scale"))
        data = call_data(*(arguments.get(name) for name in names))
        q_rows, k_rows = rows_of(q), rows_of(k)  # kept alive: what is prepared is an address
        ranges = arguments["query_ranges"]
        return function(
            operator, prepared("q", q_rows), prepared("k", k_rows), *data, ranges, *more,
            stream=placement(q).get("stream", 0),
        )  # fmt: skip
    except InvalidArgument as error:
        raise diagnosed(error, {"q": q, "k": k, **arguments}) from None


def attention_blocks(
    q: Any, k: Any, pattern: Pattern | BlockPattern | str | None = None, *, causal: bool = False,
    scale: float | None = None, block_size: int | None = None, lengths: Any = None, key_mask: Any = None,
    alibi_slopes: Any = None, query_ranges: Sequence[tuple[int, int]] | None = None,
) -> dict[str, Any]:  # fmt: skip
    """The blocks of the (query, key) square that attend, with their probabilities: a dict of

    block_indices [blocks, 4]: (entry, head, block row, block column); block_values [blocks, block_size, block_size]:
    every covered query row sums to 1 over its blocks; block_size: by default that of the block mask, or 64.

    Memory grows with the pairs that attend, and they are found on the host, wherever the arrays are; attention_received
    stays linear in the tokens and runs where they are."""
    places, values, size = _run(
        _longspan.attention_blocks, q, k, pattern, (0 if block_size is None else block_size,), causal=causal,
        scale=scale, lengths=lengths, key_mask=key_mask, alibi_slopes=alibi_slopes, query_ranges=query_ranges,
    )  # fmt: skip
    return {"block_indices": _like(places, q), "block_values": _like(values, q), "block_size": size}


def attention_received(
    q: Array, k: Array, pattern: Pattern | BlockPattern | str | None = None, *, causal: bool = False,
    scale: float | None = None, lengths: Any = None, key_mask: Any = None, alibi_slopes: Any = None,
    query_ranges: Sequence[tuple[int, int]] | None = None,
) -> Array:  # fmt: skip
    """The total weight every key receives from all queries, float32 [batch, heads, tokens]: what heat maps draw. Costs
    a forward and a backward where the arrays are, and memory linear in the tokens."""
    check_arrays(False, q=q, k=k)
    received = new_array(q, (q.shape[0], q.shape[2], k.shape[1]), _float32(q))
    _run(
        _longspan.attention_received, q, k, pattern, (prepared("received", received),), causal=causal, scale=scale,
        lengths=lengths, key_mask=key_mask, alibi_slopes=alibi_slopes, query_ranges=query_ranges,
    )  # fmt: skip
    return received


def adaptive_mask(
    q: Any, k: Any, pattern: Pattern | BlockPattern | str, *, causal: bool = False, lengths: Any = None,
    key_mask: Any = None, query_ranges: Sequence[tuple[int, int]] | None = None,
) -> BlockMask:  # fmt: skip
    """The blocks an adaptive pattern chooses for these arrays: a mask of batch * heads heads, entry by entry."""
    return _run(
        _longspan.adaptive_mask, q, k, pattern, causal=causal, lengths=lengths, key_mask=key_mask,
        query_ranges=query_ranges,
    )  # fmt: skip
