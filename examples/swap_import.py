#!/usr/bin/env python3
"""A small training script for dilated attention. It was written for another package; one import changed.

The task: tokens are random, one of the first eight at odd positions is marked, and the last token must name it. Only
the second branch reaches that far: its segments span the sequence, and its dilation of 2 keeps the odd positions.
"""

from __future__ import annotations

import argparse

import torch
from torch import nn

# from dilated_attention_pytorch.dilated_attention import MultiheadDilatedAttention
from longspan.torch import MultiheadDilatedAttention

SYMBOLS = 8


class Model(nn.Module):
    def __init__(self, width: int, tokens: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(2 * SYMBOLS, width)
        self.position = nn.Parameter(torch.randn(tokens, width) * 0.1)
        self.norm = nn.LayerNorm(width)
        self.attention = MultiheadDilatedAttention(width, 4, [1, 2], [tokens // 2, tokens])
        self.head = nn.Linear(width, SYMBOLS)

    def forward(self, symbols: torch.Tensor) -> torch.Tensor:
        x = self.embedding(symbols) + self.position
        y = self.norm(x)
        y, _ = self.attention(y, y, y, is_causal=True)
        return self.head((x + y)[:, -1])


def make_batch(batch: int, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    symbols = torch.randint(SYMBOLS, (batch, tokens))
    place = 2 * torch.randint(SYMBOLS, (batch, 1)) + 1
    answer = symbols.gather(1, place)
    symbols.scatter_(1, place, answer + SYMBOLS)  # marked
    return symbols, answer.squeeze(1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=64)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    model = Model(64, arguments.tokens)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for step in range(arguments.steps + 1):
        symbols, answer = make_batch(32, arguments.tokens)
        logits = model(symbols)
        loss = nn.functional.cross_entropy(logits, answer)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 50 == 0:
            right = (logits.argmax(-1) == answer).float().mean()
            print(f"step {step:4d}  loss {loss.item():.3f}  right {right:.0%}")


if __name__ == "__main__":
    main()
