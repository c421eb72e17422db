"""Decoding: what later positions can still attend to, and nothing else.

A position of a branch attends to the rows of its strand in its own segment. So a branch keeps those rows of the current
segment only, packed; when the next segment begins, they are overwritten. In strand coordinates a step is dense causal
attention of the new rows over all rows kept, which is the operator with a query range.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .._errors import InvalidArgument
from .dilated import DilatedAttention
from .operator import attention

_SMALLEST = 64  # rows of a first allocation; it doubles up to what the segment can hold


class _Strand:
    """Keys and values of one branch: the rows of the current segment's strand."""

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

    def _reserve(self, like: Tensor, rows: int) -> None:
        """Room for this many rows; rows kept so far stay."""
        held = 0 if self.keys is None else self.keys.shape[1]
        if rows <= held:
            return
        count = min(self.most, max(rows, 2 * held, _SMALLEST))
        grown = [like.new_empty((like.shape[0], count, *like.shape[2:])) for _ in range(2)]
        if self.keys is not None and self.values is not None:
            grown[0][:, :held], grown[1][:, :held] = self.keys, self.values
        self.keys, self.values = grown

    def step(
        self, first: int, query: Tensor | None, key: Tensor, value: Tensor, out: Tensor | None, options: dict
    ) -> None:
        """Takes the rows of positions first, first + 1, ... and fills their rows of out, segment by segment."""
        key, value = key[:, :, self.heads], value[:, :, self.heads]
        end = first + key.shape[1]
        while first < end:
            start = first // self.segment * self.segment
            stop = min(end, start + self.segment)
            before, after = self._rows_before(first - start), self._rows_before(stop - start)
            base = end - key.shape[1]
            if after > before:
                rows = slice(start + self.phase + before * self.dilation - base, stop - base, self.dilation)
                keys, values = key[:, rows], value[:, rows]
                if before > 0 or stop < start + self.segment:  # else the whole strand is here and nobody needs it later
                    self._reserve(keys, after)
                    self.keys[:, before:after], self.values[:, before:after] = keys, values
                    keys, values = self.keys[:, :after], self.values[:, :after]
                if query is not None and out is not None:
                    out[:, rows, self.heads] = attention(
                        query[:, rows, self.heads], keys, values, None, causal=True,
                        query_ranges=[(before, after - before)], **options,
                    )  # fmt: skip
            first = stop


class DilatedCache:
    """The past of one DilatedAttention, which is causal then: `attend` takes the rows of the next positions and returns
    what the full forward gives there. Inference only: it records no gradients and applies no dropout."""

    def __init__(self, module: DilatedAttention, heads: int) -> None:
        if not isinstance(module, DilatedAttention):
            raise InvalidArgument(
                f"module is {type(module).__name__}: the cache decodes DilatedAttention (and ImprovedDilatedAttention)",
                "module",
            )
        groups = len(module.segment_lengths)
        if heads < groups:
            raise InvalidArgument(
                f"heads is {heads}, segment_lengths has {groups} entries: give at least one head for each", "heads"
            )
        self.heads = heads
        self._options = {
            "scale": module.softmax_scale, "output_scale": 1.0 / groups, "allow_tf32": module.allow_tf32
        }  # fmt: skip
        self._strands = []
        begin = 0
        for index, (segment, dilation) in enumerate(zip(module.segment_lengths, module.dilation_rates)):
            count = heads // groups + (1 if index < heads % groups else 0)
            self._strands.append(_Strand(slice(begin, begin + count), segment, dilation, index % dilation))
            begin += count
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
        if x.dim() != 4 or x.shape[2] != self.heads:
            raise InvalidArgument(
                f"{name} has shape {list(x.shape)}: give [batch, tokens, heads = {self.heads}, head_dim]", name
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
        out = None if query is None else torch.zeros_like(query, memory_format=torch.contiguous_format)
        for strand in self._strands:
            strand.step(self.position, query, key, value, out, self._options)
        self.position += key.shape[1]
        return out
