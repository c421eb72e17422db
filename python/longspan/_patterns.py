"""Patterns, plans and the kernels that can run them."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

from ._errors import InvalidArgument
from ._longspan import Attention, BlockMask, Options, Pattern, Plan, commit, gpus, num_threads, version, why_no_gpu


def dense() -> Pattern:
    """Every position sees every position (or every earlier one, if causal)."""
    return Pattern.dense()


def dilated(segments: Sequence[int], dilations: Sequence[int]) -> Pattern:
    """Dilated attention by head groups: branch i owns the i-th contiguous range of heads."""
    return Pattern.dilated(list(segments), list(dilations))


def longnet(
    segments: Sequence[int], dilations: Sequence[int], *, phase: str = "paper", pad_keys: bool = False
) -> Pattern:
    """LongNet: every branch on all heads, mixed by one softmax. phase is 'paper' or 'torchscale'; pad_keys attends to
    torchscale's zero padding, as published weights (Prov-GigaPath, LongViT) were trained."""
    pattern = Pattern.longnet(list(segments), list(dilations), phase=phase)
    return pattern.with_pad_keys() if pad_keys else pattern


def block_sparse(mask: Any, block_size: int = 64) -> Pattern:
    """One branch over the whole sequence with a block mask: a BlockMask, or booleans [blocks, blocks] or
    [heads, blocks, blocks]."""
    if not isinstance(mask, BlockMask):
        mask = BlockMask(np.ascontiguousarray(mask, dtype=bool), block_size)
    return Pattern.block_sparse(mask)


def as_pattern(pattern: Pattern | str | None) -> Pattern:
    """None is dense attention, text is parsed."""
    if pattern is None:
        return Pattern.dense()
    if isinstance(pattern, str):
        return Pattern.parse(pattern)
    if isinstance(pattern, Pattern):
        return pattern
    raise InvalidArgument(
        f"pattern is {type(pattern).__name__}: give a longspan.Pattern, its text, or None for dense", "pattern"
    )


def compiled(pattern: Pattern | str | None, *options: object) -> Attention:
    """The Attention for these options; made once for each combination."""
    # Looked at first, since what is no pattern may not even be hashable.
    if not isinstance(pattern, (str, Pattern)):
        pattern = as_pattern(pattern)
    return _compiled(pattern, *options)  # type: ignore[arg-type]


@functools.lru_cache(maxsize=512)
def _compiled(
    pattern: Pattern | str,
    causal: bool,
    scale: float | None,
    output_scale: float | None,
    dropout: float,
    deterministic: bool,
    detached_mix: bool,
    allow_tf32: bool,
    kernel: str | None,
) -> Attention:
    options = Options(
        causal=causal,
        scale=scale,
        output_scale=output_scale,
        dropout=dropout,
        deterministic=deterministic,
        detached_mix=detached_mix,
        allow_tf32=allow_tf32,
        kernel=kernel or "",
    )
    return Attention(as_pattern(pattern), options)


def plan(pattern: Pattern | str | None = None, *, options: Options | None = None, **problem: Any) -> Plan:
    """The plan of a pattern for a problem: tokens, heads, head_dim and optionally batch, kv_heads, query_rows, dtype
    ('f32', 'bf16', 'f16', 'f64'), device, lengths, key_mask, alibi (the last three: whether a call has them)."""
    return Attention(as_pattern(pattern), options or Options()).plan(**problem)


def kernels(
    pattern: Pattern | str | None = None, *, pass_: str = "forward", options: Options | None = None, **problem: Any
) -> list[tuple[str, bool, str]]:
    """(name, can it run the problem, why not) for every kernel of this build, fastest first. The default problem is
    dense attention over 1,024 tokens, 8 heads of 64, float32."""
    defaults = {"tokens": 1024, "heads": 8, "head_dim": 64}
    return plan(pattern, options=options, **(defaults | problem)).verdicts(pass_)


def info() -> dict[str, Any]:
    """Version, commit, threads, GPUs and every kernel with its verdict on a plain problem of the CPU."""
    return {
        "version": version(),
        "commit": commit(),
        "threads": num_threads(),
        "gpus": gpus(),
        "why_no_gpu": why_no_gpu(),
        "kernels": [
            {"name": name, "runs": runs, "why_not": reason} for name, runs, reason in kernels(dtype="f32")
        ],
    }
