"""Makes torchscale (and what embeds it: Prov-GigaPath, LongViT) run its dilated attention through Longspan.

    import longspan.torchscale
    longspan.torchscale.install()        # before or after torchscale is imported, or even importable

No flash-attn, any device, float32 or half, batches with padding, correct decoding; parameters and their names stay
torchscale's own, so published weights load unchanged. uninstall() restores the original.
"""

from __future__ import annotations

import ast
import functools
import importlib.abc
import importlib.util
import sys
from types import ModuleType
from typing import Any

from . import torch as _longspan_torch  # first: says what is missing where torch is absent or too old

import torch
from torch import Tensor

from ._errors import InvalidArgument, Unsupported
from ._longspan import Pattern

__all__ = ["install", "uninstall"]

# The module that defines DilatedAttention, under whatever package a copy of torchscale lives.
_MODULE_TAIL = "torchscale.component.dilated_attention"
_CLASS_NAME = "DilatedAttention"
_ORIGINAL = "_longspan_original_forward"


def _is_target(module_name: str) -> bool:
    return module_name == _MODULE_TAIL or module_name.endswith("." + _MODULE_TAIL)


def _whole_numbers(name: str, value: Any) -> list[int]:
    """A list of the configuration; torchscale keeps it as text in some versions."""
    if isinstance(value, str):
        try:
            value = ast.literal_eval(value)
        except (SyntaxError, ValueError):
            value = None
    if isinstance(value, int):
        value = (value,)
    if not value:
        raise InvalidArgument(f"args.{name} is {value!r}: give a list of whole numbers", name)
    return [int(item) for item in value]


@functools.lru_cache(maxsize=64)
def _make_pattern(segments: Any, dilations: Any) -> str:
    pattern = Pattern.longnet(
        _whole_numbers("segment_length", segments), _whole_numbers("dilated_ratio", dilations), phase="torchscale"
    )
    return str(pattern.with_pad_keys())


@torch.compiler.assume_constant_result  # takes and returns plain values, so a graph may hold the answer
def _pattern(segments: Any, dilations: Any) -> str:
    return _make_pattern(segments, dilations)


def _pattern_of(args: Any) -> str:
    segments, dilations = args.segment_length, args.dilated_ratio
    return _pattern(
        tuple(segments) if isinstance(segments, list) else segments,
        tuple(dilations) if isinstance(dilations, list) else dilations,
    )


def _split_padding(padding: Tensor) -> tuple[Tensor, Tensor]:
    """(lengths, key_mask) for a padding mask [batch, tokens], true = padding. An entry padded at its end only gets its
    own length, so that it equals the entry run alone; any other entry keeps its full length and a key mask."""
    tokens = padding.shape[1]
    kept = tokens - padding.sum(dim=1)
    positions = torch.arange(tokens, device=padding.device)
    suffix = (padding == (positions >= kept.unsqueeze(1))).all(dim=1)
    return torch.where(suffix, kept, tokens), ~padding


