"""Gradients of parameters over the link that a ring uses: DistributedDataParallel's buckets, in pieces that let the
messages of rings go first."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from .._errors import invalid
from .._named import refused
from .options import finite, integer
from .process_group import waits

__all__ = ["reduce_behind_rings"]


def reduce_behind_rings(model: DistributedDataParallel, *, piece_bytes: int = 1 << 20, patience: float = 0.05) -> None:
    """Makes DistributedDataParallel average each bucket in pieces of at most `piece_bytes`, beside the rest of the backward. A
    piece starts when no ring of this process waits for messages, or has waited for `patience` seconds meanwhile, so that
    neither starves. The same on all ranks, before the first backward. Groups of NCCL, whose kernels queue on the GPU,
    get the pieces at once."""
    if not isinstance(model, DistributedDataParallel):
        raise refused("model", model, "a DistributedDataParallel, made before")
    if integer("piece_bytes", piece_bytes) < 1:
        raise invalid("piece_bytes", f"is {piece_bytes}: give at least 1")
    if finite("patience", patience) < 0:
        raise invalid("patience", f"is {patience}: give 0 or more seconds")
    model.register_comm_hook(_Pieces(model.process_group, piece_bytes, patience), _reduce)


class _Pieces:
    """Averages buckets of one group, piece by piece, in the order in which they come, as on all ranks."""

    def __init__(self, group: Any, piece_bytes: int, patience: float) -> None:
        self.group, self.piece_bytes, self.patience = group, piece_bytes, patience
        # Joined when the interpreter ends: a thread that it finds within torch would end the process.
        self._thread = ThreadPoolExecutor(1, "longspan gradients")

    def pieces(self, buffer: Tensor) -> Sequence[Tensor]:
        return buffer.split(max(1, self.piece_bytes // buffer.element_size()))

    def add(self, buffer: Tensor, done: torch.futures.Future[Tensor]) -> None:
        self._thread.submit(self._average, buffer, done)

    def _average(self, buffer: Tensor, done: torch.futures.Future[Tensor]) -> None:
        try:
            for piece in self.pieces(buffer):
                waits.over(self.patience)
                all_reduce(piece, self.group)
        except BaseException as error:
            done.set_exception(error)  # type: ignore[arg-type]  # torch's stub names the result's type
        else:
            done.set_result(buffer)


def all_reduce(piece: Tensor, group: Any) -> None:
    dist.all_reduce(piece, group=group)


# torch reads these annotations, so they are no strings.
def _reduce(state: _Pieces, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    buffer = bucket.buffer()
    buffer.div_(dist.get_world_size(state.group))
    if buffer.is_cuda:
        works = [dist.all_reduce(piece, group=state.group, async_op=True) for piece in state.pieces(buffer)]
        return works[-1].get_future().then(lambda _: buffer)
    done: torch.futures.Future[Tensor] = torch.futures.Future()
    state.add(buffer, done)
    return done
