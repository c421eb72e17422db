"""Prov-GigaPath's slide encoder in plain torch over Longspan: no torchscale, timm, fairscale or flash-attn.

Parameter names are those of the published weights, so load_slide_weights reads them unchanged. Everything but the
attention is ordinary torch: tile projection, 2-D sine positions, a class token, pre-norm layers with norms inside
attention and feed-forward.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

from .._errors import InvalidArgument, invalid
from .._longspan import Pattern
from .operator import attention

# What GigaPath computes for slides of up to 262,144 pixels in tiles of 256.
SEGMENTS = (1024, 5792, 32768, 185363, 1048576)
DILATIONS = (1, 2, 4, 8, 16)

#: (q, k, v, lengths) [batch, tokens, heads, head_dim] -> the same shape; lengths may be None.
AttentionFunction = Callable[[Tensor, Tensor, Tensor, "Tensor | None"], Tensor]


def longspan_attention(segments: Sequence[int] = SEGMENTS, dilations: Sequence[int] = DILATIONS) -> AttentionFunction:
    """The attention that published weights were trained with: all heads in every branch, zero padding attended."""
    pattern = str(Pattern.longnet(list(segments), list(dilations), phase="torchscale").with_pad_keys())

    def attend(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor | None) -> Tensor:
        return attention(q, k, v, pattern, lengths=lengths)

    return attend


class _SelfAttention(nn.Module):
    def __init__(self, width: int, heads: int, attend: AttentionFunction) -> None:
        super().__init__()
        self.heads = heads
        self.attend = attend
        self.k_proj = nn.Linear(width, width)
        self.v_proj = nn.Linear(width, width)
        self.q_proj = nn.Linear(width, width)
        self.out_proj = nn.Linear(width, width)
        self.inner_attn_ln = nn.LayerNorm(width)

    def forward(self, x: Tensor, lengths: Tensor | None) -> Tensor:
        split = (*x.shape[:2], self.heads, x.shape[2] // self.heads)
        q, k, v = (project(x).view(split) for project in (self.q_proj, self.k_proj, self.v_proj))
        out = self.attend(q, k, v, lengths).reshape(x.shape)
        return self.out_proj(self.inner_attn_ln(out))


class _FeedForward(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(width, hidden)
        self.fc2 = nn.Linear(hidden, width)
        self.ffn_layernorm = nn.LayerNorm(hidden)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.ffn_layernorm(functional.gelu(self.fc1(x))))


class _Layer(nn.Module):
    def __init__(self, width: int, heads: int, hidden: int, attend: AttentionFunction) -> None:
        super().__init__()
        self.self_attn = _SelfAttention(width, heads, attend)
        self.self_attn_layer_norm = nn.LayerNorm(width)
        self.ffn = _FeedForward(width, hidden)
        self.final_layer_norm = nn.LayerNorm(width)

    def forward(self, x: Tensor, lengths: Tensor | None) -> Tensor:
        x = x + self.self_attn(self.self_attn_layer_norm(x), lengths)
        return x + self.ffn(self.final_layer_norm(x))


class _Encoder(nn.Module):
    def __init__(self, layers: int, width: int, heads: int, attend: AttentionFunction) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_Layer(width, heads, 4 * width, attend) for _ in range(layers))
        self.layer_norm = nn.LayerNorm(width)

    def forward(self, x: Tensor, lengths: Tensor | None) -> list[Tensor]:
        """Hidden states: the input, every layer's output, and last the normed result."""
        states = [x]
        for layer in self.layers:
            states.append(layer(states[-1], lengths))
        return [*states, self.layer_norm(states[-1])]


class _TileProjection(nn.Module):
    def __init__(self, tile_features: int, width: int) -> None:
        super().__init__()
        self.proj = nn.Linear(tile_features, width)


