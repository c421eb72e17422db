"""What the ring classes share: reports of calls, the autograd functions, and the mixin that finds ranks and runs them."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from .._errors import CommError, InvalidArgument, Unsupported, invalid, renamed
from .._longspan import (
    Attention, Ring, RingHalo, Shards, local_ring, ring_backward_together, ring_forward_together, trim_memory,
)  # fmt: skip
from .._named import choice, flag
from .._patterns import compiled
from .operator import _NAMES, _empty_like, _empty_lse, raw_tensor, with_contiguous_rows
from .options import finite, integer, integers, key_mask, require_tensors
from .process_group import agree, communicator_of, gather, group_or_default

#: Seconds that one exchange may take, where nothing else is said.
DEADLINE = 60.0


@dataclasses.dataclass
class RingReport:
    """What one call on one rank did. Bytes are payload."""

    rank: int
    backward: bool
    bytes_sent: int
    bytes_received: int
    messages_sent: int
    messages_received: int
    header_bytes_sent: int
    halo_bytes: int
    rounds: int
    waited_seconds: float
    overlapped_seconds: float
    total_seconds: float
    late_error: str = ""


class RingMonitor:
    """Sums over calls, and the last report of each pass. `callback(report)` is called after every call, from the thread
    that made it."""

    def __init__(self, callback: Callable[[RingReport], None] | None = None) -> None:
        self.callback = callback
        self._lock = threading.Lock()
        self.reset()

    def reset(self) -> None:
        self.calls = self.bytes_sent = self.bytes_received = self.messages_sent = 0
        self.waited_seconds = self.overlapped_seconds = self.total_seconds = 0.0
        self.last_forward: RingReport | None = None
        self.last_backward: RingReport | None = None

    def add(self, report: RingReport) -> None:
        with self._lock:
            self.calls += 1
            for name in ("bytes_sent", "bytes_received", "messages_sent", "waited_seconds", "overlapped_seconds",
                         "total_seconds"):  # fmt: skip
                setattr(self, name, getattr(self, name) + getattr(report, name))
            if report.backward:
                self.last_backward = report
            else:
                self.last_forward = report
        if self.callback is not None:
            self.callback(report)


@dataclasses.dataclass
class _RankCall:
    """One rank's part of a call: its ring, its rows (views), and what backward will need."""

    ring: Ring
    rows: list[tuple[int, int]]  # (start, count) within the caller's tensors
    halo: RingHalo | None = None

    def part(self, tensor: Tensor, dim: int = 1) -> Tensor:
        """These rows; a copy where they are not one range."""
        parts = [tensor.narrow(dim, start, count) for start, count in self.rows]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim)

    def write(self, target: Tensor, part: Tensor, dim: int = 1) -> None:
        at = 0
        for start, count in self.rows:
            target.narrow(dim, start, count).copy_(part.narrow(dim, at, count))
            at += count


def _run_ranks(
    calls: list[_RankCall], like: Tensor, work: Callable[[_RankCall, dict[str, Any]], None],
    together: Callable[[list[Ring], int], bool], forget: Callable[[], None],
) -> None:  # fmt: skip
    """work(call, where and until when) for every rank at once: in this thread if there is one rank, or if
    together(rings, stream) could do it on the GPU, else in a thread for each, which Ctrl-C in this one stops. forget:
    called where it fails."""
    stream = torch.cuda.current_stream(like.device) if like.is_cuda else None
    where = {} if stream is None else {"stream": stream.cuda_stream}

    def run(call: _RankCall, stop: threading.Event | None) -> None:
        with torch.cuda.stream(stream):  # and its device; threads have streams of their own
            work(call, {**where, "stop": stop})

    try:
        if len(calls) == 1:
            run(calls[0], None)
        elif stream is None or not together([call.ring for call in calls], stream.cuda_stream):
            _run_threads(calls, run)
    except InvalidArgument as error:
        forget()
        raise renamed(error, _NAMES) from None
    except BaseException:
        forget()
        raise


def _run_threads(calls: list[_RankCall], run: Callable[[_RankCall, threading.Event], None]) -> None:
    stop = threading.Event()
    with ThreadPoolExecutor(len(calls)) as pool:
        runs = [pool.submit(run, call, stop) for call in calls]
        try:
            wait(runs)  # joining a thread instead would, interrupted, take it for ended
        except BaseException:
            stop.set()
            raise
    found = [error for error in (one.exception() for one in runs) if error is not None]
    if found:
        raise next((error for error in found if not isinstance(error, CommError)), found[0])


