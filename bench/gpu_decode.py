#!/usr/bin/env python3
"""Few query rows over a long cache: longspan.torch.attention beside PyTorch's scaled_dot_product_attention; a token through
DilatedCache; and tokens per second of LongNet's base model beside the same model with SDPA over a dense cache.

    python bench/gpu_decode.py --json bench/results/h200_decode.json
    python bench/gpu_decode.py 'grouped*'

Times are microseconds of one call: eager, back to back, with the host's part where it is longer, and as one of many in
a CUDA graph, where the device alone counts. Both take turns; the median of all turns counts. Caches smaller than L2
are several, used in turn, so that keys come from memory. The peer is the fastest of SDPA's backends and of the layouts
[B, N, H, D] and [B, H, N, D] for its keys; ours has the first. Tokens are timed by the wall clock, one after the other.
"""

from __future__ import annotations

import argparse
import dataclasses
import fnmatch
import json
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import longspan
import longspan.torch as lt
from longspan.bench.timing import gpu_facts, gpu_seconds, without_folders

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION, "efficient": SDPBackend.EFFICIENT_ATTENTION,
}  # fmt: skip
BYTES_BEYOND_L2 = 400 << 20
SEGMENTS, DILATIONS = [2048, 4096, 8192, 16384, 32768], [1, 2, 4, 8, 16]


@dataclasses.dataclass(frozen=True)
class Row:
    name: str
    tokens: int
    heads: int
    kv_heads: int
    head_dim: int
    batch: int = 1
    rows: int = 1
    pattern: longspan.Pattern | None = None  # without one, dense, there is a peer
    key_mask: bool = False
    alibi: bool = False
    dtype: str = "bfloat16"


def rows() -> list[Row]:
    return [
        Row("grouped 131k d128", 131072, 32, 8, 128),
        Row("grouped 131k d128 key_mask", 131072, 32, 8, 128, key_mask=True),
        Row("grouped 131k d128 alibi", 131072, 32, 8, 128, alibi=True),
        *(Row(f"grouped 131k d128 {count} rows", 131072, 32, 8, 128, rows=count) for count in (2, 4, 8, 15, 16, 17)),
        Row("grouped 131k d64", 131072, 32, 8, 64),
        Row("grouped 131k d96", 131072, 32, 8, 96),
        Row("grouped 131k d192", 131072, 16, 4, 192),
        Row("grouped 131k d256", 131072, 16, 4, 256),
        Row("grouped 131k d128 f16", 131072, 32, 8, 128, dtype="float16"),
        Row("grouped 131k d128 f32", 131072, 32, 8, 128, dtype="float32"),
        Row("plain 32k d128", 32768, 32, 32, 128),
        Row("plain 32k d128 16 rows", 32768, 32, 32, 128, rows=16),
        Row("one key head 131k d128", 131072, 32, 1, 128),
        Row("grouped 16k d128 batch 8", 16384, 32, 8, 128, batch=8),
        Row("grouped 8k d128", 8192, 32, 8, 128),
        Row("small 2k d64", 2048, 12, 12, 64),
        Row("small 2k d64 batch 8", 2048, 12, 12, 64, batch=8),
        Row("dilated 32k d64", 32768, 12, 12, 64, pattern=longspan.Pattern.dilated(SEGMENTS, DILATIONS)),
        Row("longnet 32k d64", 32768, 12, 12, 64, pattern=longspan.Pattern.longnet(SEGMENTS, DILATIONS)),
    ]


