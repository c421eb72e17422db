#!/usr/bin/env python3
"""Longspan and its best PyTorch peer on one GPU, taking turns in one run.

Ours, twice: "longspan" is what users call, longspan.torch.attention, with whatever kernels this build has (their names
are recorded); "engine" is the compiled operator alone, with outputs and workspace at hand.
Peers: what a PyTorch user composes from slices and scaled_dot_product_attention (cuDNN or flash, with copies or on
strided views) or, for patterns that mix branches, from flash and its softmax sums, eager and compiled; the fastest of
them is timed beside ours, and where branches mix, eager and compiled both. The error of ours and of the fastest is
taken against float64 on the same inputs. With --block-sparse: block masks against compiled FlexAttention.

    python bench/gpu_vs_torch.py --json bench/results/h200_vs_torch.json
    python bench/gpu_vs_torch.py --quick 'dilated*' memory linear
    python bench/gpu_vs_torch.py --block-sparse --json bench/results/h200_block_sparse.json

burst: median of 7 calls after a pause of 0.25 s, each waited for before the next, so that the host's part is in it;
queued: 7 more right behind, in a row, each by its own events; of both the better of two; sustained: back to back calls,
median of three turns (a card in a long run sits at its power cap). Times include everything a call does: outputs of
"longspan" and of peers are allocated by torch.
"""

from __future__ import annotations

import argparse
import dataclasses
import fnmatch
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import longspan
import longspan.torch as lt  # before torch itself: says what is missing
from longspan.bench.composition import longnet_composition
from longspan.bench.timing import gpu_facts, gpu_seconds, without_folders
from longspan.torch.operator import raw_tensor

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

STEPS = ("forward", "forward_backward")
KINDS = ("burst", "queued", "sustained")  # of times
COMPILED = "compiled "  # how names of peers begin that torch.compile makes
OURS = {"": "longspan", "engine_": "engine"}  # by how the keys of their ratios begin
BACKENDS = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}


def gpu_seconds_of_each(function: Callable[[], object], calls: int) -> list[float]:
    """The device's time of each of several calls in a row. The host may run ahead of the device, as it does in a loop:
    where it cannot, the time is the host's."""
    pairs = []
    for _ in range(calls):
        pairs.append((torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)))
        pairs[-1][0].record()
        function()
        pairs[-1][1].record()
    torch.cuda.synchronize()
    return [begin.elapsed_time(end) / 1000 for begin, end in pairs]


@dataclasses.dataclass(frozen=True)
class Row:
    name: str
    tokens: int
    heads: int
    head_dim: int
    segments: tuple[int, ...]
    dilations: tuple[int, ...]
    causal: bool = False
    mixed: bool = False  # every branch on all heads, as torchscale has it, zero padding included
    dtype: torch.dtype = torch.bfloat16

    @property
    def pattern(self) -> str:
        if self.mixed:
            return str(longspan.longnet(self.segments, self.dilations, phase="torchscale", pad_keys=True))
        return str(longspan.dilated(self.segments, self.dilations))

    def plan(self, kernel: str = "") -> longspan.Plan:
        return longspan.plan(
            self.pattern, options=longspan.Options(causal=self.causal, kernel=kernel), tokens=self.tokens,
            heads=self.heads, head_dim=self.head_dim, dtype="bf16" if self.dtype is torch.bfloat16 else "f16",
            device="cuda",
        )  # fmt: skip

    def inputs(self, count: int = 4) -> list[Tensor]:
        generator = torch.Generator("cuda").manual_seed(0)
        shape = (1, self.tokens, self.heads, self.head_dim)
        return [torch.randn(shape, device="cuda", dtype=self.dtype, generator=generator) for _ in range(count)]


