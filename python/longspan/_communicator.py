"""How the ranks of a ring talk, for transports written in Python."""

from __future__ import annotations

import abc
from collections.abc import Sequence
from typing import Any


class Communicator(abc.ABC):
    """One rank's end of a ring. Derive from it to bring a transport of your own; errors that its methods raise become a
    CommError that names the step, and end the communicator's use. KeyboardInterrupt and SystemExit pass as they are."""

    #: This rank, and how many there are.
    rank: int
    size: int
    #: Whether messages of GPU tensors come as GPU memory (objects with __cuda_array_interface__, ready when begin is
    #: called, and to be when wait returns) instead of going by way of the host.
    takes_gpu: bool = False

    @abc.abstractmethod
    def begin(
        self, sends: Sequence[tuple[int, memoryview | Any]], receives: Sequence[tuple[int, memoryview | Any]]
    ) -> None:
        """Starts one exchange: at most one message to and from each peer. Memoryviews of what is sent are read-only. All
        are released when wait or abort returns, so keep no array over them; a transport that still moves messages after
        a failure may do so at their addresses, which stay valid until the process ends."""

    @abc.abstractmethod
    def wait(self, seconds: float) -> None:
        """Returns when every message has arrived and left; raises, naming a rank, if that takes longer."""

    @abc.abstractmethod
    def abort(self) -> None:
        """Gives the exchange up."""
