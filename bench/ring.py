#!/usr/bin/env python3
"""Rings, measured: bytes moved for the sizes people run, memory of a rank, and MPI ranks against one process.

    python bench/ring.py --longspan build/release/longspan [bytes] [memory] [mpi]      all three without names

Writes bench/results/ring_bytes.json, ring_memory.json and ring_mpi.json. Bytes are plain integers from `longspan plan`;
where `counted` is true they were also counted by `longspan ring` on the way and were equal on every rank.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
from pathlib import Path

RESULTS = Path(__file__).parent / "results"
RINGS = (2, 4, 8, 16, 64)
# name, tokens, heads, head_dim, dtype, assignment of heads, segments, dilations
FAMILIES = [
    ("LongNet base", 32768, 12, 64, "bf16", "all", [2048, 4096, 8192, 16384, 32768], [1, 2, 4, 6, 12]),
    ("seed benchmarks", 262144, 8, 64, "bf16", "groups", [1024, 4096, 8192], [1, 2, 4]),
    ("GigaPath", 200000, 16, 48, "bf16", "torchscale", [1024, 5792, 32768, 185363, 1048576], [1, 2, 4, 8, 16]),
    ("LongViT", 1048576, 16, 24, "bf16", "torchscale", [1024, 4096, 32768, 262144, 1048576], [1, 2, 4, 8, 16]),
    ("1M, ten branches", 1048576, 12, 64, "bf16", "all", [2048 << i for i in range(10)], [1 << i for i in range(10)]),
    ("1M, ten branches, head groups", 1048576, 12, 64, "bf16", "groups", [2048 << i for i in range(10)], [1 << i for i in range(10)]),
    ("billion tokens", 1_000_000_000, 4, 64, "bf16", "all", [2048, 131072, 8388608, 536870912, 1_000_000_000], [1, 64, 4096, 262144, 488281]),
]  # fmt: skip
MOST_COUNTED = 40000  # tokens that a run of the benchmark can afford


def problem(tokens, heads, head_dim, dtype, assignment, segments, dilations) -> list[str]:
    arguments = [
        "--tokens", tokens, "--heads", heads, "--head-dim", head_dim, "--dtype", dtype,
        "--segments", ",".join(map(str, segments)), "--dilations", ",".join(map(str, dilations)),
    ]  # fmt: skip
    if assignment != "groups":
        arguments += ["--assign", "all"]
    if assignment == "torchscale":
        arguments += ["--phase", "torchscale"]
    return [str(one) for one in arguments]


def run(command: list[str], **environment: str) -> dict:
    result = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **environment})
    if result.returncode != 0:
        raise SystemExit(f"{' '.join(command)}: {result.stderr}")
    return json.loads(result.stdout[result.stdout.index("{") :])


def machine() -> dict:
    model = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    return {"cpu": model[0].split(": ")[1] if model else platform.machine(), "cpus": os.cpu_count()}


def write(name: str, content: dict) -> None:
    (RESULTS / f"{name}.json").write_text(json.dumps(content, indent=1) + "\n")


def measure_bytes(longspan: str) -> None:
    rows = []
    for name, *shape in FAMILIES:
        for ranks in RINGS:
            arguments = problem(*shape)
            ring = run([longspan, "plan", "--json", "--ranks", str(ranks), *arguments])["ring"]["per_rank"]
            row = {"family": name, "tokens": shape[0], "ranks": ranks, "counted": False}
            for key in ("bytes_received", "all_gather_bytes", "naive_ring_bytes"):
                row[f"largest_{key}"] = max(rank[key] for rank in ring)
                row[f"total_{key}"] = sum(rank[key] for rank in ring)
            row["total_bytes_sent"] = sum(rank["bytes_sent"] for rank in ring)
            if shape[0] <= MOST_COUNTED and ranks <= 8:
                counted = run([longspan, "ring", "--json", "--ranks", str(ranks), *arguments])
                assert counted["bytes_as_planned"], (name, ranks)
                assert [rank["bytes_received"] for rank in counted["per_rank"]] == [rank["bytes_received"] for rank in ring]
                row["counted"] = True
            rows.append(row)
            print(f"{name:32} k={ranks:3} {row['largest_bytes_received']:>16,} {row['largest_all_gather_bytes']:>16,} "
                  f"{row['largest_naive_ring_bytes']:>18,}")  # fmt: skip
    write("ring_bytes", {"what": "bytes that the rank with most receives in one forward, and sums over ranks; the all-gather cuts segments at shard ends", "results": rows})


def measure_memory(longspan: str) -> None:
    """One forward over 8 local ranks: what a rank's tensors and remote rows take, and the process as a whole."""
    arguments = ["--tokens", "1048576", "--heads", "2", "--head-dim", "64", "--segments", "2048,1048576", "--dilations", "1,512", "--assign", "all"]
    result = run([longspan, "ring", "--json", "--ranks", "8", *arguments])
    ranks = [{key: rank[key] for key in ("rank", "rows", "tensor_bytes", "halo_bytes", "bytes_received", "seconds")} for rank in result["per_rank"]]
    peak = max(rank["process_peak_bytes"] for rank in result["per_rank"])
    held = sum(rank["tensor_bytes"] + rank["halo_bytes"] for rank in ranks)
    write("ring_memory", {"machine": machine(), "command": f"longspan ring --ranks 8 {' '.join(arguments)}", "per_rank": ranks,
                          "process_peak_bytes": peak, "tensors_and_halos_bytes": held, "peak_per_rank_bytes": peak // 8})  # fmt: skip
    print(f"tensors and halos {held / 2**20:.0f} MiB, process peak {peak / 2**20:.0f} MiB")


def measure_mpi(longspan: str, pairs: int = 3) -> None:
    """Interleaved: one process with all threads, then two MPI ranks that share them."""
    threads = os.cpu_count() or 1
    arguments = ["--tokens", "65536", "--heads", "8", "--head-dim", "64", "--segments", "2048,8192,65536", "--dilations", "1,4,32", "--backward"]
    one, two = [], []
    for _ in range(pairs):
        alone = run([longspan, "ring", "--json", "--ranks", "1", *arguments])
        one.append(sum(alone["per_rank"][0][key] if key == "seconds" else alone["per_rank"][0][key]["seconds"] for key in ("seconds", "backward")))
        ranks = run(["mpirun", "--allow-run-as-root", "--oversubscribe", "--bind-to", "none", "-n", "2", longspan, "ring", "--json", *arguments],
                    OMP_NUM_THREADS=str(max(threads // 2, 1)))["per_rank"]  # fmt: skip
        two.append({"seconds": max(rank["seconds"] for rank in ranks) + max(rank["backward"]["seconds"] for rank in ranks),
                    "waited_seconds": [rank["waited_seconds"] + rank["backward"]["waited_seconds"] for rank in ranks],
                    "overlapped_seconds": [rank["overlapped_seconds"] + rank["backward"]["overlapped_seconds"] for rank in ranks]})  # fmt: skip
    ratio = statistics.median(run["seconds"] for run in two) / statistics.median(one)
    write("ring_mpi", {"machine": machine(), "command": f"longspan ring {' '.join(arguments)}", "one_process_seconds": one, "two_ranks": two, "ratio": ratio})
    print(f"two MPI ranks take {ratio:.3f} of one process's time")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--longspan", default="build/release/longspan")
    parser.add_argument("parts", nargs="*", choices=["bytes", "memory", "mpi", []], default=[])
    arguments = parser.parse_args()
    parts = arguments.parts or ["bytes", "memory", "mpi"]
    for part in parts:
        {"bytes": measure_bytes, "memory": measure_memory, "mpi": measure_mpi}[part](arguments.longspan)


if __name__ == "__main__":
    main()
