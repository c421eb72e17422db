"""Attention over a sequence that is split over ranks: drop-ins for the ring classes people have, and helpers.

With a process group every rank passes its own contiguous rows, in the order of ranks, and gets its rows back; without one
`ring_size=k` splits the whole sequence over k threads. Either way the result is that of one device with the same kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .._errors import invalid
from .._named import refused
from .dilated import DilatedAttention
from .multihead import MultiheadArguments, _Multihead
from .operator import check_dense
from .options import Branches, Placed, check_dropout, integer, made_from, warn_once
from .process_group import agree, communicator_of, gather, group_or_default
from .ring_calls import DEADLINE, RingArguments, RingCalls, RingMonitor, RingReport, RingSettings, layout_of

__all__ = [
    "RingAdvancedDistributedDilatedAttention", "RingAttentionConfig", "RingDilatedAttention",
    "RingDilatedAttentionProduction", "RingDilatedAttentionV2", "RingDilatedAttentionV2Collective", "RingMonitor",
    "RingMultiheadDilatedAttention", "RingReport", "create_production_ring_attention", "shard", "unshard",
]  # fmt: skip


@dataclass
class _Dropout:
    dropout: float = 0.0


@dataclass
class RingAttentionConfig(RingArguments, _Dropout, Branches):
    """The arguments of RingDilatedAttention as one object, for RingDilatedAttentionProduction."""


@dataclass
class _RingModule(Placed, RingAttentionConfig):
    pass


class RingDilatedAttention(RingCalls, nn.Module):
    """Dilated attention over a ring, equal to DilatedAttention on one device for any number of ranks.
    The arguments after dropout are those of RingArguments.
    """

    @made_from(_RingModule)
    def __init__(self, arguments: _RingModule) -> None:
        nn.Module.__init__(self)
        # The one-device module holds pattern, dropout and their checks.
        self.attention = DilatedAttention(
            arguments.segment_lengths, arguments.dilation_rates,
            attention_dropout=check_dropout("dropout", arguments.dropout),
        )  # fmt: skip
        self.segment_lengths = self.attention.segment_lengths
        self.dilation_rates = self.attention.dilation_rates
        self.dropout = self.attention.dropout
        self._init_ring(arguments)

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, is_causal: bool = False, attention_mask: Tensor | None = None
    ) -> Tensor:
        """query [b, n, h, d], key and value [b, n, h or fewer, d] -> [b, n, h, d], all of this rank's rows.
        attention_mask [b, n] or [b, 1, 1, n], of this rank's keys: true where a key may be attended."""
        one = self.attention
        settings = RingSettings(one.pattern, is_causal, one.softmax_scale, self.dropout if self.training else 0.0)
        out = self._over_ring(query, key, value, settings, attention_mask)
        return one(query, key, value, is_causal, attention_mask) if out is None else out

    def extra_repr(self) -> str:
        return f"ring_size={self.ring_size}, use_checkpointing={self.use_checkpointing}, layout={self.layout!r}"


@dataclass
class _RingMultihead(RingArguments, MultiheadArguments):
    pass


