"""A torch process group as the transport of a ring: gloo for host memory, NCCL for that of GPUs."""

from __future__ import annotations

import os
import queue
import threading
import time
import warnings
import weakref
import zlib
from collections.abc import Sequence
from concurrent.futures import Future
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .._communicator import Communicator
from .._errors import CommError, InvalidArgument, invalid
from .._longspan import all_gather, native_communicator


def group_or_default(group: Any, otherwise: str = "") -> Any:
    """The group itself, torch's default group, or None where torch.distributed is not in use. Refused: a group of other
    processes, and one process of several (torchrun sets WORLD_SIZE) that has not joined a group. `otherwise` is what else
    the caller could do, for the message."""
    if group is None and dist.is_available() and dist.is_initialized():
        group = dist.group.WORLD
    if group is None:
        processes = os.environ.get("WORLD_SIZE", "1")
        if processes.isdecimal() and int(processes) > 1:
            raise InvalidArgument(
                f"there is no process group, but WORLD_SIZE is {processes}: this is one of {processes} processes, and each "
                'would compute alone. Call torch.distributed.init_process_group("gloo") first ("nccl" where tensors are on '
                f"GPUs){otherwise}",
                "process_group",
            )
    elif dist.get_rank(group) < 0:
        raise invalid("process_group", "does not contain this process: call the module on the group's own ranks only")
    return group


_given_up: list[Any] = []
class _Waits:
    """How many rings of this process wait for messages, which then have the link to themselves."""

    def __init__(self) -> None:
        self._count, self._changed = 0, threading.Condition()

    def __enter__(self) -> None:
        with self._changed:
            self._count += 1

    def __exit__(self, *_: object) -> None:
        with self._changed:
            self._count -= 1
            self._changed.notify_all()

    def over(self, seconds: float) -> bool:
        """Returns when no ring waits, or after so many seconds; whether none does."""
        with self._changed:
            return self._changed.wait_for(lambda: self._count == 0, seconds)


waits = _Waits()


