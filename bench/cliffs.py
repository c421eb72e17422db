"""What each option costs: its time over the plain call's, and the time of the best peer that has the option over ours.

    python bench/cliffs.py --device cpu [--json] [--only TEXT] [--turns 9] [--tokens 2048] [--threads 1]
    python bench/cliffs.py --device cuda --turns 5

Rows are options alone, their likeliest combinations, head dims, and few query rows over a long cache. All functions of a
row take turns with the plain call on tensors of the same size; numbers are medians of turns. `per pair` divides by the
share of pairs that the options leave. The peer is scaled_dot_product_attention on its fastest backend. On a GPU the rows
run twice: with the kernels that the GPU gets, and with those that GPUs other than Hopper get. Results go to
bench/results/<device>_cliffs.json; scripts/readme_tables.py makes the README's table of them.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

import longspan
from longspan.bench.timing import gpu_facts, gpu_seconds, machine, without_folders

RESULTS = Path(__file__).resolve().parent / "results"
KEPT, DROPOUT = 0.9, 0.1


BACKENDS = [SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]
DTYPES = {torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16"}


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

    def __init__(self, size: Size, options: frozenset[str], dtype: torch.dtype, device: str, kernel: str = "") -> None:
        self.size, self.options, self.kernel = size, options, kernel
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
        self.end = length if size.rows and "lengths" in options else size.tokens  # of the query rows

    def kept(self) -> float:
        """Share of the plain call's pairs."""
        keys = self.key_mask[0].double() if self.key_mask is not None else torch.ones(self.size.tokens, dtype=torch.float64)
        if "causal" in self.options and not self.size.rows:  # the first keys are seen by more queries than the last ones
            keys = keys * torch.linspace(1, 0, len(keys), dtype=torch.float64, device=keys.device)
        share = float(keys.mean())
        return share * (KEPT ** (1 if self.size.rows else 2) if self.lengths is not None else 1.0)

    def problem(self) -> dict[str, Any]:
        """What longspan.plan takes."""
        size, options = self.size, {"key_mask": self.key_mask, "alibi": self.slopes, "lengths": self.lengths}
        return {"tokens": size.tokens, "heads": size.heads, "kv_heads": size.kv_heads, "head_dim": size.head_dim,
                "query_rows": size.rows or None, "dtype": DTYPES[self.q.dtype], "device": self.q.device.type,
                **{name: value is not None for name, value in options.items()}}  # fmt: skip

    def settings(self) -> dict[str, Any]:
        """What longspan.Options takes."""
        chosen = {"causal": "causal" in self.options, "dropout": DROPOUT if "dropout" in self.options else 0.0}
        return chosen | ({"deterministic": True} if "deterministic" in self.options else {}) | ({"kernel": self.kernel} if self.kernel else {})

    def ours(self) -> Callable[[], torch.Tensor]:
        arguments: dict[str, Any] = {**self.settings(), "key_mask": self.key_mask, "alibi_slopes": self.slopes, "lengths": self.lengths}
        if self.size.rows:
            arguments["query_ranges"] = [(self.end - self.size.rows, self.size.rows)]
        return lambda: longspan.attention(self.q, self.k, self.v, **arguments)

    def peers(self) -> dict[str, Callable[[], torch.Tensor]]:
        """scaled_dot_product_attention: a boolean mask, or a float one with ALiBi; is_causal where there is no mask."""
        size, mask, device = self.size, None, self.q.device
        causal = "causal" in self.options
        allowed = self.key_mask
        keys, queries = torch.arange(size.tokens, device=device), torch.arange(self.end - self.q.shape[1], self.end, device=device)
        if self.lengths is not None:
            allowed = (keys < self.lengths)[None]
        if allowed is not None or (causal and (self.slopes is not None or size.rows > 1)):
            mask = (keys[None] <= queries[:, None]) if causal else torch.ones(1, size.tokens, dtype=torch.bool, device=device)
            mask = (mask & allowed if allowed is not None else mask)[None, None]
        if self.slopes is not None:
            bias = (queries[:, None] - keys).abs().to(self.q.dtype) * -self.slopes[:, None, None].to(self.q.dtype)
            mask = (bias if mask is None else bias.masked_fill_(~mask[0], -torch.inf)).reshape(1, size.heads, len(queries), -1)
        rows = [x.transpose(1, 2) for x in (self.q, self.k, self.v)]
        options = {"attn_mask": mask, "dropout_p": DROPOUT if "dropout" in self.options else 0.0,
                   "is_causal": causal and mask is None and not size.rows, "enable_gqa": size.heads != size.kv_heads}  # fmt: skip

        def call(backend: SDPBackend | None) -> torch.Tensor:
            if backend is None:
                return scaled_dot_product_attention(*rows, **options).transpose(1, 2)
            with sdpa_kernel(backend):
                return scaled_dot_product_attention(*rows, **options).transpose(1, 2)

        if device.type == "cpu":
            return {"sdpa": lambda: call(None)}
        return {backend.name.split("_")[0].lower(): functools.partial(call, backend) for backend in BACKENDS}


