#!/usr/bin/env python3
"""Errors of the operator and of PyTorch's fused kernels against float64, on the same inputs.

Relative errors of norms of out, dq, dk and dv, with scores of a standard deviation of 1 and of 4, where few keys have all
the weight. Rows, peers and float64 results are those of gpu_vs_torch.py.

    python bench/gpu_errors.py --json bench/results/h200_errors.json
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

import gpu_vs_torch as bench
import longspan
import longspan.torch as lt
from longspan.bench.timing import gpu_facts, without_folders

import torch


def rows() -> list[bench.Row]:
    result = []
    for dtype, kind in ((torch.bfloat16, ""), (torch.float16, "_f16")):
        for causal in (False, True):
            suffix = kind + ("_causal" if causal else "")
            shapes = [(f"dense_4k_d{head_dim}", 4096, 4, head_dim, (4096,), (1,)) for head_dim in (64, 128)]
            shapes.append(("dilated_8k", 8192, 8, 64, (2048, 4096, 8192), (1, 2, 4)))
            result += [bench.Row(name + suffix, *shape, causal, dtype=dtype) for name, *shape in shapes]
    return result


def measure(row: bench.Row, deviation: float, deterministic: bool) -> dict[str, object]:
    query, key, value, grad = row.inputs()
    inputs = [query * deviation**0.5, key * deviation**0.5, value, grad]
    pattern = row.pattern

    def ours(*qkv: torch.Tensor) -> torch.Tensor:
        return lt.attention(*qkv, pattern, causal=row.causal, deterministic=deterministic)

    peers = {name: attend for name, attend in bench.peers(row, quick=True).items() if name.endswith("views")}
    errors = bench.errors(row, {"longspan": ours, **peers}, inputs)
    ratios = {
        name: {quantity: errors["longspan"][quantity] / error for quantity, error in errors[name].items()}
        for name in peers
    }
    return {
        "name": row.name,
        "deviation_of_scores": deviation,
        "kernels": {step: row.plan().kernel(step) for step in ("forward", "backward")},
        "errors": errors,
        "over_peers": ratios,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--deterministic", action="store_true", help="ask ours for the same bits on every run")
    parser.add_argument("--json", type=Path, help="write everything here")
    arguments = parser.parse_args()
    if not torch.cuda.is_available() or not longspan.info()["gpus"]:
        sys.exit(f"gpu_errors: no GPU to measure: {longspan.info()['why_no_gpu'] or 'torch sees none'}")
    results = []
    for row in rows():
        for deviation in (1.0, 4.0):
            results.append(measure(row, deviation, arguments.deterministic))
            told = results[-1]
            for name, ratios in told["over_peers"].items():
                line = "  ".join(f"{quantity} {ratio:.3f}" for quantity, ratio in ratios.items())
                print(f"{row.name:20} scores of {deviation:.0f}: errors over {name:12} {line}", flush=True)
    if arguments.json:
        report = {
            **gpu_facts(),
            "torch": torch.__version__,
            "longspan": longspan.__version__,
            "commit": longspan.__commit__,
            "command": " ".join(["python bench/gpu_errors.py", *without_folders(sys.argv[1:])]),
            "date": time.strftime("%Y-%m-%d"),
            "rows": results,
        }
        arguments.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
