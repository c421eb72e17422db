"""What picking every r-th row costs: slice, unfold, gather and index_select, alone and inside attention, against attention
that has dilation as an addressing mode. Times are medians of interleaved runs.

    python bench/indexing.py --device cpu --json bench/results/indexing_cpu.json
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time

import torch
from torch.nn import functional

import longspan.torch as lt

PICKS = {
    "slice": lambda x, rows, rate, offset: x[:, offset::rate],
    "unfold": lambda x, rows, rate, offset: x[:, offset:].unfold(1, 1, rate)[..., 0],
    "gather": lambda x, rows, rate, offset: torch.gather(x, 1, rows[None, :, None, None].expand(x.shape[0], -1, *x.shape[2:])),
    "index_select": lambda x, rows, rate, offset: torch.index_select(x, 1, rows),
}


def composed(pick, segment: int, rate: int, offset: int, rows: torch.Tensor):
    """One dilated branch out of torch's operators: pick the rows of q, k and v, attend within segments, put them back."""

    def attend(query, key, value):
        batch, tokens, heads, width = query.shape
        kept = -(-(min(segment, tokens) - offset) // rate)
        split = [pick(x, rows, rate, offset).reshape(-1, kept, heads, width).transpose(1, 2) for x in (query, key, value)]
        mixed = functional.scaled_dot_product_attention(*split).transpose(1, 2).reshape(batch, -1, heads, width)
        out = torch.zeros_like(query)
        if pick in (PICKS["slice"], PICKS["unfold"]):
            out[:, offset::rate] = mixed
            return out
        return out.index_copy(1, rows, mixed)

    return attend


class Clock:
    def __init__(self, device: str, repeats: int) -> None:
        self.device, self.repeats = device, repeats

    def _once(self, call) -> float:
        if self.device != "cuda":
            begin = time.perf_counter()
            call()
            return 1000 * (time.perf_counter() - begin)
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        torch.cuda._sleep(1_000_000)  # so that the host is ahead and launches are not what is measured
        first.record()
        call()
        last.record()
        torch.cuda.synchronize()
        return first.elapsed_time(last)

    def medians(self, calls: dict) -> dict:
        times = {name: [] for name in calls}
        for turn in range(self.repeats + 2):
            for name, call in calls.items():
                spent = self._once(call)
                if turn > 1:
                    times[name].append(spent)
        return {name: statistics.median(found) for name, found in times.items()}


def with_backward(call, tensors, grad):
    def both():
        for x in tensors:
            x.grad = None
        call().backward(grad)

    return both


def measure(clock: Clock, tokens: int, heads: int, width: int, segment: int, rate: int, offset: int, dtype) -> dict:
    device = clock.device
    tensors = [torch.randn(1, tokens, heads, width, device=device, dtype=dtype, requires_grad=True) for _ in range(3)]
    plain = [x.detach() for x in tensors]
    rows = torch.arange(offset, tokens, rate, device=device)
    kept = torch.randn(1, len(rows), heads, width, device=device, dtype=dtype)
    whole = torch.randn_like(plain[0])
    pattern = f"dilated {segment}/{rate}" if offset == 0 else f"dilated {segment}/1 {segment}/{rate}"
    calls = {name: composed(pick, segment, rate, offset, rows) for name, pick in PICKS.items()}
    ours = lambda *x: lt.attention(*x, pattern)  # noqa: E731
    if offset == 0:
        wanted, found = calls["slice"](*plain), ours(*plain)
        assert torch.allclose(found.float(), wanted.float(), atol=2e-2), "the composition and Longspan disagree"
    row: dict = {"tokens": tokens, "heads": heads, "head_dim": width, "segment": segment, "rate": rate, "offset": offset,
                 "dtype": str(dtype).removeprefix("torch.")}  # fmt: skip
    row["view_ms"] = clock.medians({name: lambda pick=pick: pick(plain[0], rows, rate, offset) for name, pick in
                                    list(PICKS.items())[:2]})  # fmt: skip
    row["pick_ms"] = clock.medians({name: lambda pick=pick: pick(plain[0], rows, rate, offset).contiguous() for name, pick in
                                    PICKS.items()})  # fmt: skip
    one = tensors[:1]
    row["pick_both_ms"] = clock.medians({
        name: with_backward(lambda pick=pick: pick(tensors[0], rows, rate, offset).contiguous(), one, kept)
        for name, pick in PICKS.items()
    })  # fmt: skip
    if offset == 0:
        every = {**calls, "longspan": ours}
        row["attention_ms"] = clock.medians({name: lambda call=call: call(*plain) for name, call in every.items()})
        row["attention_both_ms"] = clock.medians({
            name: with_backward(lambda call=call: call(*tensors), tensors, whole) for name, call in every.items()
        })  # fmt: skip
    return row


def strands(clock: Clock, tokens: int, heads: int, width: int, dtype) -> list[dict]:
    """The same pairs at every rate: r times the segment at r times the step. What the step alone costs, and an offset."""
    plain = [torch.randn(1, tokens, heads, width, device=clock.device, dtype=dtype) for _ in range(3)]
    rates = (1, 2, 4, 8, 16)
    calls = {}
    for rate in rates:
        # As many heads as strands would be covered: one strand in r rows, so r times the tokens hold as many pairs.
        longer = [x.repeat(1, rate, 1, 1) for x in plain]
        calls[rate] = lambda longer=longer, rate=rate: lt.attention(*longer, f"dilated {tokens * rate}/{rate}")
    found = clock.medians(calls)
    return [{"rate": rate, "tokens": tokens * rate, "rows_per_strand": tokens, "ms": found[rate]} for rate in rates]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--tokens", type=int, default=0)
    parser.add_argument("--repeats", type=int, default=0)
    parser.add_argument("--json")
    arguments = parser.parse_args()
    on_gpu = arguments.device == "cuda"
    tokens = arguments.tokens or (65536 if on_gpu else 8192)
    dtype, segment = (torch.bfloat16, 8192) if on_gpu else (torch.float32, 2048)
    clock = Clock(arguments.device, arguments.repeats or (20 if on_gpu else 5))
    cases = [(rate, offset) for rate in (1, 2, 4, 8) for offset in ((0,) if rate == 1 else (0, 1))]
    report = {
        "device": torch.cuda.get_device_name() if on_gpu else platform.processor() or platform.machine(),
        "threads": torch.get_num_threads(), "cores": os.cpu_count(), "torch": torch.__version__,
        "rows": [measure(clock, tokens, 8, 64, segment, rate, offset, dtype) for rate, offset in cases],
        "strands": strands(clock, 8192 if on_gpu else 1024, 8, 64, dtype),
    }  # fmt: skip
    text = json.dumps(report, indent=1)
    print(text)
    if arguments.json:
        with open(arguments.json, "w") as file:
            file.write(text + "\n")


if __name__ == "__main__":
    main()