class RingMultiheadDilatedAttention(_Multihead):
    """MultiheadDilatedAttention whose attention runs over a ring: projections are this rank's rows alone. Takes the
    arguments of MultiheadDilatedAttention (dilation_rates first) and those of RingArguments."""

    @made_from(_RingMultihead)
    def __init__(self, arguments: _RingMultihead) -> None:
        super().__init__(arguments)
        given = {item.name: getattr(arguments, item.name) for item in fields(RingAttentionConfig)}
        self.attention = RingDilatedAttention(**given)

    def _project(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.q_proj(query), self.k_proj(key), self.v_proj(value)

    def get_memory_info(self) -> dict[str, Any]:
        return self.attention.get_memory_info()

    def clear_cache(self) -> None:
        self.attention.clear_cache()


class RingAdvancedDistributedDilatedAttention(RingMultiheadDilatedAttention):
    """RingMultiheadDilatedAttention with segment_lengths first, and its monitor at hand: `monitor` (a RingMonitor) sums
    bytes, messages, waiting and overlap; `callback` hears of every call. Gradients of parameters are averaged by torch's
    DistributedDataParallel over the data-parallel dimension of a mesh, which also buckets them; arguments of the older
    class that did so itself are accepted and have no effect."""

    _BY_DDP = frozenset({"bucket_size_mb", "communication_optimization", "enable_gradient_bucketing", "overlap_communication",
                         "use_gradient_compression"})  # fmt: skip

    def __init__(
        self, embed_dim: int, num_heads: int, segment_lengths: Sequence[int], dilation_rates: Sequence[int],
        *arguments: Any, callback: Callable[[RingReport], None] | None = None, **named: Any,
    ) -> None:  # fmt: skip
        ignored = sorted(self._BY_DDP & named.keys())
        for name in ignored:
            named.pop(name)
        if ignored:
            warn_once(
                "ring bucketing",
                f"{type(self).__name__}: {', '.join(ignored)} have no effect: wrap the module in "
                "DistributedDataParallel, which buckets gradients and overlaps their exchange",
            )
        super().__init__(embed_dim, num_heads, dilation_rates, segment_lengths, *arguments, monitor=callback, **named)

    @property
    def monitor(self) -> RingMonitor:
        return self.attention.monitor


class RingDilatedAttentionProduction(RingDilatedAttention):
    """RingDilatedAttention made from a RingAttentionConfig."""

    def __init__(self, config: RingAttentionConfig) -> None:
        super().__init__(**vars(config))
        self.config = config


def create_production_ring_attention(
    segment_lengths: Sequence[int], dilation_rates: Sequence[int], **arguments: Any
) -> RingDilatedAttentionProduction:
    return RingDilatedAttentionProduction(RingAttentionConfig(segment_lengths, dilation_rates, **arguments))


# Names of older packages for what is one class here.
RingDilatedAttentionV2 = RingDilatedAttentionV2Collective = RingDilatedAttention


def shard(
    tensor: Tensor, rank: int | None = None, ring_size: int | None = None, *, dim: int = 1, layout: str = "contiguous",
    process_group: Any = None,
) -> Tensor:  # fmt: skip
    """This rank's rows of a whole tensor: a view, or a copy where layout="zigzag" gives two ranges."""
    rank, ring_size = _place(rank, ring_size, process_group)
    if not isinstance(tensor, Tensor):
        raise refused("tensor", tensor, "a torch tensor")
    check_dense("tensor", tensor)
    dim = integer("dim", dim)
    if not -tensor.dim() <= dim < tensor.dim():
        raise invalid("dim", f"is {dim}: tensor has {tensor.dim()} dimensions")
    ranges = layout_of(layout)(tensor.shape[dim], ring_size).ranges(rank) or [(0, 0)]
    parts = [tensor.narrow(dim, start, count) for start, count in ranges]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


def unshard(
    shards: Sequence[Tensor] | Tensor, *, dim: int = 1, layout: str = "contiguous", process_group: Any = None,
    deadline: float = DEADLINE,
) -> Tensor:  # fmt: skip
    """The whole tensor: from the list of all ranks' rows, or from this rank's rows, gathered over the process group within
    `deadline` seconds."""
    if isinstance(shards, Tensor):
        group = group_or_default(process_group)
        if group is None:
            return shards
        communicator, moved = communicator_of(group), shards.movedim(dim, 0)
        settings = {"dim": dim, "layout": layout, "dtype": str(shards.dtype), "other dimensions": tuple(moved.shape[1:])}
        counts = [rows for (rows,) in agree(communicator, "unshard, lengths of ranks", [len(moved)], settings, deadline)]
        gathered = gather(communicator, "unshard, rows", moved, counts, deadline)
        shards = [one.movedim(0, dim) for one in gathered]
    if layout == "contiguous":
        return torch.cat(list(shards), dim)
    tokens = sum(one.shape[dim] for one in shards)
    places = layout_of(layout)(tokens, len(shards))
    pieces = []
    for rank, one in enumerate(shards):
        at = 0
        for start, count in places.ranges(rank):
            pieces.append((start, one.narrow(dim, at, count)))
            at += count
    return torch.cat([piece for _, piece in sorted(pieces, key=lambda pair: pair[0])], dim)


def _place(rank: int | None, ring_size: int | None, process_group: Any) -> tuple[int, int]:
    group = group_or_default(process_group) if rank is None or ring_size is None else None
    if group is None and (rank is None or ring_size is None):
        raise invalid("rank", "and ring_size are missing: give both, or initialise a process group")
    rank = dist.get_rank(group) if rank is None else integer("rank", rank)
    ring_size = dist.get_world_size(group) if ring_size is None else integer("ring_size", ring_size)
    if not 0 <= rank < ring_size:
        raise invalid("rank", f"is {rank}: give 0 to {ring_size - 1}")
    return rank, ring_size
