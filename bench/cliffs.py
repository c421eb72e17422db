"""What each option costs: its time over the plain call's, and the time of the best peer that has the option over ours.

    python bench/cliffs.py --device cpu [--json] [--only TEXT] [--turns 9] [--tokens 2048] [--threads 1]

Rows are options alone, their likeliest combinations, head dims, and one query row over a long cache. All functions of a
row take turns with the plain call on tensors of the same size; numbers are medians of turns. `per pair` divides by the
share of pairs that the options leave. Results go to bench/results/<device>_cliffs.json.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.nn.functional import scaled_dot_product_attention

import longspan
from longspan.bench.timing import machine

RESULTS = Path(__file__).resolve().parent / "results"
KEPT, DROPOUT = 0.9, 0.1


class Size(NamedTuple):
    """Of one row's tensors. `rows` of queries, the last positions; 0 means all."""

    tokens: int
    heads: int
    kv_heads: int
    head_dim: int
    rows: int = 0
    scale: float = 1.0  # of q and k


class Data:
    """Tensors of one row, and what its options make of them for us and for peers."""

    def __init__(self, size: Size, options: frozenset[str], dtype: torch.dtype, device: str) -> None:
        self.size, self.options = size, options
        generator = torch.Generator(device).manual_seed(1)

        def normal(rows: int, heads: int, factor: float = 1.0) -> torch.Tensor:
            made = torch.randn(1, rows, heads, size.head_dim, device=device, generator=generator) * factor
            return made.to(dtype).requires_grad_(not size.rows)

        rows = size.rows or size.tokens
        self.q, self.dout = normal(rows, size.heads, size.scale), normal(rows, size.heads).detach()
        self.k, self.v = normal(size.tokens, size.kv_heads, size.scale), normal(size.tokens, size.kv_heads)
        length = int(size.tokens * KEPT)
        at = torch.arange(size.tokens, device=device)
        kept = torch.rand(size.tokens, device=device, generator=generator) < KEPT if "key_mask" in options else at < length
        self.key_mask = kept[None] if options & {"key_mask", "padding"} else None
        self.slopes = 2.0 ** (-8.0 * torch.arange(1, size.heads + 1, device=device) / size.heads) if "alibi" in options else None
        self.lengths = torch.tensor([length], device=device) if "lengths" in options else None

    def kept(self) -> float:
        """Share of the plain call's pairs."""
        share = 0.5 if "causal" in self.options else 1.0
        share *= float(self.key_mask.float().mean()) if self.key_mask is not None else 1.0
        return share * (KEPT**2 if self.lengths is not None else 1.0)

    def ours(self) -> Callable[[], torch.Tensor]:
        arguments: dict[str, Any] = {"causal": "causal" in self.options, "key_mask": self.key_mask, "alibi_slopes": self.slopes,
                                     "lengths": self.lengths, "dropout": DROPOUT if "dropout" in self.options else 0.0}  # fmt: skip
        if self.size.rows:
            arguments["query_ranges"] = [(self.size.tokens - self.size.rows, self.size.rows)]
        return lambda: longspan.attention(self.q, self.k, self.v, **arguments)

    def peer(self) -> Callable[[], torch.Tensor]:
        """scaled_dot_product_attention: a boolean mask, or a float one with ALiBi; is_causal where there is no mask."""
        size, mask = self.size, None
        causal = "causal" in self.options
        allowed = self.key_mask
        if self.lengths is not None:
            allowed = (torch.arange(size.tokens, device=self.q.device) < self.lengths)[None]
        if allowed is not None or (causal and self.slopes is not None):
            at = torch.arange(size.tokens, device=self.q.device)
            mask = (at[None] <= at[:, None]) if causal else torch.ones(1, size.tokens, dtype=torch.bool, device=self.q.device)
            mask = (mask & allowed if allowed is not None else mask)[None, None]
        if self.slopes is not None:
            at = torch.arange(size.tokens, device=self.q.device)
            bias = -self.slopes[:, None, None] * (at[:, None] - at).abs()
            mask = (bias if mask is None else bias.masked_fill(~mask, -torch.inf)).to(self.q.dtype).reshape(1, size.heads, size.tokens, -1)
        rows = [x.transpose(1, 2) for x in (self.q, self.k, self.v)]
        drop = DROPOUT if "dropout" in self.options else 0.0
        return lambda: scaled_dot_product_attention(*rows, attn_mask=mask, dropout_p=drop, is_causal=causal and mask is None,
                                                    enable_gqa=size.heads != size.kv_heads).transpose(1, 2)  # fmt: skip


ALONE = ["causal", "key_mask", "padding", "lengths", "alibi", "dropout"]
TOGETHER = ["causal padding", "causal lengths", "causal dropout", "causal padding dropout", "causal alibi", "causal alibi padding",
            "padding dropout", "alibi dropout", "key_mask dropout", "key_mask alibi dropout"]  # fmt: skip


