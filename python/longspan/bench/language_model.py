"""A training step of LongNetLM against the same model with the same weights, written with torch's own operators alone."""

from __future__ import annotations

import copy
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
from .timing import alternate

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


def compiled(model: LongNetLM) -> LongNetLM:
    """The same weights; layers of a kind are compiled once, as torch advises for stacks of equal blocks."""
    result = copy.deepcopy(model)
    for layer in [*result.long_net.encoder.layers, *result.long_net.decoder.layers]:
        layer.compile()
    return result


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


def gpu_peak(step: Callable[[], object], models: list[LongNetLM]) -> int:
    """Bytes of a step beyond parameters, as torch's allocator counts them. Longspan's workspaces are torch's memory, too."""
    for model in models:
        model.zero_grad()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


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


def bench_lm(context: int, repeats: int, dtype: torch.dtype, device: str, compile_too: bool, pattern: str) -> dict:
    layers, width, heads = sizes(device)
    segments, dilations = PATTERNS[pattern](context)
    models = {"": make_model(context, device, pattern), "torch_": make_model(context, device, pattern, plain=True)}
    step = make_step(context, dtype, device)
    error = (step(models[""]) - step(models["torch_"])).abs().item()
    failed = {}
    if compile_too:
        for name in ("", "torch_"):
            candidate = compiled(models[name])
            try:
                step(candidate)
                models[f"compiled_{name}"] = candidate
            except Exception as problem:  # torch.compile fails in many ways, for want of a compiler for one
                failed[f"compiled_{name}step"] = f"{type(problem).__name__}: {str(problem).strip().splitlines()[0]}"
    functions = {f"{name}step": (lambda model=model: step(model)) for name, model in models.items()}
    seconds = alternate(functions, repeats, device)
    dtype_name = str(dtype).removeprefix("torch.")
    if device == "cpu":
        peak = {
            f"{name}step": cpu_peak(str(context), dtype_name, pattern, "torch" if name else "ours") for name in ("", "torch_")
        }
    else:
        peak = {name: gpu_peak(function, list(models.values())) for name, function in functions.items()}
    median = {name: taken["median"] for name, taken in seconds.items()}
    ratios = {name: median[name.replace("step", "torch_step")] / median[name]
              for name in ("step", "compiled_step") if name.replace("step", "torch_step") in median and name in median}  # fmt: skip
    ratios["best"] = min(value for name, value in median.items() if "torch" in name) / min(
        value for name, value in median.items() if "torch" not in name
    )
    return {
        "what": "LongNetLM step",
        "device": device,
        "dtype": dtype_name,
        "tokens": context,
        "layers": layers,
        "width": width,
        "heads": heads,
        "segments": segments,
        "dilations": dilations,
        "largest_difference": error,
        "seconds": seconds,
        "failed": failed,
        "peak_bytes": peak,
        "times_faster_than_torch": ratios,
    }


if __name__ == "__main__":
    measure_cpu_peak(*sys.argv[1:])
