#!/usr/bin/env python3
"""Trains a byte-level LongNetLM on a file of text, and writes some text of its own at the end.

    python examples/train_lm.py --data FILE --context 8192
    torchrun --nproc-per-node 4 examples/train_lm.py --data FILE --ring 2     # 2 rings of 2: 2 sequences at a time
    torchrun --nproc-per-node 4 examples/train_lm.py --data FILE --ring 2 --shard     # parameters shared out, too (FSDP)

Checkpoints are safetensors files with a checksum, replaced in one step; the one before is kept. A killed run goes on from the
last one with the same losses: what a step draws depends on the seed and its number alone. A damaged one is named, and the one
before it used. Under torchrun the ranks of a ring share
each sequence, the rings share the batch, and the losses are those of one process with the whole batch, to rounding. A
checkpoint holds whole tensors: it goes on with any number of processes.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import math
import os
import sys
import time
from pathlib import Path
from typing import NoReturn

import numpy as np
import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from longspan.torch import LongNetLM, MultiheadDilatedAttention, RingDilatedAttention

BYTES = 256


@dataclasses.dataclass
class Place:
    """Where this process stands: rank of its ring, and which ring of how many."""

    rank: int = 0
    ring_rank: int = 0
    ring_size: int = 1
    ring: int = 0
    rings: int = 1
    group: dist.ProcessGroup | None = None
    mesh: DeviceMesh | None = None  # processes by rank in their ring, and ring


def join(ring_size: int | None, device: str) -> Place:
    """Under torchrun: rings of ring_size neighbours (default: everybody in one)."""
    if "WORLD_SIZE" not in os.environ:
        return Place()
    kind = torch.device(device).type
    dist.init_process_group("gloo" if kind == "cpu" else "cpu:gloo,cuda:nccl")
    rank, world = dist.get_rank(), dist.get_world_size()
    size = ring_size or world
    if world % size:
        raise SystemExit(f"--ring {size}: {world} processes cannot be split into rings of {size}")
    mesh = DeviceMesh(kind, torch.arange(world).view(-1, size).T.contiguous(), mesh_dim_names=("ring", "data"))
    return Place(rank, rank % size, size, rank // size, world // size, mesh.get_group("ring"), mesh)


def make_model(arguments: argparse.Namespace, place: Place) -> LongNetLM:
    torch.manual_seed(arguments.seed)
    segments = [min(arguments.context, size) for size in (256, 1024, 4096, 16384)][: arguments.heads]
    model = LongNetLM(
        BYTES,
        d_model=arguments.width,
        nhead=arguments.heads,
        num_encoder_layers=arguments.layers,
        num_decoder_layers=arguments.layers,
        dim_feedforward=4 * arguments.width,
        segment_lengths=segments,
        dilation_rates=[1, 2, 4, 8][: len(segments)],
        dropout=arguments.dropout,
        positions="rotary",
        gradient_checkpointing=arguments.gradient_checkpointing,
    )
    if place.group is not None:
        for module in model.modules():
            if isinstance(module, MultiheadDilatedAttention):
                one = module.attention
                module.attention = RingDilatedAttention(
                    one.segment_lengths, one.dilation_rates, one.dropout, process_group=place.group
                )
    return model.to(arguments.device)


def share(model: LongNetLM, arguments: argparse.Namespace, place: Place) -> torch.nn.Module:
    """The model as all processes train it. Every process has the mean over as many bytes, so the mean of gradients over all
    of them is that of the whole batch."""
    if place.mesh is None:
        return model
    if not arguments.shard:
        return DistributedDataParallel(model)
    from torch.distributed.fsdp import fully_shard  # torch 2.6 or later

    # Rings keep copies of what is sharded over them; one ring alone is sharded over its ranks.
    mesh = place.mesh if place.rings > 1 else place.mesh["ring"]
    for layer in [*model.long_net.encoder.layers, *model.long_net.decoder.layers]:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def whole(value: torch.Tensor) -> torch.Tensor:
    return value.full_tensor() if hasattr(value, "full_tensor") else value


def make_batch(data: np.ndarray, step: int, arguments: argparse.Namespace, place: Place) -> tuple[torch.Tensor, ...]:
    """This process's rows and columns of the step's batch: inputs, and the bytes that follow them."""
    drawn = np.random.default_rng([arguments.seed, step]).integers(len(data) - arguments.context, size=arguments.batch)
    mine = drawn[place.ring :: place.rings]
    share = arguments.context // place.ring_size
    first = place.ring_rank * share
    rows = np.stack([data[start + first : start + first + share + 1] for start in mine]).astype(np.int64)
    rows = torch.from_numpy(rows).to(arguments.device)
    return rows[:, :-1], rows[:, 1:]


def settings(arguments: argparse.Namespace) -> dict[str, int]:
    return {name: getattr(arguments, name) for name in ("context", "width", "layers", "heads", "batch", "seed")}


def flush(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    os.fsync(handle)
    os.close(handle)


class Damaged(Exception):
    """A checkpoint is not what was written."""


def checksum(tensors: dict[str, torch.Tensor], metadata: dict[str, str]) -> str:
    """Of names, types, shapes and bytes."""
    result = hashlib.blake2b(digest_size=16)
    for name, tensor in sorted(tensors.items()):
        result.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        result.update(tensor.reshape(-1).view(torch.uint8).numpy())
    result.update(json.dumps([metadata["step"], metadata["settings"]]).encode())
    return result.hexdigest()


def before(file: Path) -> Path:
    return file.with_name(f"{file.stem}.before{file.suffix}")


def save(
    file: Path, step: int, model: LongNetLM, optimizer: torch.optim.Optimizer, arguments: argparse.Namespace, place: Place
) -> None:
    """Writes beside the old file and replaces it when all is on the disk; the old one, unless it was found damaged, becomes
    the one before. Processes that share parameters gather them."""
    tensors = {f"model.{name}": value for name, value in model.state_dict().items()}
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state[parameter].items():
            tensors[f"optimizer.{key}.{name}"] = torch.as_tensor(value)
    tensors = {name: whole(value.detach()).cpu().contiguous() for name, value in tensors.items()}
    if place.rank != 0:
        return
    file.parent.mkdir(parents=True, exist_ok=True)
    unfinished = file.with_suffix(".unfinished")
    metadata = {"step": str(step), "settings": json.dumps(settings(arguments))}
    save_file(tensors, unfinished, {**metadata, "checksum": checksum(tensors, metadata)})
    flush(unfinished)
    if file.exists() and file not in DAMAGED:
        os.replace(file, before(file))
    DAMAGED.discard(file)
    os.replace(unfinished, file)
    flush(file.parent)


DAMAGED: set[Path] = set()


def read(file: Path, arguments: argparse.Namespace) -> tuple[int, dict[str, torch.Tensor]]:
    """The step to go on with, and all tensors. Raises Damaged."""
    try:
        with safe_open(file, "pt") as stored:
            metadata = stored.metadata() or {}
            tensors = {name: stored.get_tensor(name) for name in stored.keys()}
        if metadata["checksum"] != checksum(tensors, metadata):
            raise Damaged("its bytes are not those that were written")
    except (SafetensorError, OSError, ValueError) as error:
        raise Damaged(str(error)) from None
    except KeyError as error:
        raise Damaged(f"it has no {error.args[0]}") from None
    for name, value in json.loads(metadata["settings"]).items():
        if value != settings(arguments)[name]:
            raise SystemExit(
                f"{file} was written with --{name} {value}, this run has {settings(arguments)[name]}: use the same, or "
                "another --out"
            )
    return int(metadata["step"]), tensors


def read_newest(file: Path, arguments: argparse.Namespace, place: Place) -> tuple[int, dict[str, torch.Tensor]]:
    """What to go on with: the newest checkpoint that is whole, step 0 if there has been none. The first process chooses."""
    chosen: list[Path | str | None] = [None]
    step, tensors = 0, {}
    for one in (file, before(file)):
        if one.is_dir():
            raise SystemExit(f"{one} is a folder, where a checkpoint is to be written: move it away, or use another --out")
    if file.parent.exists() and not file.parent.is_dir():
        raise SystemExit(f"--out {file.parent} is a file: give a folder for checkpoints")
    if place.rank == 0:
        wrong = {}
        for one in (file, before(file)):
            try:
                if one.exists():
                    (step, tensors), chosen = read(one, arguments), [one]
                    break
            except Damaged as error:
                wrong[one] = str(error)
                DAMAGED.add(one)
        for one, reason in wrong.items():
            print(f"{one} is damaged ({reason})", *([f"going on from {chosen[0]}"] if chosen[0] else []), sep="; ", flush=True)
        if wrong and chosen[0] is None:
            chosen = [f"no checkpoint is whole: {', '.join(map(str, wrong))}; remove them to begin anew, or use another --out"]
    if place.group is not None:
        dist.broadcast_object_list(chosen)
    if isinstance(chosen[0], str):
        raise SystemExit(chosen[0])
    if place.rank != 0 and chosen[0] is not None:
        try:
            step, tensors = read(chosen[0], arguments)
        except Damaged as error:
            raise SystemExit(f"{chosen[0]} is whole on the first process, and on process {place.rank} not: {error}") from None
    return step, tensors


def load_model(model: LongNetLM, tensors: dict[str, torch.Tensor]) -> None:
    model.load_state_dict({name.removeprefix("model."): x for name, x in tensors.items() if name.startswith("model.")})


def load_optimizer(model: LongNetLM, optimizer: torch.optim.Optimizer, tensors: dict[str, torch.Tensor]) -> None:
    """After sharding, which makes other parameters of the model's."""

    def placed(key: str, value: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
        if key == "step":
            return value
        value = value.to(parameter.device)
        if not hasattr(parameter, "device_mesh"):
            return value
        from torch.distributed.tensor import distribute_tensor

        return distribute_tensor(value, parameter.device_mesh, parameter.placements)

    for name, parameter in model.named_parameters():
        optimizer.state[parameter] = {
            key: placed(key, tensors[f"optimizer.{key}.{name}"], parameter) for key in ("step", "exp_avg", "exp_avg_sq")
        }


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="a file; its bytes are the tokens")
    parser.add_argument("--context", type=int, default=8192)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch", type=int, help="sequences in a step, over all processes (default: one for each ring)")
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=2, help="of the encoder, and as many of the decoder")
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--bf16", action="store_true", help="autocast to bfloat16")
    parser.add_argument("--gradient-checkpointing", action="store_true")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--ring", type=int, help="processes that share a sequence (default: all of them)")
    parser.add_argument("--shard", action="store_true", help="share parameters out over the rings (FSDP) instead of copying them (DDP)")
    parser.add_argument("--out", type=Path, help="folder for checkpoints; a run that finds one goes on from it")
    parser.add_argument("--save-every", type=int, default=50)
    parser.add_argument("--sample", type=int, default=200, help="bytes to generate at the end")
    return parser.parse_args()