def in_graph(call: Callable[[int], object], count: int) -> Callable[[], object]:
    """`count` calls as one graph."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(count):
            call(i)
    return graph.replay


def functions(row: Row, caches: list[tuple[Tensor, Tensor]], query: Tensor) -> dict[str, Callable[[int], Tensor]]:
    """What is timed, by name; each takes the number of the call."""
    kept = torch.rand(row.batch, row.tokens, device="cuda") < 0.9 if row.key_mask else None
    slopes = torch.full((row.heads,), 0.01, device="cuda") if row.alibi else None
    last = [(row.tokens - row.rows, row.rows)]

    def ours(i: int) -> Tensor:
        key, value = caches[i % len(caches)]
        options = {"causal": True, "query_ranges": last, "key_mask": kept, "alibi_slopes": slopes}
        return lt.attention(query, key, value, row.pattern, **options)

    made: dict[str, Callable[[int], Tensor]] = {"longspan": ours}
    if row.pattern is not None or row.key_mask or row.alibi:
        return made
    turned = query.transpose(1, 2)
    mask = None  # several rows are causal
    if row.rows > 1:
        at = torch.arange(row.tokens, device="cuda")
        mask = (at <= at[-row.rows :, None])[None, None]
    heads_first = [tuple(x.transpose(1, 2).contiguous() for x in pair) for pair in caches]
    rows_first = [tuple(x.transpose(1, 2) for x in pair) for pair in caches]
    for layout, pairs in (("bnhd", rows_first), ("bhnd", heads_first)):
        for name, backend in BACKENDS.items():

            def peer(i: int, pairs=pairs, backend=backend) -> Tensor:
                with sdpa_kernel(backend):
                    return scaled_dot_product_attention(
                        turned, *pairs[i % len(pairs)], attn_mask=mask, enable_gqa=row.heads != row.kv_heads
                    )

            try:
                peer(0)
                made[f"{name} {layout}"] = peer
            except RuntimeError:  # the backend does not take it
                pass
    return made


def measure(row: Row, turns: int) -> dict[str, object]:
    dtype = getattr(torch, row.dtype)

    def tensor(count: int, heads: int) -> Tensor:
        return torch.randn(row.batch, count, heads, row.head_dim, device="cuda", dtype=dtype)

    cache_bytes = 2 * row.batch * row.tokens * row.kv_heads * row.head_dim * dtype.itemsize
    copies = min(16, BYTES_BEYOND_L2 // cache_bytes + 1)
    caches = [(tensor(row.tokens, row.kv_heads), tensor(row.tokens, row.kv_heads)) for _ in range(copies)]
    made = functions(row, caches, tensor(row.rows, row.heads))
    calls = 20 if cache_bytes > 200 << 20 else 64
    graphs = {name: in_graph(call, calls) for name, call in made.items()}
    eager: dict[str, list[float]] = {name: [] for name in made}
    graphed: dict[str, list[float]] = {name: [] for name in made}
    for _ in range(turns + 1):  # the first turn warms up
        for name, call in made.items():
            numbers = iter(range(calls))
            eager[name].append(gpu_seconds(lambda call=call, numbers=numbers: call(next(numbers)), calls) * 1e6)
            graphed[name].append(gpu_seconds(graphs[name], 1) / calls * 1e6)
    result = dataclasses.asdict(row) | {"pattern": str(row.pattern) if row.pattern else "dense"}
    result["us"] = {name: statistics.median(taken[1:]) for name, taken in eager.items()}
    result["graph_us"] = {name: statistics.median(taken[1:]) for name, taken in graphed.items()}
    result["cache_bytes"] = cache_bytes
    if row.pattern is None:
        result["terabytes_per_second"] = cache_bytes / result["graph_us"]["longspan"] * 1e-6
    return result


def wall_seconds(call: Callable[[], object], calls: int, turns: int) -> float:
    """Of one call among many, by the wall clock; the median of the turns."""
    taken = []
    for _ in range(turns + 1):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            call()
        torch.cuda.synchronize()
        taken.append((time.perf_counter() - start) / calls)
    return statistics.median(taken[1:])


@torch.no_grad()
def token(name: str, pattern: longspan.Pattern, turns: int) -> dict[str, object]:
    """A token through a cache of 12 heads of 64 that holds 30,000."""
    cache = lt.DilatedCache(pattern, heads=12)
    past, last = (torch.randn(1, count, 12, 64, device="cuda", dtype=torch.bfloat16) for count in (30000, 1))
    cache.append(past, past)
    cache.reserve(32768)
    eager = wall_seconds(lambda: cache.attend(last, last, last), 50, turns)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        cache.attend(last, last, last)
    return {"name": name, "eager_us": eager * 1e6, "graph_us": wall_seconds(graph.replay, 50, turns) * 1e6}


class DenseCache:
    """SDPA over all tokens before, in memory that a graph can use, too: what a model without dilation does."""

    follows = True

    def __init__(self, room: int) -> None:
        self.room, self.position, self.rows = room, 0, None

    def catch_up(self, leader: object = None) -> None:
        pass

    def reserve(self, tokens: int) -> None:
        self.at = torch.tensor([self.position], device="cuda")
        self.places = torch.arange(self.room, device="cuda")

    def next_position(self) -> object:
        return self.at.clone() if torch.cuda.is_current_stream_capturing() else self.position

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        if self.rows is None:
            self.rows = key.new_zeros(2, key.shape[0], self.room, *key.shape[2:])
        count, turned = key.shape[1], query.transpose(1, 2)
        if torch.cuda.is_current_stream_capturing():
            self.rows.index_copy_(2, self.at, torch.stack((key, value)))
            keys, values = self.rows.transpose(2, 3)
            out = scaled_dot_product_attention(turned, keys, values, attn_mask=(self.places <= self.at)[None, None, None])
            self.at += 1
        else:
            end = self.position + count
            self.rows[0, :, self.position : end], self.rows[1, :, self.position : end] = key, value
            keys, values = self.rows[:, :, :end].transpose(2, 3)
            with sdpa_kernel(SDPBackend.FLASH_ATTENTION):  # cuDNN makes a plan for each length, which takes longer
                out = scaled_dot_product_attention(turned, keys, values, is_causal=count > 1)
            self.position = end
        return out.transpose(1, 2)


@torch.no_grad()
def generation(whose: str, context: int, turns: int) -> dict[str, object]:
    """Greedy tokens of LongNet's base model (24 layers, 768 wide), bfloat16, batch 1, by the same loop for both caches."""
    torch.manual_seed(0)
    model = lt.LongNetLM(256, positions="rotary", device="cuda", dtype=torch.bfloat16).eval()
    steps = 64
    room = context + steps * (turns + 3) + 1
    cache = model.new_cache(room)
    if whose == "SDPA":
        cache._take({layer: tuple(DenseCache(room) for _ in caches) for layer, caches in cache._layers.items()})
    logits = model.decode(torch.randint(256, (1, context), device="cuda"), cache, last_only=True)
    last = logits[:, -1].argmax(-1, keepdim=True)

    def step() -> None:
        last.copy_(model.decode(last, cache)[:, -1].argmax(-1, keepdim=True))

    step()
    cache.reserve(room)
    eager = wall_seconds(step, steps // 4, turns)
    cache.reserve(room)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    graphed = wall_seconds(graph.replay, steps // 2, turns)
    return {"whose": whose, "context": context, "eager_tokens_per_second": 1 / eager, "graph_tokens_per_second": 1 / graphed}


def headline(result: dict) -> str:
    text = f"{result['name']:28}"
    for kind in ("us", "graph_us"):
        times = result[kind]
        peers = {name: value for name, value in times.items() if name != "longspan"}
        text += f" {times['longspan']:8.1f}"
        if peers:
            best = min(peers, key=peers.__getitem__)
            text += f" {peers[best]:8.1f} {times['longspan'] / peers[best]:6.3f} {best:11}"
        else:
            text += " " * 28
    return text + (f" {result['terabytes_per_second']:5.2f} TB/s" if "terabytes_per_second" in result else "")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="which rows, with * and ?; all without any")
    parser.add_argument("--turns", type=int, default=9)
    parser.add_argument("--json", type=Path, help="write everything here, after each row")
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore", module=__name__)  # torch's, of backends that do not take a row
    if not torch.cuda.is_available() or not longspan.info()["gpus"]:
        sys.exit(f"gpu_decode: no GPU to measure: {longspan.info()['why_no_gpu'] or 'torch sees none'}")
    report = {
        **gpu_facts(),
        "torch": torch.__version__,
        "longspan": longspan.__version__,
        "commit": longspan.__commit__,
        "command": " ".join(["python bench/gpu_decode.py", *without_folders(sys.argv[1:])]),
        "date": time.strftime("%Y-%m-%d"),
        "rows": [],
        "tokens": [],
        "generate": [],
    }

    def save() -> None:
        if arguments.json:
            arguments.json.write_text(json.dumps(report, indent=1) + "\n")

    print("microseconds: longspan, best peer, ours over it, which; then the same in a graph")
    for row in rows():
        if arguments.names and not any(fnmatch.fnmatch(row.name, one) for one in arguments.names):
            continue
        report["rows"].append(measure(row, arguments.turns))
        torch.cuda.empty_cache()
        print(headline(report["rows"][-1]), flush=True)
        save()
    for name, pattern in (("dilated", longspan.Pattern.dilated), ("longnet", longspan.Pattern.longnet)):
        if not arguments.names or "tokens" in arguments.names:
            report["tokens"].append(token(f"a token through DilatedCache, {name}", pattern(SEGMENTS, DILATIONS), arguments.turns))
            print(report["tokens"][-1], flush=True)
    for context in (2048, 32768):
        for whose in ("longspan", "SDPA"):
            if not arguments.names or "generate" in arguments.names:
                report["generate"].append(generation(whose, context, arguments.turns))
                print(report["generate"][-1], flush=True)
                torch.cuda.empty_cache()
    save()


if __name__ == "__main__":
    main()
