"""Makes torchscale (and what embeds it: Prov-GigaPath, LongViT) run its dilated attention through Longspan.

    import longspan.torchscale
    longspan.torchscale.install()        # before or after torchscale is imported, or even importable

No flash-attn, any device, float32 or half, batches with padding, correct decoding; parameters and their names stay
torchscale's own, so published weights load unchanged. uninstall() restores the original.
"""

from __future__ import annotations

import ast
import functools
import inspect
from collections.abc import Iterator
from types import ModuleType
from typing import Any

from . import torch as _longspan_torch  # first: says what is missing where torch is absent or too old

import torch
from torch import Tensor, nn

from ._errors import InvalidArgument, Unsupported, invalid, warn_once
from ._longspan import Pattern
from ._patterns import noticed

__all__ = ["install", "installed", "uninstall"]

_CLASS_NAME = "DilatedAttention"


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
    return str(noticed(pattern).with_pad_keys())


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
            raise invalid(
                name,
                f"has shape {list(tensor.shape)}: give [batch, tokens, {module.embed_dim}], the same for query, "
                "key and value",
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
        self, query, key, value, incremental_state=None, key_padding_mask=None, attn_mask=None, rel_pos=None,
        is_first_step=False, is_causal=False,
    ):  # fmt: skip
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
            raise invalid(
                "key_padding_mask",
                f"has shape {list(key_padding_mask.shape)}: give {[batch, tokens]}, cached tokens "
                "included",
            )
        lengths, key_mask = _padding_arguments(key_padding_mask)
        out = _longspan_torch.attention(
            q, k, v, _pattern_of(self.args), causal=is_causal, scale=self.scaling,
            dropout=self.dropout if self.training else 0.0, lengths=lengths, key_mask=key_mask,
            query_ranges=None if first == 0 else [(first, rows)], detached_mix=detached_mix,
        )  # fmt: skip
        out = out.reshape(batch, rows, self.embed_dim)
        if self.inner_attn_ln is not None:
            out = self.inner_attn_ln(out)
        return self.out_proj(out), None

    return forward


# What makes a class torchscale's, whatever its module is called.
_HELPERS = ("dense_to_sparse", "sparse_to_dense", "gathering", "scattering")
_FORWARD = frozenset(inspect.signature(_make_forward(False)).parameters)
_NEVER = ("longspan", "torch")  # packages whose own modules the new forward is made of
_BASE, _BASE_ARGUMENTS = "MultiheadAttention", {"args", "embed_dim", "num_heads"}

_INIT = nn.Module.__init__
_replaced: dict[type[nn.Module], Any] = {}  # class -> its own forward


def _parameters(function: Any) -> set[str]:
    try:
        return set(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return set()


def _differences(cls: type[nn.Module]) -> list[str]:
    """What a class lacks of torchscale's DilatedAttention; empty for a copy of it."""
    lacks = [f"no method {name}" for name in _HELPERS if not callable(getattr(cls, name, None))]
    bases = [base for base in cls.__mro__[1:] if base.__name__ == _BASE]
    if not any(_BASE_ARGUMENTS <= _parameters(base.__init__) for base in bases):
        lacks.append(f"not derived from torchscale's {_BASE}")
    if _parameters(cls.forward) != _FORWARD:
        lacks.append("a forward with other arguments")
    return lacks


def _consider(cls: type[nn.Module], detached_mix: bool) -> None:
    """Takes the class over if it is torchscale's, and says so where it only has the name."""
    if cls.__name__ != _CLASS_NAME or "forward" not in cls.__dict__ or cls.__module__.partition(".")[0] in _NEVER:
        return
    differences = _differences(cls)
    if not differences:
        _replace(cls, detached_mix)
    elif cls not in _replaced:
        where = f"{cls.__module__}.{cls.__qualname__}"
        warn_once(
            f"torchscale {where}",
            f"{where} is not torchscale's class and was left alone ({', '.join(differences)}): "
            "longspan.torchscale.install(the class) takes it by hand",
        )


def _replace(cls: type[nn.Module], detached_mix: bool) -> None:
    """In place, so that instances made before change with it."""
    if cls not in _replaced:
        _replaced[cls] = cls.__dict__["forward"]
    cls.forward = _make_forward(detached_mix)  # type: ignore[method-assign]


def _subclasses(cls: type) -> Iterator[type]:
    for one in cls.__subclasses__():
        yield one
        yield from _subclasses(one)


def _watch(detached_mix: bool) -> None:
    """Looks at every class of modules that is made from now on, so imports are seen, whatever they are called; and at
    classes of new instances, since a base may keep its subclasses to itself."""

    def __init_subclass__(cls: type[nn.Module], **keywords: Any) -> None:
        super(nn.Module, cls).__init_subclass__(**keywords)
        _consider(cls, detached_mix)

    @functools.wraps(_INIT)
    def __init__(self: nn.Module, *args: Any, **kwargs: Any) -> None:
        for cls in type(self).__mro__:
            if cls.__name__ == _CLASS_NAME and cls not in _replaced:
                _consider(cls, detached_mix)
        _INIT(self, *args, **kwargs)

    nn.Module.__init_subclass__ = classmethod(__init_subclass__)  # type: ignore[assignment]
    nn.Module.__init__ = __init__  # type: ignore[method-assign]


def _by_hand(target: Any) -> type[nn.Module]:
    cls = getattr(target, _CLASS_NAME, None) if isinstance(target, ModuleType) else target
    if (
        not (isinstance(cls, type) and issubclass(cls, nn.Module) and "forward" in cls.__dict__)
        or cls.__module__.partition(".")[0] in _NEVER
    ):
        what = f"module {target.__name__}" if isinstance(target, ModuleType) else repr(target)
        raise invalid("target", f"is {what}: give a copy of torchscale's {_CLASS_NAME}, or a module that has one")
    return cls


def install(target: ModuleType | type[nn.Module] | None = None, *, detached_mix: bool = False) -> list[type[nn.Module]]:
    """Routes torchscale's DilatedAttention through Longspan: every copy of it, imported already or later, under whatever
    name. Calling it again replaces the earlier choice. target: this class, or this module's, only. Gradients are the
    exact ones; detached_mix=True reproduces the original's, which hold the weights between branches constant.

    Returns what installed() does then: the classes replaced so far."""
    if target is not None:
        _replace(_by_hand(target), detached_mix)
        return installed()
    uninstall()
    for cls in list(_subclasses(nn.Module)):
        _consider(cls, detached_mix)
    _watch(detached_mix)
    return installed()


def installed() -> list[type[nn.Module]]:
    """The classes whose forward is Longspan's now."""
    return list(_replaced)


def uninstall() -> None:
    """Restores every class as it was. Does nothing if install() was not called."""
    nn.Module.__init__ = _INIT  # type: ignore[method-assign]
    if "__init_subclass__" in nn.Module.__dict__:
        del nn.Module.__init_subclass__
    while _replaced:
        cls, forward = _replaced.popitem()
        cls.forward = forward
