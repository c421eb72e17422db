"""Patterns, plans and the kernels that can run them."""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypedDict

import numpy as np

from . import _longspan
from ._errors import invalid, warn_once
from ._named import constant, flag, refused, shown
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

__all__ = [
    "adaptive", "bigbird", "block_sparse", "dense", "dilated", "dilated_sparse", "draw", "global_local",
    "hierarchical", "info", "kernels", "local_window", "longformer", "longnet", "plan", "random_blocks", "strided",
]  # fmt: skip

if TYPE_CHECKING:
    from typing_extensions import Unpack


#: Of hierarchical: (stride, window), -1 for everything.
LEVELS = ((64, 256), (256, 1024), (1024, -1))


@constant
def dense() -> Pattern:
    """Every position sees every position (or every earlier one, if causal)."""
    return Pattern.dense()


@constant
def dilated(segments: Sequence[int], dilations: Sequence[int]) -> Pattern:
    """Dilated attention by head groups: branch i owns the i-th contiguous range of heads."""
    return noticed(Pattern.dilated(segments, dilations))


@constant
def longnet(
    segments: Sequence[int], dilations: Sequence[int], *, phase: str = "paper", pad_keys: bool = False
) -> Pattern:
    """LongNet: every branch on all heads, mixed by one softmax. phase is 'paper' or 'torchscale'; pad_keys attends to
    torchscale's zero padding, as published weights (Prov-GigaPath, LongViT) were trained."""
    return noticed(Pattern.longnet(segments, dilations, phase=phase)).with_pad_keys(flag("pad_keys", pad_keys))


def noticed(pattern: Pattern) -> Pattern:
    """The pattern; says so where a dilation exceeds its segment, which is what swapped lists look like."""
    for segment, dilation in pattern.branches:
        if segment is not None and dilation > segment:
            warn_once(
                f"swapped {pattern}",
                f"pattern '{pattern}' has dilation {dilation} in segments of {segment}: such a strand has one row at most, "
                "which attends to itself alone. Were the lists swapped? Segments come first, then dilations",
            )
            break
    return pattern


@constant
def block_sparse(mask: Any, block_size: int = 64) -> Pattern:
    """One branch over the whole sequence with a block mask: a BlockPattern or its text (such as
    'local_window(512)+random(0.1,7)'), a BlockMask, or booleans [blocks, blocks] or [heads, blocks, blocks]."""
    return Pattern.block_sparse(as_blocks(mask, block_size))


@constant
def as_blocks(mask: Any, block_size: int = 64) -> BlockPattern:
    """What block_sparse takes, as a BlockPattern. block_size serves booleans only: everything else knows its own."""
    if isinstance(mask, BlockPattern):
        return mask
    if isinstance(mask, BlockMask):
        return BlockPattern(mask)
    if isinstance(mask, str):
        return BlockPattern.parse(mask)
    wanted = "booleans [blocks, blocks], a BlockMask, a BlockPattern or its text"
    try:
        array = np.asarray(mask)
    except Exception:  # whatever an object's own conversion raises
        raise refused("mask", mask, wanted) from None
    if array.dtype != np.bool_:
        raise invalid("mask", f"is {shown(mask)} of {array.dtype}: give {wanted}")
    return BlockPattern(BlockMask(np.ascontiguousarray(array), block_size))


@constant
def local_window(window: int, block_size: int = 64) -> BlockPattern:
    """Block rows see blocks at most (window / block_size) / 2 away (whole divisions)."""
    return BlockPattern.local_window(window, block_size)


@constant
def strided(stride: int, block_size: int = 64) -> BlockPattern:
    """Block rows see every (stride / block_size)-th block, counted from themselves."""
    return BlockPattern.strided(stride, block_size)


@constant
def dilated_sparse(rates: Sequence[int], block_size: int = 64) -> BlockPattern:
    """Block rows see themselves and the blocks that are one of `rates` blocks away."""
    return BlockPattern.dilated_sparse(rates, block_size)


@constant
def global_local(global_tokens: int, window: int, block_size: int = 64) -> BlockPattern:
    """A local window; the first global_tokens see everything and are seen by everything."""
    return BlockPattern.global_local(global_tokens, window, block_size)


@constant
def hierarchical(levels: Sequence[tuple[int, int]] = LEVELS, block_size: int = 64) -> BlockPattern:
    """(stride, window) of each level in tokens: every stride-th row sees a window, or everything if window is -1."""
    return BlockPattern.hierarchical(levels, block_size)


@constant
def random_blocks(density: float, seed: int = 0, block_size: int = 64) -> BlockPattern:
    """Per head and block row: the diagonal, and blocks drawn at random; density is the fraction kept."""
    return BlockPattern.random(density, seed, block_size)