def _in_lines(tensor: Tensor) -> Tensor:
    """The tensor, or a copy where its rows on a GPU do not begin at multiples of 16 bytes, or repeat."""
    if not tensor.is_cuda:
        return tensor
    size = tensor.element_size()
    steps = [step * size for count, step in zip(tensor.shape[:3], tensor.stride()[:3]) if count > 1]
    if tensor.data_ptr() % 16 == 0 and all(step > 0 and step % 16 == 0 for step in steps):
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)


def _raw(extras: dict[str, Any]) -> dict[str, Any]:
    return {name: raw_tensor(name, x) if isinstance(x, Tensor) else x for name, x in extras.items()}


class _RingFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, query, key, value, calls, extras, keep, monitor, forget):
        """extras: keyword arguments of both passes (seed, and tensors of the whole sequence). forget: called where a pass
        fails, so that the next call makes anew what has failed."""
        out, lse, raw_extras = _empty_like(query), _empty_lse(query), _raw(extras)

        def work(call: _RankCall, placement: dict[str, Any]) -> None:
            call.halo = RingHalo() if keep else None
            inputs = [call.part(x) for x in (query, key, value)]
            own_out, own_lse = call.part(out), call.part(lse, 2)
            call.ring.forward(
                *map(raw_tensor, ("query", "key", "value", "out"), (*inputs, own_out)), raw_tensor("lse", own_lse),
                keep=call.halo, **placement, **raw_extras,
            )  # fmt: skip
            if len(call.rows) > 1:
                call.write(out, own_out)
                call.write(lse, own_lse, 2)

        def together(rings: list[Ring], stream: int) -> bool:
            halos = [RingHalo() for _ in rings] if keep else []
            tensors = map(raw_tensor, ("query", "key", "value", "out", "lse"), (query, key, value, out, lse))
            done = ring_forward_together(
                rings, *tensors, raw_extras.get("key_mask"), raw_extras["seed"], stream, halos
            )
            for call, halo in zip(calls, halos):
                call.halo = halo if done else None
            return done

        _run_ranks(calls, query, work, together, forget)
        for call in calls:
            monitor.add(RingReport(call.ring.rank, False, **call.ring.report()))
        ctx.save_for_backward(query, key, value, out, lse)
        ctx.calls, ctx.extras, ctx.monitor, ctx.forget = calls, extras, monitor, forget
        ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    def backward(ctx, grad_out, _grad_lse):
        return *_RingGradients.apply(grad_out, *ctx.saved_tensors, ctx), None, None, None, None, None


class _RingGradients(torch.autograd.Function):
    """The backward as a function of its own, so that create_graph raises: there are no second derivatives."""

    @staticmethod
    def forward(_, grad_out, query, key, value, out, lse, ctx):
        """ctx: that of the forward."""
        grad_out, raw_extras = _in_lines(with_contiguous_rows(grad_out)), _raw(ctx.extras)
        grads = [_empty_like(x) for x in (query, key, value)]

        def work(call: _RankCall, placement: dict[str, Any]) -> None:
            inputs = [call.part(x) for x in (query, key, value, out)]
            own_grads = [call.part(x) for x in grads]
            own_grad_out, own_lse = call.part(grad_out), call.part(lse, 2)
            call.ring.backward(
                *map(raw_tensor, ("query", "key", "value", "out"), inputs), raw_tensor("lse", own_lse),
                raw_tensor("grad_out", own_grad_out), None, *map(raw_tensor, ("dq", "dk", "dv"), own_grads),
                kept=call.halo, **placement, **raw_extras,
            )  # fmt: skip
            if len(call.rows) > 1:
                for target, part in zip(grads, own_grads):
                    call.write(target, part)

        def together(rings: list[Ring], stream: int) -> bool:
            names = ("query", "key", "value", "out", "lse", "grad_out", "dq", "dk", "dv")
            tensors = map(raw_tensor, names, (query, key, value, out, lse, grad_out, *grads))
            kept = [] if ctx.calls[0].halo is None else [call.halo for call in ctx.calls]
            return ring_backward_together(
                rings, *tensors, raw_extras.get("key_mask"), raw_extras["seed"], stream, kept
            )

        _run_ranks(ctx.calls, query, work, together, ctx.forget)
        for call in ctx.calls:
            ctx.monitor.add(RingReport(call.ring.rank, True, **call.ring.report()))
        for call in ctx.calls:
            call.halo = None  # a second backward, on every rank, fetches again
        return tuple(grads)

    @staticmethod
    def backward(ctx, *grads):
        raise Unsupported("attention over a ring has first derivatives only: call backward without create_graph")