ALONE = ["causal", "key_mask", "padding", "lengths", "alibi", "dropout"]
TOGETHER = ["causal padding", "causal lengths", "causal dropout", "causal padding dropout", "causal alibi", "causal alibi padding",
            "padding dropout", "alibi dropout", "key_mask dropout", "key_mask alibi dropout"]  # fmt: skip


def long_size(device: str) -> Size:
    return Size(16384 if device == "cpu" else 131072, 32, 8, 128, rows=1)


def table(arguments: argparse.Namespace) -> list[tuple[str, str, Size, frozenset[str], torch.dtype]]:
    """Kind of kernels, name, size, options and type of each row. A row is compared with the plain call of its own group: with
    no options, head dim 64 and as many key heads, or one query row."""
    whole = arguments.tokens or (2048 if arguments.device == "cpu" else 16384)
    heads = 4 if arguments.device == "cpu" else 16
    long = long_size(arguments.device)
    rows: list[tuple[str, str, Size, frozenset[str], torch.dtype]] = []

    def add(kind: str, dtype: torch.dtype, name: str, size: Size, options: str = "") -> None:
        rows.append((kind, name, size, frozenset(options.split()), dtype))

    kinds = [("cpu", torch.float32, whole), ("cpu", torch.bfloat16, whole)]
    if arguments.device == "cuda":
        kinds = [("hopper", torch.bfloat16, whole), ("hopper", torch.float32, whole // 4), ("portable", torch.bfloat16, whole // 2)]
    for kind, dtype, tokens in kinds:
        plain = Size(tokens, heads, heads, 64)
        for name in ["plain", *ALONE, *TOGETHER, *(["deterministic"] if arguments.device == "cuda" else [])]:
            add(kind, dtype, name, plain, name.removeprefix("plain"))
        for factor in (3, 6, 10, 30) if kind == "cpu" else (6,):
            add(kind, dtype, f"q and k times {factor}", plain._replace(scale=float(factor)))
        add(kind, dtype, "grouped queries 4:1", plain._replace(kv_heads=heads // 4))
        for dim in (32, 96, 128, 192, 256):
            add(kind, dtype, f"head dim {dim}", plain._replace(head_dim=dim))
        if kind == "portable":
            continue
        add(kind, dtype, "one row", long)
        for option in ("key_mask", "padding", "lengths", "alibi", "key_mask alibi"):
            add(kind, dtype, f"one row, {option}", long, option)
        for count in (2, 16) if kind == "cpu" else (2, 8, 15, 16, 17):
            add(kind, dtype, f"{count} rows", long._replace(rows=count), "causal")
        for dim in (64, 96, 192, 256):
            add(kind, dtype, f"one row, head dim {dim}", long._replace(head_dim=dim))
        for kv_heads in (1, 32):
            add(kind, dtype, f"one row, {kv_heads} key heads", long._replace(kv_heads=kv_heads))
    if arguments.device == "cuda":
        add("hopper", torch.float16, "plain", Size(whole, heads, heads, 64))
        add("hopper", torch.float16, "one row", long)
    return rows


def medians(functions: dict[str, Callable[[], Any]], turns: int, device: str) -> dict[str, float]:
    """Seconds; on a CPU of processor time, so that neighbours count little, and on a GPU of its own. The functions take turns,
    so that a slow moment of the machine is everybody's."""

    def taken(function: Callable[[], Any], calls: int) -> float:
        if device != "cpu":
            return gpu_seconds(function, calls)
        start = time.process_time()
        function()
        return time.process_time() - start

    calls = {}
    for name, function in functions.items():
        taken(function, 1)
        calls[name] = 1 if device == "cpu" else max(1, min(50, int(0.003 / taken(function, 1))))
    samples: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(turns):
        for name, function in functions.items():
            samples[name].append(taken(function, calls[name]))
    return {name: statistics.median(times) for name, times in samples.items()}


def fastest(functions: dict[str, Callable[[], Any]], device: str) -> tuple[str, Callable[[], Any]] | None:
    """Of those that run at all."""
    able = {}
    for name, function in functions.items():
        try:
            function()
            able[name] = function
        except RuntimeError:  # the backend does not take it, or there is no memory for its mask
            continue
    if len(able) < 2:
        return next(iter(able.items()), None)
    times = medians(able, 1, device)
    return min(able.items(), key=lambda item: times[item[0]])


def measure(kind: str, name: str, size: Size, options: frozenset[str], dtype: torch.dtype, arguments: argparse.Namespace) -> dict[str, Any]:
    kernel = "cuda-mma" if kind == "portable" else ""
    data = Data(size, options, dtype, arguments.device, kernel)
    like = long_size(arguments.device) if size.rows else size._replace(scale=1.0, head_dim=64, kv_heads=size.heads)
    base = Data(like, frozenset(), dtype, arguments.device, kernel)
    work = data.kept() * size.head_dim * size.kv_heads / base.size.head_dim / base.size.kv_heads if size.rows else data.kept() * size.head_dim / 64
    row: dict[str, Any] = {"kind": kind, "row": name, **size._asdict(), "options": sorted(options), "pairs": data.kept(),
                           "problem": data.problem(), "settings": data.settings(), "kernels": {}}  # fmt: skip
    plan = longspan.plan(options=longspan.Options(**data.settings()), **data.problem())

    def step(function: Callable[[], torch.Tensor], of: Data) -> Callable[[], None]:
        return lambda: function().backward(of.dout)

    def add(step_kind: str, pass_: str, ours: Callable, plain: Callable, peers: dict[str, Callable]) -> None:
        row["kernels"][pass_] = plan.kernel(pass_)
        functions = {"ours": ours, "plain": plain}
        peer = fastest(peers, arguments.device)
        if peer is not None:
            row[f"{step_kind}_peer"], functions["peer"] = peer
        times = medians(functions, arguments.turns, arguments.device)
        row[step_kind] = {who: seconds * 1e3 for who, seconds in times.items()}
        row[f"{step_kind}_over_plain"] = times["ours"] / times["plain"]
        row[f"{step_kind}_per_pair"] = times["ours"] / times["plain"] / work
        if peer is not None:
            row[f"peer_over_ours_{step_kind}"] = times["peer"] / times["ours"]

    with torch.no_grad():
        add("forward", "forward", data.ours(), base.ours(), data.peers())
    if not size.rows:
        steps = {who: step(function, data) for who, function in data.peers().items()}
        add("both", "backward", step(data.ours(), data), step(base.ours(), base), steps)
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
    warnings.filterwarnings("ignore", module=__name__)  # torch's, of backends that do not take a row
    torch.set_num_threads(arguments.threads)
    longspan.set_num_threads(arguments.threads)
    out = sys.stderr if arguments.json else sys.stdout
    print(f"{'':43}{'forward':>10} {'of plain':>9} {'per pair':>9} {'peer':>6} | {'f+b':>10} {'of plain':>9} {'per pair':>9} {'peer':>6}", file=out)
    report = {"machine": {**machine(), **gpu_facts()}, "longspan": longspan.__version__, "commit": longspan.__commit__,
              "command": " ".join(["python bench/cliffs.py", *without_folders(sys.argv[1:])]), "results": []}  # fmt: skip
    for kind, name, size, options, dtype in table(arguments):
        if arguments.only not in f"{kind} {DTYPES[dtype]} {name}":
            continue
        report["results"].append(row := measure(kind, name, size, options, dtype, arguments))
        line = f"{kind:8} {DTYPES[dtype]:4} {name:28}"
        for step_kind in ("forward", "both"):
            if step_kind in row:
                line += (f"{row[step_kind]['ours']:9.3f} ms {row[f'{step_kind}_over_plain']:7.2f} {row[f'{step_kind}_per_pair']:9.2f} "
                         f"{row.get(f'peer_over_ours_{step_kind}', 0):6.2f} | ")  # fmt: skip
        print(f"{line}{row['kernels']['forward']}", file=out, flush=True)
        if arguments.device == "cuda":
            torch.cuda.empty_cache()
        if not arguments.only:
            RESULTS.mkdir(exist_ok=True)
            (RESULTS / f"{'h200' if arguments.device == 'cuda' else 'cpu'}_cliffs.json").write_text(json.dumps(report, indent=1) + "\n")
    if arguments.json:
        print(json.dumps(report))


if __name__ == "__main__":
    main()
