#!/usr/bin/env python3
"""Fits the rates of src/plan/device_rates.cpp to committed measurements.

    python bench/device_rates.py            prints the fits and how far off they are
    python bench/device_rates.py --check    fails where the table says something else

Seconds of a pass are FLOPs / rate + bytes of strand rows / rate + seconds of a call: least squares of relative errors.
Heads narrower than 64 cost as much as 64. On CPUs, and where a head dim has few measurements, the call's part is given.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "bench" / "results"
SEED = ([2048, 4096, 8192], [1, 2, 4])
MILLION = ([2048, 8192, 32768, 131072, 1048576], [1, 4, 16, 64, 512])
WIDE = ([8192, 16384, 32768, 65536], [1, 2, 4, 8])
SLIDE = ([1024, 5792, 32768, 185363, 1048576], [1, 2, 4, 8, 16])
MERGED = ([2048, 8192, 32768], [1, 2, 4])


def strands(tokens: int, segment: int, dilation: int, phase: int, causal: bool) -> tuple[float, float]:
    """Pairs and rows of one head in one branch."""
    pairs = rows = 0.0
    segment = min(segment, tokens)
    for length, times in ((segment, tokens // segment), (tokens % segment, 1)):
        count = max(0, -(-(length - phase) // dilation))
        pairs += times * (count * (count + 1) / 2 if causal else count * count)
        rows += times * count
    return pairs, rows


def work(tokens: int, heads: int, segments: list[int], dilations: list[int], groups: bool, causal: bool) -> tuple[float, float]:
    pairs = rows = 0.0
    for branch, (segment, dilation) in enumerate(zip(segments, dilations)):
        own = heads // len(segments) + (branch < heads % len(segments)) if groups else heads
        for head in range(own):
            found = strands(tokens, segment, dilation, (branch if groups else head) % dilation, causal)
            pairs, rows = pairs + found[0], rows + found[1]
    return pairs, rows


def gpu_shape(name: str) -> tuple[int, float, float] | None:
    """Head dim, pairs and strand rows of a workload of longspan_gpu_bench; None where it is not part of the fit."""
    causal, name = name.endswith("_causal"), name.removesuffix("_causal")
    if name in ("dense16k_d48", "dense16k_d64", "dense16k_d128"):
        return int(name[10:]), *work(16384, 16, [16384], [1], False, causal)
    if name.startswith("seed"):
        return 64, *work(int(name[4:-1]) * 1024, 8, *SEED, True, causal)
    if name == "million":
        return 64, *work(1 << 20, 12, *MILLION, True, causal)
    if name == "wide131k":
        return 128, *work(131072, 16, *WIDE, True, causal)
    if name.startswith("strand"):
        return 64, *work(131072, 8, [int(name[6:])], [1], True, causal)
    if name.startswith("slide"):
        return 48, *work({"slide10k": 10001, "slide65k": 65536}[name], 16, *SLIDE, False, causal)
    if name == "merged65k_d64":
        return 64, *work(65536, 12, *MERGED, False, causal)
    return None


def gpu_rows(backward: bool, wide: bool) -> Iterator[tuple[float, float, float]]:
    """FLOPs, bytes of strand rows and seconds."""
    for row in json.loads((RESULTS / "h200_hopper.json").read_text())["workloads"]:
        shape, milliseconds = gpu_shape(row["workload"]), row.get("backward_ms" if backward else "forward_ms")
        if shape is None or milliseconds is None or (shape[0] > 64) != wide:
            continue
        head_dim, pairs, rows = shape
        yield (10 if backward else 4) * pairs * max(head_dim, 64), rows * head_dim * 2 * (8 if backward else 4), milliseconds / 1e3


def cpu_rows(backward: bool, dtype: str) -> Iterator[tuple[float, float, float]]:
    found = json.loads((RESULTS / "cpu_vs_torch.json").read_text())
    threads, size = found["machine"]["threads"], 4 if dtype == "float32" else 2
    for row in found["results"]:
        if row["dtype"] != dtype or row["case"] != "dilated":
            continue
        pairs, rows = work(row["tokens"], row["heads"], row["segments"], row["dilations"], True, row["causal"])
        milliseconds = row["both_ms"] - row["forward_ms"] if backward else row["forward_ms"]
        head_dim = row["head_dim"]
        yield (10 if backward else 4) * pairs * head_dim, rows * head_dim * size * (8 if backward else 4), milliseconds / 1e3 * threads


def fit(rows: list[tuple[float, float, float]], call: float | None) -> tuple[list[float], list[float]]:
    """Coefficients of FLOPs, bytes and a call, and model / measurement of each row."""
    free = 2 if call is not None else 3
    lines = [[flops / seconds, size / seconds, 1 / seconds] for flops, size, seconds in rows]
    wanted = [1 - (call or 0) * line[2] for line in lines]
    matrix = [[sum(a[i] * a[j] for a in lines) for j in range(free)] + [sum(a[i] * y for a, y in zip(lines, wanted))] for i in range(free)]
    for i in range(free):  # normal equations are small and far from singular: no pivots
        for j in range(free):
            if j != i:
                factor = matrix[j][i] / matrix[i][i]
                matrix[j] = [b - factor * a for a, b in zip(matrix[i], matrix[j])]
    found = [matrix[i][-1] / matrix[i][i] for i in range(free)] + ([] if call is None else [call])
    return found, [sum(c * x for c, x in zip(found, line)) for line in lines]


def fits() -> dict[tuple[str, bool, int], list[float]]:
    """Of each entry of the table: TFLOP/s, GB/s and microseconds, forward and backward."""
    table: dict[tuple[str, bool, int], list[float]] = {}

    def add(key: tuple[str, bool, int], rows: list[tuple[float, float, float]], call: float | None) -> float:
        found, errors = fit(rows, call)
        table.setdefault(key, []).extend([1e-12 / found[0], 1e-9 / found[1], found[2] * 1e6])
        print(f"{key}: {table[key][-3]:.4g} TFLOP/s, {table[key][-2]:.4g} GB/s, {table[key][-1]:.3g} us; "
              f"model / measured {min(errors):.2f} to {max(errors):.2f} in {len(errors)} rows")  # fmt: skip
        return found[2]

    calls = {backward: add(("h200", False, 64), list(gpu_rows(backward, False)), None) for backward in (False, True)}
    for backward in (False, True):
        add(("h200", False, 128), list(gpu_rows(backward, True)), calls[backward])
        for dtype in ("float32", "bfloat16"):
            add(("cpu", dtype == "float32", 64), list(cpu_rows(backward, dtype)), 20e-6)
    return table


def check(table: dict[tuple[str, bool, int], list[float]]) -> None:
    text = (ROOT / "src" / "plan" / "device_rates.cpp").read_text()
    for (name, wide, head_dim), found in table.items():
        entry = re.search(rf'Entry\{{"{name}", {str(wide).lower()}, {head_dim}, true, \{{([^}}]*)\}},\s*\{{([^}}]*)\}}', text)
        assert entry, f"device_rates.cpp has no entry for {name} {wide} {head_dim}"
        told = [float(number) for number in ",".join(entry.groups()).split(",")]
        for one, other in zip(told, found):
            assert abs(one - other) <= 0.01 * other, f"{name} {wide} {head_dim}: the table says {told}, the fit {found}"


if __name__ == "__main__":
    fitted = fits()
    if "--check" in sys.argv[1:]:
        check(fitted)