def rows() -> list[Row]:
    result = []
    for causal in (False, True):
        suffix = "_causal" if causal else ""
        for head_dim in (64, 128):
            result.append(Row(f"dense_16k_d{head_dim}{suffix}", 16384, 16, head_dim, (16384,), (1,), causal))
        for tokens, label in ((8192, "8k"), (32768, "32k"), (131072, "131k")):
            result.append(Row(f"dilated_{label}{suffix}", tokens, 8, 64, (2048, 4096, 8192), (1, 2, 4), causal))
        wide = ((8192, 16384, 32768, 65536), (1, 2, 4, 8))
        result.append(Row(f"dilated_131k_d128{suffix}", 131072, 16, 128, *wide, causal))
        million = ((2048, 8192, 32768, 131072, 1048576), (1, 4, 16, 64, 512))
        result.append(Row(f"dilated_1m{suffix}", 1048576, 12, 64, *million, causal))
    slide = ((1024, 5792, 32768, 185363, 1048576), (1, 2, 4, 8, 16))
    for tokens, label in ((10001, "10k"), (65536, "65k")):
        result.append(Row(f"gigapath_{label}", tokens, 16, 48, *slide, mixed=True, dtype=torch.float16))
    return result


def strand_slices(row: Row) -> list[tuple[int, slice, slice]]:
    """(segment, positions in it, heads) of each branch by head groups; the remainder of heads goes to the first."""
    result, begin = [], 0
    groups = len(row.segments)
    for index, (segment, dilation) in enumerate(zip(row.segments, row.dilations)):
        end = begin + row.heads // groups + (index < row.heads % groups)
        result.append((min(segment, row.tokens), slice(index % dilation, None, dilation), slice(begin, end)))
        begin = end
    return result


def by_groups(row: Row, copies: bool) -> Callable[..., Tensor]:
    """Each branch on its own heads: slice, attend, put back; rows that no branch covers are zero."""

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        out = torch.zeros_like(query)
        for segment, positions, heads in strand_slices(row):

            def strands(x: Tensor) -> Tensor:
                return x.view(-1, segment, row.heads, row.head_dim)[:, positions, heads].transpose(1, 2)

            parts = [strands(x).contiguous() if copies else strands(x) for x in (query, key, value)]
            strands(out).copy_(functional.scaled_dot_product_attention(*parts, is_causal=row.causal))
        return out

    return attend


