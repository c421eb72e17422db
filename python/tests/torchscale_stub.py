"""A package with the shape of torchscale's dilated attention, written into a folder: what install() relies on, and no
more. Its own forward is a marker, so that tests see whether it was replaced."""

from __future__ import annotations

from pathlib import Path

SOURCE = '''
import torch
from torch import nn


class MultiheadAttention(nn.Module):
    def __init__(self, args, embed_dim, num_heads, dropout=0.0, xpos=None, subln=False):
        super().__init__()
        self.args = args
        self.embed_dim, self.num_heads, self.head_dim = embed_dim, num_heads, embed_dim // num_heads
        self.scaling = self.head_dim**-0.5
        self.dropout = dropout
        self.k_proj, self.v_proj, self.q_proj, self.out_proj = (nn.Linear(embed_dim, embed_dim) for _ in range(4))
        self.inner_attn_ln = nn.LayerNorm(embed_dim) if subln else None
        self.xpos = xpos


class DilatedAttention(MultiheadAttention):
    def dense_to_sparse(self, x, ratio): ...
    def sparse_to_dense(self, out, lse, ratio): ...
    def gathering(self, x, dr, sl, is_causal=True, offset=0, is_kv=False, seq_parall=True): ...
    def scattering(self, outs, lses, seq_len, bsz, offset=0): ...

    def forward(
        self, query, key, value, incremental_state=None, key_padding_mask=None, attn_mask=None, rel_pos=None,
        is_first_step=False, is_causal=False,
    ):
        return "original", None
'''


def write(root: Path, package: str = "torchscale", file: str = "component/dilated_attention.py") -> None:
    """Makes `package` (dots allowed) importable from root, with the class in a file of it."""
    place = root.joinpath(*package.split("."), *file.split("/"))
    place.parent.mkdir(parents=True, exist_ok=True)
    for folder in place.parents:
        if folder == root:
            break
        (folder / "__init__.py").touch()
    place.write_text(SOURCE)
