"""The fork's functions over attention scores and heads. They form N x N scores or masks, as their names promise; modules
here never do."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ... import torch as longspan_torch


def _with_causal(scores: Tensor, is_causal: bool) -> Tensor:
    if not is_causal:
        return scores
    rows, columns = scores.shape[-2:]
    future = torch.ones(rows, columns, dtype=torch.bool, device=scores.device).triu(1)
    return scores.masked_fill(future, -math.inf)


def compute_attention_scores(
    q: Tensor, k: Tensor, scale: float | None = None, attention_mask: Tensor | None = None, is_causal: bool = False
) -> Tensor:
    scores = q @ k.transpose(-2, -1) * (1 / math.sqrt(q.shape[-1]) if scale is None else scale)
    return _with_causal(scores if attention_mask is None else scores + attention_mask, is_causal)


def create_dilated_mask(seq_len: int, segment_length: int, dilation_rate: int, device: Any = None) -> Tensor:
    """True where two positions share a segment and their distance is a multiple of the rate."""
    at = torch.arange(seq_len, device=device)
    same = at[:, None] // segment_length == at // segment_length
    return same & ((at[:, None] - at) % dilation_rate == 0)


def create_block_diagonal_mask(seq_len: int, block_size: int, device: Any = None, overlap: int = 0) -> Tensor:
    """True within blocks, which reach `overlap` positions into their neighbours."""
    at = torch.arange(seq_len, device=device)
    block = at // block_size
    begin, end = block * block_size - overlap, (block + 1) * block_size + overlap
    inside = (at >= begin[:, None]) & (at < end[:, None])
    return inside | inside.t()


def apply_dilated_attention_pattern(
    scores: Tensor, segment_length: int, dilation_rate: int, group_idx: int, total_groups: int
) -> Tensor:
    mask = create_dilated_mask(scores.shape[-1], segment_length, dilation_rate, scores.device)
    return scores.masked_fill(~mask, -math.inf)


def standard_attention(
    q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False, attention_mask: Tensor | None = None, dropout_p: float = 0.0
) -> Tensor:
    """Dense attention over [batch, tokens, heads, head_dim]: Longspan's, or torch's where a mask is added to scores."""
    if attention_mask is None:
        return longspan_torch.attention(q, k, v, causal=is_causal, dropout=dropout_p)
    query, key, value = (x.transpose(1, 2) for x in (q, k, v))
    mask = attention_mask
    if is_causal:
        mask = _with_causal(torch.zeros(q.shape[1], k.shape[1], dtype=q.dtype, device=q.device), True) + mask
    return functional.scaled_dot_product_attention(query, key, value, mask, dropout_p).transpose(1, 2)


optimize_attention_computation = standard_attention


def flash_attention_forward(
    q: Tensor, k: Tensor, v: Tensor, dropout_p: float = 0.0, is_causal: bool = False, backend: str | None = None
) -> Tensor:
    """backend is accepted: Longspan's registry chooses the kernel."""
    return standard_attention(q, k, v, is_causal, dropout_p=dropout_p)


def chunked_flash_attention(
    q: Tensor, k: Tensor, v: Tensor, chunk_size: int = 2048, dropout_p: float = 0.0, is_causal: bool = False
) -> Tensor:
    """chunk_size is accepted: no scores are stored that chunks would save."""
    return standard_attention(q, k, v, is_causal, dropout_p=dropout_p)


def compute_alibi_bias(seq_len: int, num_heads: int, device: Any = None, dtype: torch.dtype = torch.float32) -> Tensor:
    """[heads, tokens, tokens], signed distances times slopes. attention(alibi_slopes=...) needs the slopes alone."""
    slopes = 2.0 ** (-8.0 * torch.arange(1, num_heads + 1, device=device, dtype=dtype) / num_heads)
    at = torch.arange(seq_len, device=device, dtype=dtype)
    return slopes[:, None, None] * (at - at[:, None])


