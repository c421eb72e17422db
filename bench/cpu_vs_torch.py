"""The CPU engine against the fastest composition of torch's own operators, in one run.

    python bench/cpu_vs_torch.py [--quick] [--json] [--only TEXT [--again]] [--repeats 5] [--compiled] [--threads 2]

Ours and torch take turns on the same tensors. A sample is clean if short bursts of matrix products (and tiles, for bfloat16) right
before and right after it ran at 90% of the best seen (busy neighbours halve a machine's speed for seconds at a time); where a time
limit ends before there are enough of them, the samples with the fastest bursts count, and the row says so. A pause around each
sample lets torch's threads, which spin after a call, go to sleep. Our outputs are allocated beforehand; the allocator is told to
keep its memory for both sides. Numbers, hardware, commit and command go to bench/results/cpu_*.json.
--quick: 8,192 tokens only, without scaling and memory. --compiled: torch.compile joins the peers (minutes of compiling).
--again: after a full run that something disturbed, the cases of --only take the place of its own and say so.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path

RESULTS = Path(__file__).resolve().parent / "results"
GATE = 0.9
PAUSE = 0.03  # seconds; between bursts and samples too, since the bursts are torch's and its threads spin after them
WAITS = 10  # for a quiet moment before a sample
SETTINGS = {"MALLOC_MMAP_THRESHOLD_": "8589934592", "MALLOC_TRIM_THRESHOLD_": "17179869184", "MALLOC_TOP_PAD_": "67108864"}


def prepare() -> None:
    """Starts this script again under the settings that must be there before Python is."""
    if os.environ.get("LONGSPAN_BENCH_READY"):
        return
    environment = {**os.environ, **SETTINGS, "LONGSPAN_BENCH_READY": "1"}
    # Some virtual machines show AMX but hide its shapes; oneDNN then stops torch's bfloat16 with an illegal instruction.
    probe = "import torch; x = torch.ones(64, 64, dtype=torch.bfloat16); x @ x"
    if subprocess.run([sys.executable, "-c", probe], capture_output=True).returncode != 0:
        environment["ONEDNN_MAX_CPU_ISA"] = "avx512_core_bf16"
    os.execve(sys.executable, [sys.executable, *sys.argv], environment)


prepare()

import torch  # noqa: E402
import longspan  # noqa: E402
from longspan.bench.composition import longnet_composition  # noqa: E402
from longspan.bench.timing import machine  # noqa: E402

GIGAPATH = ([1024, 5792, 32768, 185363, 1048576], [1, 2, 4, 8, 16])


class Burst:
    """Speed of a short run that fits the cache: whether the machine is ours right now. Matrix products, and for bfloat16 a
    small forward, too: AMX tiles are shared with neighbours of whom a float32 product notices nothing."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        a, b, c = (torch.randn(384, 384) for _ in range(3))
        self.runs = [(6 * 2 * 384**3, lambda: [torch.mm(a, b, out=c) for _ in range(6)])]
        if dtype is torch.bfloat16:
            q, out = torch.randn(1, 1024, 2, 64).to(dtype), torch.empty(1, 1024, 2, 64, dtype=dtype)
            self.runs.append((4 * 1024**2 * 64 * 2, lambda: longspan.attention(q, q, q, out=out)))
        self.bests = [0.0] * len(self.runs)
        for _ in range(60):
            self.measure()

    @property
    def best(self) -> float:
        """GFLOP/s of the matrix products."""
        return self.bests[0]

    def measure(self) -> float:
        """Fraction of the best speed seen."""
        fraction = 1.0
        for index, (flops, run) in enumerate(self.runs):
            start = time.perf_counter()
            run()
            speed = flops / (time.perf_counter() - start) / 1e9
            self.bests[index] = max(self.bests[index], speed)
            fraction = min(fraction, speed / self.bests[index])
        return fraction


