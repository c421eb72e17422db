"""Decoding: what later positions can still attend to, and nothing else.

A position of a branch attends to the rows of its strand in its own segment. So the cache keeps those rows of the current
segment only, packed; when the next segment begins, they are overwritten. The heads of all branches lie in one piece of
memory as if they were entries of a batch, each with a length of its own: a token is one call of the operator, and its
lengths are computed where the rows are. Several tokens are taken strand by strand: in strand coordinates they are dense
causal attention with a query range. Where several branches cover a position (LongNet's own assignment), their results
are mixed by their softmax sums.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._errors import Unsupported, invalid
from .._longspan import Pattern
from .._named import refused
from .._patterns import as_pattern, compiled
from .dilated import DilatedAttention
from .operator import attention, attention_of_first_rows
from .options import finite, integer

_SMALLEST = 64  # tokens that a first allocation has room for; it doubles up to what segments can hold
_AHEAD = 64  # steps whose lengths are computed at once
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


class _Clock:
    """How many rows of its strand each head has up to a position, on the device: a CUDA graph of a step that is replayed
    goes on with the next position. Caches that take the same positions share one."""

    def __init__(self, strands: Sequence[_Strand], branches: int, heads: int) -> None:
        numbers = torch.zeros(3, branches, heads, dtype=torch.int64)
        for one in strands:
            for row, number in zip(numbers, (one.segment, one.dilation, one.phase)):
                row[one.branch, one.heads] = number
        self.numbers = numbers.flatten(1)
        self.forget()

    def forget(self) -> None:
        self.captured = False
        self._at: tuple[Any, int] | None = None
        self._now: Tensor | None = None

    def to(self, first: Sequence[int], taken: int, device: torch.device) -> Tensor:
        """Rows [entries] of each strand up to positions first + taken; 0 where a position is not in it."""
        if self._at == (first, taken):
            return self._lengths
        capturing = _capturing(device)
        if self._at == (first, taken - 1):
            self._now += 1
        elif capturing:
            raise invalid("cache", "is empty in a graph capture: let it take a token before")
        else:
            self._jump(torch.tensor(first, dtype=torch.int64)[:, None] + taken, device)
        self._at = first, taken
        if capturing:
            self.captured, self.ahead = True, None
            self._lengths = self._count(self._now).view(-1)
            return self._lengths
        if self.ahead is None or taken - self._begin >= _AHEAD:
            steps = torch.arange(_AHEAD, device=device)[:, None, None]
            self.ahead, self._begin = self._count(self._now + steps).flatten(1), taken
            self._each = self.ahead.unbind()
        self.step = taken - self._begin
        self._lengths = self._each[self.step]
        return self._lengths

    def _jump(self, now: Tensor, device: torch.device) -> None:
        """In place where graphs may look."""
        if self._now is None:
            self._segment, self._dilation, self._phase = self.numbers.to(device)
            self._now = now.to(device)
        else:
            self._now.copy_(now)
        self.ahead: Tensor | None = None  # lengths of the next steps; none in a capture

    def _count(self, now: Tensor) -> Tensor:
        offset = now % self._segment
        covered = torch.eq(offset % self._dilation, self._phase, out=torch.empty_like(offset))
        return torch.addcmul(covered, covered, offset // self._dilation)

    def taken(self) -> int:
        """Tokens taken before the next position, replays of graphs included."""
        if self.captured and not _capturing(self._now.device):
            first, _ = self._at
            self._at, self.ahead = (first, int(self._now[0]) - first[0]), None
        return self._at[1] + 1

    def __getstate__(self) -> dict[str, Any]:
        if self.captured:
            self.taken()
        return {**self.__dict__, "captured": False}  # a copy is in no graph

    def next(self) -> Tensor:
        """The next position of each batch entry, on the device."""
        return self._now + 1


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
        self._clock, self._shares_clock = _Clock(self._strands, self._branches, heads), False
        self.reset()

    def reset(self) -> None:
        """Back to position 0, for any batch and type; memory is given back."""
        self._clock.forget()
        self._taken, self._first = 0, (0,)
        self._kind: tuple | None = None  # batch, head_dim, dtype and device it began with
        self._room = 0  # tokens from which on there is no memory
        self._rows: Tensor | None = None  # keys and values [2, batch, branches, heads, 1 + rows, head_dim]
        self._flat: tuple[Tensor, ...] = ()

    @property
    def position(self) -> int | list[int]:
        """Tokens taken so far; of joined caches, those of each."""
        self.catch_up()
        return [start + self._taken for start in self._first] if any(self._first) else self._taken

    def catch_up(self) -> None:
        """Counts the tokens that replays of a graph took."""
        if self._clock.captured:
            self._taken = self._clock.taken()

    def next_position(self) -> int | list[int] | Tensor:
        """The position of the next token; in a graph capture on the device, where replays find their own."""
        return self._clock.next() if self._kind and _capturing(self._kind[3]) else self.position

    @property
    def bytes(self) -> int:
        """Memory of keys and values kept."""
        return 0 if self._rows is None else self._rows.numel() * self._rows.element_size()

    def follow(self, other: DilatedCache) -> None:
        """Counts positions together with a cache that takes the same, if strands are the same."""
        if torch.equal(self._clock.numbers, other._clock.numbers):
            self._clock, self._shares_clock = other._clock, True

    @classmethod
    def joined(cls, caches: Sequence[DilatedCache]) -> DilatedCache:
        """Caches of single sequences, each at a position of its own, as one for their batch."""
        most = max(caches, key=lambda cache: cache._room)
        result = copy.copy(most)
        result._clock, result._shares_clock = _Clock(most._strands, most._branches, most.heads), False
        result._first, result._taken = tuple(cache.position for cache in caches), 0
        result._kind = (len(caches), *most._kind[1:])
        result._rows = most._rows.new_empty(2, len(caches), *most._rows.shape[2:])
        for entry, cache in enumerate(caches):
            result._rows[:, entry : entry + 1, :, :, : cache._rows.shape[4]] = cache._rows
        result._flatten()
        return result

    def _flatten(self) -> None:
        """The memory as a step sees it: the first row of each entry, all rows, and keys and values to attend to."""
        keys, values = (x.flatten(0, 2) for x in self._rows)
        first = torch.arange(2 * len(keys), device=keys.device).view(2, len(keys)) * keys.shape[1]
        self._flat = first, self._rows.flatten(0, 4), keys[:, 1:, None], values[:, 1:, None]
        self._placed_for: Tensor | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_flat": (), "_places": ()}  # copies are made of the memory, not of views of it

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if self._rows is not None:
            self._flatten()

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
        if self._clock.captured or _capturing(device):
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
            self._rows = rows
            self._flatten()

    @torch.no_grad()
    def append(self, key: Tensor, value: Tensor) -> None:
        """Keys and values [batch, tokens, heads, head_dim] of the next positions, whose own results nobody needs."""
        self._take(None, key, value)

    @torch.no_grad()
    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Rows [batch, tokens, heads, head_dim] of the next positions, one or many -> the attention's rows there."""
        return self._take(query, key, value)

    def _take(self, query: Tensor | None, key: Tensor, value: Tensor) -> Any:
        for name, x in (("key", key), ("value", value), ("query", query)):
            if x is not None:
                self._check(name, x, key)
        if self._kind is None:
            self._kind = (key.shape[0], key.shape[3], key.dtype, key.device)
            self._first = (0,) * key.shape[0]
        if not self._shares_clock:
            self.catch_up()
        tokens, out = key.shape[1], None
        self._reserve(max(self._first, default=0) + self._taken + tokens)
        if tokens == 1:
            out = self._step(query, key, value)
            self._taken += 1
        elif any(self._first):
            parts = [self._take(*(None if x is None else x[:, i : i + 1] for x in (query, key, value))) for i in range(tokens)]
            out = None if query is None else torch.cat([query[:, :0], *parts], dim=1)
        elif tokens:
            out = self._chunk(query, key, value)
            self._taken += tokens
            self._clock.to(self._first, self._taken - 1, key.device)
        return query if tokens == 0 else out

    def _step(self, query: Tensor | None, key: Tensor, value: Tensor) -> Tensor | None:
        """One token of each entry."""
        lengths = self._clock.to(self._first, self._taken, key.device)
        first, memory, keys, values = self._flat
        if (ahead := self._clock.ahead) is None:
            place = (first + lengths).view(-1)
        else:
            if self._placed_for is not ahead:
                self._placed_for, self._places = ahead, (first + ahead[:, None]).flatten(1).unbind()
            place = self._places[self._clock.step]
        memory.index_copy_(0, place, self._spread(torch.stack((key, value))))
        if query is None:
            return None
        rows = self._spread(query).view(-1, 1, 1, query.shape[3])
        result = attention_of_first_rows(self._operator, rows, keys, values, lengths, self._mixes)
        if not self._mixes:
            return result.view(query.shape)
        parts, sums = (x.unflatten(0, (query.shape[0], self._branches, self.heads)).flatten(3) for x in result)
        weights = sums.softmax(dim=1).nan_to_num()  # of rows that no branch covers
        return (parts * weights).sum(dim=1, keepdim=True).to(query.dtype)

    def _spread(self, x: Tensor) -> Tensor:
        """A token's rows [entries, head_dim], repeated for each branch."""
        if self._branches > 1:
            x = x.expand(*x.shape[:-3], self._branches, -1, -1)
        return x.reshape(-1, x.shape[-1])

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
