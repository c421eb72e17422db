"""A torch process group as the transport of a ring: gloo for host memory, NCCL for that of GPUs."""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .._communicator import Communicator
from .._errors import InvalidArgument


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
        raise InvalidArgument(
            "process_group does not contain this process: call the module on the group's own ranks only", "process_group"
        )
    return group


class ProcessGroupCommunicator(Communicator):
    """Messages by batch_isend_irecv on the caller's group. gloo moves host memory, which rows on a GPU are copied to. NCCL
    moves GPU memory, beside the stream that computes; rows of CPU tensors go by way of the current GPU there. A deadline
    ends the wait, but torch has no way to take messages back: a group that failed is of no more use."""

    def __init__(self, group: Any) -> None:
        self.group = group
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)
        self.takes_gpu = dist.get_backend(group) == "nccl"
        self._stream: torch.cuda.Stream | None = None
        self._works: list[tuple[str, str, Any]] = []
        self._arrivals: list[tuple[Tensor, Tensor]] = []

    def begin(self, sends: Sequence[tuple[int, Any]], receives: Sequence[tuple[int, Any]]) -> None:
        if not self.takes_gpu:
            return self._begin(sends, receives)
        if self._stream is None:
            self._stream = torch.cuda.Stream()
        with torch.cuda.stream(self._stream):
            self._begin(sends, receives)

    def _begin(self, sends: Sequence[tuple[int, Any]], receives: Sequence[tuple[int, Any]]) -> None:
        operations, meanings = [], []
        self._works, self._arrivals = [], []
        for peer, memory in receives:
            tensor = self._tensor(memory)
            if self.takes_gpu and not tensor.is_cuda:
                on_gpu = torch.empty_like(tensor, device="cuda")
                self._arrivals.append((tensor, on_gpu))
                tensor = on_gpu
            operations.append(self._operation(dist.irecv, tensor, peer))
            meanings.append((f"rank {peer}", "sent"))
        for peer, memory in sends:
            tensor = self._tensor(memory)
            operations.append(self._operation(dist.isend, tensor.cuda() if self.takes_gpu else tensor, peer))
            meanings.append((f"rank {peer}", "took"))
        if operations:
            works = dist.batch_isend_irecv(operations)
            # NCCL answers with one work for all.
            if len(works) != len(meanings):
                peers = sorted({peer for peer, _ in meanings})
                meanings = [(" or ".join(peers), "exchanged")] * len(works)
            self._works = [(peer, did, work) for (peer, did), work in zip(meanings, works)]

    @staticmethod
    def _tensor(memory: Any) -> Tensor:
        return _of_host_memory(memory) if isinstance(memory, memoryview) else torch.as_tensor(memory, device="cuda")

    def _operation(self, kind: Any, tensor: Tensor, peer: int) -> Any:
        return dist.P2POp(kind, tensor, dist.get_global_rank(self.group, peer), self.group)

    def wait(self, seconds: float) -> None:
        seconds = max(seconds, 0.001)
        for peer, did, work in self._works:
            try:
                done = self._wait_on_gpu(work, seconds) if self.takes_gpu else work.wait(timedelta(seconds=seconds))
            except RuntimeError as error:
                late = "imed out" in str(error) or "imeout" in str(error)
                reason = "before the deadline" if late else f"({str(error).splitlines()[0]})"
                raise RuntimeError(f"{peer} {did} nothing {reason}") from None
            if done is False:
                raise RuntimeError(f"{peer} {did} nothing before the deadline")
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
        # The memory that messages point to is kept by the ring.
        self._works, self._arrivals = [], []


def _of_host_memory(memory: memoryview) -> Tensor:
    # What is sent is only read, which torch cannot know of a buffer.
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given buffer is not writable")
        return torch.frombuffer(memory, dtype=torch.uint8)


def _meeting_place(group: Any) -> torch.device:
    return torch.device("cuda") if dist.get_backend(group) == "nccl" else torch.device("cpu")


def gather_counts(group: Any, count: int) -> list[int]:
    """Every rank's number, in the order of ranks."""
    place = _meeting_place(group)
    own = torch.tensor([count], dtype=torch.int64, device=place)
    counts = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    dist.all_gather(counts, own, group=group)
    return [int(one) for one in counts]


def gather_columns(group: Any, tensor: Tensor, counts: Sequence[int]) -> Tensor:
    """[batch, rows of this rank] of every rank, side by side."""
    place = _meeting_place(group)
    padded = tensor.new_zeros((tensor.shape[0], max(counts))).to(place)
    padded[:, : tensor.shape[1]] = tensor
    parts = [torch.empty_like(padded) for _ in counts]
    dist.all_gather(parts, padded, group=group)
    return torch.cat([part[:, :count] for part, count in zip(parts, counts)], dim=1).to(tensor.device)


def shared_seed(group: Any) -> int:
    """One number drawn by the first rank from torch's generator."""
    seed = torch.randint(0x7FFF_FFFF_FFFF_FFFF, (1,), dtype=torch.int64).to(_meeting_place(group))
    dist.broadcast(seed, dist.get_global_rank(group, 0), group=group)
    return int(seed)
