"""One process of a training over rings, as torchrun starts it: `--ring` processes share each sequence, and as many rings as
fit have different ones. GPUs with NCCL where there are any, else CPUs with gloo.

    torchrun --nproc-per-node 4 examples/slurm/train_ring.py --ring 2 --tokens 4096 --steps 3
    torchrun --nproc-per-node 4 examples/slurm/train_ring.py --ring 4 --wrap fsdp

The ring is the fast dimension of the mesh: its ranks are neighbours, on one node where it is no larger than a node.
"""

from __future__ import annotations

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from longspan.torch import RingMonitor, RingMultiheadDilatedAttention, reduce_behind_rings, shard


class Block(nn.Module):
    def __init__(self, width: int, heads: int, tokens: int, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        # Neighbours closely, everything else at a distance.
        segments, dilations = [min(2048, tokens), tokens], [1, 16]
        self.attention = RingMultiheadDilatedAttention(width, heads, dilations, segments, process_group=group)
        self.mix = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.before(x), is_causal=True)[0]
        return x + self.mix(self.between(x))


def wrapped(model: nn.Module, wrap: str, device: torch.device) -> nn.Module:
    """Parameters are the same on all processes, over rings and replicas alike, so both wrappers span them all."""
    if wrap == "fsdp":
        for block in model:
            fully_shard(block)
        return fully_shard(model)
    model = DistributedDataParallel(model, device_ids=[device.index] if device.type == "cuda" else None)
    reduce_behind_rings(model)
    return model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ring", type=int, default=0, help="processes that share a sequence (default: all)")
    parser.add_argument("--wrap", choices=("ddp", "fsdp"), default="ddp")
    parser.add_argument("--tokens", type=int, default=65536)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--steps", type=int, default=5)
    arguments = parser.parse_args()

    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)  # before the group is made: rings take it from here
    dist.init_process_group("nccl" if on_gpu else "gloo")
    size = dist.get_world_size()
    ring = arguments.ring or size
    if size % ring:
        raise SystemExit(f"--ring {ring} does not divide {size} processes")
    mesh = init_device_mesh(device.type, (size // ring, ring), mesh_dim_names=("data", "ring"))
    place, replica, group = mesh.get_local_rank("ring"), mesh.get_local_rank("data"), mesh.get_group("ring")

    torch.manual_seed(0)
    blocks = [Block(arguments.width, arguments.heads, arguments.tokens, group) for _ in range(arguments.layers)]
    model = wrapped(nn.Sequential(*blocks).to(device), arguments.wrap, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(arguments.steps):
        generator = torch.Generator().manual_seed(1000 * step + replica)
        # Stands for data: a rank needs its own rows only.
        rows = shard(torch.randn(1, arguments.tokens, arguments.width, generator=generator), place, ring).to(device)
        optimizer.zero_grad()
        # The share of this rank in its sequence's loss; times the ring's size, since gradients are averaged over all.
        loss = (model(rows) - rows.roll(1, dims=-1)).square().sum() / (arguments.tokens * arguments.width) * ring
        loss.backward()
        optimizer.step()
        total = loss.detach().clone()
        dist.all_reduce(total)
        if dist.get_rank() == 0:
            print(f"step {step}: loss {total.item() / size:.4f}", flush=True)
    monitors: list[RingMonitor] = [block.attention.attention.monitor for block in blocks]
    if dist.get_rank() == 0:
        print(f"rank 0 of {size}: {sum(one.calls for one in monitors)} ring calls, "
              f"{sum(one.bytes_received for one in monitors)} bytes received, "
              f"waited {sum(one.waited_seconds for one in monitors):.3f} s of "
              f"{sum(one.total_seconds for one in monitors):.3f} s")  # fmt: skip
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
