"""python -m longspan.bench [module] [encoder] [overhead] [decode] [lm]: prints ratios to torch, or times, and writes
torch_*.json files, or gpu_torch_*.json with --device cuda."""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path

import longspan
from longspan.torch import DilatedAttention, DilatedCache  # before torch itself: says what is missing
from longspan.torch import attention as torch_attention
from longspan.torch.longnet import DILATION_RATES, SEGMENT_LENGTHS
from longspan.torch.operator import raw_tensor
from longspan.torch.slide_encoder import DILATIONS, SEGMENTS, SlideEncoder

import torch

from .composition import dilated_composition, longnet_composition
from .language_model import bench_lm
from .timing import alternate, machine, microseconds
from .variants import MODES, SCOPES, SWITCHES, Variant

MODULE_SEGMENTS, MODULE_DILATIONS = [2048, 4096, 8192], [1, 2, 4]
DTYPES = {torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16"}


def described(what: str, device: str, dtype: torch.dtype, **more: object) -> dict:
    return {"what": what, "device": device, "dtype": str(dtype).removeprefix("torch."), **more}


def kernel_names(pattern: str, **problem) -> dict[str, str | None]:
    plan = longspan.plan(pattern, **problem)
    return {"forward": plan.kernel("forward"), "backward": plan.kernel("backward")}


def bench_module(tokens: int, repeats: int, dtype: torch.dtype, causal: bool, device: str) -> dict:
    """DilatedAttention, and the bare operator with given outputs, against the composition."""
    generator = torch.Generator().manual_seed(0)
    query, key, value, grad = (
        torch.randn(1, tokens, 8, 64, generator=generator).to(device, dtype) for _ in range(4)
    )
    leaves = [x.clone().requires_grad_() for x in (query, key, value)]
    module = DilatedAttention(MODULE_SEGMENTS, MODULE_DILATIONS)
    peer = dilated_composition(MODULE_SEGMENTS, MODULE_DILATIONS)
    out = torch.empty_like(query)
    lse = torch.empty(1, 8, tokens, device=device)
    grads = [torch.empty_like(query) for _ in range(3)]
    options = dict(pattern=module.pattern, causal=causal)

    def engine_forward():
        longspan.attention(query, key, value, out=out, lse=lse, **options)

    def engine_both():
        engine_forward()
        longspan.attention_backward(
            query, key, value, out, lse, grad, dq=grads[0], dk=grads[1], dv=grads[2], **options
        )

    def forward(attend):
        with torch.no_grad():
            return attend(query, key, value, is_causal=causal)

    def both(attend):
        return torch.autograd.grad(attend(*leaves, is_causal=causal), leaves, grad)

    error = (forward(module).float() - forward(peer).float()).abs().max().item()
    seconds = alternate(
        {
            "forward": lambda: forward(module),
            "engine_forward": engine_forward,
            "torch_forward": lambda: forward(peer),
            "forward_backward": lambda: both(module),
            "engine_forward_backward": engine_both,
            "torch_forward_backward": lambda: both(peer),
        },
        repeats,
        device,
    )
    ratios = {
        f"{who}{step}": seconds[f"torch_{step}"]["median"] / seconds[f"{who}{step}"]["median"]
        for who in ("", "engine_")
        for step in ("forward", "forward_backward")
    }
    problem = {"tokens": tokens, "heads": 8, "head_dim": 64}
    return described(
        "DilatedAttention", device, dtype, **problem, causal=causal, segments=MODULE_SEGMENTS,
        dilations=MODULE_DILATIONS, largest_difference=error, seconds=seconds, times_faster_than_torch=ratios,
        kernels=kernel_names(module.pattern, **problem, dtype=DTYPES[dtype], device=device),
    )  # fmt: skip


def bench_encoder(tiles: int, repeats: int, layers: int, dtype: torch.dtype, device: str) -> dict:
    """The whole slide encoder over Longspan, and the same weights over torch's composition; 16 bits by autocast."""
    torch.manual_seed(0)
    ours = SlideEncoder(layers=layers).eval().to(device)
    theirs = SlideEncoder(layers=layers, attend=longnet_composition(SEGMENTS, DILATIONS)).eval().to(device)
    theirs.load_state_dict(ours.state_dict())
    features = torch.randn(1, tiles, 1536).to(device)
    cell = torch.arange(tiles)
    coordinates = (torch.stack([cell // 128, cell % 128], dim=-1) * 256.0)[None].to(device)
    cast = torch.autocast(torch.device(device).type, dtype, enabled=dtype is not torch.float32)
    with torch.inference_mode(), cast:
        error = (ours(features, coordinates) - theirs(features, coordinates)).abs().max().item()
        seconds = alternate(
            {"encoder": lambda: ours(features, coordinates), "torch_encoder": lambda: theirs(features, coordinates)},
            repeats,
            device,
        )
    ratio = seconds["torch_encoder"]["median"] / seconds["encoder"]["median"]
    return described(
        "SlideEncoder", device, dtype, tokens=tiles + 1, layers=layers, width=768, heads=16,
        largest_difference=error, seconds=seconds, times_faster_than_torch={"encoder": ratio},
    )  # fmt: skip


class _Nothing(torch.autograd.Function):
    """What torch itself takes of a call that records gradients, and of its backward: as many tensors, nothing computed."""

    @staticmethod
    def forward(ctx, query, key, value):
        out, lse = torch.empty_like(query), query.new_empty((1, 1, 2))
        ctx.save_for_backward(query, key, value, out, lse)
        return out

    @staticmethod
    def backward(ctx, grad):
        return tuple(torch.empty_like(x) for x in ctx.saved_tensors[:3])


def bench_overhead(repeats: int, device: str) -> dict:
    """What a call costs the host beside its kernel: two rows of eight numbers, on one thread."""
    threads = longspan.num_threads(), torch.get_num_threads()
    longspan.set_num_threads(1)
    torch.set_num_threads(1)
    try:
        query, key, value = (torch.randn(1, 2, 1, 8, device=device) for _ in range(3))
        leaves = [x.clone().requires_grad_() for x in (query, key, value)]
        pattern = str(longspan.dilated([2], [1]))
        operator = longspan.Attention(longspan.Pattern.parse(pattern))
        out, lse = torch_attention(query, key, value, pattern, return_lse=True)
        grads = [torch.empty_like(query) for _ in range(3)]
        raw = [raw_tensor("x", x) for x in (query, key, value, out, lse)]
        raw_grads = [raw_tensor("x", x) for x in grads]
        grad = torch.ones_like(out)
        recorded, nothing = torch_attention(*leaves, pattern), _Nothing.apply(*leaves)

        def without_gradients():
            with torch.no_grad():
                torch_attention(query, key, value, pattern)

        calls = {
            "kernel_forward": lambda: operator.forward(*raw),
            "kernel_backward": lambda: operator.backward(*raw, raw[0], None, *raw_grads),
            "without_gradients": without_gradients, "recording_gradients": lambda: torch_attention(*leaves, pattern),
            "backward": lambda: torch.autograd.grad(recorded, leaves, grad, retain_graph=True),
            "torch_recording": lambda: _Nothing.apply(*leaves),
            "torch_backward": lambda: torch.autograd.grad(nothing, leaves, grad, retain_graph=True),
        }  # fmt: skip
        result = {name: microseconds(call, repeats) for name, call in calls.items()}
    finally:
        longspan.set_num_threads(0)
        torch.set_num_threads(threads[1])
    return {"what": "overhead", "device": device, "microseconds": result}


def bench_decode(positions: list[int], groups: int, dtype: torch.dtype, device: str) -> list[dict]:
    """One attention layer of LongNet's base model, token by token, up to each position: where segments are fullest. All
    positions take turns, in groups of as many tokens as the pattern takes to repeat."""
    period = 12  # the least common multiple of the dilations: every token of a group is covered by other branches
    longest = SEGMENT_LENGTHS[-1]
    rows = torch.randn(1, longest, 12, 64, generator=torch.Generator().manual_seed(0)).to(device, dtype)
    token = rows[:, :1]
    module = DilatedAttention(SEGMENT_LENGTHS, DILATION_RATES)
    caches = [DilatedCache(module, heads=12) for _ in positions]

    def advance(cache: DilatedCache, position: int) -> None:
        while (left := position - groups * period - cache.position) > 0:
            cache.append(rows[:, :left], rows[:, :left])

    def decode(cache: DilatedCache) -> float:
        start = time.perf_counter()
        for _ in range(period):
            cache.attend(token, token, token)
        if device != "cpu":
            torch.cuda.synchronize(device)
        return (time.perf_counter() - start) / period * 1e6

    samples: list[list[float]] = []
    for before in (longest, 0):  # the last segment but one warms up: its memory is new to the process
        for cache, position in zip(caches, positions):
            advance(cache, position - before)
        samples = [[] for _ in positions]
        for _ in range(groups):
            for cache, taken in zip(caches, samples):
                taken.append(decode(cache))
    return [
        described(
            "decode", device, dtype, position=position, heads=12, head_dim=64, segments=list(SEGMENT_LENGTHS),
            dilations=list(DILATION_RATES), tokens_timed=groups * period, cache_bytes=cache.bytes,
            microseconds={"token": statistics.median(taken), "best_token": min(taken)},
        )
        for cache, position, taken in zip(caches, positions, samples)
    ]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m longspan.bench", description=__doc__)
    parser.add_argument("parts", nargs="*", help="module, encoder, overhead, decode, lm; all without any")
    parser.add_argument("--out", type=Path, help="folder for the files; without it JSON goes to stdout")
    parser.add_argument("--tokens", type=int, nargs="*", default=[2048, 131072], help="of the module benchmark")
    parser.add_argument("--tiles", type=int, default=10_000, help="of the encoder benchmark (a class token is added)")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--positions", type=int, nargs="*", default=[131072, 1048576], help="of the decode benchmark")
    parser.add_argument("--context", type=int, help="of the lm benchmark (default 8192; 32768 on a GPU)")
    parser.add_argument("--compiled", action="store_true", help="of the lm benchmark: torch.compile of both sides, too")
    parser.add_argument(
        "--variants", nargs="+", metavar="SCOPE[:MODE][+SWITCH...]", help="of the lm benchmark, instead of --compiled: "
        f"scope {', '.join(SCOPES)}; mode {', '.join(MODES[1:])}; switches {', '.join(SWITCHES)}",
    )  # fmt: skip
    parser.add_argument("--kernels", type=int, default=0, help="of the lm benchmark on a GPU: keep so many of the longest")
    parser.add_argument("--pattern", choices=["thirds", "paper"], default="thirds", help="of the lm benchmark")
    parser.add_argument("--repeats", type=int, help="samples of each time (default 5; 40 below 10,000 tokens)")
    parser.add_argument("--device", default="cpu", help="cpu, cuda or cuda:1")
    parser.add_argument(
        "--dtype", choices=["float32", "bfloat16", "float16"], nargs="*",
        help="default: float32; on a GPU bfloat16 for modules and float16 for the encoder",
    )  # fmt: skip
    arguments = parser.parse_args()
    device = arguments.device
    if device != "cpu" and not (torch.cuda.is_available() and longspan.info()["gpus"]):
        parser.error(f"--device {device}: {longspan.info()['why_no_gpu'] or 'torch sees no GPU'}")
    unknown = set(arguments.parts) - {"module", "encoder", "overhead", "decode", "lm"}
    if unknown:
        parser.error(f"unknown part {sorted(unknown)[0]!r}: module, encoder, overhead, decode and lm are there")
    try:
        names = arguments.variants or ["eager", *(["layers"] if arguments.compiled else [])]
        variants = [Variant.parse(name) for name in names]
    except ValueError as error:
        parser.error(str(error))
    torch.set_num_threads(longspan.num_threads())

    def chosen_dtypes(on_gpu: str) -> list[torch.dtype]:
        names = arguments.dtype or ["float32" if device == "cpu" else on_gpu]
        return [getattr(torch, name) for name in names]

    makers = {
        "module": lambda: [
            bench_module(tokens, arguments.repeats or (40 if tokens < 10_000 else 5), dtype, causal, device)
            for tokens in arguments.tokens
            for dtype in chosen_dtypes("bfloat16")
            for causal in (False, True)
        ],
        "encoder": lambda: [
            bench_encoder(arguments.tiles, arguments.repeats or 5, arguments.layers, dtype, device)
            for dtype in chosen_dtypes("float16")
        ],
        "overhead": lambda: [bench_overhead(arguments.repeats or 1000, device)],
        "decode": lambda: [
            result
            for dtype in chosen_dtypes("bfloat16")
            for result in bench_decode(arguments.positions, arguments.repeats or 20, dtype, device)
        ],
        "lm": lambda: [
            bench_lm(
                arguments.context or (8192 if device == "cpu" else 32768), arguments.repeats or 5, dtype, device,
                variants, arguments.pattern, arguments.kernels,
            )  # fmt: skip
            for dtype in chosen_dtypes("bfloat16")
        ],
    }
    for part in arguments.parts or makers:
        results = makers[part]()
        for result in results:
            numbers = result.get("times_faster_than_torch") or result["microseconds"]
            label = f"{result['what']} {result.get('tokens', result.get('position', ''))} {result.get('dtype', '')}".strip()
            label += " causal" if result.get("causal") else ""
            print(label, {name: round(value, 2) for name, value in numbers.items()}, file=sys.stderr)
        text = json.dumps({"machine": machine(), "results": results}, indent=2) + "\n"
        if arguments.out:
            arguments.out.mkdir(parents=True, exist_ok=True)
            where = "torch" if device == "cpu" else "gpu_torch"
            (arguments.out / f"{where}_{part}.json").write_text(text)
        else:
            print(text)


if __name__ == "__main__":
    main()