def table(arguments: argparse.Namespace) -> list[tuple[str, Size, frozenset[str]]]:
    """Name, size and options of each row. A row is compared with the plain call of its own group: what stands before it with no
    options and the same head dim, heads and inputs."""
    heads = 4 if arguments.device == "cpu" else 16
    plain = Size(arguments.tokens, heads, heads, 64)
    rows = [(name, plain, frozenset(name.split())) for name in ALONE + TOGETHER]
    rows += [(f"q and k times {factor}", plain._replace(scale=float(factor)), frozenset()) for factor in (3, 6, 10, 30)]
    rows += [("grouped queries 4:1", plain._replace(kv_heads=heads // 4), frozenset())]
    rows += [(f"head dim {dim}", plain._replace(head_dim=dim), frozenset()) for dim in (32, 96, 128, 192, 256)]
    rows += [("one row, 131,072 keys", Size(131072, 32, 8, 128, rows=1), frozenset())]
    return rows


def medians(functions: dict[str, Callable[[], Any]], turns: int, device: str) -> dict[str, float]:
    """Seconds; on a CPU of processor time, so that neighbours count little. The functions take turns, so that a slow moment
    of the machine is everybody's."""
    clock = time.process_time if device == "cpu" else time.perf_counter

    def taken(function: Callable[[], Any]) -> float:
        start = clock()
        function()
        if device != "cpu":
            torch.cuda.synchronize()
        return clock() - start

    for function in functions.values():
        taken(function)
    samples = {name: [] for name in functions}  # type: dict[str, list[float]]
    for _ in range(turns):
        for name, function in functions.items():
            samples[name].append(taken(function))
    return {name: statistics.median(times) for name, times in samples.items()}


def measure(name: str, size: Size, options: frozenset[str], dtype: torch.dtype, arguments: argparse.Namespace) -> dict[str, Any]:
    data = Data(size, options, dtype, arguments.device)
    base = Data(size._replace(scale=1.0, head_dim=64, kv_heads=size.heads) if not size.rows else size, frozenset(), dtype, arguments.device)
    functions = {"ours": data.ours(), "plain": base.ours(), "peer": data.peer()}
    work = data.kept() * size.head_dim / base.size.head_dim
    row: dict[str, Any] = {"row": name, "dtype": str(dtype).removeprefix("torch."), **size._asdict(), "options": sorted(options), "pairs": data.kept()}

    def step(function: Callable[[], torch.Tensor], of: Data) -> Callable[[], None]:
        return lambda: function().backward(of.dout)

    def add(kind: str, times: dict[str, float]) -> None:
        row[kind] = {who: seconds * 1e3 for who, seconds in times.items()}
        row[f"{kind}_over_plain"] = times["ours"] / times["plain"]
        row[f"{kind}_per_pair"] = times["ours"] / times["plain"] / work
        row[f"peer_over_ours_{kind}"] = times["peer"] / times["ours"]

    with torch.no_grad():
        add("forward", medians(functions, arguments.turns, arguments.device))
    if not size.rows:
        steps = {who: step(function, base if who == "plain" else data) for who, function in functions.items()}
        add("both", medians(steps, arguments.turns, arguments.device))
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--json", action="store_true", help="results on standard output as JSON, the table on standard error")
    parser.add_argument("--only", default="", help="rows whose name or dtype contains this text")
    parser.add_argument("--turns", type=int, default=9)
    parser.add_argument("--tokens", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1, help="of a CPU")
    arguments = parser.parse_args()
    arguments.tokens = arguments.tokens or (2048 if arguments.device == "cpu" else 16384)
    torch.set_num_threads(arguments.threads)
    longspan.set_num_threads(arguments.threads)
    out = sys.stderr if arguments.json else sys.stdout
    print(f"{'':34}{'forward':>10} {'of plain':>9} {'per pair':>9} {'peer':>6} | {'f+b':>10} {'of plain':>9} {'per pair':>9} {'peer':>6}", file=out)
    results = []
    for dtype in (torch.float32, torch.bfloat16):
        for name, size, options in table(arguments):
            if arguments.only not in f"{name} {dtype}":
                continue
            results.append(row := measure(name, size, options, dtype, arguments))
            line = f"{row['dtype']:9} {name:24}"
            for kind in ("forward", "both"):
                if kind in row:
                    line += (f"{row[kind]['ours']:7.1f} ms {row[f'{kind}_over_plain']:9.2f} {row[f'{kind}_per_pair']:9.2f} "
                             f"{row[f'peer_over_ours_{kind}']:6.2f} | ")  # fmt: skip
            print(line.rstrip(" |"), file=out, flush=True)
    report = {"machine": machine(), "command": " ".join(["python", "bench/cliffs.py", *sys.argv[1:]]), "results": results}
    if not arguments.only:
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / f"{arguments.device}_cliffs.json").write_text(json.dumps(report, indent=1) + "\n")
    if arguments.json:
        print(json.dumps(report))


if __name__ == "__main__":
    main()
