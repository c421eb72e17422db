#!/usr/bin/env python3
"""Gradients of parameters and rows of a ring over one imitated link: who waits for whom.

    python bench/ring_gradients.py [--ranks 2] [--rate 1e8]

Each of `--ranks` gloo processes has a port of `--rate` bytes per second, which messages of the ring and reductions of gradients
pass one after the other, in the order in which they start. Steps take turns: gradients averaged after the backward; DDP's
buckets, each at once; the same buckets in pieces behind the ring (reduce_behind_rings). Writes ring_gradients.json.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import longspan
from longspan.torch import RingMultiheadDilatedAttention, gradients, process_group, reduce_behind_rings, shard

RESULTS = Path(__file__).parent / "results"


class Port:
    """Bytes pass at a rate, in the order in which they were asked for."""

    def __init__(self, rate: float) -> None:
        self.rate, self.free, self.lock = rate, 0.0, threading.Lock()

    def take(self, size: float) -> float:
        """When they will have passed."""
        with self.lock:
            self.free = max(self.free, time.monotonic()) + size / self.rate
            return self.free


PORT = Port(1e9)


def until(moment: float) -> None:
    time.sleep(max(0.0, moment - time.monotonic()))


class OverPort(process_group.ProcessGroupCommunicator):
    """Messages that have come when those of the transport have and the port has passed them."""

    passed = 0.0

    def begin(self, sends: Any, receives: Any) -> None:
        self.passed = PORT.take(max(sum(memory.nbytes for _, memory in sends), sum(memory.nbytes for _, memory in receives)))
        super().begin(sends, receives)

    def _wait(self, seconds: float) -> None:
        super()._wait(seconds)
        until(self.passed)


def all_reduce(piece: torch.Tensor, group: Any) -> None:
    size = dist.get_world_size(group)
    passed = PORT.take(2 * (size - 1) / size * piece.nbytes)  # as a ring of reductions moves them
    dist.all_reduce(piece, group=group)
    until(passed)


class Block(nn.Module):
    def __init__(self, width: int, tokens: int) -> None:
        super().__init__()
        self.attention = RingMultiheadDilatedAttention(width, 4, [1, 2], [1024, tokens])
        self.mix = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(x)[0]
        return x + self.mix(x)


def worker(rank: int, arguments: argparse.Namespace, folder: str) -> None:
    torch.set_num_threads(1)
    longspan.set_num_threads(1)
    PORT.rate = arguments.rate
    process_group.ProcessGroupCommunicator = OverPort
    gradients.all_reduce = all_reduce
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=arguments.ranks)
    torch.manual_seed(0)
    rows = shard(torch.randn(1, arguments.tokens, arguments.width), rank, arguments.ranks)

    def blocks() -> nn.Module:
        return nn.Sequential(*(Block(arguments.width, arguments.tokens) for _ in range(arguments.layers)))

    whole, pieces = (DistributedDataParallel(blocks(), bucket_cap_mb=arguments.bucket_mb) for _ in range(2))
    reduce_behind_rings(whole, piece_bytes=1 << 40, patience=0.0)
    reduce_behind_rings(pieces, piece_bytes=arguments.piece_bytes)
    after = blocks()
    models = {"after": after, "buckets": whole, "pieces": pieces}
    steps: dict[str, list[tuple[float, float]]] = {name: [] for name in models}
    for _ in range(arguments.steps + 1):
        for name, model in models.items():
            monitors = [block.attention.attention.monitor for block in (model if name == "after" else model.module)]
            for monitor in monitors:
                monitor.reset()
            dist.barrier()
            begin = time.monotonic()
            model(rows).square().mean().backward()
            if name == "after":
                for parameter in model.parameters():
                    parameter.grad /= arguments.ranks
                    all_reduce(parameter.grad, None)
            dist.barrier()
            steps[name].append((time.monotonic() - begin, sum(monitor.waited_seconds for monitor in monitors)))
    if rank == 0:
        Path(folder, "steps").write_text(json.dumps({name: of[1:] for name, of in steps.items()}))
    dist.barrier()
    os._exit(0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, kind, value in (("ranks", int, 2), ("rate", float, 1e8), ("tokens", int, 1024), ("width", int, 384), ("layers", int, 3),
                              ("bucket-mb", float, 8.0), ("piece-bytes", int, 1 << 18), ("steps", int, 7)):  # fmt: skip
        parser.add_argument(f"--{name}", type=kind, default=value)
    parser.add_argument("--results", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(worker, (arguments, folder), nprocs=arguments.ranks)
        steps = json.loads(Path(folder, "steps").read_text())
    rows = {}
    for name, of in steps.items():
        seconds, waited = (statistics.median(values) for values in zip(*of))
        rows[name] = {"step_seconds": seconds, "ring_waited_seconds": waited}
        print(f"{name:8} step {seconds * 1e3:7.1f} ms, of which the rings waited {waited * 1e3:6.1f} ms (medians of {len(of)})")
    settings = {name: value for name, value in vars(arguments).items() if name != "results"}
    content = {"cpus": os.cpu_count(), "settings": settings, "results": rows}
    (arguments.results / "ring_gradients.json").write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
