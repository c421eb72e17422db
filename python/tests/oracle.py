"""Independent float64 formulas of what Longspan computes, in plain torch: slow, whole score matrices, an own reading of
the definition. Autograd differentiates them, so they are the oracle of gradients too."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def group_ranges(heads: int, groups: int) -> list[range]:
    """Contiguous head ranges of G branches; the first H mod G have one more."""
    ranges, start = [], 0
    for group in range(groups):
        count = heads // groups + (1 if group < heads % groups else 0)
        ranges.append(range(start, start + count))
        start += count
    return ranges


def branch_pairs(tokens: int, segment: int, dilation: int, phase: int) -> Tensor:
    """[tokens, tokens] booleans: row i sees key j in this branch."""
    segment = min(segment, tokens)
    position = torch.arange(tokens)
    covered = (position % segment) % dilation == phase
    same = position[:, None] // segment == position[None, :] // segment
    return covered[:, None] & covered[None, :] & same


def dilated_counts(tokens: int, heads: int, segments: list[int], dilations: list[int]) -> Tensor:
    """[heads, tokens, tokens]: how often row i sees key j, by head groups."""
    counts = torch.zeros(heads, tokens, tokens, dtype=torch.float64)
    for index, owned in enumerate(group_ranges(heads, len(segments))):
        pairs = branch_pairs(tokens, segments[index], dilations[index], index % dilations[index])
        for head in owned:
            counts[head] += pairs
    return counts


def longnet_counts(tokens: int, heads: int, segments: list[int], dilations: list[int], phase: str = "paper") -> Tensor:
    """The same when every branch owns all heads."""
    counts = torch.zeros(heads, tokens, tokens, dtype=torch.float64)
    for segment, dilation in zip(segments, dilations):
        for head in range(heads):
            offset = head % dilation if phase == "paper" else head // math.ceil(heads / dilation)
            counts[head] += branch_pairs(tokens, segment, dilation, offset)
    return counts


def counted_attention(
    q: Tensor, k: Tensor, v: Tensor, counts: Tensor, *, causal=False, scale=None, output_scale=1.0, key_mask=None,
    slopes=None, pads=None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """One softmax per row over keys that count several times. Tensors [b, n, h, d], counts [h, n, n], pads [h, n] zero
    keys. Returns out [b, n, h, d] and lse [b, h, n] in float64."""
    q, k, v = (x.double() for x in (q, k, v))
    heads, tokens = q.shape[2], q.shape[1]
    k, v = (x.repeat_interleave(heads // x.shape[2], dim=2) for x in (k, v))
    scores = torch.einsum("bihd,bjhd->bhij", q, k) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if slopes is not None:
        position = torch.arange(tokens)
        scores = scores - slopes.double()[:, None, None] * (position[:, None] - position[None, :]).abs()
    seen = counts[None].expand(q.shape[0], -1, -1, -1)
    if causal:
        seen = seen * torch.ones(tokens, tokens, dtype=torch.float64).tril()
    if key_mask is not None:
        seen = seen * key_mask[:, None, None, :]
    extra = torch.zeros(heads, tokens, dtype=torch.float64) if pads is None else pads
    extra = extra[None, :, :, None]
    largest = torch.where(seen > 0, scores.detach(), -torch.inf).amax(-1, keepdim=True)
    largest = torch.where(extra > 0, largest.clamp(min=0.0), largest).nan_to_num(neginf=0.0)
    weights = torch.where(seen > 0, scores - largest, 0.0).exp() * seen
    total = weights.sum(-1, keepdim=True) + extra * torch.exp(-largest)
    empty = total == 0
    total = total.masked_fill(empty, 1.0)  # before log and division, so that gradients of empty rows are zero, not NaN
    lse = (largest + total.log()).masked_fill(empty, -torch.inf).squeeze(-1)
    return output_scale * torch.einsum("bhij,bjhd->bihd", weights / total, v), lse


def torchscale_attention(
    q: Tensor, k: Tensor, v: Tensor, segments: list[int], dilations: list[int], *, causal=False, detached=True
) -> Tensor:
    """torchscale's way: pad to whole segments, keep every r-th row of each head, plain attention with the zero rows
    attended (causal: they come last and are never seen), then mix branches by exp(lse), which carries no gradient if
    detached. [b, n, h, d] in float64; right for dilations that divide their segments."""
    q, k, v = (x.double() for x in (q, k, v))
    batch, tokens, heads, head_dim = q.shape
    outs, sums = [], []
    for segment, dilation in zip(segments, dilations):
        width = min(segment, tokens)
        pieces = math.ceil(tokens / width)
        rows = math.ceil(width / dilation)
        out = torch.zeros(batch, pieces * width, heads, head_dim, dtype=torch.float64)
        lse = torch.full((batch, pieces * width, heads), -torch.inf, dtype=torch.float64)
        for piece in range(pieces):
            for head in range(heads):
                offset = head // math.ceil(heads / dilation)
                index = piece * width + offset + dilation * torch.arange(rows)
                real = (index < tokens) & (index < (piece + 1) * width)

                def take(x: Tensor) -> Tensor:
                    picked = x[:, index.clamp(max=tokens - 1), head]
                    return torch.where(real[:, None], picked, 0.0)

                scores = take(q) @ take(k).transpose(1, 2) * head_dim**-0.5
                if causal:
                    scores = scores.masked_fill(torch.ones(rows, rows, dtype=torch.bool).triu(1), -torch.inf)
                result = scores.softmax(-1) @ take(v)
                out[:, index[real], head] = result[:, real]
                lse[:, index[real], head] = scores.logsumexp(-1)[:, real]
        outs.append(out[:, :tokens])
        sums.append(lse[:, :tokens])
    mix = torch.stack(sums).softmax(0)
    if detached:
        mix = mix.detach()
    return (torch.stack(outs) * mix[..., None]).sum(0)
