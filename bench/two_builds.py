#!/usr/bin/env python3
"""Two builds of Longspan taking turns in one run: is anything slower than it was?

    python bench/two_builds.py --before FOLDER --after FOLDER [--device cuda] [--turns 9] [--json FILE] [row...]

A folder holds the package `longspan` of one build (site-packages of an environment, or python/ beside a built module). Each
build runs in a process of its own; for every row the two processes take turns, one sample each, so that a change of the
machine's speed meets both. Printed, and written to FILE: medians and their ratio, after over before, for the forward and
for forward+backward. Rows are the shapes of bench/gpu_vs_torch.py or bench/cpu_vs_torch.py, block masks, one query row
(decoding) and a ring of local ranks; names may hold * and ?.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

DILATED = ([2048, 4096, 8192], [1, 2, 4])
WIDE = ([8192, 16384, 32768, 65536], [1, 2, 4, 8])
MILLION = ([2048, 8192, 32768, 131072, 1048576], [1, 4, 16, 64, 512])
SLIDE = ([1024, 5792, 32768, 185363, 1048576], [1, 2, 4, 8, 16])


def rows(device: str) -> dict[str, dict]:
    """What each row computes: tokens, heads, head_dim, and what differs from dense bfloat16 attention."""
    table: dict[str, dict] = {}
    if device == "cpu":
        for dtype in ("float32", "bfloat16"):
            for causal in (False, True):
                end = f"_{dtype}{'_causal' if causal else ''}"
                common = {"dtype": dtype, "causal": causal}
                table["dense_2k_d64" + end] = {"tokens": 2048, "heads": 8, "head_dim": 64, **common}
                table["dilated_8k" + end] = {"tokens": 8192, "heads": 8, "head_dim": 64, "pattern": DILATED, **common}
            table[f"dense_2k_d128_{dtype}"] = {"tokens": 2048, "heads": 8, "head_dim": 128, "dtype": dtype}
            table[f"gigapath_10k_{dtype}"] = {"tokens": 10001, "heads": 4, "head_dim": 48, "slide": True, "dtype": dtype}
            table[f"blocks_4k_{dtype}"] = {"tokens": 4096, "heads": 8, "head_dim": 64, "block": 64, "dtype": dtype}
            table[f"one_row_16k_{dtype}"] = {"tokens": 16384, "heads": 8, "head_dim": 64, "one_row": True, "dtype": dtype}
        table["ring_8k_of_4"] = {"tokens": 8192, "heads": 8, "head_dim": 64, "pattern": DILATED, "ranks": 4, "dtype": "float32"}
        return table
    for causal in (False, True):
        end = "_causal" if causal else ""
        for head_dim in (48, 64, 128, 256):
            table[f"dense_16k_d{head_dim}{end}"] = {"tokens": 16384, "heads": 16, "head_dim": head_dim, "causal": causal}
        for tokens in (8192, 32768, 131072):
            table[f"dilated_{tokens // 1024}k{end}"] = {"tokens": tokens, "heads": 8, "head_dim": 64, "pattern": DILATED, "causal": causal}
        table[f"dilated_131k_d128{end}"] = {"tokens": 131072, "heads": 16, "head_dim": 128, "pattern": WIDE, "causal": causal}
        table[f"dilated_1m{end}"] = {"tokens": 1048576, "heads": 12, "head_dim": 64, "pattern": MILLION, "causal": causal}
    for tokens in (10001, 65536):
        table[f"gigapath_{tokens // 1000}k"] = {"tokens": tokens, "heads": 16, "head_dim": 48, "slide": True, "dtype": "float16"}
    for head_dim in (64, 128):
        for block in (64, 128):
            table[f"blocks{block}_32k_d{head_dim}"] = {"tokens": 32768, "heads": 8, "head_dim": head_dim, "block": block}
    table["dense_4k_float32"] = {"tokens": 4096, "heads": 16, "head_dim": 64, "dtype": "float32"}
    table["one_row_131k_d128"] = {"tokens": 131072, "heads": 32, "kv_heads": 8, "head_dim": 128, "one_row": True}
    table["ring_131k_of_2"] = {"tokens": 131072, "heads": 8, "head_dim": 64, "pattern": DILATED, "ranks": 2}
    return table


def far_blocks(blocks: int):
    """Five blocks around the diagonal, the first one, and four far diagonals."""
    import numpy

    seen = numpy.zeros((blocks, blocks), dtype=bool)
    row = numpy.arange(blocks)
    for step in range(-2, 3):
        near = row[(row + step >= 0) & (row + step < blocks)]
        seen[near, near + step] = True
    for part in (16, 8, 4, 2):
        seen[row, (row + blocks // part) % blocks] = True
    seen[:, 0] = True
    return seen


def bodies(row: dict, device: str) -> dict:
    """The forward, and forward+backward where the row has one, as functions without arguments."""
    import longspan
    import longspan.torch as lt
    import torch

    dtype = getattr(torch, row.get("dtype", "bfloat16"))
    tokens, heads, head_dim = row["tokens"], row["heads"], row["head_dim"]
    generator = torch.Generator(device).manual_seed(0)

    def tensor(count: int, of_heads: int):
        return torch.randn(1, count, of_heads, head_dim, generator=generator, device=device).to(dtype)

    kv_heads = row.get("kv_heads", heads)
    key, value = tensor(tokens, kv_heads), tensor(tokens, kv_heads)
    options = {"causal": row.get("causal", False)}
    pattern = longspan.dilated(*row["pattern"]) if "pattern" in row else longspan.dense()
    if row.get("slide"):
        pattern = longspan.longnet(*SLIDE, phase="torchscale", pad_keys=True)
    if "block" in row:
        pattern = longspan.block_sparse(far_blocks(tokens // row["block"]), row["block"])
    if row.get("one_row"):
        options["query_ranges"] = [(tokens - 1, 1)]
        query = tensor(1, heads)
    else:
        query, grad = tensor(tokens, heads), tensor(tokens, heads)

    def attend(*tensors):
        return lt.attention(*tensors, pattern, **options)

    if "ranks" in row:
        attend = lt.RingDilatedAttention(*row["pattern"], ring_size=row["ranks"])

    def forward():
        with torch.no_grad():
            return attend(query, key, value)

    if row.get("one_row"):
        return {"forward": forward}
    leaves = [x.detach().requires_grad_() for x in (query, key, value)]
    return {"forward": forward, "step": lambda: torch.autograd.grad(attend(*leaves), leaves, grad)}


def answer(device: str) -> None:
    """The process of one build: reads "row name" and then one line for each sample, "step calls"; writes milliseconds."""
    import torch

    import longspan

    table, made = rows(device), {}
    print(json.dumps({"commit": longspan.__commit__, "folder": str(Path(longspan.__file__).parent)}), flush=True)

    def sample(body, calls: int) -> float:
        if device == "cpu":
            began = time.perf_counter()
            for _ in range(calls):
                body()
            return (time.perf_counter() - began) / calls * 1e3
        first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        first.record()
        for _ in range(calls):
            body()
        last.record()
        last.synchronize()
        return first.elapsed_time(last) / calls

    for line in sys.stdin:
        word, argument = line.split()
        if word == "row":
            made = {}
            if device != "cpu":
                torch.cuda.empty_cache()
            try:
                made = bodies(table[argument], device)
                for body in made.values():
                    body()
                print(json.dumps({step: max(sample(body, 2), 1e-3) for step, body in made.items()}), flush=True)
            except (RuntimeError, longspan.Error) as error:
                print(json.dumps({"error": str(error).splitlines()[0]}), flush=True)
        else:
            print(json.dumps(sample(made[word], int(argument))), flush=True)


class Build:
    """A process that answers for one build."""

    def __init__(self, folder: Path, device: str) -> None:
        environment = {**os.environ, "PYTHONPATH": str(folder.resolve())}
        command = [sys.executable, __file__, "--answer", "--device", device]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)
        self.facts = self.read()

    def read(self):
        line = self.process.stdout.readline()
        if not line:
            sys.exit("two_builds: a build's process ended; its message is above")
        return json.loads(line)

    def ask(self, word: str, argument: object):
        self.process.stdin.write(f"{word} {argument}\n")
        self.process.stdin.flush()
        return self.read()


def compare(builds: dict[str, Build], name: str, turns: int, milliseconds: float) -> dict:
    estimates = {label: build.ask("row", name) for label, build in builds.items()}
    result: dict = {"name": name}
    for label, found in estimates.items():
        if "error" in found:
            return {**result, "error": f"{label}: {found['error']}"}
    for step, estimate in estimates["before"].items():
        calls = max(1, min(200, int(milliseconds / estimate)))
        samples: dict[str, list[float]] = {label: [] for label in builds}
        for turn in range(turns):
            for label in list(builds)[:: 1 if turn % 2 else -1]:
                samples[label].append(builds[label].ask(step, calls))
        middle = {label: statistics.median(taken) for label, taken in samples.items()}
        # Of every turn, then their median: a machine that slows down in between moves it less than either median.
        by_turn = statistics.median(b / a for a, b in zip(samples["before"], samples["after"]))
        result[step] = {
            **{f"{label}_ms": taken for label, taken in middle.items()},
            "after_over_before": middle["after"] / middle["before"],
            "after_over_before_by_turn": by_turn,
            "least_over_least": min(samples["after"]) / min(samples["before"]),
        }
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="which rows, with * and ?; all without any")
    parser.add_argument("--before", type=Path, help="folder that holds the package of the older build")
    parser.add_argument("--after", type=Path, help="folder that holds the package of the newer build")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--turns", type=int, default=9)
    parser.add_argument("--sample-ms", type=float, default=20, help="about as long as a sample takes")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--answer", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.answer:
        return answer(arguments.device)
    if not arguments.before or not arguments.after:
        parser.error("--before and --after name the folders of the two builds")
    names = [n for n in rows(arguments.device) if not arguments.names or any(fnmatch.fnmatch(n, one) for one in arguments.names)]
    if not names:
        parser.error(f"no row is called {arguments.names[0]!r}: {', '.join(rows(arguments.device))}")
    builds = {"before": Build(arguments.before, arguments.device), "after": Build(arguments.after, arguments.device)}
    report = {label: build.facts["commit"] for label, build in builds.items()}
    report |= {"device": arguments.device, "turns": arguments.turns, "date": time.strftime("%Y-%m-%d"), "rows": []}
    print("after over before: medians, by turn, of the fastest samples", *(f"{k}: {v}" for k, v in report.items() if k != "rows"), sep="\n  ")
    for name in names:
        result = compare(builds, name, arguments.turns, arguments.sample_ms)
        report["rows"].append(result)
        line = f"{name:28}"
        for step in ("forward", "step"):
            if step in result:
                found = result[step]
                ratios = [found[k] for k in ("after_over_before", "after_over_before_by_turn", "least_over_least")]
                line += f"  {step} {found['before_ms']:9.4f} ms " + " ".join(f"{ratio:.3f}" for ratio in ratios)
        print(line, result.get("error", ""), flush=True)
        if arguments.json:
            arguments.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
