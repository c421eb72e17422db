"""Drop-ins for DilatedAttention and ImprovedDilatedAttention: modules without parameters over the one operator."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from .._arguments import Arguments
from .._named import flag
from .operator import attention
from .options import accept_pool_arguments, check_dropout, dilated_pattern, finite, integers, key_mask, require_tensors


class DilatedAttention(nn.Module):
    """Dilated attention by head groups: group i of the heads attends within segments of segment_lengths[i] tokens, to
    every dilation_rates[i]-th of them. The output is divided by the number of groups.

    softmax_scale: factor on scores, by default 1 / sqrt(head_dim). attention_dropout: active in training only, governed
    by torch.manual_seed. op, device, dtype: accepted for compatibility; there is nothing to choose or to place.
    """

    def __init__(
        self, segment_lengths: Sequence[int], dilation_rates: Sequence[int], softmax_scale: float | None = None,
        attention_dropout: float = 0.0, op: Any = None, *, device: Any = None, dtype: Any = None,
        **pool_arguments: Any,
    ) -> None:  # fmt: skip
        super().__init__()
        accept_pool_arguments(type(self).__name__, pool_arguments)
        self.segment_lengths = integers("segment_lengths", segment_lengths)
        self.dilation_rates = integers("dilation_rates", dilation_rates)
        self.softmax_scale = None if softmax_scale is None else finite("softmax_scale", softmax_scale)
        self.dropout = check_dropout("attention_dropout", attention_dropout)
        self.allow_tf32 = False
        # Text, not an object: it pickles, exports and compiles as it is.
        self.pattern = str(dilated_pattern(self.segment_lengths, self.dilation_rates))

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, is_causal: bool = False, attention_mask: Tensor | None = None
    ) -> Tensor:
        """query [b, n, h, d], key and value [b, n, h or fewer, d] -> [b, n, h, d]. attention_mask [b, n] or
        [b, 1, 1, n]: true where a key may be attended."""
        if is_causal is not True and is_causal is not False:
            is_causal = flag("is_causal", is_causal)
        options: Arguments = {"causal": is_causal}  # what is not asked for costs the host nothing
        if self.softmax_scale is not None:
            options["scale"] = self.softmax_scale
        if self.allow_tf32:
            options["allow_tf32"] = True
        if attention_mask is not None:
            require_tensors(query=query, key=key, value=value)
            options["key_mask"] = key_mask("attention_mask", attention_mask, key.shape[0], key.shape[1])
        if self.dropout and self.training:
            options["dropout"] = self.dropout
        return attention(query, key, value, self.pattern, **options)

    def extra_repr(self) -> str:
        return f"segment_lengths={self.segment_lengths}, dilation_rates={self.dilation_rates}, dropout={self.dropout}"


class ImprovedDilatedAttention(DilatedAttention):
    """The same result as DilatedAttention, with the constructor of the class of that name."""

    def __init__(
        self, segment_lengths: Sequence[int], dilation_rates: Sequence[int], dropout: float = 0.0,
        use_tf32: bool = True, *, device: Any = None, dtype: Any = None, **pool_arguments: Any,
    ) -> None:  # fmt: skip
        super().__init__(
            segment_lengths, dilation_rates, attention_dropout=check_dropout("dropout", dropout), **pool_arguments
        )
        self.allow_tf32 = flag("use_tf32", use_tf32)