def train(arguments: argparse.Namespace, place: Place) -> LongNetLM:
    if not arguments.data.is_file():
        raise SystemExit(f"--data {arguments.data} is {'a folder' if arguments.data.is_dir() else 'not there'}: give a file")
    data = np.memmap(arguments.data, np.uint8, mode="r")
    if len(data) <= arguments.context:
        raise SystemExit(f"--data has {len(data)} bytes: more than --context {arguments.context} are needed")
    if arguments.context % place.ring_size or arguments.batch % place.rings:
        raise SystemExit(
            f"--context {arguments.context} must be a multiple of the ring's {place.ring_size} processes, --batch "
            f"{arguments.batch} of the {place.rings} rings"
        )
    model = make_model(arguments, place)
    file = arguments.out / "checkpoint.safetensors" if arguments.out else None
    begin, tensors = read_newest(file, arguments, place) if file else (0, {})
    if tensors:
        load_model(model, tensors)
    shared = share(model, arguments, place)
    optimizer = torch.optim.AdamW(model.parameters(), lr=arguments.lr, weight_decay=0.01)
    if tensors:
        load_optimizer(model, optimizer, tensors)
    first, started = place.ring_rank * (arguments.context // place.ring_size), time.monotonic()
    for step in range(begin, arguments.steps):
        inputs, targets = make_batch(data, step, arguments, place)
        torch.manual_seed(arguments.seed + 1_000_003 * (step + 1))  # dropout
        for group in optimizer.param_groups:
            group["lr"] = arguments.lr * min(1.0, (step + 1) / 20)
        with torch.autocast(torch.device(arguments.device).type, torch.bfloat16, enabled=arguments.bf16):
            logits = shared(inputs, first=first, length=arguments.context)
        loss = functional.cross_entropy(logits.float().flatten(0, 1), targets.flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        mean = loss.detach()
        if place.group is not None:
            dist.all_reduce(mean)
            mean = mean / dist.get_world_size()
        if place.rank == 0:
            speed = (step + 1 - begin) * arguments.batch * arguments.context / (time.monotonic() - started)
            left = (arguments.steps - step - 1) * arguments.batch * arguments.context / speed
            print(
                f"step {step + 1}/{arguments.steps}  loss {mean.item():.6f}  {mean.item() / math.log(2):.3f} bits a byte  "
                f"{speed:,.0f} bytes/s  {left:.0f} s left",
                flush=True,
            )
        if file and ((step + 1) % arguments.save_every == 0 or step + 1 == arguments.steps):
            save(file, step + 1, model, optimizer, arguments, place)
    return model


def leave() -> NoReturn:
    """Ends a process of several. torch's sharding keeps groups in caches of its own; their threads may still drop tensors
    while the interpreter shuts down, which aborts it. All that is to be kept is written by now, so it ends without that."""
    dist.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def main() -> None:
    arguments = parse()
    place = join(arguments.ring, arguments.device)
    arguments.batch = arguments.batch or place.rings
    model = train(arguments, place)
    if place.group is not None:
        leave()
    if arguments.sample:
        prompt = torch.tensor([list(b"The ")], device=arguments.device)
        text = model.generate(prompt, arguments.sample, temperature=0.8, top_p=0.95, seed=arguments.seed)
        print(bytes(text[0].tolist()).decode(errors="replace"))


if __name__ == "__main__":
    main()