class ProcessGroupCommunicator(Communicator):
    """Messages by isend and irecv on the caller's group. gloo moves host memory, which rows on a GPU are copied to. NCCL
    moves GPU memory, beside the stream that computes; rows of CPU tensors go by way of the current GPU there. A deadline
    ends the wait, but torch has no way to take messages back: a group that failed is of no more use."""

    def __init__(self, group: Any) -> None:
        self._group = weakref.ref(group)
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)
        self.takes_gpu = dist.get_backend(group) == "nccl"
        self._stream: torch.cuda.Stream | None = None
        self._exchanges = 0
        self._works: list[tuple[int, str, Any]] = []
        self._arrivals: list[tuple[Tensor, Tensor]] = []
        self._error: RuntimeError | None = None
        self._waiter: queue.SimpleQueue | None = None

    def __del__(self) -> None:
        if self._waiter is not None:
            self._waiter.put(None)

    @property
    def group(self) -> Any:
        group = self._group()
        if group is None:
            raise RuntimeError("the process group was destroyed")
        return group

    def begin(self, sends: Sequence[tuple[int, Any]], receives: Sequence[tuple[int, Any]]) -> None:
        if not self.takes_gpu:
            return self._begin(sends, receives)
        if self._stream is None:
            self._stream = torch.cuda.Stream()
        with torch.cuda.stream(self._stream):
            self._begin(sends, receives)

    def _begin(self, sends: Sequence[tuple[int, Any]], receives: Sequence[tuple[int, Any]]) -> None:
        operations, meanings = [], []
        self._works, self._arrivals, self._error = [], [], None
        self._exchanges += 1
        for peer, memory in receives:
            tensor = self._tensor(memory)
            if self.takes_gpu and not tensor.is_cuda:
                on_gpu = torch.empty_like(tensor, device="cuda")
                self._arrivals.append((tensor, on_gpu))
                tensor = on_gpu
            operations.append(self._operation(dist.irecv, tensor, peer))
            meanings.append((peer, "sent"))
        for peer, memory in sends:
            tensor = self._tensor(memory)
            operations.append(self._operation(dist.isend, tensor.cuda() if self.takes_gpu else tensor, peer))
            meanings.append((peer, "took"))
        if self.takes_gpu and operations:
            works = dist.batch_isend_irecv(operations)
            # NCCL answers with one work for all.
            self._works = [(peer, did, works[min(i, len(works) - 1)]) for i, (peer, did) in enumerate(meanings)]
        elif operations:
            for one, (peer, did) in zip(operations, meanings):
                try:
                    self._works.append((peer, did, one.op(one.tensor, one.peer, one.group, one.tag)))
                except RuntimeError as error:
                    self._error = self._error or self._lost(peer, did, error)  # raised later: others wait for their messages

    @staticmethod
    def _tensor(memory: Any) -> Tensor:
        return _of_host_memory(memory) if isinstance(memory, memoryview) else torch.as_tensor(memory, device="cuda")

    def _operation(self, kind: Any, tensor: Tensor, peer: int) -> Any:
        # gloo ends the process when a message is longer than what it arrives in. A tag made of exchange and size keeps
        # ranks that are not at the same exchange, or compute something else, from hearing each other.
        tag = zlib.crc32(f"{self._exchanges} {tensor.numel()}".encode()) & 0x7FFF_FFFF
        return dist.P2POp(kind, tensor, dist.get_global_rank(self.group, peer), self.group, tag)

    @staticmethod
    def _lost(peer: int, did: str, error: RuntimeError) -> RuntimeError:
        return RuntimeError(f"rank {peer} {did} nothing ({str(error).splitlines()[0]})")

    def wait(self, seconds: float) -> None:
        if self._error is not None:
            raise self._error
        with waits:
            self._wait_unless_interrupted(seconds)

    def _wait_unless_interrupted(self, seconds: float) -> None:
        if self.takes_gpu or threading.current_thread() is not threading.main_thread():
            return self._wait(seconds)
        # gloo's wait lets no signal through. Another thread waits, and this one for it, which Ctrl-C ends.
        if self._waiter is None:
            self._waiter = queue.SimpleQueue()
            threading.Thread(target=_wait_for_others, args=(self._waiter,), daemon=True).start()
        outcome: Future[None] = Future()
        self._waiter.put((lambda: self._wait(seconds), outcome))
        outcome.result()

    def _wait(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        late: dict[int, str] = {}
        for peer, did, work in self._works:
            left = max(end - time.monotonic(), 0.001)
            try:
                done = self._wait_on_gpu(work, left) if self.takes_gpu else work.wait(timedelta(seconds=left))
            except RuntimeError as error:
                if "timed out" not in str(error).lower() and "timeout" not in str(error).lower():
                    raise self._lost(peer, did, error) from None
                done = False
            if done is False:
                late.setdefault(peer, did)
        if late:
            did = next(iter(late.values()))
            names = " or ".join(f"rank {peer}" for peer, what in late.items() if what == did)
            raise RuntimeError(f"{names} {did} nothing before the deadline")
        if self._arrivals:
            with torch.cuda.stream(self._stream):
                for host, on_gpu in self._arrivals:
                    host.copy_(on_gpu)
        self._works, self._arrivals = [], []

    def _wait_on_gpu(self, work: Any, seconds: float) -> bool:
        """work.wait() only makes a stream wait: the host asks that stream until the deadline."""
        deadline = time.monotonic() + seconds
        with torch.cuda.stream(self._stream):
            work.wait()
            done = torch.cuda.Event()
            done.record()
        while not done.query():
            if time.monotonic() > deadline:
                return False
            time.sleep(20e-6)
        return True

    def abort(self) -> None:
        # What is on its way to ranks that live still arrives: dropped works would take it back, and those ranks would miss
        # this one instead of the one that is lost. The memory of messages is kept by the ring.
        _given_up.append((self._works, self._arrivals))
        self._works, self._arrivals = [], []


def _wait_for_others(waits: queue.SimpleQueue) -> None:
    """A thread's life: works of waits until one is None."""
    while (item := waits.get()) is not None:
        wait, outcome = item
        try:
            outcome.set_result(wait())
        except BaseException as error:
            outcome.set_exception(error)
        del item, wait, outcome  # they hold the communicator


def _of_host_memory(memory: memoryview) -> Tensor:
    # What is sent is only read, which torch cannot know of a buffer.
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given buffer is not writable")
        return torch.frombuffer(memory, dtype=torch.uint8)


_known: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()


def communicator_of(group: Any) -> Any:
    """This rank's end of a ring over the group: one for everything here that uses the group, since its messages come in one
    order. Refuses a group in which an exchange has failed."""
    communicator = _known.get(group)
    if communicator is None:
        communicator = _known[group] = native_communicator(ProcessGroupCommunicator(group))
    if communicator.failure:
        raise CommError(
            f"process_group {group.group_name!r} of ranks {dist.get_process_group_ranks(group)} is of no more use, it failed "
            f"before: {communicator.failure}. Make a new one with the ranks that are left, or start all again"
        )
    return communicator


def gather(communicator: Any, what: str, own: Tensor, counts: Sequence[int], deadline: float) -> list[Tensor]:
    """The tensors of all ranks, which differ in their first dimension only: counts, by rank. A CommError names the rank that
    did not send, and the step, which is `what`."""
    own = own.detach().contiguous()
    parts = [own.new_empty((count, *own.shape[1:])) for count in counts]
    placement = {}
    if own.is_cuda:
        placement = {"device": own.device.index, "stream": torch.cuda.current_stream(own.device).cuda_stream}
    memory = [(tensor.data_ptr(), tensor.numel() * tensor.element_size()) for tensor in (own, *parts)]
    all_gather(communicator, what, memory[0], memory[1:], deadline, **placement)
    return parts


def agree(communicator: Any, what: str, numbers: Sequence[int], settings: Any, deadline: float) -> list[list[int]]:
    """Every rank's numbers, by rank. A CommError on all ranks where settings differ, which leaves the group in use."""
    digest = zlib.crc32(repr(settings).encode())
    own = torch.tensor([[digest, *numbers]], dtype=torch.int64)
    found = torch.cat(gather(communicator, what, own, [1] * communicator.size, deadline)).tolist()
    others = [rank for rank, (their_digest, *_) in enumerate(found) if their_digest != digest]
    if others:
        raise CommError(
            f"{what} on rank {communicator.rank}: rank {' and '.join(map(str, others))} computes something else than "
            f"{settings}: all ranks must be called with the same, but for the number of their rows"
        )
    return [numbers for _, *numbers in found]
