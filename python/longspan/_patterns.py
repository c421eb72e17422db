"""Patterns, plans and the kernels that can run them."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

from ._errors import InvalidArgument
from . import _longspan
from ._longspan import (
    Attention,
    BlockMask,
    BlockPattern,
    Options,
    Pattern,
    Plan,
    commit,
    gpus,
    num_threads,
    version,
    why_no_gpu,
)


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
    """One branch over the whole sequence with a block mask: a BlockPattern or its text (such as
    'local_window(512)+random(0.1,7)'), a BlockMask, or booleans [blocks, blocks] or [heads, blocks, blocks]."""
    return Pattern.block_sparse(as_blocks(mask, block_size))


def as_blocks(mask: Any, block_size: int = 64) -> BlockPattern:
    """What block_sparse takes, as a BlockPattern. block_size serves booleans only: everything else knows its own."""
    if isinstance(mask, BlockPattern):
        return mask
    if isinstance(mask, BlockMask):
        return BlockPattern(mask)
    if isinstance(mask, str):
        return BlockPattern.parse(mask)
    array = np.asarray(mask)
    if array.dtype != np.bool_:
        raise InvalidArgument(
            f"mask is {type(mask).__name__} of {array.dtype}: give booleans, a BlockMask, a BlockPattern or its text",
            "mask",
        )
    return BlockPattern(BlockMask(np.ascontiguousarray(array), block_size))


def local_window(window: int, block_size: int = 64) -> BlockPattern:
    """Block rows see blocks at most (window / block_size) / 2 away (whole divisions)."""
    return BlockPattern.local_window(window, block_size)


def strided(stride: int, block_size: int = 64) -> BlockPattern:
    """Block rows see every (stride / block_size)-th block, counted from themselves."""
    return BlockPattern.strided(stride, block_size)


def dilated_sparse(rates: Sequence[int], block_size: int = 64) -> BlockPattern:
    """Block rows see themselves and the blocks that are one of `rates` blocks away."""
    return BlockPattern.dilated_sparse(list(rates), block_size)


def global_local(global_tokens: int, window: int, block_size: int = 64) -> BlockPattern:
    """A local window; the first global_tokens see everything and are seen by everything."""
    return BlockPattern.global_local(global_tokens, window, block_size)


def hierarchical(
    levels: Sequence[tuple[int, int]] = ((64, 256), (256, 1024), (1024, -1)), block_size: int = 64
) -> BlockPattern:
    """(stride, window) of each level in tokens: every stride-th row sees a window, or everything if window is -1."""
    return BlockPattern.hierarchical([(stride, window) for stride, window in levels], block_size)


def random_blocks(density: float, seed: int = 0, block_size: int = 64) -> BlockPattern:
    """Per head and block row: the diagonal, and blocks drawn at random; density is the fraction kept."""
    return BlockPattern.random(density, seed, block_size)


def adaptive(density: float, block_size: int = 64) -> BlockPattern:
    """Per call, batch entry and head: the blocks whose mean key fits the mean query best; density is kept."""
    return BlockPattern.adaptive(density, block_size)


def bigbird(
    global_tokens: int | None = None,
    window: int | None = None,
    density: float = 0.05,
    seed: int = 0,
    block_size: int = 64,
) -> BlockPattern:
    """Global tokens (default: two blocks, or all there are), a local window (default: three blocks) and random blocks."""
    return BlockPattern.bigbird(
        -1 if global_tokens is None else global_tokens, -1 if window is None else window, density, seed, block_size
    )


def longformer(window: int = 512, global_tokens: int | None = None, block_size: int = 64) -> BlockPattern:
    """A local window and some global tokens (default: 64, or all there are)."""
    if global_tokens is None:
        return BlockPattern.parse(f"block={block_size} longformer({window})")
    return BlockPattern.global_local(global_tokens, window, block_size)


def draw(
    pattern: Pattern | BlockPattern | str | None = None,
    tokens: int = 4096,
    *,
    heads: int = 8,
    head: int = 0,
    causal: bool = False,
    cells: int | None = None,
    svg: bool = False,
    ascii: bool = False,
) -> str:
    """A picture of one head of a pattern, queries down and keys across: text, or an SVG drawing."""
    made = plan(pattern, options=Options(causal=causal), tokens=tokens, heads=heads, head_dim=1)
    if svg:
        return _longspan.draw_svg(made, head, 128 if cells is None else cells)
    return _longspan.draw(made, head, 48 if cells is None else cells, ascii)


def as_pattern(pattern: Pattern | str | None) -> Pattern:
    """None is dense attention, text is parsed."""
    if pattern is None:
        return Pattern.dense()
    if isinstance(pattern, str):
        return Pattern.parse(pattern)
    if isinstance(pattern, Pattern):
        return pattern
    if isinstance(pattern, (BlockPattern, BlockMask)):
        return Pattern.block_sparse(as_blocks(pattern))
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
