#!/usr/bin/env python3
"""What it costs in accuracy to keep an older maximum of a row while it grew by less than a limit, as the Hopper forward does.

Attention in tiles of keys as the kernels do it, in float32 on the CPU with weights rounded to bfloat16, against float64. A
key that has nearly all the weight of a row is rounded then, where subtracting the maximum always would give it exactly 1.

    python bench/kept_maximum.py --json bench/results/kept_maximum.json
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path

import torch
from torch import Tensor

KEYS, QUERIES, HEAD_DIM, TILE = 4096, 512, 64, 128


def attend(scores: Tensor, value: Tensor, limit: float) -> Tensor:
    """Scores in base 2. A limit of 0 always subtracts the maximum."""
    largest = torch.full(scores.shape[:1], -1e30)
    total, out = torch.zeros_like(largest), torch.zeros(len(scores), HEAD_DIM)
    for first in range(0, KEYS, TILE):
        tile = scores[:, first : first + TILE]
        top = torch.maximum(largest, tile.max(1).values)
        top = torch.where(top - largest < limit, largest, top)
        factor, largest = torch.exp2(largest - top), top
        weights = torch.exp2(tile - largest[:, None])
        total = total * factor + weights.sum(1)
        out = out * factor[:, None] + weights.bfloat16().float() @ value[first : first + TILE].float()
    return (out / total[:, None]).bfloat16()


def error_over_always(deviation: float, limits: list[float]) -> dict[str, float]:
    generator = torch.Generator().manual_seed(0)

    def draw(rows: int, factor: float) -> Tensor:
        return (torch.randn(rows, HEAD_DIM, generator=generator) * factor).bfloat16().double()

    query, key, value = draw(QUERIES, deviation**0.5), draw(KEYS, deviation**0.5), draw(KEYS, 1.0)
    scores = query @ key.T / HEAD_DIM**0.5
    expected = scores.softmax(1) @ value
    always, *others = (
        (attend((scores / math.log(2)).float(), value, limit).double() - expected).norm().item()
        for limit in [0.0, *limits]
    )
    return {f"{limit:g}": round(error / always, 3) for limit, error in zip(limits, others)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the result here")
    arguments = parser.parse_args()
    limits = [1.0, 2.0, 4.0, 8.0]
    report = {
        "command": "python bench/kept_maximum.py",
        "torch": torch.__version__,
        "error_of_out_over_always_subtracting": [
            {"deviation_of_scores": deviation, "limits_in_base_2": error_over_always(deviation, limits)}
            for deviation in (1.0, 4.0)
        ],
    }
    print(json.dumps(report, indent=1))
    if arguments.json:
        arguments.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