@dataclasses.dataclass
class RingArguments:
    """What every module over a ring takes.

    process_group: each rank passes its own rows (lengths may differ by rank); None is torch's default group if there is
    one. ring_size: None or the group's size; 1 means no ring; without any group, the number of local ranks over the whole
    sequence. use_checkpointing: fetch remote rows again in backward instead of keeping them. deadline: seconds that one
    exchange may take. halo_limit_bytes: beyond it the exchange runs in rounds. layout: "contiguous", or "zigzag" (as
    shard() makes it) for balanced causal work. shard_lengths: rows of every rank, which saves a small gather per call.
    monitor: called with a RingReport after every call.
    """

    ring_size: int | None = None
    use_checkpointing: bool = False
    process_group: Any = None
    deadline: float | None = None
    layout: str = "contiguous"
    halo_limit_bytes: int = 0
    shard_lengths: Sequence[int] | None = None
    monitor: Callable[[RingReport], None] | None = None

    def __post_init__(self) -> None:
        self.use_checkpointing = bool(self.use_checkpointing)
        self.deadline = DEADLINE if self.deadline is None else finite("deadline", self.deadline)
        if self.deadline <= 0:
            raise invalid("deadline", f"is {self.deadline}: give seconds above 0")
        layout_of(self.layout)
        self.halo_limit_bytes = integer("halo_limit_bytes", self.halo_limit_bytes)
        if self.shard_lengths is not None:
            self.shard_lengths = integers("shard_lengths", self.shard_lengths)
        if self.ring_size is not None:
            self.ring_size = integer("ring_size", self.ring_size)
            if self.ring_size < 1:
                raise invalid("ring_size", f"is {self.ring_size}: give at least 1")


class RingSettings(NamedTuple):
    """What a ring is made for, and what its ranks must have alike."""

    pattern: Any  # or, until the tokens of the whole sequence are known, what makes it for them
    causal: bool
    scale: float | None
    dropout: float
    deterministic: bool = False

    def seed(self) -> int:
        """Drawn from torch's generator where it is needed."""
        return int(torch.randint(0x7FFF_FFFF_FFFF_FFFF, (), dtype=torch.int64)) if self.dropout else 0

    def operator(self) -> Attention:
        return compiled(**self._asdict(), kernel="")


