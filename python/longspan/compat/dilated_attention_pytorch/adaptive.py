"""The fork's names for what learns blocks: its config, with its order and defaults, the scorer and the trainer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...torch.adaptive import AdaptiveSparsityTrainer, ImportanceScorer, best, block_means, with_gumbel_noise

__all__ = ["AdaptiveConfig", "AdaptiveSparsityTrainer", "Attributes", "ImportanceScorer"]


@dataclass
class AdaptiveConfig:
    """base_sparsity is the fraction of blocks pruned."""

    base_sparsity: float = 0.9
    temperature: float = 1.0
    learnable_temperature: bool = True
    min_temperature: float = 0.1
    hidden_dim: int = 128
    num_layers: int = 2
    share_across_heads: bool = False
    sparsity_reg_weight: float = 0.01
    hard_sparsity: bool = False


class Attributes:
    """The parts of the learned choice where the fork's class has them. In state_dict they are under `learned`."""

    learned: Any
    importance_scorer = property(lambda self: self.learned.importance_scorer)
    q_summary_proj = property(lambda self: self.learned.q_summary_proj)
    k_summary_proj = property(lambda self: self.learned.k_summary_proj)
    log_temperature = property(lambda self: self.learned.log_temperature)

    # Steps of the choice, for those who look at one head.
    def _compute_block_summaries(self, q: Tensor, k: Tensor, head_idx: int) -> tuple[Tensor, Tensor]:
        means = [block_means(x[:, :, head_idx, None], self.block_size, None)[:, :, 0] for x in (q, k)]  # type: ignore[attr-defined]
        return self.q_summary_proj(means[0]), self.k_summary_proj(means[1])

    def _generate_adaptive_pattern(
        self, q: Tensor, k: Tensor, head_idx: int, target_sparsity: float
    ) -> tuple[Tensor, ...]:
        """Block rows and columns of the first batch entry."""
        scores = self.importance_scorer(*self._compute_block_summaries(q, k, head_idx), head_idx)
        return best(scores, 1.0 - target_sparsity, False)[0].nonzero(as_tuple=True)

    def _gumbel_softmax_topk(self, scores: Tensor, k: int, temperature: float, hard: bool = False) -> Tensor:
        if self.training:  # type: ignore[attr-defined]
            scores = with_gumbel_noise(scores)
        mask = torch.zeros_like(scores).scatter(-1, scores.topk(k).indices, 1.0)
        soft = (scores / temperature).softmax(-1) * mask
        return mask + (soft - soft.detach()) if hard else soft