class SlideEncoder(nn.Module):
    """Tile embeddings and their coordinates -> one embedding per slide. The defaults are GigaPath's published model:
    12 layers, 768 wide, 16 heads."""

    def __init__(
        self, *, tile_features: int = 1536, width: int = 768, layers: int = 12, heads: int = 16,
        tile_pixels: int = 256, grid: int = 1000, global_pool: bool = False, attend: AttentionFunction | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        if width % 4 or width % heads:
            raise invalid("width", f"is {width}: give a multiple of 4 and of heads = {heads}")
        self.tile_pixels = tile_pixels
        self.grid = grid
        self.global_pool = global_pool
        self.patch_embed = _TileProjection(tile_features, width)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, width))
        self.encoder = _Encoder(layers, width, heads, attend or longspan_attention())
        self.norm = nn.LayerNorm(width, eps=1e-6)
        self._initialise()

    def _initialise(self) -> None:
        nn.init.normal_(self.cls_token, std=0.02)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)
                nn.init.zeros_(module.bias)

    def _positions(self, coordinates: Tensor, width: int) -> Tensor:
        """Sines and cosines of the tile's column, then of its row. Computed for the tiles there are, not looked up in a
        table of a million."""
        quarter = width // 4
        frequencies = 10000.0 ** -(torch.arange(quarter, dtype=torch.float64, device=coordinates.device) / quarter)
        cells = torch.floor(coordinates / self.tile_pixels).double()
        # The published table is indexed row * grid + column and wraps like one.
        flat = cells[..., 0] * self.grid + cells[..., 1]
        column, row = flat % self.grid, torch.div(flat, self.grid, rounding_mode="floor")
        angles = [axis[..., None] * frequencies for axis in (column, row)]
        return torch.cat([part for angle in angles for part in (angle.sin(), angle.cos())], dim=-1)

    def forward(
        self, tiles: Tensor, coordinates: Tensor, lengths: Tensor | None = None, *, all_layers: bool = False
    ) -> Tensor | list[Tensor]:
        """tiles [batch, n, tile_features], coordinates [batch, n, 2] in pixels -> [batch, width]; all_layers: a list,
        one for the input and one for each layer. lengths [batch]: tiles each slide has; the rest is padding."""
        if tiles.dim() != 3 or coordinates.shape != (*tiles.shape[:2], 2):
            raise InvalidArgument(
                f"tiles has shape {list(tiles.shape)}, coordinates has {list(coordinates.shape)}: give [batch, n, "
                "features] and [batch, n, 2]",
                "coordinates",
            )
        x = self.patch_embed.proj(tiles)
        x = x + self._positions(coordinates, x.shape[-1]).to(x.dtype)
        x = torch.cat([self.cls_token.expand(x.shape[0], -1, -1), x], dim=1)
        states = self.encoder(x, None if lengths is None else lengths + 1)
        results = [self._summary(state, lengths) for state in (states[:-1] if all_layers else states[-1:])]
        return results if all_layers else results[0]

    def _summary(self, state: Tensor, lengths: Tensor | None) -> Tensor:
        if not self.global_pool:
            return self.norm(state[:, 0])
        if lengths is None:
            return self.norm(state[:, 1:].mean(dim=1))
        kept = torch.arange(state.shape[1] - 1, device=state.device) < lengths[:, None]
        return self.norm((state[:, 1:] * kept[..., None]).sum(dim=1) / lengths[:, None])


def load_slide_weights(encoder: SlideEncoder, file: str | Path) -> None:
    """Loads GigaPath's slide_encoder.pth (or a state_dict of SlideEncoder). Raises if a parameter is missing."""
    if Path(file).is_dir():
        raise invalid("file", f"{file} is a folder: give slide_encoder.pth inside it, or another file")
    state = torch.load(file, map_location="cpu", weights_only=True)
    state = state.get("model", state)
    wanted = encoder.state_dict().keys()
    missing = sorted(wanted - state.keys())
    if missing:
        raise invalid("file", f"{file} lacks {len(missing)} parameters, among them {missing[0]}")
    encoder.load_state_dict({name: state[name] for name in wanted})
