#!/usr/bin/env python3
"""Embeds a slide with a GigaPath-size encoder on a CPU: no flash-attn, no GPU, nothing downloaded.

    python examples/gigapath_cpu.py                               # 10,000 random tiles, random weights
    python examples/gigapath_cpu.py --weights slide_encoder.pth   # the published weights
    python examples/gigapath_cpu.py --gigapath path/to/prov-gigapath   # Prov-GigaPath's own code, unmodified
"""

from __future__ import annotations

import argparse
import functools
import sys
import time

import numpy
import torch

import longspan
import longspan.torchscale
from longspan.torch.slide_encoder import SlideEncoder, load_slide_weights


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiles", type=int, default=10_000, help="tiles of the slide (default 10000)")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--weights", help="published slide_encoder.pth; random weights without it")
    parser.add_argument("--gigapath", help="checkout of prov-gigapath: runs its own encoder through install()")
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], default="float32")
    return parser.parse_args()


def make_slide(tiles: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A stand-in for the tile encoder's output: features and pixel coordinates of tiles on a square of tissue."""
    side = int(tiles**0.5) + 1
    cell = torch.arange(tiles)
    coordinates = torch.stack([cell // side, cell % side], dim=-1) * 256.0
    return torch.randn(1, tiles, 1536), coordinates[None]


def original_encoder(arguments: argparse.Namespace):
    """Prov-GigaPath's encoder as its authors wrote it; install() is all it takes."""
    longspan.torchscale.install()
    sys.path.insert(0, arguments.gigapath)
    from gigapath import slide_encoder

    numpy.set_printoptions(legacy="1.25")  # GigaPath prints NumPy integers into a text and evaluates that
    norm = functools.partial(torch.nn.LayerNorm, eps=1e-6)
    model = slide_encoder.LongNetViT(embed_dim=arguments.width, depth=arguments.layers, mlp_ratio=4, norm_layer=norm)
    if arguments.weights:
        state = torch.load(arguments.weights, map_location="cpu", weights_only=True)
        model.load_state_dict(state["model"], strict=False)
    return model, lambda tiles, coordinates: model(tiles, coordinates)[-1]


def own_encoder(arguments: argparse.Namespace):
    """The same encoder without its dependencies."""
    model = SlideEncoder(layers=arguments.layers, width=arguments.width)
    if arguments.weights:
        load_slide_weights(model, arguments.weights)
    return model, model


def main() -> None:
    arguments = parse_arguments()
    torch.manual_seed(0)
    model, embed = (original_encoder if arguments.gigapath else own_encoder)(arguments)
    model.eval().to(getattr(torch, arguments.dtype))
    tiles, coordinates = make_slide(arguments.tiles)
    parameters = sum(p.numel() for p in model.parameters())
    size = f"{arguments.layers} layers, {arguments.width} wide, {parameters / 1e6:.1f} M parameters"
    print(f"{type(model).__name__}: {size}")
    print(f"{arguments.tiles} tiles, {arguments.dtype}, {longspan.num_threads()} threads")
    with torch.inference_mode():
        start = time.perf_counter()
        embedding = embed(tiles.to(getattr(torch, arguments.dtype)), coordinates)
        seconds = time.perf_counter() - start
    assert torch.isfinite(embedding).all()
    print(f"slide embedding of {embedding.shape[-1]} numbers in {seconds:.1f} s, norm {embedding.float().norm():.3f}")


if __name__ == "__main__":
    main()
