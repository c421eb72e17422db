#!/usr/bin/env python3
"""Rings, measured: bytes moved for the sizes people run, memory of a rank, MPI and local ranks against one process.

    python bench/ring.py --longspan build/release/longspan [bytes] [memory] [mpi] [local] [gpu]      the first three without names

Writes bench/results/ring_bytes.json, ring_memory.json, ring_mpi.json, ring_local_N.json (of N cores)
and ring_gpu.json (or the same names in --results). `local` wants 16 cores, `gpu` a GPU. Bytes are plain integers from `longspan plan`;
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


def write(name: str, longspan: str, content: dict) -> None:
    commit = run([longspan, "info", "--json"])["commit"]
    (RESULTS / f"{name}.json").write_text(json.dumps({"commit": commit, **content}, indent=1) + "\n")


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
            if shape[0] <= MOST_COUNTED:
                counted = run([longspan, "ring", "--json", "--ranks", str(ranks), *arguments])
                assert counted["bytes_as_planned"], (name, ranks)
                assert [rank["bytes_received"] for rank in counted["per_rank"]] == [rank["bytes_received"] for rank in ring]
                row["counted"] = True
            rows.append(row)
            print(f"{name:32} k={ranks:3} {row['largest_bytes_received']:>16,} {row['largest_all_gather_bytes']:>16,} "
                  f"{row['largest_naive_ring_bytes']:>18,}")  # fmt: skip
    write("ring_bytes", longspan, {"what": "bytes that the rank with most receives in one forward, and sums over ranks; the all-gather cuts segments at shard ends", "results": rows})


def measure_memory(longspan: str) -> None:
    """One forward over 8 local ranks: what a rank's tensors and remote rows take, and the process as a whole."""
    arguments = ["--tokens", "1048576", "--heads", "2", "--head-dim", "64", "--segments", "2048,1048576", "--dilations", "1,512", "--assign", "all"]
    result = run([longspan, "ring", "--json", "--ranks", "8", *arguments])
    ranks = [{key: rank[key] for key in ("rank", "rows", "tensor_bytes", "halo_bytes", "bytes_received", "seconds")} for rank in result["per_rank"]]
    peak = max(rank["process_peak_bytes"] for rank in result["per_rank"])
    held = sum(rank["tensor_bytes"] + rank["halo_bytes"] for rank in ranks)
    write("ring_memory", longspan, {"machine": machine(), "command": f"longspan ring --ranks 8 {' '.join(arguments)}", "per_rank": ranks,
                          "process_peak_bytes": peak, "tensors_and_halos_bytes": held, "peak_per_rank_bytes": peak // 8})  # fmt: skip
    print(f"tensors and halos {held / 2**20:.0f} MiB, process peak {peak / 2**20:.0f} MiB")


def passes(rank: dict, key: str) -> float:
    return rank[key] + rank["backward"][key]


def measure_against_one(longspan: str, ranks: int, arguments: list[str], command: list[str], pairs: int) -> dict:
    """Pairs of one process with all cores and `ranks` ranks that share them, forward and backward, which goes first
    changing from pair to pair."""
    threads = len(os.sched_getaffinity(0))
    alone, ring = [], []

    def run_alone() -> None:
        alone.append(passes(run([longspan, "ring", "--json", "--ranks", "1", *arguments])["per_rank"][0], "seconds"))

    def run_ring() -> None:
        # MPI ranks share the cores by number; local ranks have the process's threads in common.
        share = {"OMP_NUM_THREADS": str(max(threads // ranks, 1))} if command[0] == "mpirun" else {}
        found = run([*command, *arguments], **share)["per_rank"]
        ring.append({
            "seconds": max(rank["seconds"] for rank in found) + max(rank["backward"]["seconds"] for rank in found),
            "waited_seconds": [round(passes(rank, "waited_seconds"), 6) for rank in found],
            "overlapped_seconds": [round(passes(rank, "overlapped_seconds"), 6) for rank in found],
        })  # fmt: skip

    for pair in range(pairs):
        for one in (run_alone, run_ring) if pair % 2 == 0 else (run_ring, run_alone):
            one()
        print(f"pair {pair}: {alone[-1]:.3f} s alone, {ring[-1]['seconds']:.3f} s over {ranks} ranks, "
              f"longest wait {max(ring[-1]['waited_seconds']):.3f} s", flush=True)  # fmt: skip
    ratio = statistics.median(of_ring["seconds"] / of_one for of_ring, of_one in zip(ring, alone))
    times = statistics.median(of_ring["seconds"] for of_ring in ring) / statistics.median(alone)
    waited = statistics.median(max(of_ring["waited_seconds"]) for of_ring in ring)
    overlapped = statistics.median(min(of_ring["overlapped_seconds"]) for of_ring in ring)
    print(f"{ranks} ranks take {ratio:.3f} of one process's time (median of {pairs} pairs; {min(alone):.3f} s at best; "
          f"longest wait {waited:.3f} s, least overlap {overlapped:.3f} s)")  # fmt: skip
    return {"command": f"longspan ring {' '.join(arguments)}", "ranks": ranks, "cpus_used": threads,
            "median_ratio_of_pairs": ratio, "ratio_of_medians": times, "median_largest_waited_seconds": waited,
            "median_smallest_overlapped_seconds": overlapped, "one_process_seconds": alone, "ring": ring}  # fmt: skip


def measure_mpi(longspan: str) -> None:
    """Two ranks, each with half the cores. Head groups: the far branch's work is whole heads, and crosses the ranks."""
    arguments = ["--tokens", "32768", "--heads", "8", "--head-dim", "64", "--segments", "2048,8192,32768", "--dilations", "1,4,16", "--backward", "--repeat", "3"]
    mpirun = ["mpirun", "--allow-run-as-root", "--oversubscribe", "--bind-to", "none", "-n", "2"]
    found = measure_against_one(longspan, 2, arguments, [*mpirun, longspan, "ring", "--json"], 11)
    write("ring_mpi", longspan, {"machine": machine(), **found})


def measure_local(longspan: str) -> None:
    """Eight ranks of one process: 16,384 rows each; 4,096 each of what the MPI ranks have; 2,048 each of strands that they share."""
    results = []
    for arguments in (
        ["--tokens", "131072", "--heads", "4", "--segments", "2048,32768,131072", "--dilations", "1,16,64"],
        ["--tokens", "32768", "--heads", "8", "--segments", "2048,8192,32768", "--dilations", "1,4,16"],
        ["--tokens", "16384", "--heads", "16", "--segments", "2048,8192,16384", "--dilations", "1,4,8"],
    ):
        arguments += ["--head-dim", "64", "--backward", "--repeat", "9"]
        results.append(measure_against_one(longspan, 8, arguments, [longspan, "ring", "--json", "--ranks", "8"], 5))
    write(f"ring_local_{os.cpu_count()}", longspan, {"machine": machine(), "results": results})


def measure_gpu(longspan: str) -> None:
    """Ranks that share one GPU against the GPU alone, with the kernel that rings run there and with the fastest."""
    arguments = ["--device", "cuda", "--dtype", "bf16", "--tokens", "131072", "--heads", "8", "--head-dim", "64",
                 "--segments", "2048,16384,131072", "--dilations", "1,8,64", "--backward", "--repeat", "7"]  # fmt: skip
    rows = []
    for ranks, extra in ((1, []), (1, ["--kernel", "cuda-mma"]), (2, []), (4, []), (8, [])):
        found = run([longspan, "ring", "--json", "--ranks", str(ranks), *arguments, *extra])["per_rank"]
        rows.append({
            "ranks": ranks,
            "kernel": found[0]["kernel"],
            "forward_seconds": max(rank["seconds"] for rank in found),
            "backward_seconds": max(rank["backward"]["seconds"] for rank in found),
            "bytes_received": [rank["bytes_received"] for rank in found],
            "halo_bytes": max(rank["backward"]["halo_bytes"] for rank in found),
        })  # fmt: skip
        print(f"{ranks} ranks, {rows[-1]['kernel']}: forward {rows[-1]['forward_seconds'] * 1e3:.2f} ms, "
              f"backward {rows[-1]['backward_seconds'] * 1e3:.2f} ms")  # fmt: skip
    write("ring_gpu", longspan, {"gpu": gpu_name(longspan), "command": f"longspan ring {' '.join(arguments)}", "results": rows})


def gpu_name(longspan: str) -> str:
    return run([longspan, "info", "--json"])["gpus"][0]["name"]


def main() -> None:
    global RESULTS
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--longspan", default="build/release/longspan")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parts = {"bytes": measure_bytes, "memory": measure_memory, "mpi": measure_mpi, "local": measure_local, "gpu": measure_gpu}
    parser.add_argument("parts", nargs="*", choices=[*parts, []], default=[])
    arguments = parser.parse_args()
    RESULTS = arguments.results
    for part in arguments.parts or ["bytes", "memory", "mpi"]:
        parts[part](arguments.longspan)


if __name__ == "__main__":
    main()
