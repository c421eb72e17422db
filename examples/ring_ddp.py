"""A ring on one dimension of a mesh, DistributedDataParallel on the other: each group of `--ring` processes shares one
sequence, `--data` such groups have different ones, and DDP buckets and averages gradients over the latter.

    python examples/ring_ddp.py --data 2 --ring 2 --steps 3      starts its processes itself (gloo, CPU)

Compares the parameters after a few steps with one process that saw everything.
"""

from __future__ import annotations

import argparse
import os
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import longspan
from longspan.torch import MultiheadDilatedAttention, RingMultiheadDilatedAttention, shard

WIDTH, HEADS, TOKENS = 32, 4, 96
SEGMENTS, RATES = [16, 96], [1, 3]


def sequence(step: int, replica: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + replica)
    return tuple(torch.randn(1, TOKENS, WIDTH, generator=generator) for _ in range(2))


def train(module: nn.Module, optimizer: torch.optim.Optimizer, inputs: torch.Tensor, targets: torch.Tensor, ring: int) -> None:
    optimizer.zero_grad()
    # A rank's loss is its share of its sequence's; times the ring's size, since DDP averages over all processes.
    loss = (module(inputs, is_causal=True)[0] - targets).square().sum() / (TOKENS * WIDTH) * ring
    loss.backward()
    optimizer.step()


def worker(rank: int, data: int, ring: int, steps: int, folder: str) -> None:
    torch.set_num_threads(1)
    longspan.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=data * ring)
    mesh = init_device_mesh("cpu", (data, ring), mesh_dim_names=("data", "ring"))
    place, group = mesh.get_local_rank("ring"), mesh.get_group("ring")
    torch.manual_seed(0)
    module = RingMultiheadDilatedAttention(WIDTH, HEADS, RATES, SEGMENTS, process_group=group)
    # Parameters are the same on every process, and each process sees other rows: gradients are averaged over both
    # dimensions of the mesh, in DDP's buckets.
    model = DistributedDataParallel(module)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(steps):
        inputs, targets = (shard(x, place, ring) for x in sequence(step, mesh.get_local_rank("data")))
        train(model, optimizer, inputs, targets, ring)
    if rank == 0:
        torch.save(module.state_dict(), os.path.join(folder, "parameters"))
        report = module.attention.monitor
        print(f"rank 0: {report.calls} calls, {report.bytes_received} bytes received, waited {report.waited_seconds:.3f} s")
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=int, default=2)
    parser.add_argument("--ring", type=int, default=2)
    parser.add_argument("--steps", type=int, default=3)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(worker, (arguments.data, arguments.ring, arguments.steps, folder), nprocs=arguments.data * arguments.ring)
        parameters = torch.load(os.path.join(folder, "parameters"))

    torch.manual_seed(0)
    one = MultiheadDilatedAttention(WIDTH, HEADS, RATES, SEGMENTS)
    optimizer = torch.optim.SGD(one.parameters(), lr=0.05)
    for step in range(arguments.steps):
        parts = [sequence(step, replica) for replica in range(arguments.data)]
        inputs, targets = (torch.cat(part) for part in zip(*parts))
        train(one, optimizer, inputs, targets, 1 / arguments.data)
    worst = max(float((parameters[name] - value).abs().max()) for name, value in one.state_dict().items())
    print(f"largest difference of a parameter after {arguments.steps} steps: {worst:.1e}")
    if worst > 1e-5:
        raise SystemExit("the mesh learnt something else than one process")
    print("equal to one process")


if __name__ == "__main__":
    main()
