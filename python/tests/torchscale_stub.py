"""A package with the shape of torchscale's dilated attention, written into a folder: what install() relies on, and no
more. Its own forward is a marker, so that tests see whether it was replaced."""

from __future__ import annotations

from pathlib import Path

SOURCE = '''
import torch
from torch import nn


class DilatedAttention(nn.Module):
    def __init__(self, args, embed_dim, num_heads, dropout=0.0, xpos=None, subln=False):
        super().__init__()
        self.args = args
        self.embed_dim, self.num_heads, self.head_dim = embed_dim, num_heads, embed_dim // num_heads
        self.scaling = self.head_dim**-0.5
        self.dropout = dropout
        self.k_proj, self.v_proj, self.q_proj, self.out_proj = (nn.Linear(embed_dim, embed_dim) for _ in range(4))
        self.inner_attn_ln = nn.LayerNorm(embed_dim) if subln else None
        self.xpos = xpos

    def forward(self, query, key, value, **kwargs):
        return "original", None
'''


def write(root: Path, package: str = "torchscale") -> None:
    """Makes `package` (dots allowed) importable from root."""
    folder = root
    for part in [*package.split("."), "component"]:
        folder = folder / part
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "__init__.py").touch()
    (folder / "dilated_attention.py").write_text(SOURCE)
