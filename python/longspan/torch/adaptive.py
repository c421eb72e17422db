"""Blocks that are learned: what scores them, the gate that carries gradients to the scores, and a trainer for the
temperature.

Blocks are scored from block means: (mean query . mean key) / sqrt(head_dim), plus a learned product of F features each. The
best of a row attend. Among them the learned part is also added to every score, as F more columns of query and key, so that
the attention's own gradient is exact for it: nothing of the size blocks x blocks is differentiated.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from .options import at_least, finite

#: Columns that the gate adds to query and key; twice as many where it is straight-through.
FEATURES = 16


def _layers(towers: int, widths: list[int]) -> nn.ParameterList:
    """Weights [towers, in, out] of layers one after another."""
    weights = [torch.empty(towers, first, last) for first, last in zip(widths, widths[1:])]
    for weight in weights:
        nn.init.normal_(weight, std=weight.shape[1] ** -0.5)
    return nn.ParameterList(map(nn.Parameter, weights))


class ImportanceScorer(nn.Module):
    """Features of queries and of keys, whose products are scores. num_layers matrices with ReLU between, hidden_dim wide, for
    each head or shared."""

    def __init__(
        self, input_dim: int, hidden_dim: int = 128, num_layers: int = 2, num_heads: int = 1, share_across_heads: bool = False
    ) -> None:
        super().__init__()
        self.num_heads, self.share_across_heads = at_least("num_heads", num_heads, 1), share_across_heads
        inner = [at_least("hidden_dim", hidden_dim, 1)] * (at_least("num_layers", num_layers, 1) - 1)
        towers = 1 if share_across_heads else num_heads
        self.query = _layers(towers, [at_least("input_dim", input_dim, 1), *inner, FEATURES])
        self.key = _layers(towers, [input_dim, *inner, FEATURES])

    def features(self, x: Tensor, weights: nn.ParameterList) -> Tensor:
        """[batch, rows, heads, input_dim] -> [batch, rows, heads, FEATURES]."""
        for index, weight in enumerate(weights):
            x = torch.relu(x) if index else x
            x = torch.einsum("bnhi,hio->bnho", x, weight.to(x.dtype).expand(x.shape[2], -1, -1))
        return x

    def forward(self, q_summary: Tensor, k_summary: Tensor, head_idx: int | None = None) -> Tensor:
        """Means [batch, blocks, input_dim] of one head -> scores [batch, query blocks, key blocks]; without head_idx the mean
        of all heads' scores."""
        heads = 1 if self.share_across_heads else self.num_heads
        sides = [
            self.features(x[:, :, None].expand(-1, -1, heads, -1), weights)
            for x, weights in ((q_summary, self.query), (k_summary, self.key))
        ]
        scores = torch.einsum("bihf,bjhf->bhij", *sides) * FEATURES**-0.5
        return scores.mean(1) if head_idx is None or heads == 1 else scores[:, head_idx]


def _blocks(x: Tensor, size: int, counted: Tensor | None) -> tuple[Tensor, Tensor]:
    """[batch, tokens, heads, d] -> rows [batch, blocks, size, heads, d], at least float32, and which of them count:
    those of counted [batch, tokens], or all."""
    rows = x if x.dtype is torch.float64 else x.float()
    weight = rows.new_ones(x.shape[:2]) if counted is None else counted.to(rows.dtype)
    padding = -x.shape[1] % size
    # A row that does not count may hold anything, NaN included.
    rows = rows if counted is None else torch.where(counted[:, :, None, None], rows, 0.0)
    rows = nn.functional.pad(rows, (0, 0, 0, 0, 0, padding)).unflatten(1, (-1, size))
    return rows, nn.functional.pad(weight, (0, padding)).unflatten(1, (-1, size))


def block_means(x: Tensor, size: int, counted: Tensor | None) -> Tensor:
    rows, weight = _blocks(x, size, counted)
    return rows.sum(2) / weight.sum(2).clamp_min(1)[:, :, None, None]