@constant
def adaptive(density: float, block_size: int = 64) -> BlockPattern:
    """Per call, batch entry and head: the blocks whose mean key fits the mean query best; density is kept."""
    return BlockPattern.adaptive(density, block_size)


@constant
def bigbird(
    global_tokens: int | None = None, window: int | None = None, density: float = 0.05, seed: int = 0,
    block_size: int = 64,
) -> BlockPattern:  # fmt: skip
    """Global tokens (default: two blocks, or all there are), a local window (default: three blocks) and random blocks."""
    return BlockPattern.bigbird(
        -1 if global_tokens is None else global_tokens, -1 if window is None else window, density, seed, block_size
    )


@constant
def longformer(window: int = 512, global_tokens: int | None = None, block_size: int = 64) -> BlockPattern:
    """A local window and some global tokens (default: 64, or all there are)."""
    if global_tokens is None:
        return BlockPattern.parse(f"block={block_size} longformer({window})")
    return BlockPattern.global_local(global_tokens, window, block_size)


def draw(
    pattern: Pattern | BlockPattern | str | None = None, tokens: int = 4096, *, heads: int = 8, head: int = 0,
    causal: bool = False, cells: int | None = None, svg: bool = False, ascii: bool = False,
) -> str:  # fmt: skip
    """A picture of one head of a pattern, queries down and keys across: text, or an SVG drawing."""
    made = plan(pattern, options=Options(causal=causal), tokens=tokens, heads=heads, head_dim=1)
    if flag("svg", svg):
        return _longspan.draw_svg(made, head, 128 if cells is None else cells)
    return _longspan.draw(made, head, 48 if cells is None else cells, ascii)


@constant
def as_pattern(pattern: Pattern | BlockPattern | BlockMask | str | None) -> Pattern:
    """None is dense attention, text is parsed."""
    if pattern is None:
        return Pattern.dense()
    if isinstance(pattern, str):
        return noticed(parsed(pattern))
    if isinstance(pattern, Pattern):
        return noticed(pattern)
    if isinstance(pattern, (BlockPattern, BlockMask)):
        return Pattern.block_sparse(as_blocks(pattern))
    raise invalid(
        "pattern", f"is {shown(pattern)}: give a longspan.Pattern, a BlockPattern, the text of one, or None for dense"
    )


def parsed(text: str) -> Pattern:
    """The pattern whose str() is text."""
    return Pattern.parse(text)


def whole_seed(seed: Any) -> int:
    try:
        result = operator.index(seed)
    except TypeError:
        raise refused("seed", seed, "a whole number of 64 bits") from None
    if not -(2**63) <= result < 2**64:
        raise refused("seed", seed, "a whole number of 64 bits")
    return result


def compiled(pattern: Pattern | BlockPattern | str | None, **options: Any) -> Attention:
    """The Attention for these options; made once for each combination."""
    try:
        return cached(pattern, **options)
    except TypeError as error:
        if "unhashable" not in str(error):
            raise
        return cached.__wrapped__(pattern, **options)  # which says what is wrong with it


@functools.lru_cache(maxsize=512)
def cached(pattern: Pattern | BlockPattern | str | None, **options: Any) -> Attention:
    for name in ("causal", "deterministic", "detached_mix", "allow_tf32"):
        if name in options:
            options[name] = flag(name, options[name])
    if options.get("kernel", "") is None:
        del options["kernel"]
    return Attention(as_pattern(pattern), Options(**options))


class ProblemArguments(TypedDict, total=False):
    """What a plan is made for."""

    tokens: int
    heads: int
    head_dim: int
    batch: int
    kv_heads: int | None
    query_rows: int | None
    dtype: str
    device: str
    lengths: bool
    key_mask: bool
    alibi: bool


def plan(
    pattern: Pattern | BlockPattern | str | None = None, *, options: Options | None = None,
    **problem: Unpack[ProblemArguments],
) -> Plan:  # fmt: skip
    """The plan of a pattern for a problem: tokens, heads, head_dim and optionally batch, kv_heads, query_rows, dtype
    ('f32', 'bf16', 'f16', 'f64'), device, lengths, key_mask, alibi (the last three: whether a call has them)."""
    return Attention(as_pattern(pattern), Options() if options is None else options).plan(**problem)  # type: ignore[misc]


def kernels(
    pattern: Pattern | BlockPattern | str | None = None, *, pass_: str = "forward", options: Options | None = None,
    **problem: Unpack[ProblemArguments],
) -> list[tuple[str, bool, str]]:  # fmt: skip
    """(name, can it run the problem, why not) for every kernel of this build, fastest first. The default problem is
    dense attention over 1,024 tokens, 8 heads of 64, float32."""
    defaults: ProblemArguments = {"tokens": 1024, "heads": 8, "head_dim": 64}
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
