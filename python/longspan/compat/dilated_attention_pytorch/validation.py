"""ValidationMixin: the checks that classes of the fork inherit, with the phrases that its users match."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from ..._errors import invalid


class ValidationMixin:
    """Static checks. Each raises longspan.InvalidArgument, which is a ValueError."""

    @staticmethod
    def validate_segment_dilation_match(segment_lengths: Sequence[int], dilation_rates: Sequence[int]) -> None:
        if len(segment_lengths) != len(dilation_rates):
            raise invalid(
                "dilation_rates",
                f"has {len(dilation_rates)} entries, segment_lengths {len(segment_lengths)}: they must have the same length",
            )
        if not segment_lengths:
            raise invalid("segment_lengths", "cannot be empty: segment_lengths cannot be empty, give at least one entry")

    @staticmethod
    def validate_positive_values(values: Sequence[float], name: str) -> None:
        if not all(value > 0 for value in values):
            raise invalid(name, f"is {list(values)}: all entries must be positive")

    @staticmethod
    def validate_tensor_shape(tensor: Tensor, expected_dims: int, name: str) -> None:
        if tensor.dim() != expected_dims:
            raise invalid(name, f"has shape {list(tensor.shape)}: expected {expected_dims}D tensor")

    @staticmethod
    def validate_tensor_shapes_match(
        tensors: list[Tensor], names: list[str], dims_to_check: list[int] | None = None
    ) -> None:
        first = tensors[0]
        for tensor, name in zip(tensors[1:], names[1:]):
            for dim in range(first.dim()) if dims_to_check is None else dims_to_check:
                if tensor.shape[dim] != first.shape[dim]:
                    raise invalid(
                        name,
                        f"has shape {list(tensor.shape)}, {names[0]} {list(first.shape)}: Shape mismatch at dimension {dim}",
                    )

    @staticmethod
    def validate_sequence_length(seq_len: int, segment_lengths: Sequence[int]) -> None:
        """Any length is fine."""

    @staticmethod
    def validate_device_dtype_consistency(tensors: Sequence[Tensor], names: Sequence[str]) -> None:
        for tensor, name in zip(tensors[1:], names[1:]):
            if tensor.device != tensors[0].device or tensor.dtype != tensors[0].dtype:
                raise invalid(
                    name,
                    f"is {tensor.dtype} on {tensor.device}, {names[0]} is {tensors[0].dtype} on {tensors[0].device}: "
                    "give them alike",
                )

    @staticmethod
    def validate_batch_first_format(tensor: Tensor, name: str, expected_dims: int = 4) -> None:
        ValidationMixin.validate_tensor_shape(tensor, expected_dims, name)

    @staticmethod
    def validate_attention_mask(mask: Any, batch_size: int, seq_len: int, name: str = "attention_mask") -> None:
        if mask is not None and mask.shape[-1] != seq_len:
            raise invalid(name, f"has shape {list(mask.shape)}: its last dimension must be {seq_len} keys")

    @staticmethod
    def validate_dropout_prob(dropout: float, name: str = "dropout") -> None:
        if not 0.0 <= dropout <= 1.0:
            raise invalid(name, f"is {dropout}: it must be between 0.0 and 1.0")

    @staticmethod
    def validate_head_dim(embed_dim: int, num_heads: int) -> int:
        if num_heads < 1 or embed_dim % num_heads:
            raise invalid("embed_dim", f"is {embed_dim}: it must be divisible by num_heads ({num_heads})")
        head_dim = embed_dim // num_heads
        if head_dim % 8:
            warnings.warn(f"head_dim {head_dim} should be divisible by 8: GPUs refuse others", stacklevel=3)
        if head_dim > 128:
            warnings.warn(f"head_dim {head_dim} > 128: the fastest GPU kernels end at 128", stacklevel=3)
        return head_dim

    @staticmethod
    def validate_num_heads(num_heads: int, num_groups: int) -> None:
        if num_heads < num_groups:
            raise invalid("num_heads", f"is {num_heads}, there are {num_groups} segment lengths: give one head for each")