def compute_rotary_embeddings(
    seq_len: int, dim: int, device: Any = None, base: int = 10000, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor]:
    assert dim % 2 == 0, f"dim is {dim}: rotations need an even number"
    rates = base ** (-torch.arange(0, dim, 2, device=device, dtype=torch.float32) / dim)
    angles = torch.arange(seq_len, device=device, dtype=torch.float32)[:, None] * rates
    angles = torch.cat([angles, angles], -1)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def apply_rotary_embeddings(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Of [batch, tokens, heads, head_dim], halves rotated against each other."""

    def rotated(x: Tensor) -> Tensor:
        low, high = x.chunk(2, -1)
        return x * cos[:, None] + torch.cat([-high, low], -1) * sin[:, None]

    return rotated(q), rotated(k)


def split_attention_heads(tensor: Tensor, num_heads: int) -> Tensor:
    return tensor.unflatten(-1, (num_heads, -1))


def merge_attention_heads(tensor: Tensor, num_heads: int, head_dim: int) -> Tensor:
    return tensor.reshape(*tensor.shape[:-2], num_heads * head_dim)


def create_4d_causal_mask(seq_len: int, device: Any = None, dtype: torch.dtype = torch.float32) -> Tensor:
    return _with_causal(torch.zeros(1, 1, seq_len, seq_len, device=device, dtype=dtype), True)


def apply_head_specific_masks(attention_scores: Tensor, head_masks: list[Tensor] | None = None) -> Tensor:
    if head_masks is None:
        return attention_scores
    return attention_scores.masked_fill(~torch.stack([mask.bool() for mask in head_masks]), -math.inf)


def compute_position_embeddings(
    seq_len: int, embed_dim: int, device: Any = None, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Sines at even, cosines at odd places."""
    angles = torch.arange(seq_len, device=device)[:, None] * 10000.0 ** (
        -torch.arange(0, embed_dim, 2, device=device) / embed_dim
    )
    return torch.stack([angles.sin(), angles.cos()], -1).flatten(1)[:, :embed_dim].to(dtype)


def get_attention_backend_info() -> dict[str, Any]:
    return {"backend": "longspan", "has_flash_attn": False, "has_sdpa": True}


#: Compute capability -> what the fork calls it.
_ARCHITECTURES = ((9, "hopper"), (8, "ampere"), (7, "volta_turing"), (0, "pascal_or_older"))


def get_flash_attention_support(device: Any) -> dict[str, Any]:
    """What the fork would choose between. Nothing here depends on it: kernels are in `longspan info`."""
    device = torch.device(device)
    result = {
        "has_flash_attn": False, "has_flash_attn_2": False, "has_flash_attn_3": False, "supports_fp8": False,
        "gpu_architecture": None, "compute_capability": None, "recommended_backend": "standard",
    }  # fmt: skip
    if device.type != "cuda":
        return result
    properties = torch.cuda.get_device_properties(device)
    name = next(name for least, name in _ARCHITECTURES if properties.major >= least)
    backend = "standard" if properties.major < 7 else "sdpa"
    return {**result, "compute_capability": (properties.major, properties.minor), "gpu_architecture": name,
            "supports_fp8": properties.major >= 9, "recommended_backend": backend}  # fmt: skip


def select_attention_backend(
    device: Any, seq_len: int, is_causal: bool = False, has_custom_mask: bool = False
) -> str:
    """The fork's names for it; flash_attention_forward takes any."""
    if has_custom_mask:
        return "sdpa"
    return "standard" if seq_len < 128 or torch.device(device).type == "cpu" else "sdpa"


def get_gpu_compute_capability(device: Any) -> tuple[int, int] | None:
    return torch.cuda.get_device_capability(device) if torch.device(device).type == "cuda" else None


def is_pascal_or_older(device: Any) -> bool:
    return (get_gpu_compute_capability(device) or (7, 0))[0] < 7


def get_optimal_dtype(device: Any, prefer_fp16: bool = True, warn_pascal: bool = True) -> torch.dtype:
    if torch.device(device).type != "cuda" or is_pascal_or_older(device):
        return torch.float32
    return torch.float16 if prefer_fp16 else torch.bfloat16


def warn_suboptimal_dtype(device: Any, dtype: torch.dtype) -> None:
    """Silent: `attention` itself warns once where a dtype runs on a slow kernel."""


def standardize_attention_output(output: Any, need_weights: bool = False, force_tuple: bool = True) -> Any:
    pair = output if isinstance(output, tuple) else (output, None)
    return pair if force_tuple or need_weights else pair[0]