def _running_means(x: Tensor, size: int, counted: Tensor | None) -> Tensor:
    """At each row the mean of its block up to it."""
    rows, weight = _blocks(x, size, counted)
    return (rows.cumsum(2) / weight.cumsum(2).clamp_min(1)[..., None, None]).flatten(1, 2)[:, : x.shape[1]]


def with_gumbel_noise(scores: Tensor) -> Tensor:
    """So that the largest is drawn with the probabilities of the scores' softmax."""
    return scores - (-torch.rand_like(scores).clamp_min(1e-9).log()).clamp_min(1e-9).log()


def best(ranking: Tensor, density: float, causal: bool) -> Tensor:
    """[.., blocks, blocks] -> true for the best of each row, the diagonal among them; causal: of those up to the diagonal."""
    blocks = ranking.shape[-1]
    at = torch.arange(blocks, device=ranking.device)
    ranking = ranking.masked_fill(at[:, None] == at, math.inf)
    candidates = torch.full_like(at, blocks)
    if causal:
        ranking = ranking.masked_fill(at[:, None] < at, -math.inf)
        candidates = at + 1
    kept = (density * candidates + 0.5).floor().clamp_min(1)
    places = ranking.sort(dim=-1, descending=True, stable=True).indices.argsort(-1)
    return places < kept[:, None]


