"""The fork's names for what learns blocks: its config, with its order and defaults, the scorer and the trainer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ...torch.adaptive import AdaptiveSparsityTrainer, ImportanceScorer

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