def alternate(functions: dict, repeats: int, burst: Burst, limit: float) -> tuple[dict[str, float], bool]:
    """Median seconds of each function's `repeats` samples around which the machine was quietest, and whether all of them passed
    the gate. Sampling ends when they all do, or after `limit` seconds."""
    for function in functions.values():
        function()
    samples: dict[str, list[tuple[float, float]]] = {name: [] for name in functions}  # speed of the bursts around it, seconds
    began = time.perf_counter()

    def clean(name: str) -> int:
        return sum(speed >= GATE for speed, _ in samples[name])

    def more_wanted() -> bool:
        if min(map(len, samples.values())) < repeats:
            return True
        return min(map(clean, functions)) < repeats and time.perf_counter() - began < limit

    while more_wanted():
        for name, function in functions.items():
            if clean(name) >= repeats:
                continue
            for _ in range(WAITS):  # neighbours come and go within a second
                if (before := burst.measure()) >= GATE:
                    break
                time.sleep(PAUSE)
            time.sleep(PAUSE)
            start = time.perf_counter()
            function()
            taken = time.perf_counter() - start
            time.sleep(PAUSE)
            samples[name].append((min(before, burst.measure()), taken))
    chosen = {name: sorted(taken, reverse=True)[:repeats] for name, taken in samples.items()}
    good = all(speed >= GATE for taken in chosen.values() for speed, _ in taken)
    return {name: statistics.median(seconds for _, seconds in taken) for name, taken in chosen.items()}, good


