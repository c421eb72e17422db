"""Drawing the next token from logits."""

from __future__ import annotations

import torch
from torch import Tensor

from .._errors import invalid
from .options import finite, integer


class Sampler:
    """Logits [batch, tokens] -> one token for each entry."""

    def __init__(
        self, temperature: float, top_k: int | None, top_p: float | None, seed: int | None, device: torch.device
    ) -> None:
        self.temperature = finite("temperature", temperature)
        if self.temperature < 0:
            raise invalid("temperature", f"is {temperature}: give 0 (the likeliest token) or more")
        self.top_k = None if top_k is None else integer("top_k", top_k)
        if self.top_k is not None and self.top_k < 1:
            raise invalid("top_k", f"is {top_k}: give at least 1, or None for all tokens")
        self.top_p = None if top_p is None else finite("top_p", top_p)
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise invalid("top_p", f"is {top_p}: give a probability above 0, up to 1")
        self.generator = None
        if seed is not None:
            self.generator = torch.Generator(device).manual_seed(integer("seed", seed))

    def probabilities(self, logits: Tensor) -> Tensor:
        """What a token is drawn with, for temperatures above 0."""
        logits = logits.float() / self.temperature
        if self.top_k is not None and self.top_k < logits.shape[-1]:
            least = logits.topk(self.top_k, dim=-1).values[:, -1:]
            logits = logits.masked_fill(logits < least, -torch.inf)
        result = logits.softmax(dim=-1)
        if self.top_p is not None and self.top_p < 1:
            ordered, order = result.sort(dim=-1, descending=True)
            # The token that crosses the limit still belongs to the set.
            ordered = ordered.masked_fill(ordered.cumsum(dim=-1) - ordered >= self.top_p, 0.0)
            result = torch.zeros_like(result).scatter(-1, order, ordered)
            result = result / result.sum(dim=-1, keepdim=True)
        return result

    def __call__(self, logits: Tensor) -> Tensor:
        if self.temperature == 0:
            return logits.argmax(dim=-1)
        # As torch.multinomial draws one of each row, without its checks, which a CUDA graph cannot hold.
        chances = self.probabilities(logits)
        return (chances / torch.empty_like(chances).exponential_(generator=self.generator)).argmax(dim=-1)
