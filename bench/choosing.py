"""Time and memory of one call for each row of docs/choosing.md.

    python bench/choosing.py --device cuda --json bench/results/choosing_h200.json
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time

import torch

import longspan
import longspan.torch as lt

PATTERNS = {
    "dense": lambda n: "dense",
    "window": lambda n: longspan.Pattern.block_sparse(longspan.BlockPattern.local_window(1024, 64)),
    "bigbird": lambda n: longspan.Pattern.block_sparse(longspan.BlockPattern.bigbird(64, 512, 0.02, 0, 64)),
    "adaptive": lambda n: longspan.Pattern.block_sparse(longspan.BlockPattern.adaptive(0.05, 64)),
    "dilated": lambda n: longspan.dilated([2048, 8192, 32768], [1, 4, 16]),
    "longnet": lambda n: longspan.longnet([2048, 8192, 32768], [1, 4, 16]),
}


def peak(device: str, call) -> float:
    """MiB above what was there: of torch's allocator on a GPU, of workspace on a CPU."""
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        call()
        torch.cuda.synchronize()
        return (torch.cuda.max_memory_allocated() - before) / 2**20
    longspan.host_memory.trim()
    longspan.host_memory.reset_peak()
    call()
    return longspan.host_memory.statistics()["peak_used_bytes"] / 2**20


def median_ms(device: str, call, repeats: int) -> float:
    times = []
    for turn in range(repeats + 1):
        if device == "cuda":
            torch.cuda.synchronize()
        begin = time.perf_counter()
        call()
        if device == "cuda":
            torch.cuda.synchronize()
        if turn:
            times.append(1000 * (time.perf_counter() - begin))
    return statistics.median(times)


def measure(device: str, name: str, tokens: int, dtype, repeats: int) -> dict:
    heads, width = 12, 64
    tensors = [torch.randn(1, tokens, heads, width, device=device, dtype=dtype) for _ in range(3)]
    pattern = PATTERNS[name](tokens)
    grad = torch.randn_like(tensors[0])

    def forward():
        return lt.attention(*tensors, pattern, causal=True)

    def both():
        given = [x.detach().requires_grad_() for x in tensors]
        lt.attention(*given, pattern, causal=True).backward(grad)

    return {
        "pattern": name, "tokens": tokens, "forward_ms": median_ms(device, forward, repeats), "forward_mib": peak(device, forward),
        "both_ms": median_ms(device, both, repeats), "both_mib": peak(device, both),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--tokens", type=int, nargs="*", default=[])
    parser.add_argument("--json")
    arguments = parser.parse_args()
    on_gpu = arguments.device == "cuda"
    lengths = arguments.tokens or ([8192, 65536, 262144, 1048576] if on_gpu else [2048, 8192])
    dtype = torch.bfloat16 if on_gpu else torch.float32
    rows = []
    for tokens in lengths:
        for name in PATTERNS:
            if tokens > 131072 and name in ("dense", "adaptive", "bigbird"):
                continue  # their work grows with the square
            rows.append(measure(arguments.device, name, tokens, dtype, 5 if on_gpu else 3))
            print(json.dumps(rows[-1]), flush=True)
    device = torch.cuda.get_device_name() if on_gpu else platform.processor() or platform.machine()
    report = {"device": device, "threads": torch.get_num_threads(), "heads": 12, "head_dim": 64, "causal": True,
              "dtype": str(dtype).removeprefix("torch."), "rows": rows}  # fmt: skip
    if arguments.json:
        with open(arguments.json, "w") as file:
            file.write(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