def peers(row: Row, quick: bool) -> dict[str, Callable[..., Tensor]]:
    if row.mixed:
        attend = longnet_composition(row.segments, row.dilations)
        names = {"flash composition": attend}
        return names if quick else {**names, f"{COMPILED}flash composition": torch.compile(attend, dynamic=False)}

    def on(backend: SDPBackend, attend: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def call(*qkv: Tensor) -> Tensor:
            with sdpa_kernel([backend]):
                return attend(*qkv)

        return call

    kinds = {"copies": True, "views": False} if row.dilations != (1,) else {"views": False}
    return {
        f"{name} {kind}": on(backend, by_groups(row, copies))
        for name, backend in BACKENDS.items()
        for kind, copies in kinds.items()
    }


def timed(body: Callable[[], object], calls: int) -> float:
    """Milliseconds of one call among `calls`."""
    return gpu_seconds(body, calls) * 1e3


def burst(body: Callable[[], object]) -> tuple[float, float]:
    """Milliseconds of a call, waited for and queued."""
    time.sleep(0.25)
    waited = statistics.median(timed(body, 1) for _ in range(7))
    return waited, statistics.median(gpu_seconds_of_each(body, 7)) * 1e3


def take_turns(bodies: dict[str, Callable[[], object]], quick: bool) -> dict[str, dict[str, float]]:
    """Milliseconds of each body by KINDS; all see the same state of the card."""
    calls = {}
    for name, body in bodies.items():
        timed(body, 2)
        calls[name] = max(3, min(1000, int((50 if quick else 120) / max(timed(body, 2), 1e-3))))
    result = {}
    for name, body in bodies.items():
        waited, queued = map(min, zip(*(burst(body) for _ in range(1 if quick else 2))))
        result[name] = {"burst_ms": waited, "queued_ms": queued}
    names = list(bodies)
    samples: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(1 if quick else 3):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            samples[name].append(timed(bodies[name], calls[name]))
    for name, taken in samples.items():
        result[name]["sustained_ms"] = statistics.median(taken)
    return result


def add_rates(times: dict, flops: float) -> None:
    for taken in list(times.values()):
        for kind in KINDS:
            taken[f"{kind}_tflops"] = flops / taken[f"{kind}_ms"] * 1e-9


def add_ratios(times: dict, rivals: dict[str, str]) -> None:
    """How many times faster both of ours are than rivals, whose names come by how the keys of their ratios end."""
    for kind in KINDS:
        for ending, rival in rivals.items():
            for label, name in OURS.items():
                ratio = times[rival][f"{kind}_ms"] / times[name][f"{kind}_ms"]
                times[f"{kind}_{label}times_faster{ending}"] = ratio


def engine_steps(
    plan: longspan.Plan, operator: longspan.Attention, inputs: list[Tensor]
) -> dict[str, Callable[[], object]]:
    """The compiled operator on raw tensors: no autograd, nothing allocated."""
    query, key, value, grad = inputs
    batch, tokens, heads, _ = query.shape
    out, *grads = (torch.empty_like(query) for _ in range(4))
    lse = torch.empty(batch, heads, tokens, device="cuda")
    size = max(plan.workspace_bytes(step) for step in ("forward", "backward"))
    workspace = torch.empty(size, dtype=torch.uint8, device="cuda")
    tensors = [raw_tensor("tensor", x) for x in (query, key, value, out)]
    more = [raw_tensor("tensor", x) for x in (lse, grad, *grads)]
    place = {"stream": torch.cuda.current_stream().cuda_stream, "allocate": lambda count: workspace.data_ptr()}
    held = (inputs, out, grads, lse)  # raw tensors own nothing

    def both() -> tuple:
        operator.forward(*tensors, more[0], **place)
        operator.backward(*tensors, more[0], more[1], None, *more[2:], **place)
        return held

    return {"forward": lambda: operator.forward(*tensors, **place), "forward_backward": both}


def steps(attend: Callable[..., Tensor], inputs: list[Tensor]) -> dict[str, Callable[[], object]]:
    query, key, value, grad = inputs
    leaves = [x.detach().requires_grad_() for x in (query, key, value)]

    def forward() -> Tensor:
        with torch.no_grad():
            return attend(query, key, value)

    return {
        "forward": forward,
        "forward_backward": lambda: torch.autograd.grad(attend(*leaves), leaves, grad),
    }


def time_peers(row: Row, inputs: list[Tensor], quick: bool) -> tuple[dict[str, Callable[..., Tensor]], dict]:
    """The compositions that run, and the milliseconds of each for each step (or why there are none)."""
    able, taken = {}, {}
    for name, attend in peers(row, quick).items():
        try:
            taken[name] = {}
            for step, body in steps(attend, inputs).items():
                timed(body, 2)
                taken[name][step] = min(timed(body, 2) for _ in range(3))
            able[name] = attend
        except RuntimeError as error:
            taken[name] = str(error).splitlines()[0]
    if not able:
        raise RuntimeError(f"no peer runs {row.name}: {taken}")
    return able, taken


def relative_error(actual: Tensor, expected: Tensor) -> float:
    return ((actual.double() - expected).norm() / expected.norm()).item()


def float64_attention(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    scores = query @ key.transpose(-2, -1) * query.shape[-1] ** -0.5
    return scores.softmax(-1) @ value, scores.logsumexp(-1)


def errors(row: Row, attends: dict[str, Callable[..., Tensor]], inputs: list[Tensor]) -> dict[str, dict[str, float]]:
    """Relative errors of norms against float64: of whole results where branches mix (forward only: compositions hold
    the weights between branches constant), else of one strand of each branch, with gradients."""
    if row.mixed:
        exact = longnet_composition(row.segments, row.dilations, float64_attention)
        want = exact(*(x.double() for x in inputs[:3]))
        return {
            name: {"out": relative_error(steps(attend, inputs)["forward"](), want)} for name, attend in attends.items()
        }
    results = {}
    for name, attend in attends.items():
        leaves = [x.detach().requires_grad_() for x in inputs[:3]]
        out = attend(*leaves)
        results[name] = (out.detach(), *torch.autograd.grad(out, leaves, inputs[3]))
        del out
    sums = {name: [[0.0, 0.0] for _ in range(4)] for name in attends}
    for segment, positions, heads in strand_slices(row):

        def strand(x: Tensor) -> Tensor:
            return x.view(-1, segment, row.heads, row.head_dim)[-1, positions, heads.stop - 1]

        leaves = [strand(x).double().requires_grad_() for x in inputs[:3]]
        scores = leaves[0] @ leaves[1].T * row.head_dim**-0.5
        if row.causal:
            scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -torch.inf)
        want = scores.softmax(-1) @ leaves[2]
        del scores
        expected = (want.detach(), *torch.autograd.grad(want, leaves, strand(inputs[3]).double()))
        for name, result in results.items():
            for total, actual, wanted in zip(sums[name], result, expected):
                total[0] += (strand(actual).double() - wanted).square().sum().item()
                total[1] += wanted.square().sum().item()
    quantities = ("out", "dq", "dk", "dv")
    return {
        name: {quantity: (wrong / whole) ** 0.5 for quantity, (wrong, whole) in zip(quantities, total)}
        for name, total in sums.items()
    }


def measure_row(row: Row, quick: bool, kernel: str) -> dict[str, object]:
    inputs = row.inputs()
    pattern = row.pattern

    def ours(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return lt.attention(query, key, value, pattern, causal=row.causal, kernel=kernel)

    able, candidates = time_peers(row, inputs, quick)
    best = {step: min(able, key=lambda name: candidates[name][step]) for step in STEPS}
    result: dict[str, object] = {
        **{name: value for name, value in dataclasses.asdict(row).items() if name != "dtype"},
        "dtype": str(row.dtype).removeprefix("torch."),
        "kernels": {step: row.plan(kernel).kernel(step) for step in ("forward", "backward")},
        "peers": best,
        "peer_candidates_ms": candidates,
    }
    totals = row.plan().totals
    operator = longspan.Attention(
        longspan.Pattern.parse(pattern), longspan.Options(causal=row.causal, kernel=kernel)
    )
    engine = engine_steps(row.plan(kernel), operator, inputs)
    for step, peer_name in best.items():
        attends = {"longspan": ours, "peer": able[peer_name]}
        rivals = {"": "peer"}
        for name, attend in able.items() if row.mixed else ():
            kind = "compiled" if name.startswith(COMPILED) else "eager"
            rivals[f"_than_{kind}"] = rival = "peer" if name == peer_name else f"{kind}_peer"
            attends[rival] = attend
        bodies = {name: steps(attend, inputs)[step] for name, attend in attends.items()}
        times = take_turns({"engine": engine[step], **bodies}, quick)
        add_rates(times, totals["forward_flops"] + (totals["backward_flops"] if step == "forward_backward" else 0))
        add_ratios(times, rivals)
        result[step] = times
    for label, name in OURS.items():
        for kind in KINDS:
            milliseconds = [result[step][name][f"{kind}_ms"] for step in ("forward_backward", "forward")]
            taken = max(milliseconds[0] - milliseconds[1], 1e-6)
            result[f"{label}backward_{kind}_tflops"] = totals["backward_flops"] / taken * 1e-9
    result["errors"] = errors(row, attends, inputs)
    result["error_over_peer"] = {
        quantity: ours / result["errors"]["peer"][quantity] for quantity, ours in result["errors"]["longspan"].items()
    }
    return result


def block_rows() -> list[Row]:
    shapes = [(tokens, head_dim) for head_dim in (64, 128) for tokens in (32768, 131072)]
    return [Row(f"blocks_{n // 1024}k_d{head_dim}", n, 8, head_dim, (n,), (1,)) for n, head_dim in shapes]


def far_blocks(blocks: int) -> Tensor:
    """Five blocks around the diagonal, the first one, and four far diagonals."""
    rows = torch.arange(blocks)
    seen = torch.zeros(blocks, blocks, dtype=torch.bool)
    for step in range(-2, 3):
        near = rows[(rows + step >= 0) & (rows + step < blocks)]
        seen[near, near + step] = True
    for part in (16, 8, 4, 2):
        seen[rows, (rows + blocks // part) % blocks] = True
    seen[:, 0] = True
    return seen


def flex_mask(seen: Tensor, size: int) -> object:
    """The mask as FlexAttention takes it; compiled, since it would put down every pair of positions otherwise."""
    from torch.nn.attention.flex_attention import create_block_mask

    def allowed(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return seen[i // size, j // size]

    tokens = len(seen) * size
    return create_block_mask(allowed, None, None, tokens, tokens, "cuda", size, _compile=True)


def measure_blocks(row: Row, quick: bool, kernel: str) -> dict[str, object]:
    """A mask of blocks of 128 against compiled FlexAttention and our own dense rate, and what adaptive choice costs."""
    from torch.nn.attention.flex_attention import flex_attention

    inputs = row.inputs()
    size = 128
    seen = far_blocks(row.tokens // size)
    pattern = longspan.block_sparse(seen.numpy(), size)
    adaptive = longspan.block_sparse(longspan.adaptive(seen.float().mean().item(), size))
    flex = torch.compile(flex_attention, dynamic=False)
    kept = flex_mask(seen.cuda(), size)
    # FlexAttention takes heads before rows; its own tensors are laid out as it likes them best.
    flipped = [x.transpose(1, 2).contiguous() for x in inputs]
    options = longspan.Options(kernel=kernel)
    problem = dict(tokens=row.tokens, heads=row.heads, head_dim=row.head_dim, dtype="bf16", device="cuda")
    plan = longspan.plan(pattern, options=options, **problem)
    engine = engine_steps(plan, longspan.Attention(pattern, options), inputs)
    # Dense attention where it is fastest, and over the same tokens and heads.
    dense = {
        name: Row(name, tokens, heads, row.head_dim, (tokens,), (1,))
        for name, tokens, heads in (("dense", 16384, 16), ("dense_same", row.tokens, row.heads))
    }
    dense_engine = {
        name: engine_steps(one.plan(kernel), longspan.Attention(longspan.dense(), options), one.inputs())
        for name, one in dense.items()
    }
    ours = steps(lambda *qkv: lt.attention(*qkv, pattern, kernel=kernel), inputs)
    theirs = steps(lambda *qkv: flex(*qkv, block_mask=kept), flipped)
    difference = (ours["forward"]() - theirs["forward"]().transpose(1, 2)).abs().max().item()
    result: dict[str, object] = {
        "name": row.name, "tokens": row.tokens, "heads": row.heads, "head_dim": row.head_dim, "block_size": size,
        "density": seen.float().mean().item(), "dtype": "bfloat16", "largest_difference": difference,
        "kernels": {step: plan.kernel(step) for step in ("forward", "backward")},
        "peers": {step: "compiled FlexAttention" for step in STEPS},
    }  # fmt: skip
    totals = plan.totals
    for step in STEPS:
        parts = ("forward",) if step == "forward" else ("forward", "backward")
        if not all(plan.kernel(part) for part in parts):
            continue
        bodies = {"longspan": ours[step], "engine": engine[step], "peer": theirs[step]}
        times = take_turns({**bodies, **{name: one[step] for name, one in dense_engine.items()}}, quick)
        rates = {name: times.pop(name) for name in dense}
        for name, taken in rates.items():
            flops = dense[name].plan(kernel).totals
            add_rates({name: taken}, sum(flops[f"{part}_flops"] for part in parts))
        add_rates(times, sum(totals[f"{part}_flops"] for part in parts))
        add_ratios(times, {"": "peer"})
        for kind in KINDS:
            for name in dense:
                times[f"{kind}_of_{name}"] = times["engine"][f"{kind}_tflops"] / rates[name][f"{kind}_tflops"]
        result[step] = {**times, **rates}
    try:
        with torch.no_grad():
            taken = take_turns({"": lambda: lt.attention(*inputs[:3], adaptive, kernel=kernel)}, quick)[""]
        # Of as many blocks: what the forward with a fixed mask does not take is the choice.
        result["adaptive"] = taken
        fixed = result["forward"]["longspan"]["sustained_ms"]
        result["adaptive_choice_of_forward"] = taken["sustained_ms"] / fixed - 1
    except longspan.Error as error:
        result["adaptive"] = f"{type(error).__name__}: {error}"
    return result


def measure_memory(quick: bool) -> dict[str, object]:
    """Device memory of a forward at 131,072 tokens, by torch's count and by the driver's."""
    row = Row("memory", 131072, 8, 64, (2048, 4096, 8192), (1, 2, 4))
    query, key, value = row.inputs(3)

    def forward() -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            return lt.attention(query, key, value, row.pattern, return_lse=True)

    forward()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before, free = torch.cuda.memory_allocated(), torch.cuda.mem_get_info()[0]
    out, lse = forward()
    torch.cuda.synchronize()
    needed = sum(x.nbytes for x in (query, key, value, out, lse))
    extra = torch.cuda.max_memory_allocated() - before - out.nbytes - lse.nbytes
    return {
        "name": "memory",
        "tokens": row.tokens,
        "inputs_outputs_lse_bytes": needed,
        "extra_bytes": extra,
        "driver_bytes_taken": free - torch.cuda.mem_get_info()[0],
        "library_pool_reserved_bytes": longspan.device_memory.statistics()["reserved_bytes"],
        "peak_over_needed": (needed + extra) / needed,
    }


def measure_linear(quick: bool) -> dict[str, object]:
    """Time per token at fixed segments up to 4,194,304 tokens."""
    points = []
    for tokens in (2**17, 2**19, 2**22) if quick else (2**17, 2**18, 2**19, 2**20, 2**21, 2**22):
        row = Row("linear", tokens, 8, 64, (2048, 4096, 8192), (1, 2, 4))
        inputs = row.inputs()
        bodies = steps(lambda *qkv: lt.attention(*qkv, row.pattern), inputs)
        point: dict[str, object] = {"tokens": tokens}
        for step, body in bodies.items():
            timed(body, 1)
            point[f"{step}_ms"] = min(timed(body, 1) for _ in range(3))
            point[f"{step}_ns_per_token"] = point[f"{step}_ms"] * 1e6 / tokens
        points.append(point)
        del inputs, bodies
        torch.cuda.empty_cache()
    growth = {
        step: points[-1][f"{step}_ns_per_token"] / points[0][f"{step}_ns_per_token"]
        for step in ("forward", "forward_backward")
    }
    return {"name": "linear", "points": points, "time_per_token_last_over_first": growth}


def gemm_tflops() -> float:
    left, right = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    timed(lambda: left @ right, 3)
    return 2 * 8192**3 / burst(lambda: left @ right)[0] * 1e-9


def headline(result: dict) -> str:
    name = result["name"]
    if name == "memory":
        return f"memory: peak {result['peak_over_needed']:.4f} of inputs + outputs + lse"
    if name == "linear":
        growth = result["time_per_token_last_over_first"]
        return "linear: time per token, longest over shortest: " + ", ".join(f"{k} {v:.2f}" for k, v in growth.items())
    if "error" in result:
        return f"{name:24} {result['error']}"
    worst = max(result["error_over_peer"].values()) if "error_over_peer" in result else float("nan")
    line = f"{name:24}"
    measured = [step for step in STEPS if step in result]
    for step in measured:
        times = result[step]
        ratios = [times[f"{kind}_{label}times_faster"] for label in OURS for kind in KINDS]
        line += "".join(f" {times[name]['burst_ms']:8.3f}" for name in ("longspan", "engine", "peer"))
        line += f" {times['engine']['burst_tflops']:5.0f}  " + " ".join(f"{ratio:5.2f}" for ratio in ratios) + " "
    if "adaptive" in result:
        for name, words in (("dense", "of dense"), ("dense_same", "of dense over the same tokens")):
            line += f", {words}" + "".join(f" {result[step][f'burst_of_{name}']:.2f}" for step in measured)
        line += f", adaptive choice {result.get('adaptive_choice_of_forward', result['adaptive'])}"
    line += f" {worst:5.2f}  {result['kernels']['forward']}, {result['peers']['forward']}"
    for ending in ("_than_eager", "_than_compiled"):
        if f"burst_times_faster{ending}" in result["forward"]:
            ratios = [result[step][f"burst_{label}times_faster{ending}"] for step in STEPS for label in OURS]
            line += f"; {ending.removeprefix('_than_')}: " + " ".join(f"{ratio:.2f}" for ratio in ratios)
    return line


def describe_run() -> dict[str, object]:
    return {
        **gpu_facts(),
        "torch": torch.__version__,
        "longspan": longspan.__version__,
        "commit": longspan.__commit__,
        "command": " ".join(["python bench/gpu_vs_torch.py", *without_folders(sys.argv[1:])]),
        "date": time.strftime("%Y-%m-%d"),
        "gemm_bf16_tflops": gemm_tflops(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="which rows, with * and ?; all without any")
    parser.add_argument("--list", action="store_true", help="print the names of the rows")
    parser.add_argument("--quick", action="store_true", help="fewer samples, no compiled peers")
    parser.add_argument("--kernel", default="", help="run this kernel of ours, such as cuda-mma, instead of the best")
    parser.add_argument("--block-sparse", action="store_true", help="block masks against FlexAttention instead")
    parser.add_argument("--json", type=Path, help="write everything here, after each row")
    arguments = parser.parse_args()
    table = {row.name: row for row in (block_rows() if arguments.block_sparse else rows())}
    measure = measure_blocks if arguments.block_sparse else measure_row
    extras = {} if arguments.block_sparse else {"memory": measure_memory, "linear": measure_linear}
    names = [*table, *extras]
    if arguments.list:
        print(*names, sep="\n")
        return
    chosen = [n for n in names if not arguments.names or any(fnmatch.fnmatch(n, one) for one in arguments.names)]
    if not chosen:
        parser.error(f"no row is called {arguments.names[0]!r}: {', '.join(names)}")
    if not torch.cuda.is_available() or not longspan.info()["gpus"]:
        sys.exit(f"gpu_vs_torch: no GPU to measure: {longspan.info()['why_no_gpu'] or 'torch sees none'}")

    report = {**describe_run(), "rows": []}
    print(f"{report['gpu']}, driver {report['driver']}, torch {report['torch']}", end=", ")
    print(f"GEMM {report['gemm_bf16_tflops']:.0f} TFLOP/s")
    print("forward: ms of longspan, engine, peer (burst), engine's TFLOP/s, times faster: longspan burst, queued and")
    print("sustained, engine likewise; forward+backward: the same; error/peer's; kernel, peer; against the eager and the")
    print("compiled peer, burst: forward of longspan, engine, forward+backward of longspan, engine")
    for name in chosen:
        started = time.perf_counter()
        try:
            if name in extras:
                result = extras[name](arguments.quick)
            else:
                result = measure(table[name], arguments.quick, arguments.kernel)
        except (RuntimeError, longspan.Error) as error:  # one row less, not a run lost
            result = {"name": name, "error": f"{type(error).__name__}: {str(error).splitlines()[0]}"}
        result["seconds_spent"] = time.perf_counter() - started
        torch.cuda.empty_cache()
        report["rows"].append(result)
        print(headline(result), flush=True)
        if arguments.json:
            arguments.json.parent.mkdir(parents=True, exist_ok=True)
            arguments.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
