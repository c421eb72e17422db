"""Time to turn block patterns into lists of active blocks: a million tokens, and how it grows.

    python bench/block_plan.py [--threads 2] [--repeats 9]

Every sample has a seed or a size of its own, so that nothing is remembered. The best of the samples counts: planning happens
once, and what a busy neighbour adds says nothing. Numbers, hardware, commit and command go to bench/results/block_plan.json.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

import longspan
from longspan.bench.timing import machine

RESULTS = Path(__file__).resolve().parent / "results"
TOKENS, SIZE = 1 << 20, 128


def best_of(make, repeats: int) -> tuple[float, int]:
    """Seconds, and active blocks."""
    best, active = float("inf"), 0
    for index in range(repeats):
        start = time.perf_counter()
        mask = make(index)
        best = min(best, time.perf_counter() - start)
        active = mask.active_blocks
    return best, active


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=9)
    arguments = parser.parse_args()
    cases = []
    for density in (0.001, 0.01, 0.05):
        cases.append((f"bigbird density {density}", TOKENS, lambda seed, d=density: longspan.bigbird(256, 384, d, seed, SIZE).mask(TOKENS)))
    for tokens in (TOKENS // 4, TOKENS, TOKENS * 4):  # as many blocks a row: linear in tokens
        cases.append(("local_window 64 blocks", tokens, lambda i, n=tokens: longspan.local_window(64 * SIZE + i, SIZE).mask(n)))
    for blocks in (16, 64, 256):  # linear in the active blocks of a row
        cases.append((f"local_window {blocks} blocks", TOKENS, lambda i, w=blocks: longspan.local_window(w * SIZE + i, SIZE).mask(TOKENS)))
    results = []
    for threads in sorted({1, arguments.threads}):
        longspan.set_num_threads(threads)
        for name, tokens, make in cases:
            seconds, active = best_of(make, arguments.repeats)
            results.append({"pattern": name, "tokens": tokens, "block_size": SIZE, "threads": threads, "milliseconds": seconds * 1e3,
                            "active_blocks": active, "nanoseconds_per_active_block": seconds / active * 1e9})  # fmt: skip
            print(f"{name:24} {tokens:9,} tokens, {threads} threads: {seconds * 1e3:7.1f} ms, {active:10,} active blocks")
    report = {"machine": machine(), "command": " ".join(["python", "bench/block_plan.py", *sys.argv[1:]]), "results": results}
    (RESULTS / "block_plan.json").write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