class LearnedBlocks(nn.Module):
    """What BlockSparseAdaptive(learned=True) holds. `outside` is the share of the scores' softmax that the last call in
    training left outside the chosen blocks."""

    def __init__(self, config: Any, num_heads: int, head_dim: int, density: float) -> None:
        super().__init__()
        self.density, self.hard = density, bool(config.hard_sparsity)
        self.min_temperature = finite("min_temperature", config.min_temperature)
        self.weight = finite("sparsity_reg_weight", config.sparsity_reg_weight)
        self.importance_scorer = ImportanceScorer(
            head_dim, config.hidden_dim or 128, config.num_layers or 2, num_heads, config.share_across_heads
        )
        self.q_summary_proj, self.k_summary_proj = nn.Linear(head_dim, head_dim), nn.Linear(head_dim, head_dim)
        for layer in (self.q_summary_proj, self.k_summary_proj):
            nn.init.eye_(layer.weight)
            nn.init.zeros_(layer.bias)
        start = torch.tensor(finite("temperature", config.temperature)).clamp_min(self.min_temperature).log()
        if config.learnable_temperature:
            self.log_temperature = nn.Parameter(start)
        else:
            self.register_buffer("log_temperature", start)
        self.outside: Tensor | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "outside": None}  # of a graph that does not travel

    @property
    def temperature(self) -> Tensor:
        return self.log_temperature.exp().clamp_min(self.min_temperature)

    def _features(self, queries: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
        """Of means, which are wider than parameters of 16 bits."""

        def projected(layer: nn.Linear, x: Tensor) -> Tensor:
            return nn.functional.linear(x, layer.weight.to(x.dtype), layer.bias.to(x.dtype))

        scorer = self.importance_scorer
        return (
            scorer.features(projected(self.q_summary_proj, queries), scorer.query),
            scorer.features(projected(self.k_summary_proj, keys), scorer.key),
        )

    def forward(
        self, query: Tensor, key: Tensor, size: int, causal: bool, counted: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The chosen blocks [batch, heads, blocks, blocks], and the columns that gate query and key [batch, tokens, heads, F]:
        of blocks, or where causal of what each row has seen of its block."""
        width = query.shape[-1]
        q_means, k_means = block_means(query, size, counted), block_means(key, size, counted)
        q_side, k_side = self._features(q_means, k_means)
        factor = FEATURES**-0.5 / self.temperature
        learned = torch.einsum("bihf,bjhf->bhij", q_side * factor, k_side)
        scores = learned + torch.einsum("bihd,bjhd->bhij", q_means, k_means).detach() * width**-0.5
        if self.importance_scorer.share_across_heads:
            scores = scores.mean(1, keepdim=True).expand_as(scores)
        ranking = scores.detach()
        if self.training:  # Gumbel's noise: other blocks are tried as the softmax of the scores has them
            shared = self.importance_scorer.share_across_heads
            ranking = with_gumbel_noise(ranking[:, :1]).expand_as(ranking) if shared else with_gumbel_noise(ranking)
        chosen = best(ranking, self.density, causal)
        if self.training:
            allowed = scores
            if causal:
                future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
                allowed = scores.masked_fill(future, -math.inf)
            self.outside = 1.0 - (allowed.softmax(-1) * chosen).sum(-1).mean()
        if causal:
            q_side, k_side = self._features(_running_means(query, size, counted), _running_means(key, size, counted))
        else:
            rows = torch.arange(query.shape[1], device=query.device) // size
            q_side, k_side = q_side[:, rows], k_side[:, rows]
        q_side = q_side * (factor * width**0.5)  # attention multiplies by width ** -0.5
        if self.hard:  # the value is 0, the gradients are those of the gate
            q_side, k_side = (
                torch.cat([q_side - q_side.detach(), q_side.detach()], -1),
                torch.cat([k_side.detach(), k_side - k_side.detach()], -1),
            )
        return chosen, q_side.to(query.dtype), k_side.to(key.dtype)

    def loss(self) -> Tensor:
        """sparsity_reg_weight times `outside`; before any call in training 0, with gradients."""
        outside = self.outside
        if outside is None:
            outside = 0.0 * sum(one.sum() for one in self.importance_scorer.parameters())
        return self.weight * outside


class AdaptiveSparsityTrainer:
    """Lowers the temperature of a BlockSparseAdaptive(learned=True) from step to step, and reports what it chooses."""

    def __init__(
        self, model: Any, initial_temperature: float = 1.0, final_temperature: float = 0.1, annealing_steps: int = 10000
    ) -> None:
        self.model = model
        self.initial_temperature, self.final_temperature = initial_temperature, final_temperature
        self.annealing_steps = at_least("annealing_steps", annealing_steps, 1)
        self.current_step = 0

    def step(self) -> None:
        self.current_step += 1
        done = min(self.current_step / self.annealing_steps, 1.0)
        temperature = self.initial_temperature * (1 - done) + self.final_temperature * done
        with torch.no_grad():
            self.model.learned.log_temperature.fill_(math.log(temperature))

    @torch.no_grad()
    def analyze_patterns(self, dataloader: Iterable[Any], num_samples: int = 100) -> dict[str, list[float]]:
        """Of (query, key, value) batches: fractions of blocks pruned, and per batch the share of chosen blocks that differ
        between neighbouring heads (diversity) or are the same (similarity)."""
        found: dict[str, list[float]] = {"sparsity_ratios": [], "pattern_diversity": [], "head_similarity": []}
        training = self.model.training
        self.model.eval()
        try:
            for _, (query, key, value) in zip(range(num_samples), dataloader):
                _, patterns = self.model(query, key, value, return_pattern=True)
                blocks = -(-key.shape[1] // self.model.block_size)
                for entry in patterns if isinstance(patterns, list) else [patterns]:
                    sets = [set(zip(rows.tolist(), columns.tolist())) for rows, columns in entry["patterns"]]
                    found["sparsity_ratios"] += [1.0 - len(one) / blocks**2 for one in sets]
                    pairs = [len(a & b) / max(1, len(a | b)) for a, b in zip(sets, sets[1:])]
                    if pairs:
                        found["head_similarity"].append(sum(pairs) / len(pairs))
                        found["pattern_diversity"].append(1.0 - sum(pairs) / len(pairs))
        finally:
            self.model.train(training)
        return found
