"""A training step of LongNetLM against the same model with the same weights, written with torch's own operators alone."""

from __future__ import annotations

import copy
import gc
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from longspan.torch import (
    DilatedTransformerDecoderLayer,
    DilatedTransformerEncoderLayer,
    LongNetLM,
    MultiheadDilatedAttention,
)
from longspan.torch.longnet import DILATION_RATES, SEGMENT_LENGTHS

import torch
from torch import Tensor

from .composition import DilatedComposition
from .timing import alternate, gpu_profile
from .variants import Variant, prepare

# Segments of a sixteenth, a quarter and all of the context; or those of LongNet's base model, for 32,768 tokens.
PATTERNS = {
    "thirds": lambda context: ([context // 16, context // 4, context], [1, 2, 4]),
    "paper": lambda context: (list(SEGMENT_LENGTHS), list(DILATION_RATES)),
}


class PlainMultihead(MultiheadDilatedAttention):
    """Projections and norm as torch's modules have them."""

    def _project(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.q_proj(query), self.k_proj(key), self.v_proj(value)

    def _finish(self, out: Tensor) -> Tensor:
        return self.out_proj(out if self.norm is None else self.norm(out))


class PlainEncoderLayer(DilatedTransformerEncoderLayer):
    def _feed_forward(self, x: Tensor) -> Tensor:
        return self.dropout(self.linear2(self.norm3(self.dropout(self.activation(self.linear1(self.norm2(x)))))))


class PlainDecoderLayer(DilatedTransformerDecoderLayer):
    def _feed_forward(self, x: Tensor) -> Tensor:
        return self.dropout(self.linear2(self.norm4(self.dropout(self.activation(self.linear1(self.norm3(x)))))))


PLAIN = {
    MultiheadDilatedAttention: PlainMultihead,
    DilatedTransformerEncoderLayer: PlainEncoderLayer,
    DilatedTransformerDecoderLayer: PlainDecoderLayer,
}


def sizes(device: str) -> tuple[int, int, int]:
    """Layers (half of them the encoder's), width, heads."""
    return (4, 256, 4) if device == "cpu" else (12, 768, 12)


def make_model(context: int, device: str, pattern: str, *, plain: bool = False) -> LongNetLM:
    layers, width, heads = sizes(device)
    segments, dilations = PATTERNS[pattern](context)
    torch.manual_seed(0)
    model = LongNetLM(
        256, width, heads, layers // 2, layers // 2, 4 * width, segments, dilations, positions="rotary", device=device
    )
    if plain:
        for module in list(model.modules()):
            if type(module) is MultiheadDilatedAttention:
                module.attention = DilatedComposition(segments, dilations)
            module.__class__ = PLAIN.get(type(module), type(module))
    return model


def make_step(context: int, dtype: torch.dtype, device: str) -> Callable[[LongNetLM], Tensor]:
    ids = torch.randint(256, (1, context + 1), generator=torch.Generator().manual_seed(1)).to(device)

    def step(model: LongNetLM) -> Tensor:
        """Forward, loss and backward; 16 bits by autocast."""
        model.zero_grad()
        with torch.autocast(torch.device(device).type, dtype, enabled=dtype is not torch.float32):
            logits = model(ids[:, :-1])
        loss = torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        return loss.detach()

    return step


def gpu_peak(step: Callable[[], object], model: LongNetLM) -> int:
    """Bytes of a step beyond parameters, as torch's allocator counts them. Longspan's workspaces are torch's memory, too."""
    model.zero_grad()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def reserved(device: str) -> int:
    """Bytes that torch's allocator holds: graphs keep theirs."""
    if device == "cpu":
        return 0
    gc.collect()
    torch.cuda.empty_cache()
    return torch.cuda.memory_reserved()


def status(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {field}")


def cpu_peak(*arguments: str) -> int | None:
    """What the resident memory of a process of its own grows by in a step; None where the system does not say."""
    if not Path("/proc/self/clear_refs").exists():
        return None
    command = [sys.executable, "-m", "longspan.bench.language_model", *arguments, str(torch.get_num_threads())]
    return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def measure_cpu_peak(context: str, dtype: str, pattern: str, whose: str, threads: str) -> None:
    """The other process: a small step first, for what is allocated once."""
    torch.set_num_threads(int(threads))
    number, type_ = int(context), getattr(torch, dtype)
    model = make_model(number, "cpu", pattern, plain=whose == "torch")
    warm = make_model(64, "cpu", "thirds", plain=whose == "torch")
    make_step(64, type_, "cpu")(warm)
    step = make_step(number, type_, "cpu")
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = status("VmRSS")
    step(model)
    print(status("VmHWM") - before)


def measure(
    models: dict[str, LongNetLM], variants: list[Variant], step: Callable[[LongNetLM], Tensor], repeats: int, device: str,
    kernels: int,
) -> dict[str, dict]:  # fmt: skip
    """Variants that differ in switches alone, and torch's side of them, taking turns; models: "" is ours, "torch_" the
    other. Their compiled code and graphs are gone afterwards."""
    torch._dynamo.reset()  # a limit on how often a function is compiled would end in eager code
    chosen = [(f"{one.prefix}step", "", one) for one in variants]
    chosen.append((f"{variants[0].shared.prefix}torch_step", "torch_", variants[0].shared))
    result: dict[str, dict] = {"failed": {}, "seconds": {}, "peak_bytes": {}}
    functions, loss = {}, {}
    for name, whose, variant in chosen:
        try:
            model = copy.deepcopy(models[whose])
            before = reserved(device)
            function = prepare(variant, model, step, device)
            loss[name] = function().item()
            functions[name] = function
        except Exception as problem:  # torch.compile fails in many ways, for want of a compiler for one
            result["failed"][name] = f"{type(problem).__name__}: {str(problem).strip().partition(chr(10))[0]}"
            continue
        if device != "cpu":
            result["peak_bytes"][name] = reserved(device) - before if variant.in_graphs else gpu_peak(function, model)
    result["seconds"] = alternate(functions, repeats, device)
    if device != "cpu":
        for name, function in functions.items():
            for key, value in gpu_profile(function, kernels).items():
                result.setdefault(key, {})[name] = value
    peer = f"{variants[0].shared.prefix}torch_step"
    taken = {name: seconds["median"] for name, seconds in result["seconds"].items()}
    result["times_faster_than_torch"] = {
        name: taken[peer] / taken[name] for name in taken if name != peer and peer in taken
    }
    result["largest_difference"] = {name: abs(value - loss[peer]) for name, value in loss.items() if peer in loss}
    return result


def told(group: dict[str, dict]) -> list[str]:
    """A line for each step of a result of measure, and its longest kernels where they were asked for."""
    lines = [f"  {name}: {why}" for name, why in group["failed"].items()]
    for name, seconds in group["seconds"].items():
        times = {"": seconds["median"], **{key: group.get(f"{key}_seconds", {}).get(name) for key in ("host", "busy")}}
        words = [f"{key} {value * 1e3:.1f} ms".strip() for key, value in times.items() if value is not None]
        if name in group["peak_bytes"]:
            words.append(f"{group['peak_bytes'][name] / 1e9:.1f} GB")
        if name in group["times_faster_than_torch"]:
            words.append(f"{group['times_faster_than_torch'][name]:.2f} times torch's")
        lines.append(f"  {name}: {', '.join(words)}")
        for kernel, count, total in group.get("kernels", {}).get(name, []):
            lines.append(f"    {total * 1e3:6.2f} ms {count:4d} x {kernel}")
    return lines


def bench_lm(
    context: int, repeats: int, dtype: torch.dtype, device: str, variants: list[Variant], pattern: str, kernels: int = 0
) -> dict:
    """kernels: so many of the longest of each step are kept."""
    layers, width, heads = sizes(device)
    segments, dilations = PATTERNS[pattern](context)
    models = {"": make_model(context, device, pattern), "torch_": make_model(context, device, pattern, plain=True)}
    step = make_step(context, dtype, device)
    dtype_name = str(dtype).removeprefix("torch.")
    measured: dict[str, dict] = {}
    for shared in dict.fromkeys(variant.shared for variant in variants):
        same = [one for one in variants if one.shared == shared]
        with torch._dynamo.config.patch(automatic_dynamic_shapes=False):  # switches are numbers, which would become sizes
            group = measure(models, same, step, repeats, device, kernels)
        for key, values in group.items():
            measured.setdefault(key, {}).update(values)
        print(*told(group), sep="\n", file=sys.stderr, flush=True)  # what comes later may not end
    if device == "cpu":
        measured["peak_bytes"] = {
            name: cpu_peak(str(context), dtype_name, pattern, whose)
            for name, whose in (("step", "ours"), ("torch_step", "torch")) if name in measured["seconds"]
        }  # fmt: skip
    median = {name: taken["median"] for name, taken in measured["seconds"].items()}
    sides = [[value for name, value in median.items() if ("torch" in name) is theirs] for theirs in (True, False)]
    if all(sides):
        measured["times_faster_than_torch"]["best"] = min(sides[0]) / min(sides[1])
    return {
        "what": "LongNetLM step", "device": device, "dtype": dtype_name, "tokens": context, "layers": layers, "width": width,
        "heads": heads, "segments": segments, "dilations": dilations, **measured,
    }  # fmt: skip


if __name__ == "__main__":
    measure_cpu_peak(*sys.argv[1:])
