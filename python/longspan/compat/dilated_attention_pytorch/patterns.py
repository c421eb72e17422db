"""The fork's helpers for block patterns as boolean tensors [heads, blocks, blocks]. BlockPattern and BlockMask do the same
without an N x N tensor."""

from __future__ import annotations

import gzip
import os
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..._errors import invalid
from .caches import PatternCache
from .configs import PatternConfig, PatternType


class SparsePatternGenerator:
    """Patterns with the fraction of blocks that the config asks for: in each block row those that suit its type best."""

    def __init__(self, config: PatternConfig) -> None:
        self.config = config
        self.pattern_cache = PatternCache(100)

    def _order(self, blocks: int, heads: int) -> Tensor:
        """[heads or 1, blocks, blocks], the lowest kept first."""
        config, at = self.config, torch.arange(blocks)
        distance = (at[:, None] - at).abs()
        kind = PatternType(config.pattern_type)
        if kind is PatternType.RANDOM:
            seed = torch.Generator().manual_seed(config.random_seed or 0)
            return torch.rand(heads, blocks, blocks, generator=seed).masked_fill(distance == 0, -1.0)
        first = {
            PatternType.LOCAL_WINDOW: distance,
            PatternType.DILATED_SPARSE: distance + blocks * ~(torch.isin(distance, torch.tensor([0, *config.dilation_rates]))),
            PatternType.GLOBAL_LOCAL: distance.masked_fill(at < -(-config.global_tokens // config.block_size), -1),
            PatternType.STRIDED: distance + blocks * (distance % max(1, config.stride)),
            PatternType.HIERARCHICAL: torch.where(distance > 0, distance & -distance, 0).neg() % blocks + distance,
        }.get(kind)  # fmt: skip
        if first is None:
            raise invalid("pattern_type", f"is {kind.value!r}, which needs data: use BlockSparseAdaptive(learned=True)")
        return first[None]

    def generate_pattern(self, seq_len: int, num_heads: int = 1, device: Any = None) -> Tensor:
        key = (seq_len, num_heads)
        found = self.pattern_cache.get(key, device)
        if found is None:
            blocks = -(-seq_len // self.config.block_size)
            kept = min(blocks, max(1, round(self.config.sparsity_ratio * blocks)))
            order = self._order(blocks, num_heads).expand(num_heads, -1, -1)
            found = torch.zeros(num_heads, blocks, blocks, dtype=torch.bool)
            found.scatter_(2, order.sort(dim=2, stable=True).indices[..., :kept], True)
            self.pattern_cache.put(key, found)
        return found if device is None else found.to(device)


@dataclass
class PatternQualityMetrics:
    coverage_ratio: float
    locality_score: float
    global_connectivity: float
    efficiency_score: float
    compression_ratio: float
    approximation_error: float


def _block_weights(attention: Tensor, blocks: int) -> Tensor:
    """Attention weights [.., heads, tokens, tokens] summed over pairs of blocks, per row of blocks 1 in all."""
    size = -(-attention.shape[-1] // blocks)
    sums = attention.flatten(0, -4) if attention.dim() > 3 else attention[None]
    sums = torch.nn.functional.avg_pool2d(sums.float(), size, ceil_mode=True, divisor_override=1).mean(0)
    return sums / sums.sum(-1, keepdim=True).clamp_min(1e-12)


class PatternQualityAnalyzer:
    """Coverage: the share of attention weights inside the pattern, where weights or q and k are given, else its density.
    Locality: the share of its blocks near the diagonal. Connectivity: the share of rows and columns that are reached."""

    def analyze_pattern_quality(
        self, sparse_pattern: Tensor, reference_attention: Tensor | None = None, q: Tensor | None = None,
        k: Tensor | None = None,
    ) -> PatternQualityMetrics:  # fmt: skip
        pattern = sparse_pattern.bool()
        blocks, density = pattern.shape[-1], pattern.float().mean().item()
        if reference_attention is None and q is not None and k is not None:
            scores = q.transpose(1, 2) @ k.transpose(1, 2).transpose(-2, -1)
            reference_attention = (scores / q.shape[-1] ** 0.5).softmax(-1)
        coverage = density
        if reference_attention is not None:
            weights = _block_weights(reference_attention, blocks)
            coverage = ((weights * pattern).sum() / weights.sum()).item()
        at = torch.arange(blocks, device=pattern.device)
        near = (at[:, None] - at).abs() <= max(1, blocks // 8)
        active = max(1, int(pattern.sum()))
        reached = pattern.any(-1).float().mean() * pattern.any(-2).float().mean()
        return PatternQualityMetrics(
            min(coverage, 1.0), (pattern & near).sum().item() / active, reached.item(),
            coverage / density if density else 0.0, 1.0 - density, max(0.0, 1.0 - coverage),
        )  # fmt: skip


class PatternOptimizer:
    """Adds to each row the blocks with the largest weights, or the nearest, until the quality is reached."""

    def __init__(self, quality_threshold: float = 0.95) -> None:
        self.quality_threshold = quality_threshold
        self.analyzer = PatternQualityAnalyzer()

    def optimize_pattern(
        self, initial_pattern: Tensor, reference_attention: Tensor | None = None, max_iterations: int = 10
    ) -> Tensor:
        pattern = initial_pattern.bool().clone()
        blocks = pattern.shape[-1]
        at = torch.arange(blocks, device=pattern.device)
        value = -(at[:, None] - at).abs().float().expand_as(pattern)
        if reference_attention is not None:
            value = _block_weights(reference_attention, blocks).expand_as(pattern)
        for _ in range(max_iterations):
            quality = self.analyzer.analyze_pattern_quality(pattern, reference_attention)
            if quality.coverage_ratio >= self.quality_threshold or bool(pattern.all()):
                break
            best = value.masked_fill(pattern, -torch.inf).argmax(-1, keepdim=True)
            pattern.scatter_(-1, best, True)
        return pattern


def save_sparse_pattern(pattern: Tensor, filepath: str, compress: bool = True) -> None:
    """Writes filepath, or filepath.gz, with torch.save."""
    opened: Any = gzip.open(filepath + ".gz", "wb") if compress else open(filepath, "wb")
    with opened as file:
        torch.save({"pattern": pattern.cpu()}, file)


def load_sparse_pattern(filepath: str) -> Tensor:
    """What save_sparse_pattern wrote, compressed or not."""
    compressed = os.path.exists(filepath + ".gz")
    opened: Any = gzip.open(filepath + ".gz", "rb") if compressed else open(filepath, "rb")
    with opened as file:
        try:
            return torch.load(file, weights_only=True)["pattern"]
        except Exception as error:
            raise invalid(
                "filepath",
                f"is {filepath!r}, which holds no pattern of save_sparse_pattern ({error}): files of the older package "
                "are pickles, which may run code; load them there and save them here",
            ) from None


def analyze_pattern_statistics(pattern: Tensor) -> dict[str, float]:
    """sparsity_ratio is the fraction kept, as in the fork's configs; density_ratio the rest of 1, as it named them."""
    kept = pattern.float()
    rows, columns = kept.sum(-1), kept.sum(-2)
    return {
        "sparsity_ratio": kept.mean().item(), "density_ratio": 1.0 - kept.mean().item(),
        "total_elements": pattern.numel(), "active_elements": int(kept.sum()),
        "avg_row_density": rows.mean().item(), "avg_col_density": columns.mean().item(),
        "row_density_std": rows.std().item(), "col_density_std": columns.std().item(),
        "diagonal_density": kept.diagonal(dim1=-2, dim2=-1).mean().item(),
    }  # fmt: skip


def optimize_pattern_for_hardware(pattern: Tensor, hardware: str = "auto", block_size: int = 16) -> Tensor:
    """The pattern as it is: kernels take blocks of 16, 32, 64 and 128 on every device."""
    return pattern
