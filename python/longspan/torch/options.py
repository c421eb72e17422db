"""What the drop-in modules share: checked arguments, masks, and keyword arguments that have nothing left to tune."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch
from torch import Tensor, nn
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.nn import functional

from .._errors import InvalidArgument, invalid, warn_once
from .._longspan import Pattern
from .._named import refused, shown
from .._patterns import noticed

P = ParamSpec("P")
Arguments = TypeVar("Arguments")

# Keyword arguments of the older classes that only sized or switched their own memory pools and caches.
_POOL_ARGUMENTS = frozenset(
    {
        "cache_on_gpu", "enable_memory_pool", "enable_pattern_cache", "enable_profiling", "lightweight_pool",
        "max_cached_buffers", "memory_pool", "memory_pool_size", "pool_size", "use_enhanced_memory",
        "use_memory_pool", "use_pattern_cache",
    }
)  # fmt: skip

_TELLS_SIZES = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2]) >= (2, 8)

# Private, so it may be missing.
_hooked_everywhere = getattr(nn.modules.module, "_has_any_global_hook", lambda: False)

def accept_pool_arguments(class_name: str, arguments: dict) -> None:
    """Ignores what only tuned memory pools, with one warning; refuses everything else by name."""
    for name in arguments:
        if name not in _POOL_ARGUMENTS:
            raise InvalidArgument(f"{class_name} has no argument {name!r}", name)
    if arguments:
        warn_once(
            "pools",
            f"{class_name}: {', '.join(sorted(arguments))} tuned the memory pools of an older implementation and have "
            "no effect here",
        )


def made_from(
    arguments: Callable[P, Arguments],
) -> Callable[[Callable[[Any, Arguments], None]], Callable[Concatenate[Any, P], None]]:
    """Gives an __init__ that takes a dataclass the parameters of that dataclass, as they are written there, and the
    keywords with which older classes tuned their memory pools."""
    known = inspect.signature(arguments)

    def decorate(initialise: Callable[[Any, Arguments], None]) -> Callable[Concatenate[Any, P], None]:
        @functools.wraps(initialise)
        def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
            pools = {name: kwargs.pop(name) for name in list(kwargs) if name not in known.parameters}
            accept_pool_arguments(type(self).__name__, pools)
            try:
                known.bind(*args, **kwargs)
            except TypeError as error:
                raise TypeError(f"{type(self).__name__}(): {error}") from None
            initialise(self, arguments(*args, **kwargs))

        itself = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)
        __init__.__signature__ = known.replace(  # type: ignore[attr-defined]
            parameters=[itself, *known.parameters.values()], return_annotation=None
        )
        return __init__

    return decorate


@dataclass
class Branches:
    segment_lengths: Sequence[int]
    dilation_rates: Sequence[int]


@dataclass
class Placed:
    """Taken for compatibility by modules without parameters."""

    device: Any = field(default=None, kw_only=True)
    dtype: Any = field(default=None, kw_only=True)


def _whole(value: object) -> int | None:
    """A Python integer of at most 64 bits, None for everything else."""
    try:
        result = int(value)  # type: ignore[call-overload]
        return result if result == value and abs(result) < 2**63 else None
    except (TypeError, ValueError, OverflowError):
        return None


def integer(name: str, value: int) -> int:
    result = _whole(value)
    if result is None:
        raise invalid(name, f"is {value!r}: give a whole number")
    return result


def at_least(name: str, value: int, least: int) -> int:
    result = integer(name, value)
    if result < least:
        raise invalid(name, f"is {value}: give at least {least}")
    return result


def integers(name: str, values: Sequence[int]) -> list[int]:
    """A list of Python integers, or an error that names the argument."""
    try:
        result = [_whole(value) for value in values]
    except (TypeError, ValueError):
        result = [None]
    if None in result or isinstance(values, (str, bytes, Mapping)):
        raise invalid(name, f"is {values!r}: give a list of whole numbers")
    return [value for value in result if value is not None]


def finite(name: str, value: float) -> float:
    try:
        result = float(value)
    except (TypeError, ValueError):
        result = math.nan
    if not math.isfinite(result):
        raise invalid(name, f"is {value!r}: give a finite number")
    return result


def autocast_once(tensor: Tensor) -> Tensor:
    """Under autocast, the tensor in its type: each linear layer that reads it would cast it again, and keep its copy."""
    device = tensor.device.type
    if not torch.is_autocast_enabled(device) or tensor.dtype is torch.float64:
        return tensor
    return tensor.to(torch.get_autocast_dtype(device))


def surely(condition: Any) -> bool:
    """Whether a condition on sizes holds: for every size that a graph is compiled or exported for, if they may change.
    Where torch's compiler cannot tell, the answer is no."""
    if not torch.compiler.is_compiling():
        return condition
    return _TELLS_SIZES and statically_known_true(condition)


