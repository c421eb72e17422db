"""Ways to run a training step: eager, or compiled by layers or as a whole, one by one or as a CUDA graph, and what of our
own is switched. What both sides can have, both get."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import TypeVar

from longspan.torch import LongNetLM, projected

import torch
from torch import Tensor

Result = TypeVar("Result")
SCOPES = ("eager", "layers", "model")
CAPTURED = "captured"
#: torch.compile's modes, and a CUDA graph of the whole step.
MODES = ("", CAPTURED, "reduce-overhead", "max-autotune-no-cudagraphs")
#: Projections and attention together or apart, whatever the modules would choose.
SWITCHES = ("joint", "separate")


@dataclasses.dataclass(frozen=True)
class Variant:
    """scope: what is compiled. mode: how. switches: of our side."""

    scope: str
    mode: str = ""
    switches: tuple[str, ...] = ()

    @classmethod
    def parse(cls, text: str) -> Variant:
        """SCOPE[:MODE][+SWITCH...], as in layers:captured+joint."""
        first, *switches = text.split("+")
        scope, _, mode = first.partition(":")
        given = [("scope", scope, SCOPES), ("mode", mode, MODES), *(("switch", one, SWITCHES) for one in switches)]
        for name, value, known in given:
            if value not in known:
                raise ValueError(f"variant {text!r} has {name} {value!r}: give one of {', '.join(filter(None, known))}")
        if scope == "eager" and mode not in ("", CAPTURED):
            raise ValueError(f"variant {text!r}: {mode} is a mode of torch.compile; give layers or model before it")
        return cls(scope, mode, tuple(switches))

    @property
    def shared(self) -> Variant:
        """What torch's side has of it."""
        return Variant(self.scope, self.mode)

    @property
    def prefix(self) -> str:
        """Before 'step' and 'torch_step' in results."""
        names = {Variant("eager"): "", Variant("layers"): "compiled_"}
        text = "+".join((self.scope + (f":{self.mode}" if self.mode else ""), *self.switches))
        return names.get(self, f"{text}_")

    @property
    def in_graphs(self) -> bool:
        return self.mode in (CAPTURED, "reduce-overhead")


@contextlib.contextmanager
def _switched(switches: tuple[str, ...], device: str) -> Iterator[None]:
    rows, eager = dict(projected.FEWEST_ROWS), set(projected.EAGER_DEVICES)
    try:
        if "joint" in switches:
            projected.FEWEST_ROWS[device] = 0
            projected.EAGER_DEVICES.add(device)
        if "separate" in switches:
            projected.FEWEST_ROWS[device] = 1 << 62
        yield
    finally:
        projected.FEWEST_ROWS.update(rows)
        projected.EAGER_DEVICES.intersection_update(eager)


def captured(step: Callable[[], Result], before: Callable[[], object] = lambda: None) -> tuple[torch.cuda.CUDAGraph, Result]:
    """A graph of a step and what the step returned. Steps on a stream of their own come first, as torch's notes on graphs
    have it, then `before`."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    before()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = step()
    return graph, result


def prepare(
    variant: Variant, model: LongNetLM, step: Callable[[LongNetLM], Tensor], device: str
) -> Callable[[], Tensor]:
    """The step of a model, which becomes the variant's, warmed up. Layers of a kind are compiled once, as torch advises for
    stacks of equal blocks."""
    layers = [*model.long_net.encoder.layers, *model.long_net.decoder.layers]
    mode = None if variant.mode in ("", CAPTURED) else variant.mode
    for module in {"eager": [], "layers": layers, "model": [model]}[variant.scope]:
        module.compile(mode=mode)

    def run() -> Tensor:
        with _switched(variant.switches, torch.device(device).type):
            if mode == "reduce-overhead":
                torch.compiler.cudagraph_mark_step_begin()
            return step(model)

    if variant.mode == CAPTURED:
        graph, loss = captured(run, model.zero_grad)  # gradients of a graph are its own memory

        def replay(kept: object = run) -> Tensor:
            """`kept` holds the model, with whose compiled code the graph's kernels would be unloaded."""
            graph.replay()
            return loss

        return replay
    for _ in range(3 if variant.in_graphs else 1):  # torch warms up, then records, then replays
        run()
    return run
