#!/usr/bin/env python3
"""Predictions of `longspan plan --link` against local rings whose link is imitated, and predicted scaling.

    python bench/ring_link.py --longspan build/release/longspan measure [--device cpu|cuda]
    python bench/ring_link.py --longspan build/release/longspan predict [--device cpu|cuda]     the measured rings again
    python bench/ring_link.py --longspan build/release/longspan scaling

Writes bench/results/ring_link_DEVICE.json and ring_scaling.json (or the same names in --results).
One device is measured in the same run, in turns with the rings, and its rates replace those of the table; all else of a
prediction is as it was before. Ranks of a local ring share the device, as --ranks-per-device says.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
from pathlib import Path

RESULTS = Path(__file__).parent / "results"
CPU_SHAPES = [
    ("32,768 tokens, 3 branches", ["--tokens", "32768", "--heads", "4", "--head-dim", "64", "--assign", "all",
                                   "--segments", "2048,8192,32768", "--dilations", "1,4,16"]),
    ("16,384 tokens, head groups", ["--tokens", "16384", "--heads", "8", "--head-dim", "64",
                                    "--segments", "2048,16384", "--dilations", "1,4"]),
]  # fmt: skip
GPU_SHAPES = [
    ("131,072 tokens, 3 branches", ["--tokens", "131072", "--heads", "8", "--head-dim", "64", "--dtype", "bf16",
                                    "--segments", "2048,32768,131072", "--dilations", "1,16,64"]),
    ("1,048,576 tokens, 10 branches", ["--tokens", "1048576", "--heads", "12", "--head-dim", "64", "--dtype", "bf16", "--assign", "all",
                                       "--segments", ",".join(str(2048 << i) for i in range(10)),
                                       "--dilations", ",".join(str(1 << i) for i in range(10))]),
]  # fmt: skip
LINKS = [("50GB/s", "5us"), ("1GB/s", "10us"), ("100MB/s", "100us"), ("25MB/s", "1ms")]


def run(command: list[str]) -> dict:
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode != 0:
        raise SystemExit(f"{' '.join(command)}: {result.stderr}")
    return json.loads(result.stdout)


def passes(longspan: str, arguments: list[str]) -> tuple[float, float]:
    ranks = run([longspan, "ring", "--json", "--backward", *arguments])["per_rank"]
    return max(one["seconds"] for one in ranks), max(one["backward"]["seconds"] for one in ranks)


def reached(prediction: dict, totals: dict, seconds: list[float]) -> str:
    """--rate of a device that takes these seconds alone."""
    rates = []
    for which, measured in zip(("forward", "backward"), seconds):
        flops, table = totals[f"{which}_flops"], prediction["device"][which]
        rest = prediction[f"one_device_{which}_seconds"] - flops / table["flops_per_second"]
        rates.append(f"{flops / max(measured - rest, measured / 2) * 1e-9:.3f}GFLOP/s")
    return ",".join(rates)


def measure(longspan: str, device: str, repeats: int) -> None:
    rows: list[dict] = []
    on_device = ["--device", "cuda"] if device == "cuda" else []
    for name, shape in GPU_SHAPES if device == "cuda" else CPU_SHAPES:
        for ranks in (2, 4, 8):
            alone: list[tuple[float, float]] = []
            rings: list[list[tuple[float, float]]] = [[] for _ in LINKS]
            one_rank = ["--ranks", "1", "--repeat", "5", *shape, *on_device]
            for _ in range(repeats):
                alone.append(passes(longspan, one_rank))
                for times, (link, latency) in zip(rings, LINKS):
                    over = ["--ranks", str(ranks), "--link", link, "--latency", latency]
                    times.append(passes(longspan, ["--repeat", "5", *over, *shape, *on_device]))
                alone.append(passes(longspan, one_rank))
            one = [statistics.median(times) for times in zip(*alone)]
            for (link, latency), times in zip(LINKS, rings):
                forward, backward = (statistics.median(of_pass) for of_pass in zip(*times))
                rows.append({"shape": name, "ranks": ranks, "link": link, "latency": latency, "one_device_seconds": one,
                             "measured_forward_seconds": forward, "measured_backward_seconds": backward})  # fmt: skip
            write(f"ring_link_{device}", longspan, {"device": device, "cpus": os.cpu_count(), "repeats": repeats, "results": rows})
    predict(longspan, device)


def predict(longspan: str, device: str) -> None:
    """What the model says of the rings that were measured, with the rates of the one device measured beside them."""
    report = json.loads((RESULTS / f"ring_link_{device}.json").read_text())
    shapes = dict(GPU_SHAPES if device == "cuda" else CPU_SHAPES)
    model = ["--device", "h200"] if device == "cuda" else ["--threads", str(report["cpus"])]
    for row in report["results"]:
        ranks = str(row["ranks"])
        plan = [longspan, "plan", "--json", "--ranks", ranks, "--ranks-per-device", ranks, "--link", row["link"],
                "--latency", row["latency"], *shapes[row["shape"]], *model]  # fmt: skip
        told = run(plan)
        found = run([*plan, "--rate", reached(told["ring"]["prediction"], told["totals"], row["one_device_seconds"])])["ring"]["prediction"]
        measured = row["measured_forward_seconds"] + row["measured_backward_seconds"]
        row.update({"predicted_forward_seconds": found["forward_seconds"], "predicted_backward_seconds": found["backward_seconds"],
                    "ratio": found["step_seconds"] / measured})  # fmt: skip
        milliseconds = [1e3 * value for value in (*row["one_device_seconds"], row["measured_forward_seconds"], row["measured_backward_seconds"],
                                                  row["predicted_forward_seconds"], row["predicted_backward_seconds"])]  # fmt: skip
        print("{:28} {} ranks, {:>8}: alone {:7.2f} + {:7.2f} ms, measured {:7.2f} + {:7.2f}, predicted {:7.2f} + {:7.2f}, ratio {:.3f}".format(
            row["shape"], ranks, row["link"], *milliseconds, row["ratio"]))  # fmt: skip
    write(f"ring_link_{device}", longspan, report)


def scaling(longspan: str) -> None:
    """1M tokens a rank (weak) and 64M in all (strong), and what is beyond: ten branches that double, twelve heads of 64."""
    rows = []
    for kind, tokens_of in (("weak", lambda ranks: ranks << 20), ("strong", lambda ranks: 1 << 26)):
        for ranks in (1, 4, 16, 64, 256, 1024):
            tokens = tokens_of(ranks)
            doublings = tokens.bit_length() - 11
            shape = ["--tokens", str(tokens), "--heads", "12", "--head-dim", "64", "--dtype", "bf16", "--assign", "all",
                     "--segments", ",".join(str(2048 << i) for i in range(0, doublings)),
                     "--dilations", ",".join(str(1 << i) for i in range(0, doublings))]  # fmt: skip
            for device, link in (("h200", "50GB/s"), ("a100", "25GB/s")):
                found = run([longspan, "plan", "--json", "--ranks", str(ranks), "--link", link, "--latency", "5us",
                             "--device", device, *shape])["ring"]["prediction"]  # fmt: skip
                slow = next(one for one in found["per_rank"] if one["rank"] == found["slowest_rank"])
                rows.append({
                    "kind": kind, "tokens": tokens, "ranks": ranks, "device": device, "link": link,
                    "bytes_received": max(one["bytes_received"] for one in found["per_rank"]),
                    "forward_seconds": found["forward_seconds"], "backward_seconds": found["backward_seconds"],
                    "waiting_seconds": slow["forward"]["waiting_seconds"] + slow["backward"]["waiting_seconds"],
                    "efficiency": found["efficiency"], "limit": found["limit"]["by"],
                })  # fmt: skip
                print(f"{kind:6} {tokens:>13,} tokens, {ranks:4} {device}: {found['step_seconds'] * 1e3:9.2f} ms, "
                      f"{100 * found['efficiency']:5.1f}%, {found['limit']['by']}")  # fmt: skip
    write("ring_scaling", longspan, {"what": "predicted, not measured", "results": rows})


def write(name: str, longspan: str, content: dict) -> None:
    commit = run([longspan, "info", "--json"])["commit"]
    (RESULTS / f"{name}.json").write_text(json.dumps({**content, "commit": commit}, indent=1) + "\n")


def main() -> None:
    global RESULTS
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("measure", "predict", "scaling"))
    parser.add_argument("--longspan", default="build/release/longspan")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--results", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    RESULTS = arguments.results
    if arguments.what == "scaling":
        scaling(arguments.longspan)
    elif arguments.what == "predict":
        predict(arguments.longspan, arguments.device)
    else:
        measure(arguments.longspan, arguments.device, arguments.repeats)


if __name__ == "__main__":
    main()