def require_tensors(**tensors: Any) -> None:
    """That these are [batch, tokens, heads, head_dim]."""
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor) or tensor.dim() != 4:
            what = shown(tensor) if not isinstance(tensor, Tensor) else f"of shape {list(tensor.shape)}"
            raise invalid(name, f"is {what}: give a tensor [batch, tokens, heads, head_dim]")


def hooked(module: nn.Module) -> bool:
    """Whether the module has hooks, every module has, or the instance has a forward of its own."""
    return "forward" in module.__dict__ or bool(
        module._forward_pre_hooks or module._forward_hooks or module._backward_pre_hooks or module._backward_hooks
        or _hooked_everywhere()
    )


def inner_norm(norm: nn.LayerNorm, x: Tensor) -> Tensor:
    """norm(x) between two linear layers. Autocast would widen 16 bits to 32, normalise, and narrow them again for the next
    layer; the sums are of 32 bits in any case. Norms with hooks or without weights are called as they are."""
    if type(norm) is not nn.LayerNorm or x.dtype not in (torch.bfloat16, torch.float16) or hooked(norm):
        return norm(x)
    if norm.weight is None or norm.bias is None or x.dtype is norm.weight.dtype:
        return norm(x)
    with torch.autocast(x.device.type, enabled=False):
        return functional.layer_norm(x, norm.normalized_shape, norm.weight.to(x.dtype), norm.bias.to(x.dtype), norm.eps)


def check_pairs(segment_lengths: list[int], dilation_rates: list[int]) -> None:
    if len(segment_lengths) != len(dilation_rates):
        raise InvalidArgument(
            f"segment_lengths has {len(segment_lengths)} entries, dilation_rates has {len(dilation_rates)}: give one "
            "rate per segment",
            "dilation_rates",
        )


def dilated_pattern(segment_lengths: list[int], dilation_rates: list[int]) -> Pattern:
    """Head groups with the drop-in classes' output scale 1/G; messages name the Python arguments."""
    check_pairs(segment_lengths, dilation_rates)
    for name, values in (("segment_lengths", segment_lengths), ("dilation_rates", dilation_rates)):
        if not values:
            raise invalid(name, "is empty: give at least one entry")
        for value in values:
            if value < 1:
                raise invalid(name, f"has {value}: entries are at least 1")
    return noticed(Pattern.dilated(segment_lengths, dilation_rates)).with_output_scale(1.0 / len(segment_lengths))


def at_least_zero(name: str, value: float) -> float:
    result = finite(name, value)
    if result < 0:
        raise invalid(name, f"is {value}: give 0 or more")
    return result


def check_dropout(name: str, value: float) -> float:
    result = finite(name, value)
    if not 0.0 <= result < 1.0:
        raise invalid(name, f"is {value}: give a probability from 0 up to, but not including, 1")
    return result


def boolean_padding(mask: Tensor | None) -> Tensor | None:
    """A key_padding_mask as booleans, also where torch's transformer layers have made numbers of it: -inf is padding."""
    if not isinstance(mask, Tensor) or mask.layout is not torch.strided or not mask.is_floating_point():
        return mask  # type: ignore[return-value]
    padding = mask == -math.inf
    captured = mask.is_cuda and torch.cuda.is_current_stream_capturing()
    unknown_values = torch.compiler.is_compiling() or mask.is_meta or captured
    if not unknown_values and not bool((padding | (mask == 0)).all()):
        raise invalid(
            "key_padding_mask",
            "has numbers other than 0 and -inf: nothing is added to scores; give booleans, true where a key "
            "is padding",
        )
    return padding


def key_mask(name: str, mask: Tensor | None, batch: int, tokens: int, *, two_dimensional: bool = True) -> Tensor | None:
    """A mask [batch, tokens] or [batch, 1, 1, tokens] as booleans [batch, tokens]; the caller knows its sense."""
    if mask is None:
        return None
    if not isinstance(mask, Tensor) or mask.layout is not torch.strided:
        raise refused(name, mask, "a dense torch tensor of booleans")
    shape = tuple(mask.shape)
    allowed = [(batch, 1, 1, tokens)] + ([(batch, tokens)] if two_dimensional else [])
    if shape not in allowed:
        wanted = " or ".join(str(list(one)) for one in allowed)
        hint = "; use is_causal or a pattern for what depends on the query" if shape[-2:] == (tokens, tokens) else ""
        raise invalid(name, f"has shape {list(shape)}: give {wanted}{hint}")
    if mask.is_floating_point():
        raise invalid(name, f"has dtype {mask.dtype}: give booleans; nothing is added to scores")
    if mask.dtype is not torch.bool:
        mask = mask != 0
    return mask.reshape(batch, tokens)