def _padding_arguments(padding: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """The same with what has no effect left out, where looking at values is possible. An encoder hands the same mask to
    all its layers, so the answer is kept with it."""
    if padding is None:
        return None, None
    if padding.dtype is not torch.bool:
        padding = padding != 0
    if torch.compiler.is_compiling():
        return _split_padding(padding)
    version = None if padding.is_inference() else padding._version  # inference tensors do not count their changes
    remembered = None if version is None else getattr(padding, "_longspan_padding", None)
    if remembered is not None and remembered[0] == version:
        return remembered[1]
    result: tuple[Tensor | None, Tensor | None] = (None, None)
    if bool(padding.any()):
        lengths, mask = _split_padding(padding)
        inside = torch.arange(padding.shape[1], device=padding.device) < lengths.unsqueeze(1)
        result = (lengths, mask if bool((padding & inside).any()) else None)
    if version is not None:
        padding._longspan_padding = (version, result)
    return result


def _check_arguments(module: Any, query: Tensor, key: Tensor, value: Tensor, rel_pos: Any, attn_mask: Any) -> None:
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if tensor.dim() != 3 or tensor.shape[2] != module.embed_dim or tensor.shape[:2] != query.shape[:2]:
            raise InvalidArgument(
                f"{name} has shape {list(tensor.shape)}: give [batch, tokens, {module.embed_dim}], the same for query, "
                "key and value",
                name,
            )
    if rel_pos is not None:
        raise Unsupported("rel_pos: dilated attention takes no relative position bias; set rel_pos_buckets to 0")
    if attn_mask is not None:
        raise Unsupported("attn_mask: dilated attention takes is_causal and key_padding_mask, not a mask of scores")
    if getattr(module.args, "seq_parallel", False) and torch.distributed.is_initialized():
        if torch.distributed.get_world_size() > 1:
            raise Unsupported("seq_parallel: sequence parallelism of torchscale is not taken over; set it to False")


def _extend_cache(state: dict, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values [batch, tokens, heads, head_dim] after those of earlier steps; torchscale keeps them heads first,
    and reorders them by batch entry in beam search."""
    if "prev_key" in state:
        key = torch.cat([state["prev_key"].transpose(1, 2), key], dim=1)
        value = torch.cat([state["prev_value"].transpose(1, 2), value], dim=1)
    state["prev_key"] = key.transpose(1, 2)
    state["prev_value"] = value.transpose(1, 2)
    return key, value


def _rotate(xpos: Any, x: Tensor, offset: int, downscale: bool) -> Tensor:
    """torchscale's own xpos, which wants [batch * heads, tokens, head_dim]."""
    batch, tokens, heads, head_dim = x.shape
    flat = x.transpose(1, 2).reshape(batch * heads, tokens, head_dim)
    return xpos(flat, offset=offset, downscale=downscale).view(batch, heads, tokens, head_dim).transpose(1, 2)


def _make_forward(detached_mix: bool):
    """DilatedAttention.forward over Longspan. Projections, xpos, inner norm and cache stay torchscale's."""

    def forward(
        self,
        query,
        key,
        value,
        incremental_state=None,
        key_padding_mask=None,
        attn_mask=None,
        rel_pos=None,
        is_first_step=False,
        is_causal=False,
    ):
        _check_arguments(self, query, key, value, rel_pos, attn_mask)
        batch, rows, _ = query.shape
        split = (batch, rows, self.num_heads, self.head_dim)
        q, k, v = self.q_proj(query).view(split), self.k_proj(key).view(split), self.v_proj(value).view(split)
        if incremental_state is not None:
            k, v = _extend_cache(incremental_state, k, v)
        tokens = k.shape[1]
        first = tokens - rows  # position of the first query: everything before it came from the cache
        if self.xpos is not None:
            # xpos computes in the type of its own buffer; attention has one type for all.
            k = _rotate(self.xpos, k, 0, downscale=True).to(v.dtype)
            q = _rotate(self.xpos, q, first, downscale=False).to(v.dtype)

        if key_padding_mask is not None and tuple(key_padding_mask.shape) != (batch, tokens):
            raise InvalidArgument(
                f"key_padding_mask has shape {list(key_padding_mask.shape)}: give {[batch, tokens]}, cached tokens "
                "included",
                "key_padding_mask",
            )
        lengths, key_mask = _padding_arguments(key_padding_mask)
        out = _longspan_torch.attention(
            q,
            k,
            v,
            _pattern_of(self.args),
            causal=is_causal,
            scale=self.scaling,
            dropout=self.dropout if self.training else 0.0,
            lengths=lengths,
            key_mask=key_mask,
            query_ranges=None if first == 0 else [(first, rows)],
            detached_mix=detached_mix,
        )
        out = out.reshape(batch, rows, self.embed_dim)
        if self.inner_attn_ln is not None:
            out = self.inner_attn_ln(out)
        return self.out_proj(out), None

    return forward


class _Hook(importlib.abc.MetaPathFinder):
    """Patches torchscale's module right after Python has loaded it, however it is found."""

    def __init__(self, detached_mix: bool) -> None:
        self.detached_mix = detached_mix
        self._searching = False

    def find_spec(self, fullname, path=None, target=None):
        if self._searching or not _is_target(fullname):
            return None
        self._searching = True
        try:
            spec = importlib.util.find_spec(fullname)
        except ModuleNotFoundError:
            return None
        finally:
            self._searching = False
        if spec is None or spec.loader is None:
            return None
        load = spec.loader.exec_module

        def load_and_patch(module: ModuleType) -> None:
            load(module)
            if self in sys.meta_path:
                self.patch(module)

        spec.loader.exec_module = load_and_patch  # this loader object serves this one module
        return spec

    def patch(self, module: ModuleType) -> None:
        """Replaces the class's forward in place, so that instances made before change with it."""
        cls = getattr(module, _CLASS_NAME, None)
        if cls is None:
            raise Unsupported(
                f"{module.__name__} has no class {_CLASS_NAME}: Longspan knows torchscale 0.3 from its repository and "
                "the copy in Prov-GigaPath"
            )
        if _ORIGINAL not in cls.__dict__:
            setattr(cls, _ORIGINAL, cls.__dict__["forward"])
        cls.forward = _make_forward(self.detached_mix)


def _loaded_targets() -> list[ModuleType]:
    return [module for name, module in list(sys.modules.items()) if _is_target(name) and module is not None]


def install(*, detached_mix: bool = False) -> None:
    """Routes torchscale's DilatedAttention through Longspan, now and in every copy imported later. Calling it again
    replaces the earlier choice. Gradients are the exact ones; detached_mix=True reproduces the original's, which hold
    the weights between branches constant."""
    uninstall()
    hook = _Hook(detached_mix)
    sys.meta_path.insert(0, hook)
    for module in _loaded_targets():
        hook.patch(module)


def uninstall() -> None:
    """Restores torchscale as it was. Does nothing if install() was not called."""
    sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, _Hook)]
    for module in _loaded_targets():
        cls = getattr(module, _CLASS_NAME, None)
        if cls is not None and _ORIGINAL in cls.__dict__:
            cls.forward = cls.__dict__[_ORIGINAL]
            delattr(cls, _ORIGINAL)
