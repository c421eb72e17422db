"""Positions of LongNetLM: XPOS as old weights were trained with, the same rotation without its decay, or none.

XPOS turns pairs of channels by an angle that grows with the position and scales them by a power that grows or falls with
the distance from the middle of the sequence. It therefore depends on the length, and overflows when that is large.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from .._errors import InvalidArgument, invalid
from .._named import choice

KINDS = ("xpos", "rotary", "none")
_SCALE_BASE = 512
_ANGLE_BASE = 10000.0


def _per_entry(numbers: int | list[int] | Tensor, device: torch.device) -> int | Tensor:
    """One number for all batch entries, or a column of them, or what is one already. A number stays one: a copy to a GPU would wait for all that
    runs there, and could be in no graph."""
    return torch.tensor(numbers, device=device)[:, None] if isinstance(numbers, list) else numbers


class Positions(nn.Module):
    """What LongNetLM adds to embeddings [batch, tokens, width]: themselves, turned by their position."""

    def __init__(self, width: int, kind: str = "xpos", *, device: object = None) -> None:
        super().__init__()
        choice("positions", kind, KINDS)
        if width % 2 and kind != "none":
            raise invalid("d_model", f"is {width}: positions={kind!r} turns pairs of channels; give an even number")
        self.width = width
        self.kind = kind
        # Old weights bring it along. Not read: half precision would round it, and its powers far more.
        self.register_buffer("scale", self._bases(torch.device(device) if device else torch.device("cpu")))

    def _bases(self, device: torch.device) -> Tensor:
        return (torch.arange(0, self.width, 2, device=device) + 0.4 * self.width) / (1.4 * self.width)

    def _check_length(self, length: int, dtype: torch.dtype) -> None:
        """The first channel's scale is the largest: (0.4 / 1.4) ** -(half the length / 512)."""
        limit = math.log(torch.finfo(dtype).max) / math.log(1.4 / 0.4) * _SCALE_BASE
        if math.ceil(length / 2) > limit:
            raise InvalidArgument(
                f"the sequence has {length} tokens: positions='xpos' overflows {str(dtype).removeprefix('torch.')} beyond "
                f"{2 * int(limit)}; use positions='rotary' or 'none'",
                "positions",
            )

    def forward(self, x: Tensor, first: int | list[int] | Tensor = 0, length: int | list[int] | None = None) -> Tensor:
        """x holds positions first, first + 1, ... of a sequence of `length` tokens (default: x ends it); lists where batch
        entries differ."""
        if self.kind == "none":
            return torch.zeros_like(x)
        tokens = x.shape[1]
        work = torch.float64 if x.dtype is torch.float64 else torch.float32
        position = torch.arange(tokens, device=x.device) + _per_entry(first, x.device)
        pairs = self.width // 2
        frequency = _ANGLE_BASE ** -(torch.arange(pairs, dtype=torch.float64, device=x.device) / pairs)
        angle = ((position[..., None] * frequency) % (2 * math.pi)).to(work)
        sine, cosine = angle.sin(), angle.cos()
        if self.kind == "xpos":
            if length is None:
                length = [start + tokens for start in first] if isinstance(first, list) else first + tokens
            self._check_length(max(length) if isinstance(length, list) else length, x.dtype)
            middle = [math.ceil(count / 2) for count in length] if isinstance(length, list) else math.ceil(length / 2)
            centred = (position - _per_entry(middle, x.device)).to(work) / _SCALE_BASE
            scale = self._bases(x.device).to(work) ** centred[..., None]
            sine, cosine = sine * scale, cosine * scale
        even, odd = x[..., ::2].to(work), x[..., 1::2].to(work)
        turned = torch.stack((even * cosine - odd * sine, odd * cosine + even * sine), dim=-1)
        return turned.flatten(-2).to(x.dtype)

    def extra_repr(self) -> str:
        return f"{self.width}, kind={self.kind!r}"