def sliced(segments: list[int], dilations: list[int], causal: bool):
    """Slices + scaled_dot_product_attention; token counts are multiples of the segments."""

    def attend(q, k, v):
        batch, tokens, heads, head_dim = q.shape
        out, first = torch.zeros_like(q), 0
        for index, (segment, dilation) in enumerate(zip(segments, dilations)):
            owned = heads // len(segments) + (index < heads % len(segments))
            split = (batch, tokens // segment, segment, heads, head_dim)

            def rows(x):
                return x.view(split)[:, :, index % dilation :: dilation, first : first + owned]

            parts = [rows(x).transpose(2, 3).flatten(0, 1) for x in (q, k, v)]
            result = torch.nn.functional.scaled_dot_product_attention(*parts, is_causal=causal)
            rows(out).copy_(result.unflatten(0, split[:2]).transpose(2, 3))
            first += owned
        return out

    return attend


class Case:
    """One line of the table."""

    def __init__(self, name, dtype, tokens, heads, head_dim, segments, dilations, causal=False, mixed=False):
        self.name, self.dtype, self.causal, self.mixed = name, dtype, causal, mixed
        self.shape = (1, tokens, heads, head_dim)
        self.segments, self.dilations = segments, dilations
        if mixed:
            self.pattern = longspan.longnet(segments, dilations, phase="torchscale", pad_keys=True)
            self.peers = {"torch": longnet_composition(segments, dilations)}
        else:
            self.pattern = longspan.dilated(segments, dilations)
            self.peers = {"torch": sliced(segments, dilations, causal)}

    def run(self, arguments, burst: Burst) -> dict:
        torch.manual_seed(0)
        q, k, v, dout = (torch.randn(self.shape).to(self.dtype) for _ in range(4))
        out, dq, dk, dv = (torch.empty_like(q) for _ in range(4))
        lse = torch.empty(self.shape[0], self.shape[2], self.shape[1])
        needy = [x.clone().requires_grad_() for x in (q, k, v)]

        def forward():
            longspan.attention(q, k, v, self.pattern, causal=self.causal, out=out, lse=lse, return_lse=True)

        def both():
            forward()
            longspan.attention_backward(q, k, v, out, lse, dout, self.pattern, causal=self.causal, dq=dq, dk=dk, dv=dv)

        def peer_forward(peer):
            with torch.no_grad():
                return peer(q, k, v)

        def peer_both(peer):
            for x in needy:
                x.grad = None
            peer(*needy).backward(dout)

        peers = dict(self.peers)
        if arguments.compiled:
            torch._dynamo.reset()  # after eight shapes it would not compile any more
            peers["torch compiled"] = torch.compile(self.peers["torch"])
        functions = {"forward": forward, "both": both}
        for name, peer in peers.items():
            functions[f"{name} forward"] = lambda peer=peer: peer_forward(peer)
            functions[f"{name} both"] = lambda peer=peer: peer_both(peer)
        forward()
        difference = (out.float() - peer_forward(peers["torch"]).float()).abs().max().item()
        seconds, clean = alternate(functions, arguments.repeats, burst, arguments.limit)
        best_forward = min(seconds[f"{name} forward"] for name in peers)
        best_both = min(seconds[f"{name} both"] for name in peers)
        plan = longspan.plan(self.pattern, options=longspan.Options(causal=self.causal), tokens=self.shape[1], heads=self.shape[2],
                             head_dim=self.shape[3], dtype={torch.float32: "f32", torch.bfloat16: "bf16"}[self.dtype])  # fmt: skip
        flops = plan.totals["forward_flops"]
        return {
            "case": self.name, "dtype": str(self.dtype).removeprefix("torch."), "causal": self.causal,
            "tokens": self.shape[1], "heads": self.shape[2], "head_dim": self.shape[3],
            "segments": self.segments, "dilations": self.dilations, "kernel": plan.kernel(),
            "forward_ms": seconds["forward"] * 1e3, "torch_forward_ms": best_forward * 1e3,
            "forward_ratio": best_forward / seconds["forward"],
            "both_ms": seconds["both"] * 1e3, "torch_both_ms": best_both * 1e3, "both_ratio": best_both / seconds["both"],
            "forward_gflops": flops / seconds["forward"] / 1e9, "burst_gflops": burst.best,
            "backward_gflops": 2.5 * flops / (seconds["both"] - seconds["forward"]) / 1e9,
            "largest_difference": difference, "all_samples_clean": clean,
        }  # fmt: skip


def cases(quick: bool) -> list[Case]:
    listed = []
    for dtype in (torch.float32, torch.bfloat16):
        for tokens in (8192,) if quick else (8192, 32768):
            for head_dim in (64, 128):
                for causal in (False, True):
                    listed.append(Case("dilated", dtype, tokens, 8, head_dim, [2048, 4096, 8192], [1, 2, 4], causal))
        for causal in (False, True):
            listed.append(Case("short strands", dtype, 8192, 8, 64, [256, 512], [1, 2], causal))
        listed.append(Case("gigapath", dtype, 10001, 16, 48, *GIGAPATH, mixed=True))
    return listed


def place_of(row: dict) -> tuple:
    return tuple(str(row[key]) for key in ("case", "dtype", "causal", "tokens", "head_dim"))


def time_of(tokens: int, heads: int, threads: int, repeats: int, burst: Burst) -> float:
    longspan.set_num_threads(threads)
    q, k, v = (torch.randn(1, tokens, heads, 64) for _ in range(3))
    out = torch.empty_like(q)
    pattern = longspan.dilated([2048, 4096, 8192], [1, 2, 4])
    seconds, _ = alternate({"ours": lambda: longspan.attention(q, k, v, pattern, out=out)}, repeats, burst, 60.0)
    return seconds["ours"]


def scaling(threads: int, burst: Burst) -> dict:
    growth = []
    for tokens in (8192, 32768, 131072, 524288, 1048576):
        seconds = time_of(tokens, 3, threads, 3 if tokens > 200000 else 5, burst)
        growth.append({"tokens": tokens, "ms": seconds * 1e3, "us_per_token": seconds / tokens * 1e6})
    usable = len(os.sched_getaffinity(0))
    counts = sorted({1, *(2**i for i in range(10) if 2**i <= usable), usable})
    taken = {count: time_of(32768, 8, count, 5, burst) for count in counts}
    longspan.set_num_threads(threads)
    return {
        "growth": growth,
        "threads": [{"threads": n, "ms": t * 1e3, "efficiency": taken[1] / (n * t)} for n, t in taken.items()],
    }


def memory(threads: int) -> list[dict]:
    """Workspace as the library counts it, and what the process's peak resident memory grew by."""
    longspan.set_num_threads(threads)
    rows = []
    for name, pattern, tokens, heads, dtype in (
        ("dense", longspan.dense(), 131072, 1, torch.bfloat16),
        ("dilated", longspan.dilated([2048, 4096, 8192], [1, 2, 4]), 131072, 8, torch.float32),
        ("dilated", longspan.dilated([2048, 4096, 8192], [1, 2, 4]), 131072, 8, torch.bfloat16),
    ):
        q, k, v = (torch.randn(1, tokens, heads, 64).to(dtype) for _ in range(3))
        out, lse = torch.zeros_like(q), torch.zeros(1, heads, tokens)
        longspan.host_memory.trim()
        longspan.host_memory.reset_peak()
        resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        longspan.attention(q, k, v, pattern, out=out, lse=lse, return_lse=True)
        grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - resident) * 1024
        counted = longspan.host_memory.statistics()["peak_used_bytes"]
        rows.append({"case": name, "tokens": tokens, "heads": heads, "dtype": str(dtype).removeprefix("torch."), "threads": threads,
                     "workspace_bytes": counted, "resident_growth_bytes": grown, "lse_bytes": lse.numel() * 4,
                     "bound_bytes": lse.numel() * 4 + threads * 8 * 2**20})  # fmt: skip
    return rows


