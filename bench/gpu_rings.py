#!/usr/bin/env python3
"""Local rings whose ranks share one GPU, beside one device in the same run: time, time of the host, and bits.

    python bench/gpu_rings.py [--turns 3] [--json FILE]

Medians of calls, and of those the least over the turns, in which one device and every ring take part one after the other.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

import longspan
from longspan._longspan import Ring, RingHalo, Shards, local_ring, ring_backward_together, ring_forward_together
from longspan._patterns import compiled
from longspan.torch import DilatedAttention, RingDilatedAttention
from longspan.torch.operator import raw_tensor

SIZES = (2, 4, 8)


def timed(call: Callable[[], object], calls: int) -> tuple[float, float]:
    """Milliseconds of the GPU and of the host: medians."""
    call()
    on_gpu, on_host = [], []
    for _ in range(calls):
        torch.cuda.synchronize()
        first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        began = time.perf_counter()
        first.record()
        call()
        last.record()
        on_host.append((time.perf_counter() - began) * 1e3)
        torch.cuda.synchronize()
        on_gpu.append(first.elapsed_time(last))
    return statistics.median(on_gpu), statistics.median(on_host)


def turns(calls: dict[str, Callable[[], object]], count: int, turns_: int) -> dict[str, dict[str, float]]:
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in calls}
    for _ in range(turns_):
        for name, call in calls.items():
            taken[name].append(timed(call, count))
    return {name: {"ms": min(t[0] for t in times), "host_ms": min(t[1] for t in times)} for name, times in taken.items()}


def tensors(count: int, tokens: int, heads: int) -> list[torch.Tensor]:
    return [torch.randn(1, tokens, heads, 64, device="cuda", dtype=torch.bfloat16) for _ in range(count)]


def modules(turns_: int) -> dict:
    """131,072 tokens through the torch modules."""
    segments, dilations = [2048, 32768, 131072], [1, 16, 64]
    q, k, v, grad = tensors(4, 131072, 8)
    attentions = {"one device": DilatedAttention(segments, dilations)}
    attentions |= {f"ring of {size}": RingDilatedAttention(segments, dilations, ring_size=size) for size in SIZES}
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]

    def step(attention: torch.nn.Module) -> Callable[[], object]:
        return lambda: torch.autograd.grad(attention(*leaves), leaves, grad)

    with torch.no_grad():
        want = attentions["one device"](q, k, v)
        bits = {name: torch.equal(attention(q, k, v), want) for name, attention in attentions.items()}
        forward = turns({name: lambda a=attention: a(q, k, v) for name, attention in attentions.items()}, 10, turns_)
    both = turns({name: step(attention) for name, attention in attentions.items()}, 10, turns_)
    return {"name": "131,072 tokens, 8 heads, segments 2,048, 32,768, 131,072 at 1, 16, 64", "same_bits": bits, "forward": forward, "both": both}


def million(turns_: int, ranks: int = 8, heads: int = 12) -> dict:
    """1,048,576 tokens and ten branches of all heads through the engine, ranks in one thread."""
    tokens = 1 << 20
    pattern = longspan.Pattern.longnet([2048 << i for i in range(10)], [1 << i for i in range(10)])
    operator = compiled(pattern=pattern, causal=False, scale=None, dropout=0.0, deterministic=False, kernel="")
    q, k, v, dout = tensors(4, tokens, heads)
    out, want, dq, dk, dv = (torch.empty_like(q) for _ in range(5))
    lse, want_lse = (torch.empty(1, heads, tokens, device="cuda") for _ in range(2))
    shards, stream = Shards.even(tokens, ranks), torch.cuda.current_stream().cuda_stream
    rings, halos = [Ring(operator, one, shards) for one in local_ring(ranks)], [RingHalo() for _ in range(ranks)]

    def raw(**named: torch.Tensor) -> list:
        return [raw_tensor(name, tensor) for name, tensor in named.items()]

    def alone(rank: int) -> None:
        rows = {name: x.narrow(1, rank * (tokens // ranks), tokens // ranks) for name, x in {"q": q, "k": k, "v": v, "out": out}.items()}
        own_lse = lse.narrow(2, rank * (tokens // ranks), tokens // ranks)
        rings[rank].forward(*raw(**rows), raw_tensor("lse", own_lse), keep=halos[rank], stream=stream)

    def ring_forward() -> None:
        assert ring_forward_together(rings, *raw(q=q, k=k, v=v, out=out, lse=lse), None, 0, stream, halos)

    def ring_both() -> None:
        ring_forward()
        assert ring_backward_together(rings, *raw(q=q, k=k, v=v, out=out, lse=lse, dout=dout, dq=dq, dk=dk, dv=dv), None, 0, stream, halos)

    def one_forward() -> None:
        operator.forward(*raw(q=q, k=k, v=v, out=want, lse=want_lse), stream=stream)

    def one_both() -> None:
        one_forward()
        operator.backward(*raw(q=q, k=k, v=v, out=want, lse=want_lse, dout=dout), None, *raw(dq=dq, dk=dk, dv=dv), stream=stream)

    with ThreadPoolExecutor(ranks) as pool:  # the first call agrees on the problem: one thread for each rank
        list(pool.map(alone, range(ranks)))
    ring_forward()
    one_forward()
    name = f"ring of {ranks}"
    bits = {name: torch.equal(out, want) and torch.equal(lse, want_lse)}
    forward = turns({"one device": one_forward, name: ring_forward}, 3, turns_)
    both = turns({"one device": one_both, name: ring_both}, 3, turns_)
    return {"name": "1,048,576 tokens, 12 heads, ten branches of all heads, 2,048 to 1M at 1 to 512", "same_bits": bits, "forward": forward, "both": both}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    report = {
        "gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "commit": longspan.__commit__,
        "command": " ".join(["python bench/gpu_rings.py", *sys.argv[1:]]), "rows": [],
    }  # fmt: skip
    for measure in (modules, million):
        report["rows"].append(row := measure(arguments.turns))
        print(row["name"], "same bits" if all(row["same_bits"].values()) else f"BITS DIFFER: {row['same_bits']}")
        for step in ("forward", "both"):
            one = row[step]["one device"]["ms"]
            for name, times in row[step].items():
                print(f"  {step:8} {name:12} {times['ms']:8.3f} ms {times['ms'] / one:6.2f} of one device, host {times['host_ms']:.3f} ms", flush=True)
        torch.cuda.empty_cache()
    if arguments.json:
        arguments.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
