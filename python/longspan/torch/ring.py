"""Attention over a sequence that is split over ranks: drop-ins for the ring classes people have, and helpers.

With a process group every rank passes its own contiguous rows, in the order of ranks, and gets its rows back; without one
`ring_size=k` splits the whole sequence over k threads. Either way the result is that of one device with the same kernel.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .._errors import InvalidArgument
from .._named import refused
from .dilated import DilatedAttention
from .multihead import MultiheadArguments, _Multihead
from .operator import check_dense
from .options import accept_pool_arguments, check_dropout, integer, warn_once
from .process_group import agree, communicator_of, gather, group_or_default
from .ring_calls import DEADLINE, RingArguments, RingCalls, RingMonitor, RingReport, layout_of


class RingDilatedAttention(RingCalls, nn.Module):
    """Dilated attention over a ring, equal to DilatedAttention on one device for any number of ranks.
    The arguments after dropout are those of RingArguments.
    """

    def __init__(
        self,
        segment_lengths: Sequence[int],
        dilation_rates: Sequence[int],
        dropout: float = 0.0,
        ring_size: int | None = None,
        use_checkpointing: bool = False,
        process_group: Any = None,
        deadline: float | None = None,
        *,
        layout: str = "contiguous",
        halo_limit_bytes: int = 0,
        shard_lengths: Sequence[int] | None = None,
        monitor: Callable[[RingReport], None] | None = None,
        device: Any = None,
        dtype: Any = None,
        **pool_arguments: Any,
    ) -> None:
        nn.Module.__init__(self)
        # The one-device module holds pattern, dropout and their checks.
        accept_pool_arguments(type(self).__name__, pool_arguments)
        self.attention = DilatedAttention(
            segment_lengths, dilation_rates, attention_dropout=check_dropout("dropout", dropout)
        )
        self.segment_lengths = self.attention.segment_lengths
        self.dilation_rates = self.attention.dilation_rates
        self.dropout = self.attention.dropout
        self._init_ring(
            RingArguments(
                ring_size, use_checkpointing, process_group, deadline, layout, halo_limit_bytes, shard_lengths, monitor
            )
        )

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        is_causal: bool = False,
        attention_mask: Tensor | None = None,
    ) -> Tensor:
        """query [b, n, h, d], key and value [b, n, h or fewer, d] -> [b, n, h, d], all of this rank's rows.
        attention_mask [b, n] or [b, 1, 1, n], of this rank's keys: true where a key may be attended."""
        one = self.attention
        out = self._over_ring(
            query, key, value, one.pattern, is_causal, one.softmax_scale,
            self.dropout if self.training else 0.0, attention_mask,
        )  # fmt: skip
        return one(query, key, value, is_causal, attention_mask) if out is None else out

    def extra_repr(self) -> str:
        return f"ring_size={self.ring_size}, use_checkpointing={self.use_checkpointing}, layout={self.layout!r}"


_RING_ARGUMENTS = frozenset(inspect.signature(RingDilatedAttention).parameters)


class RingMultiheadDilatedAttention(_Multihead):
    """MultiheadDilatedAttention whose attention runs over a ring: projections are this rank's rows alone. Takes the
    arguments of MultiheadDilatedAttention (dilation_rates first) and, by name, those of RingDilatedAttention."""

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dilation_rates: Sequence[int],
        segment_lengths: Sequence[int],
        dropout: float = 0.0,
        bias: bool = True,
        layer_norm: bool = True,
        layer_norm_eps: float = 1e-5,
        gamma_init: float = 1.0,
        device: Any = None,
        dtype: torch.dtype | None = None,
        **ring_arguments: Any,
    ) -> None:
        pools = {name: ring_arguments.pop(name) for name in list(ring_arguments) if name not in _RING_ARGUMENTS}
        accept_pool_arguments(type(self).__name__, pools)
        arguments = MultiheadArguments(
            embed_dim, num_heads, dilation_rates, segment_lengths, dropout, bias, layer_norm, layer_norm_eps,
            gamma_init, device, dtype,
        )  # fmt: skip
        super().__init__(arguments)
        self.attention = RingDilatedAttention(segment_lengths, dilation_rates, dropout, **ring_arguments)

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
        self,
        embed_dim: int,
        num_heads: int,
        segment_lengths: Sequence[int],
        dilation_rates: Sequence[int],
        *arguments: Any,
        callback: Callable[[RingReport], None] | None = None,
        **named: Any,
    ) -> None:
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


@dataclasses.dataclass
class _Branches:
    segment_lengths: Sequence[int]
    dilation_rates: Sequence[int]
    dropout: float = 0.0


@dataclasses.dataclass
class RingAttentionConfig(RingArguments, _Branches):
    """The arguments of RingDilatedAttention as one object, for RingDilatedAttentionProduction."""


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
ALIASES = {
    "RingDilatedAttentionV2": RingDilatedAttention,
    "RingDilatedAttentionV2Collective": RingDilatedAttention,
}


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
        raise InvalidArgument(f"dim is {dim}: tensor has {tensor.dim()} dimensions", "dim")
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
        raise InvalidArgument("rank and ring_size are missing: give both, or initialise a process group", "rank")
    rank = dist.get_rank(group) if rank is None else integer("rank", rank)
    ring_size = dist.get_world_size(group) if ring_size is None else integer("ring_size", ring_size)
    if not 0 <= rank < ring_size:
        raise InvalidArgument(f"rank is {rank}: give 0 to {ring_size - 1}", "rank")
    return rank, ring_size
