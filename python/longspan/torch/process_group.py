"""A torch process group as the transport of a ring: gloo for CPU tensors, NCCL through the current GPU."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .._communicator import Communicator


def group_or_default(group: Any) -> Any:
    """The group itself, torch's default group, or None where torch.distributed is not in use."""
    if group is not None:
        return group
    return dist.group.WORLD if dist.is_available() and dist.is_initialized() else None


class ProcessGroupCommunicator(Communicator):
    """Messages by batch_isend_irecv on the caller's group. Host memory, which rows on a GPU are copied to, goes as it is
    (gloo) or by way of the current GPU (NCCL, where the host cannot enforce a deadline: torch's own timeout of the group applies)."""

    def __init__(self, group: Any) -> None:
        self.group = group
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)
        self._by_gpu = dist.get_backend(group) == "nccl"
        self._works: list[tuple[int, str, Any]] = []
        self._arrivals: list[tuple[Tensor, Tensor]] = []

    def begin(self, sends: Sequence[tuple[int, memoryview]], receives: Sequence[tuple[int, memoryview]]) -> None:
        operations, meanings = [], []
        self._works, self._arrivals = [], []
        for peer, memory in receives:
            tensor = torch.frombuffer(memory, dtype=torch.uint8)
            if self._by_gpu:
                on_gpu = torch.empty(len(memory), dtype=torch.uint8, device="cuda")
                self._arrivals.append((tensor, on_gpu))
                tensor = on_gpu
            operations.append(self._operation(dist.irecv, tensor, peer))
            meanings.append((peer, "sent"))
        for peer, memory in sends:
            # The memory is only read, which torch cannot know of a buffer.
            tensor = _read_only(memory)
            operations.append(self._operation(dist.isend, tensor.cuda() if self._by_gpu else tensor, peer))
            meanings.append((peer, "took"))
        if operations:
            works = dist.batch_isend_irecv(operations)
            # NCCL answers with one work for all.
            if len(works) != len(meanings):
                meanings = [(meanings[0][0], "exchanged")] * len(works)
            self._works = [(peer, did, work) for (peer, did), work in zip(meanings, works)]

    def _operation(self, kind: Any, tensor: Tensor, peer: int) -> Any:
        return dist.P2POp(kind, tensor, dist.get_global_rank(self.group, peer), self.group)

    def wait(self, seconds: float) -> None:
        deadline = timedelta(seconds=max(seconds, 0.001))
        for peer, did, work in self._works:
            try:
                done = work.wait() if self._by_gpu else work.wait(deadline)
            except RuntimeError as error:
                late = "imed out" in str(error) or "imeout" in str(error)
                reason = "before the deadline" if late else f"({str(error).splitlines()[0]})"
                raise RuntimeError(f"rank {peer} {did} nothing {reason}") from None
            if done is False:
                raise RuntimeError(f"rank {peer} {did} nothing before the deadline")
        for host, on_gpu in self._arrivals:
            host.copy_(on_gpu)
        self._works, self._arrivals = [], []

    def abort(self) -> None:
        # Torch has no way to take messages back; the memory they point to is kept by the ring.
        self._works, self._arrivals = [], []


def _read_only(memory: memoryview) -> Tensor:
    import warnings

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
