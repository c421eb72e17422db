"""What people write with torch's own operators, the peers of the benchmarks: fused attention on gathered rows."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional


def dilated_composition(segments: Sequence[int], dilations: Sequence[int]):
    """Dilated attention by head groups out of scaled_dot_product_attention: gather the rows of each branch, attend,
    scatter into a zeroed output, divide by the number of branches. Token counts must be multiples of the segments."""

    def attend(query: Tensor, key: Tensor, value: Tensor, is_causal: bool = False) -> Tensor:
        batch, tokens, heads, head_dim = query.shape
        groups = len(segments)
        out = torch.zeros_like(query)
        first_head = 0
        for index, (segment, dilation) in enumerate(zip(segments, dilations)):
            owned = heads // groups + (1 if index < heads % groups else 0)
            width = min(segment, tokens)
            split = (batch, tokens // width, width, heads, head_dim)
            rows = slice(index % dilation, None, dilation)
            columns = slice(first_head, first_head + owned)

            def gathered(x: Tensor) -> Tensor:
                return x.view(split)[:, :, rows, columns].transpose(2, 3).flatten(0, 1)

            result = functional.scaled_dot_product_attention(*map(gathered, (query, key, value)), is_causal=is_causal)
            out.view(split)[:, :, rows, columns] = result.unflatten(0, split[:2]).transpose(2, 3)
            first_head += owned
        return out / groups

    return attend


class DilatedComposition(nn.Module):
    """The same as a module in the place of DilatedAttention."""

    def __init__(self, segments: Sequence[int], dilations: Sequence[int]) -> None:
        super().__init__()
        self.attend = dilated_composition(segments, dilations)

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, is_causal: bool = False, attention_mask: None = None
    ) -> Tensor:
        return self.attend(query, key, value, is_causal)


def flash_attention(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """torch's fused attention on [batch, heads, rows, head_dim] that also returns the softmax sums. On a GPU it takes
    16-bit types only."""
    if query.is_cuda:
        return torch.ops.aten._scaled_dot_product_flash_attention(query, key, value)[:2]
    out, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(query, key, value)
    # The layout of its sums differs between versions of torch.
    return out, lse if lse.shape[1] == query.shape[1] else lse.transpose(1, 2)


def longnet_composition(
    segments: Sequence[int],
    dilations: Sequence[int],
    fused: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]] = flash_attention,
):
    """torchscale's arithmetic out of an attention that also returns its sums: pad to whole segments, keep every r-th
    row of each head group, attend to the zero rows too, mix branches by their sums. Heads must be a multiple of each
    dilation. Signature of slide_encoder.AttentionFunction, without lengths."""

    def branch(q: Tensor, k: Tensor, v: Tensor, segment: int, dilation: int) -> tuple[Tensor, Tensor]:
        batch, tokens, heads, head_dim = q.shape
        width = min(segment, tokens)
        pieces = math.ceil(tokens / width)
        rows = math.ceil(width / dilation)
        # [batch * pieces, rows, dilation (row offset), dilation (head group), heads of a group, head_dim]
        blocks = (batch * pieces, rows, dilation, dilation, heads // dilation, head_dim)

        def gathered(x: Tensor) -> Tensor:
            x = functional.pad(x, (0, 0, 0, 0, 0, pieces * width - tokens)).reshape(-1, width, heads, head_dim)
            if dilation == 1:
                return x.transpose(1, 2)  # every row of every head: attention reads it in place
            x = functional.pad(x, (0, 0, 0, 0, 0, rows * dilation - width))
            picked = x.view(blocks).diagonal(dim1=2, dim2=3)
            return picked.permute(0, 4, 2, 1, 3).reshape(batch * pieces, heads, rows, head_dim)

        def scattered(x: Tensor, fill: float) -> Tensor:
            last = x.shape[-1]
            whole = x.new_full((*blocks[:5], last), fill)
            picked = x.view(batch * pieces, dilation, heads // dilation, rows, last).permute(0, 3, 2, 4, 1)
            whole.diagonal(dim1=2, dim2=3).copy_(picked)
            whole = whole.view(batch * pieces, rows * dilation, heads, last)[:, :width]
            return whole.reshape(batch, pieces * width, heads, last)[:, :tokens]

        out, lse = fused(*map(gathered, (q, k, v)))
        if dilation == 1:
            flat = (x.transpose(1, 2).reshape(batch, pieces * width, heads, -1) for x in (out, lse.unsqueeze(-1)))
            return tuple(x[:, :tokens] for x in flat)
        return scattered(out, 0.0), scattered(lse.unsqueeze(-1), -1e8)

    def attend(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor | None = None) -> Tensor:
        outs, sums = zip(*(branch(q, k, v, *pair) for pair in zip(segments, dilations)))
        weights = torch.stack([x.detach() for x in sums]).softmax(0).to(q.dtype)
        mixed = outs[0] * weights[0]
        for out, weight in zip(outs[1:], weights[1:]):
            mixed = torch.addcmul(mixed, out, weight)
        return mixed

    return attend
