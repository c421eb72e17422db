#!/usr/bin/env python3
"""Retrieval over a distance that local attention cannot bridge, at the same cost.

One of the first 25 symbols, any of them, is marked, 225 others follow, and the last token must name it (in training every
eighth token of the second half, too). Two language models try: one with segments of 32 and, at a dilation of 8, of 256; one
with segments of 32 only. Both attend to 32 keys in every branch. The dilated branch keeps every eighth position, which the
mark need not be: a first attention carries it to one of those within its segment of 32, a second one from there to the end.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch.nn import functional

from longspan.torch import LongNetLM

SYMBOLS = 8
TOKENS = 250  # the last position lies on the dilated branch, which keeps positions 1, 9, 17, ...
PATTERNS = {"dilated": ([32, 256], [1, 8]), "local": ([32, 32], [1, 1])}
COLOURS = {"dilated": "#0a7d5a", "local": "#b5472f"}


def make_batch(batch: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    symbols = torch.randint(SYMBOLS, (batch, TOKENS), generator=generator)
    place = torch.randint(25, (batch, 1), generator=generator)
    answer = symbols.gather(1, place)
    symbols.scatter_(1, place, answer + SYMBOLS)  # marked
    return symbols, answer.squeeze(1)


def learn(name: str, steps: int, batch: int) -> list[tuple[int, float]]:
    """(step, fraction right) now and then; both models see the same batches."""
    torch.manual_seed(0)
    segments, dilations = PATTERNS[name]
    model = LongNetLM(2 * SYMBOLS, 64, 4, 1, 1, 128, segments, dilations, positions="rotary")
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    generator = torch.Generator().manual_seed(1)
    curve, right, seen = [], 0, 0
    for step in range(1, steps + 1):
        symbols, answer = make_batch(batch, generator)
        logits = model(symbols)[:, TOKENS // 2 + 4 :: 8]  # positions on the dilated branch, the last one included
        loss = functional.cross_entropy(logits.flatten(0, 1), answer.repeat_interleave(logits.shape[1]))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        right, seen = right + int((logits[:, -1].argmax(-1) == answer).sum()), seen + batch
        if step % 20 == 0:
            curve.append((step, right / seen))
            print(f"{name:8} step {step:4d}  loss {loss.item():.3f}  right {right / seen:.0%}", flush=True)
            right, seen = 0, 0
    return curve


def plot(curves: dict[str, list[tuple[int, float]]], steps: int) -> str:
    """An SVG drawing: the fraction right over steps."""
    width, height, left, low = 640, 320, 60, 40

    def place(step: float, share: float) -> str:
        return f"{left + step / steps * (width - left - 90):.1f},{height - low - share * (height - low - 20):.1f}"

    style = 'font-family="sans-serif" font-size="13" fill="#444"'
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}">']
    parts.append('<rect width="100%" height="100%" fill="#fff"/>')
    for share in (0, 0.5, 1):
        parts.append(f'<polyline points="{place(0, share)} {place(steps, share)}" stroke="#ddd"/>')
        parts.append(f'<text x="8" y="{float(place(0, share).split(",")[1]) + 4}" {style}>{share:.0%}</text>')
    for name, curve in curves.items():
        points = " ".join(place(*point) for point in curve)
        x, y = place(*curve[-1]).split(",")
        parts.append(f'<polyline points="{points}" fill="none" stroke="{COLOURS[name]}" stroke-width="2"/>')
        parts.append(f'<text x="{float(x) + 8}" y="{float(y) + 4}" {style}>{name}</text>')
    caption = f"right answers over {steps} training steps; chance is {1 / SYMBOLS:.1%}"
    parts.append(f'<text x="{left}" y="{height - 12}" {style}>{caption}</text>')
    return "\n".join([*parts, "</svg>\n"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--plot", type=Path, help="an SVG file to write")
    arguments = parser.parse_args()
    curves = {name: learn(name, arguments.steps, arguments.batch) for name in PATTERNS}
    if arguments.plot:
        arguments.plot.write_text(plot(curves, arguments.steps))


if __name__ == "__main__":
    main()