def flex_attention_of(blocks: torch.Tensor, size: int):
    """Compiled FlexAttention over blocks [heads, rows, columns] that it takes whole."""
    from torch.nn.attention.flex_attention import BlockMask, flex_attention

    counts = blocks.sum(-1, dtype=torch.int32)[None]
    order = blocks.int().argsort(dim=-1, descending=True, stable=True).int()[None]
    # A tensor of its own for each argument: the compiler takes equal ones for one, and then misses the other.
    kept = BlockMask.from_kv_blocks(torch.zeros_like(counts), order, counts, order.clone(), BLOCK_SIZE=size,
                                    mask_mod=lambda b, h, i, j: blocks[h, i // size, j // size])  # fmt: skip
    torch._dynamo.reset()  # for each mask anew: with sizes that vary its code for CPUs does not compile
    compiled = torch.compile(flex_attention, dynamic=False)
    return lambda rows: compiled(*rows, block_mask=kept)


def block_sparse(arguments, burst: Burst, table) -> None:
    """A tenth of the blocks of 16,384 tokens against our own dense attention, scaled_dot_product_attention with the mask and
    FlexAttention (forward only: it has no backward on a CPU), or the error that its compilation ends with."""
    tokens, heads, head_dim = (4096 if arguments.quick else 16384), 1, 64
    results = []
    for dtype in (torch.float32, torch.bfloat16):
        for size in (64, 128):
            pattern = longspan.block_sparse(longspan.random_blocks(0.1, 0, size))
            mask = longspan.plan(pattern, tokens=tokens, heads=heads, head_dim=head_dim).masks[0]
            blocks = torch.from_numpy(mask.to_dense())
            whole = blocks.repeat_interleave(size, 1).repeat_interleave(size, 2)[None]
            q, k, v = (torch.randn(1, tokens, heads, head_dim, dtype=dtype, requires_grad=True) for _ in range(3))
            functions = {"ours": lambda: longspan.attention(q, k, v, pattern), "dense": lambda: longspan.attention(q, k, v)}
            rows = [x.transpose(1, 2) for x in (q, k, v)]
            functions["torch"] = lambda: torch.nn.functional.scaled_dot_product_attention(*rows, attn_mask=whole)
            with torch.no_grad():
                forward, clean = alternate(functions, arguments.repeats, burst, arguments.limit)
                flex_error = None
                try:
                    flex, detached = flex_attention_of(blocks, size), [x.detach() for x in rows]
                    difference = (flex(detached).transpose(1, 2) - functions["ours"]()).abs().max().item()
                    taken, _ = alternate({"flex": lambda: flex(detached)}, arguments.repeats, burst, arguments.limit)
                    forward |= taken
                except Exception as error:  # no compiler, or a case that it does not know
                    flex_error, difference = f"{type(error).__name__}: {str(error).strip().splitlines()[0]}", None
            both, _ = alternate({name: (lambda f=f: f().sum().backward()) for name, f in functions.items()}, arguments.repeats,
                                burst, arguments.limit)  # fmt: skip
            row = {"tokens": tokens, "heads": heads, "head_dim": head_dim, "dtype": str(dtype).removeprefix("torch."),
                   "block_size": size, "density": mask.density, "all_samples_clean": clean, "flex_error": flex_error,
                   "flex_difference": difference,
                   "forward_ms": {name: seconds * 1e3 for name, seconds in forward.items()},
                   "both_ms": {name: seconds * 1e3 for name, seconds in both.items()}}  # fmt: skip
            for name in ("dense", "torch", "flex"):
                if name in forward:
                    row[f"forward_over_{name}"] = forward[name] / forward["ours"]
                if name in both:
                    row[f"both_over_{name}"] = both[name] / both["ours"]
            results.append(row)
            ratios = ", ".join(f"{key} {value:.2f}" for key, value in row.items() if "_over_" in key)
            print(f"{row['dtype']:9} blocks of {size:3}: {forward['ours'] * 1e3:8.1f} ms; {ratios}", file=table, flush=True)
    report = {"machine": machine(), "command": " ".join(["python", "bench/cpu_vs_torch.py", *sys.argv[1:]]), "results": results}
    if not arguments.quick:
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / "cpu_block_sparse.json").write_text(json.dumps(report, indent=1) + "\n")
    if arguments.json:
        print(json.dumps(report))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", action="store_true", help="results on standard output as JSON, the table on standard error")
    parser.add_argument("--only", default="", help="cases whose name, dtype or kernel line contains this text")
    parser.add_argument("--again", action="store_true", help="with --only: cases take their places in the last full run's file")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--limit", type=float, default=40.0, help="seconds of one case before unclean samples are taken")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--compiled", action="store_true")
    parser.add_argument("--block-sparse", action="store_true", help="only the block-sparse cases")
    arguments = parser.parse_args()
    if arguments.again and (not arguments.only or arguments.block_sparse):
        parser.error("--again: name the cases by --only")
    torch.set_num_threads(arguments.threads)
    longspan.set_num_threads(arguments.threads)
    burst = Burst()
    table = sys.stderr if arguments.json else sys.stdout
    if arguments.block_sparse:
        return block_sparse(arguments, burst, table)
    header = {"machine": machine(), "command": " ".join(["python", "bench/cpu_vs_torch.py", *sys.argv[1:]]),
              "onednn_isa": os.environ.get("ONEDNN_MAX_CPU_ISA", "default"), "malloc": SETTINGS}  # fmt: skip
    name = "cpu_quick.json" if arguments.quick else "cpu_vs_torch.json"
    if arguments.again:
        full = json.loads((RESULTS / name).read_text())
        for key in ("cpu", "threads", "torch"):
            if full["machine"][key] != header["machine"][key]:
                parser.error(f"--again: {name} is of {key} {full['machine'][key]}, this is {header['machine'][key]}")
        if arguments.compiled != ("--compiled" in full["command"]):
            parser.error(f"--again: {name} was made by {full['command']}; give --compiled as there")
    bursts = {torch.float32: burst, torch.bfloat16: Burst(torch.bfloat16)}
    results = []
    print(f"{'case':14} {'dtype':9} {'N':>6} {'D':>4} {'':6} {'ours ms':>9} {'torch':>9} {'ratio':>6} | {'f+b ms':>9} "
          f"{'torch':>9} {'ratio':>6}  kernel", file=table)  # fmt: skip
    for case in cases(arguments.quick):
        text = f"{case.name} {case.dtype} {case.shape[1]} D{case.shape[3]} {'causal' if case.causal else 'full'}"
        if arguments.only not in text:
            continue
        r = case.run(arguments, bursts[case.dtype])
        results.append(r)
        print(f"{r['case']:14} {r['dtype']:9} {r['tokens']:6} {r['head_dim']:4} {'causal' if r['causal'] else 'full':6} "
              f"{r['forward_ms']:9.1f} {r['torch_forward_ms']:9.1f} {r['forward_ratio']:6.2f} | {r['both_ms']:9.1f} "
              f"{r['torch_both_ms']:9.1f} {r['both_ratio']:6.2f}  {r['kernel']}{'' if r['all_samples_clean'] else ' (busy machine)'}",
              file=table, flush=True)  # fmt: skip
    report = {**header, "results": results}
    RESULTS.mkdir(exist_ok=True)
    if not arguments.quick and not arguments.only:
        report["scaling"] = scaling(arguments.threads, burst)
        report["memory"] = memory(arguments.threads)
        for row in report["scaling"]["growth"]:
            print(f"{row['tokens']:9} tokens {row['ms']:10.1f} ms {row['us_per_token']:8.3f} us per token", file=table)
        for row in report["scaling"]["threads"]:
            print(f"{row['threads']:9} threads {row['ms']:9.1f} ms, efficiency {row['efficiency']:.2f}", file=table)
        for row in report["memory"]:
            print(f"{row['case']:9} {row['dtype']:9} {row['tokens']} tokens: workspace {row['workspace_bytes'] / 2**20:.1f} MiB, resident "
                  f"+{row['resident_growth_bytes'] / 2**20:.1f} MiB, bound {row['bound_bytes'] / 2**20:.1f} MiB", file=table)  # fmt: skip
    if arguments.again:
        new = {place_of(row): {**row, "again": {**header["machine"], "command": header["command"]}} for row in results}
        full["results"] = [new.pop(place_of(row), row) for row in full["results"]]
        if new:
            sys.exit(f"{name} has no row for {', '.join(map(str, new))}")
        (RESULTS / name).write_text(json.dumps(full, indent=1) + "\n")
    elif not arguments.only:
        (RESULTS / name).write_text(json.dumps(report, indent=1) + "\n")
    if arguments.json:
        print(json.dumps(report))


if __name__ == "__main__":
    main()
