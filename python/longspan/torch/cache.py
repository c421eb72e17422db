"""Decoding: what later positions can still attend to, and nothing else.

A position of a branch attends to the rows of its strand in its own segment. So a branch keeps those rows of the current
segment only, packed; when the next segment begins, they are overwritten. In strand coordinates a step is dense causal
attention of the new rows over all rows kept, which is the operator with a query range. Where several branches cover a
position (LongNet's own assignment), their results are mixed by their softmax sums.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from .._errors import InvalidArgument, Unsupported
from .._longspan import Pattern
from .._named import refused
from .._patterns import as_pattern
from .dilated import DilatedAttention
from .operator import attention
from .options import finite, integer

_SMALLEST = 64  # rows of a first allocation; it doubles up to what the segment can hold
_WHOLE = 1 << 62  # the segment of a branch over the whole sequence


class _Strand:
    """Keys and values of one branch, for the heads that share a phase: the rows of the current segment's strand."""

    def __init__(self, heads: slice, segment: int, dilation: int, phase: int) -> None:
        self.heads = heads
        self.segment = segment
        self.dilation = dilation
        self.phase = phase
        self.most = self._rows_before(segment)
        self.keys: Tensor | None = None
        self.values: Tensor | None = None

    def _rows_before(self, offset: int) -> int:
        """How many rows of the strand lie before this offset in the segment."""
        return max(0, -(-(offset - self.phase) // self.dilation))

    @property
    def bytes(self) -> int:
        return 0 if self.keys is None else 2 * self.keys.numel() * self.keys.element_size()

    def _reserve(self, like: Tensor, before: int, after: int) -> None:
        """Room for `after` rows; the `before` rows kept so far stay. Rows that are free are 0: kernels may read them, though
        no later position is ever attended to."""
        held = 0 if self.keys is None else self.keys.shape[1]
        if after > held:
            count = min(self.most, max(after, 2 * held, _SMALLEST))
            grown = [like.new_zeros((like.shape[0], count, *like.shape[2:])) for _ in range(2)]
            if self.keys is not None and self.values is not None:
                grown[0][:, :before], grown[1][:, :before] = self.keys[:, :before], self.values[:, :before]
            self.keys, self.values = grown
        elif before == 0 and self.keys is not None and self.values is not None:
            self.keys.zero_()
            self.values.zero_()

    def step(
        self, first: int, query: Tensor | None, key: Tensor, value: Tensor, options: dict
    ) -> Iterator[tuple[slice, Any]]:
        """Takes the rows of positions first, first + 1, ..., segment by segment; yields which of them the strand has and
        what attention gives for them."""
        key, value = key[:, :, self.heads], value[:, :, self.heads]
        base, end = first, first + key.shape[1]
        while first < end:
            start = first // self.segment * self.segment
            stop = min(end, start + self.segment)
            before, after = self._rows_before(first - start), self._rows_before(stop - start)
            if after > before:
                rows = slice(start + self.phase + before * self.dilation - base, stop - base, self.dilation)
                keys, values = key[:, rows], value[:, rows]
                if before > 0 or stop < start + self.segment:  # else the whole strand is here and nobody needs it later
                    self._reserve(keys, before, after)
                    self.keys[:, before:after], self.values[:, before:after] = keys, values
                    # All of the memory, not the rows so far: a plan then serves many steps. Positions hide the rest.
                    keys, values = self.keys, self.values
                if query is not None:
                    yield rows, attention(
                        query[:, rows, self.heads], keys, values, None, causal=True,
                        query_ranges=[(before, after - before)], **options,
                    )  # fmt: skip
            first = stop


def _strands_of(pattern: Pattern, heads: int) -> list[_Strand]:
    """The strands of each branch: one, or for all-heads patterns one for each phase. Heads of a phase are a slice."""
    strands, first_head = [], 0
    for index, (segment, dilation) in enumerate(pattern.branches):
        segment = _WHOLE if segment is None else segment
        if pattern.assignment == "all":
            width = -(-heads // dilation)  # heads with one phase under torchscale's rule
            for phase in range(min(dilation, heads)):
                paper = pattern.phase == "paper"
                owned = slice(phase, heads, dilation) if paper else slice(phase * width, min(heads, (phase + 1) * width))
                if owned.start < owned.stop:
                    strands.append(_Strand(owned, segment, dilation, phase))
        else:
            groups = len(pattern.branches)
            count = heads // groups + (1 if index < heads % groups else 0)
            strands.append(_Strand(slice(first_head, first_head + count), segment, dilation, index % dilation))
            first_head += count
    return strands


class DilatedCache:
    """The past of one attention, which is causal then: `attend` takes the rows of the next positions and returns what the
    full forward gives there. Inference only: it records no gradients and applies no dropout.

    module: a DilatedAttention, or a pattern of dilated or LongNet attention (or its text) with `scale` on its scores."""

    def __init__(self, module: DilatedAttention | Pattern | str, heads: int, *, scale: float | None = None) -> None:
        allow_tf32 = False
        if isinstance(module, DilatedAttention):
            scale, allow_tf32, module = module.softmax_scale, module.allow_tf32, module.pattern
        elif not isinstance(module, (Pattern, str)):
            raise InvalidArgument(
                f"module is {type(module).__name__}: the cache decodes DilatedAttention (and ImprovedDilatedAttention), or "
                "a longspan.Pattern",
                "module",
            )
        heads = integer("heads", heads)
        scale = None if scale is None else finite("scale", scale)
        pattern = as_pattern(module)
        if "block=" in str(pattern):
            raise Unsupported(
                f"pattern '{pattern}' has a block mask: the cache keeps strands; decode it with longspan.torch.attention "
                "over all keys and query_ranges=[(first, count)]"
            )
        if pattern.long_segments == "skip":
            raise Unsupported(
                f"pattern '{pattern}' skips segments longer than the sequence, whose length decoding does not know: use "
                "with_long_segments('clip')"
            )
        groups = len(pattern.branches)
        if pattern.assignment != "all" and heads < groups:
            raise InvalidArgument(
                f"heads is {heads}, segment_lengths has {groups} entries: give at least one head for each", "heads"
            )
        self.heads = heads
        self._mixes = pattern.assignment == "all" and groups > 1
        self._options = {
            "scale": scale, "output_scale": pattern.output_scale, "allow_tf32": allow_tf32, "return_lse": self._mixes
        }  # fmt: skip
        self._strands = _strands_of(pattern, heads)
        self.position = 0
        self._kind: tuple | None = None  # batch, head_dim, dtype and device it began with

    @property
    def bytes(self) -> int:
        """Memory of keys and values kept."""
        return sum(strand.bytes for strand in self._strands)

    def reset(self) -> None:
        """Back to position 0, for any batch and type; memory is given back."""
        self.position = 0
        self._kind = None
        for strand in self._strands:
            strand.keys = strand.values = None

    def _check(self, name: str, x: Tensor, like: Tensor) -> None:
        if not isinstance(x, Tensor) or x.dim() != 4:
            raise refused(name, x, "a tensor [batch, tokens, heads, head_dim]")
        if x.shape[2] != self.heads:
            fix = "" if name == "query" else "; repeat the heads of grouped queries with repeat_interleave"
            raise InvalidArgument(
                f"{name} has shape {list(x.shape)}: give [batch, tokens, heads = {self.heads}, head_dim]{fix}", name
            )
        if x.shape[1] != like.shape[1]:
            raise InvalidArgument(f"{name} has {x.shape[1]} tokens, key has {like.shape[1]}: they must be equal", name)
        kind = (x.shape[0], x.shape[3], x.dtype, x.device)
        wanted = self._kind or (like.shape[0], like.shape[3], like.dtype, like.device)
        if kind != wanted:
            batch, head_dim, dtype, device = wanted
            raise InvalidArgument(
                f"{name} is {list(x.shape)} {x.dtype} on {x.device}, the cache has batch {batch}, head_dim {head_dim}, "
                f"{dtype} on {device}: go on alike, or reset() the cache",
                name,
            )

    @torch.no_grad()
    def append(self, key: Tensor, value: Tensor) -> None:
        """Keys and values [batch, tokens, heads, head_dim] of the next positions, whose own results nobody needs."""
        self._take(None, key, value)

    @torch.no_grad()
    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Rows [batch, tokens, heads, head_dim] of the next positions, one or many -> the attention's rows there."""
        return self._take(query, key, value)

    def _take(self, query: Tensor | None, key: Tensor, value: Tensor) -> Tensor | None:
        for name, x in (("key", key), ("value", value), ("query", query)):
            if x is not None:
                self._check(name, x, key)
        self._kind = (key.shape[0], key.shape[3], key.dtype, key.device)
        out = sums = None
        if query is not None:
            # Branches are mixed in the type of their sums, so that 16 bits are rounded to once.
            exact = torch.float64 if key.dtype is torch.float64 else torch.float32
            out = torch.zeros(query.shape, dtype=exact if self._mixes else query.dtype, device=query.device)
            sums = out.new_full((*out.shape[:3], 1), -torch.inf) if self._mixes else None
        for strand in self._strands:
            for rows, result in strand.step(self.position, query, key, value, self._options):
                place = (slice(None), rows, strand.heads)
                if sums is None:
                    out[place] = result
                    continue
                part, part_sums = result[0], result[1].transpose(1, 2).unsqueeze(-1)
                both = torch.logaddexp(sums[place], part_sums)
                out[place] = out[place] * (sums[place] - both).exp() + part * (part_sums - both).exp()
                sums[place] = both
        self.position += key.shape[1]
        return None if out is None or query is None else out.to(query.dtype)


class JoinedCaches:
    """Caches of single sequences, each at a position of its own, as one for their batch."""

    def __init__(self, caches: Sequence[DilatedCache]) -> None:
        self.caches = list(caches)

    @property
    def bytes(self) -> int:
        return sum(cache.bytes for cache in self.caches)

    def reset(self) -> None:
        for cache in self.caches:
            cache.reset()

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        if key.shape[0] != len(self.caches):
            raise InvalidArgument(f"key has batch {key.shape[0]}, the cache has {len(self.caches)}: go on alike", "key")
        parts = zip(self.caches, *(x.split(1) for x in (query, key, value)))
        return torch.cat([cache.attend(*rows) for cache, *rows in parts])