class RingCalls:
    """What modules over rings share: who the ranks are, their rings, and a call over them. Mixed into an nn.Module."""

    def _init_ring(self, arguments: RingArguments) -> None:
        for field in dataclasses.fields(RingArguments):
            setattr(self, field.name, getattr(arguments, field.name))
        self.monitor = RingMonitor(arguments.monitor)
        self._communicator: Any = None
        self._local: list[Any] = []
        self._rings: dict[tuple, Any] = {}

    def __getstate__(self) -> dict[str, Any]:
        # Groups and rings belong to a process; what they are made from does not.
        state = dict(self.__dict__)
        state.update(process_group=None, _communicator=None, _local=[], _rings={}, monitor=None)
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.monitor = RingMonitor()

    def _group(self) -> Any:
        """The group to ring over, or None."""
        if self.ring_size == 1:
            return None
        group = group_or_default(self.process_group, ", or give ring_size=1 to compute alone on purpose")
        if group is None:
            return None
        size = dist.get_world_size(group)
        if self.ring_size is not None and self.ring_size != size:
            raise invalid(
                "ring_size", f"is {self.ring_size} and the process group has {size} ranks: give {size}, 1 or None"
            )
        return group if size > 1 else None

    def _ring(self, settings: RingSettings, communicator: Any, index: int, shards: Shards) -> Ring:
        key = (settings, index, shards)
        if key not in self._rings:
            if len(self._rings) >= 64:
                self._rings.clear()
            self._rings[key] = Ring(settings.operator(), communicator, shards, self.deadline, self.halo_limit_bytes)
        return self._rings[key]

    def _shards(self, counts: Sequence[int]) -> Shards:
        if self.layout == "contiguous":
            offsets = [0]
            for count in counts:
                offsets.append(offsets[-1] + count)
            return Shards.contiguous(offsets)
        shards = Shards.zigzag(sum(counts), len(counts))
        wanted = [shards.rows(rank) for rank in range(len(counts))]
        if wanted != list(counts):
            raise InvalidArgument(f"ranks have {list(counts)} rows: a zigzag layout gives them {wanted}", "query")
        return shards

    def _over_ring(
        self, query: Tensor, key: Tensor, value: Tensor, settings: RingSettings, attention_mask: Tensor | None
    ) -> Tensor | None:
        """The call over the ring; None where there is none. Everything that one rank can find wrong is found before the first message: such a rank may repeat the call."""
        group = self._group()
        local = (self.ring_size or 1) if group is None else 1
        if group is None and (local == 1 or _in_graph(query)):
            return None  # a graph holds the operator: a local ring's result is that of one device
        require_tensors(query=query, key=key, value=value)
        settings = settings._replace(
            causal=flag("is_causal", settings.causal), deterministic=torch.are_deterministic_algorithms_enabled()
        )
        for name, tensor in (("query", query), ("key", key), ("value", value)):
            if tensor.shape[1] != query.shape[1] or tensor.device != query.device:
                raise invalid(
                    name,
                    f"has {tensor.shape[1]} rows on {tensor.device}, query has {query.shape[1]} on {query.device}: "
                    "give a rank's own rows of all three",
                )
        query, key, value = (_in_lines(with_contiguous_rows(x)) for x in (query, key, value))
        mask = key_mask("attention_mask", attention_mask, key.shape[0], key.shape[1])
        extras: dict[str, Any] = {"seed": 0}
        if group is not None:
            shards = self._agree(group, {"query": query, "key": key, "value": value}, settings, mask, extras)
            ranks = [(self._communicator, 0, [(0, query.shape[1])])]
        else:
            if len(self._local) != local:
                self._local, self._rings = local_ring(local), {}
            tokens = query.shape[1]
            shards = layout_of(self.layout)(tokens, local)
            if mask is not None:
                extras["key_mask"] = mask
            extras["seed"] = settings.seed()
            ranks = [(self._local[rank], rank, shards.ranges(rank) or [(0, 0)]) for rank in range(local)]
        if callable(settings.pattern):
            settings = settings._replace(pattern=settings.pattern(shards.tokens))
        calls = [_RankCall(self._ring(settings, one, index, shards), rows) for one, index, rows in ranks]
        keep = not self.use_checkpointing and torch.is_grad_enabled()
        return _RingFunction.apply(query, key, value, calls, extras, keep, self.monitor, self._forget_failed)[0]

    def _agree(
        self, group: Any, tensors: dict[str, Tensor], settings: RingSettings, mask: Tensor | None, extras: dict[str, Any]
    ) -> Shards:
        """What ranks tell each other before a call, into extras, and their shards."""
        communicator = communicator_of(group)
        if self._communicator is not communicator:
            self._communicator, self._rings = communicator, {}
        counts = self.shard_lengths
        if counts is None or mask is not None or settings.dropout:
            alike = settings._replace(pattern="one by length" if callable(settings.pattern) else str(settings.pattern))
            described = {
                **alike._asdict(), "attention_mask": mask is not None, "layout": self.layout,
                "halo_limit_bytes": self.halo_limit_bytes, "use_checkpointing": self.use_checkpointing,
                **{name: (x.device.type, str(x.dtype), x.shape[0], *x.shape[2:]) for name, x in tensors.items()},
            }  # fmt: skip
            # The seed is the first rank's; the others draw, too, and so their generators stay level with it.
            numbers = [tensors["query"].shape[1], settings.seed()]
            told = agree(communicator, "ring call, lengths of ranks", numbers, described, self.deadline)
            counts = counts or [rows for rows, _ in told]
            extras["seed"] = told[0][1]
        shards = self._shards(counts)
        if mask is not None:
            columns = gather(communicator, "ring call, attention_mask", mask.t(), counts, self.deadline)
            extras["key_mask"] = _in_order(torch.cat(columns).t(), shards)
        return shards

    def _forget_failed(self) -> None:
        """Local ranks that failed are made again in the next call; a process group that failed is refused there."""
        if any(one.failure for one in self._local):
            self._rings, self._local = {}, []

    def get_memory_info(self) -> dict[str, Any]:
        """Bytes of remote rows in the last calls, and what was moved so far."""
        last = {"forward": self.monitor.last_forward, "backward": self.monitor.last_backward}
        return {
            "ring_size": self.ring_size or (self._communicator.size if self._communicator else 1),
            "bytes_sent": self.monitor.bytes_sent, "bytes_received": self.monitor.bytes_received,
            **{f"{name}_halo_bytes": report.halo_bytes if report else 0 for name, report in last.items()},
        }  # fmt: skip

    def clear_cache(self) -> None:
        """Forgets plans and local ranks, which are made again when needed, and gives idle workspace back."""
        self._rings, self._local, self._communicator = {}, [], None
        trim_memory()


def _in_graph(query: Any) -> bool:
    """Whether the call is compiled, exported or captured."""
    if torch.compiler.is_compiling():
        return True
    return isinstance(query, Tensor) and query.is_cuda and torch.cuda.is_current_stream_capturing()


def _in_order(gathered: Tensor, shards: Shards) -> Tensor:
    """Columns in the order of ranks become columns in the order of positions."""
    result, at = torch.empty_like(gathered), 0
    for rank in range(shards.ranks):
        for start, count in shards.ranges(rank):
            result[:, start : start + count] = gathered[:, at : at + count]
            at += count
    return result


def layout_of(name: str) -> Callable[[int, int], Shards]:
    """What makes the shards of a layout; refuses names that are none."""
    makers = {"contiguous": Shards.even, "zigzag": Shards.zigzag}
    return makers[choice("layout", name, list(makers))]
