"""Decoding: what later positions can still attend to, and nothing else.

A position of a branch attends to the rows of its strand in its own segment. So the cache keeps those rows of the current
segment only, packed; when the next segment begins, they are overwritten. The heads of all branches lie in one piece of
memory as if they were entries of a batch, each with a length of its own. A token is one call, in which positions and
lengths are counted where the rows are: so a CUDA graph of a step that is replayed goes on with the next position. Several
tokens are taken strand by strand: in strand coordinates they are dense causal attention with a query range. Where several
branches cover a position (LongNet's own assignment), their results are mixed by their softmax sums.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._errors import Unsupported, invalid
from .._longspan import CacheMemory, Pattern
from .._named import refused
from .._patterns import as_pattern, compiled
from .dilated import DilatedAttention
from .operator import append_to_cache, attention, attention_of_first_rows, memory_of_cache, step_of_cache
from .options import finite, integer

_SMALLEST = 64  # tokens that a first allocation has room for; it doubles up to what segments can hold
_WHOLE = 1 << 62  # the segment of a branch over the whole sequence


def _capturing(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


class _Strand(NamedTuple):
    """One branch for the heads that share a phase."""

    branch: int
    heads: slice
    segment: int
    dilation: int
    phase: int

    def rows_before(self, offset: int) -> int:
        """How many rows of the strand lie before this offset in a segment."""
        return max(0, -(-(offset - self.phase) // self.dilation))

    def pieces(self, first: int, end: int) -> Iterator[tuple[slice, int, int]]:
        """Of positions first .. end - 1, segment by segment: those in the strand, and its rows before and after them."""
        begin = first
        while begin < end:
            start = begin // self.segment * self.segment
            until = min(end, start + self.segment)
            before, after = self.rows_before(begin - start), self.rows_before(until - start)
            if after > before:
                yield slice(start + self.phase + before * self.dilation - first, until - first, self.dilation), before, after
            begin = until


def _strands_of(pattern: Pattern, heads: int) -> list[_Strand]:
    """The strands of each branch: one, or for all-heads patterns one for each phase. Heads of a phase are a slice."""
    strands, first_head, groups = [], 0, len(pattern.branches)
    for index, (segment, dilation) in enumerate(pattern.branches):
        segment = _WHOLE if segment is None else segment
        if pattern.assignment != "all":
            count = heads // groups + (1 if index < heads % groups else 0)
            strands.append(_Strand(0, slice(first_head, first_head + count), segment, dilation, index % dilation))
            first_head += count
            continue
        width = -(-heads // dilation)  # heads with one phase under torchscale's rule
        for phase in range(min(dilation, heads)):
            paper = pattern.phase == "paper"
            owned = slice(phase, heads, dilation) if paper else slice(phase * width, min(heads, (phase + 1) * width))
            if owned.start < owned.stop:
                strands.append(_Strand(index, owned, segment, dilation, phase))
    return strands


class DilatedCache:
    """The past of one attention, which is causal then: `attend` takes the rows of the next positions and returns what the
    full forward gives there. Inference only: it records no gradients and applies no dropout.

    module: a DilatedAttention, or a pattern of dilated or LongNet attention (or its text) with `scale` on its scores.
    A step of one token may be captured as a CUDA graph; reserve() before it, since a graph's memory stays where it is."""

    def __init__(self, module: DilatedAttention | Pattern | str, heads: int, *, scale: float | None = None) -> None:
        allow_tf32 = False
        if isinstance(module, DilatedAttention):
            scale, allow_tf32, module = module.softmax_scale, module.allow_tf32, module.pattern
        elif not isinstance(module, (Pattern, str)):
            raise invalid(
                "module",
                f"is {type(module).__name__}: the cache decodes DilatedAttention (and ImprovedDilatedAttention), or "
                "a longspan.Pattern",
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
            raise invalid("heads", f"is {heads}, segment_lengths has {groups} entries: give at least one head for each")
        self.heads = heads
        self._mixes = pattern.assignment == "all" and groups > 1
        self._options = {"scale": scale, "output_scale": pattern.output_scale, "allow_tf32": allow_tf32}
        self._operator = compiled(None, **self._options)
        self._strands = _strands_of(pattern, heads)
        self._branches = groups if self._mixes else 1
        self.follows = False  # another one tells it what replays of graphs took
        self.reset()

    def reset(self) -> None:
        """Back to position 0, for any batch and type; memory is given back."""
        self._taken, self._first = 0, (0,)
        self._captured = False
        self._kind: tuple | None = None  # batch, head_dim, dtype and device it began with
        self._room = 0  # tokens from which on there is no memory
        self._rows: Tensor | None = None  # keys and values [2, batch, branches, heads, 1 + rows, head_dim]
        self._counts: Tensor | None = None  # position, and rows that the token before attends to: [2, batch, branches, heads]
        self._memory: CacheMemory | None = None

    @property
    def position(self) -> int | list[int]:
        """Tokens taken so far; of joined caches, those of each."""
        self.catch_up()
        return [start + self._taken for start in self._first] if any(self._first) else self._taken

    def catch_up(self, leader: DilatedCache | None = None) -> None:
        """Counts the tokens that replays of a graph took. leader: has done so, and takes the same ones."""
        if self._captured and not _capturing(self._kind[3]):
            self._taken = leader._taken if leader else int(self._counts.flatten()[0]) - self._first[0]

    def next_position(self) -> int | list[int] | Tensor:
        """The position of the next token; in a graph capture on the device, where replays find their own."""
        return self._counts[0, :, 0, :1].clone() if self._kind and _capturing(self._kind[3]) else self.position

    @property
    def bytes(self) -> int:
        """Memory of keys and values kept."""
        return 0 if self._rows is None else self._rows.numel() * self._rows.element_size()

    @classmethod
    def joined(cls, caches: Sequence[DilatedCache]) -> DilatedCache:
        """Caches of single sequences, each at a position of its own, as one for their batch."""
        most = max(caches, key=lambda cache: cache._room)
        result = copy.copy(most)
        result.follows = False
        result._first, result._taken = tuple(cache.position for cache in caches), 0
        result._kind = (len(caches), *most._kind[1:])
        result._rows = most._rows.new_empty(2, len(caches), *most._rows.shape[2:])
        result._counts = torch.cat([cache._counts for cache in caches], dim=1)
        for entry, cache in enumerate(caches):
            result._rows[:, entry : entry + 1, :, :, : cache._rows.shape[4]] = cache._rows
        result._bind()
        return result

    def _bind(self) -> None:
        """The memory as a step finds it."""
        strands = torch.zeros(3, self._branches, self.heads, dtype=torch.int64)
        for one in self._strands:
            for row, number in zip(strands, (one.segment, one.dilation, one.phase)):
                row[one.branch, one.heads] = number
        self._numbers = strands.to(self._rows.device)
        self._memory = memory_of_cache(self._rows, self._counts, self._numbers)

    def __getstate__(self) -> dict[str, Any]:
        self.catch_up()
        return {**self.__dict__, "_memory": None, "_captured": False}  # a copy is in no graph

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if self._rows is not None:
            self._bind()

    def _check(self, name: str, x: Tensor, like: Tensor) -> None:
        if not isinstance(x, Tensor) or x.dim() != 4:
            raise refused(name, x, "a tensor [batch, tokens, heads, head_dim]")
        if x.shape[2] != self.heads:
            fix = "" if name == "query" else "; repeat the heads of grouped queries with repeat_interleave"
            raise invalid(name, f"has shape {list(x.shape)}: give [batch, tokens, heads = {self.heads}, head_dim]{fix}")
        if x.shape[1] != like.shape[1]:
            raise invalid(name, f"has {x.shape[1]} tokens, key has {like.shape[1]}: they must be equal")
        kind = (x.shape[0], x.shape[3], x.dtype, x.device)
        wanted = self._kind or (like.shape[0], like.shape[3], like.dtype, like.device)
        if kind != wanted:
            batch, head_dim, dtype, device = wanted
            raise invalid(
                name,
                f"is {list(x.shape)} {x.dtype} on {x.device}, the cache has batch {batch}, head_dim {head_dim}, "
                f"{dtype} on {device}: go on alike, or reset() the cache",
            )

    def reserve(self, tokens: int) -> None:
        """Room for so many tokens in all. Without it memory grows as tokens come; this call needs one token taken before."""
        if self._kind is None:
            raise invalid("cache", "is empty: reserve() after the first tokens, which tell batch and type")
        self._reserve(integer("tokens", tokens))

    def _reserve(self, tokens: int) -> None:
        if tokens <= self._room:
            return
        batch, head_dim, dtype, device = self._kind
        if self._captured or _capturing(device):
            raise invalid("cache", f"has room for {self._room} tokens: reserve() before the graph capture")
        self._room = max(tokens, 2 * self._room, _SMALLEST)
        count = max(one.rows_before(min(self._room, one.segment)) for one in self._strands)
        if all(self._room >= one.segment for one in self._strands):
            self._room = _WHOLE
        kept = 0 if self._rows is None else self._rows.shape[4]
        if 1 + count > kept:
            # The first row takes what has no place in a strand.
            rows = torch.empty(2, batch, self._branches, self.heads, 1 + count, head_dim, dtype=dtype, device=device)
            if self._rows is not None:
                rows[:, :, :, :, :kept] = self._rows
            else:
                self._counts = torch.zeros(2, *rows.shape[1:4], dtype=torch.int64, device=device)
            self._rows = rows
            self._bind()

    def append(self, key: Tensor, value: Tensor) -> None:
        """Keys and values [batch, tokens, heads, head_dim] of the next positions, whose own results nobody needs."""
        self._take(None, key, value)

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Rows [batch, tokens, heads, head_dim] of the next positions, one or many -> the attention's rows there."""
        if not self.follows:
            self.catch_up()
        if self._memory is not None and max(self._first, default=0) + self._taken < self._room:
            result = step_of_cache(self._operator, self._memory, query, key, value, self._mixes)
            if result is not None:
                self._count()
                return self._mixed(*result) if self._mixes else result[0]
        return self._take(query, key, value)

    @torch.no_grad()
    def _take(self, query: Tensor | None, key: Tensor, value: Tensor) -> Any:
        for name, x in (("key", key), ("value", value), ("query", query)):
            if x is not None:
                self._check(name, x, key)
        if self._kind is None:
            self._kind = (key.shape[0], key.shape[3], key.dtype, key.device)
            self._first = (0,) * key.shape[0]
        if not self.follows:
            self.catch_up()
        tokens, out = key.shape[1], None
        self._reserve(max(self._first, default=0) + self._taken + tokens)
        if tokens == 1:
            append_to_cache(self._memory, key, value)
            self._count()
            return None if query is None else self._attend_last(query)
        if any(self._first):
            parts = [self._take(*(None if x is None else x[:, i : i + 1] for x in (query, key, value))) for i in range(tokens)]
            return None if query is None else torch.cat([query[:, :0], *parts], dim=1)
        if tokens:
            out = self._chunk(query, key, value)
            self._taken += tokens
            self._counts[0] += tokens
        return query if tokens == 0 else out

    def _count(self) -> None:
        """One token, which the memory has taken."""
        self._taken += 1
        self._captured = self._captured or _capturing(self._kind[3])

    def _attend_last(self, query: Tensor) -> Tensor:
        """Rows of the token taken last, by the operator."""
        spread = query.expand(-1, self._branches, -1, -1).reshape(-1, 1, 1, query.shape[3])
        keys, values = (x.flatten(0, 2)[:, 1:, None] for x in self._rows)
        result = attention_of_first_rows(self._operator, spread, keys, values, self._counts[1].flatten(), self._mixes)
        if not self._mixes:
            return result.view(query.shape)
        shape = (len(query), self._branches, self.heads)
        return self._mixed(result[0].view(*shape, query.shape[3]), result[1].view(shape))

    @staticmethod
    def _mixed(rows: Tensor, sums: Tensor) -> Tensor:
        """Rows [batch, branches, heads, head_dim], by their softmax sums."""
        weights = sums.softmax(dim=1).nan_to_num().unsqueeze(-1)  # of rows that no branch covers
        return (rows * weights).sum(dim=1, keepdim=True).to(rows.dtype)

    def _chunk(self, query: Tensor | None, key: Tensor, value: Tensor) -> Tensor | None:
        """Several tokens, strand by strand and segment by segment."""
        out = sums = None
        if query is not None:
            # Branches are mixed in the type of their sums, so that 16 bits are rounded to once.
            exact = torch.float64 if key.dtype is torch.float64 else torch.float32
            out = torch.zeros(query.shape, dtype=exact if self._mixes else query.dtype, device=query.device)
            sums = out.new_full((*out.shape[:3], 1), -torch.inf) if self._mixes else None
        for one in self._strands:
            kept = self._rows[:, :, one.branch, one.heads, 1:].transpose(2, 3)
            for rows, before, after in one.pieces(self._taken, self._taken + key.shape[1]):
                place = (slice(None), rows, one.heads)
                kept[0, :, before:after], kept[1, :, before:after] = key[place], value[place]
                if query is None:
                    continue
                result = attention(
                    query[place], *kept[:, :, :after], None, causal=True, query_ranges=[(before, after - before)],
                    return_lse=self._mixes, **self._options,
                )  # fmt: skip
                if sums is None:
                    out[place] = result
                    continue
                part, part_sums = result[0], result[1].transpose(1, 2).unsqueeze(-1)
                both = torch.logaddexp(sums[place], part_sums)
                out[place] = out[place] * (sums[place] - both).exp() + part * (part_sums - both).exp()
                sums[place] = both
        return None if out is None else out.to(query.dtype)
