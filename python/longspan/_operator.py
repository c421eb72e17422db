"""longspan.attention and its gradient for NumPy arrays and anything with DLPack. No copies are made."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from ._errors import InvalidArgument
from ._longspan import Pattern
from ._patterns import compiled

# The numbers of longspan::DType; a raw tensor is (address, number, DLPack device, device index, shape, strides).
BFLOAT16 = 1
CPU_DEVICE, CUDA_DEVICE = 1, 2


def _is_torch(array: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(array, torch.Tensor)


def _prepared(name: str, array: Any) -> Any:
    """What the compiled module takes. bfloat16 arrays (ml_dtypes) have neither buffer nor DLPack, so they go raw; torch
    tensors too, since that is faster and every version of torch can."""
    if _is_torch(array):
        from .torch.operator import raw_tensor

        return raw_tensor(name, array)
    if isinstance(array, np.ndarray) and array.dtype.name == "bfloat16":
        strides = tuple(stride // array.itemsize for stride in array.strides)
        return (array.__array_interface__["data"][0], BFLOAT16, CPU_DEVICE, 0, array.shape, strides)
    return array


def _call_data(lengths: Any, key_mask: Any, alibi_slopes: Any) -> list[Any]:
    """Lists and tuples become arrays; arrays stay what they are."""
    if isinstance(lengths, (list, tuple)) and not all(isinstance(length, (int, np.integer)) for length in lengths):
        raise InvalidArgument(f"lengths is {lengths}: give whole numbers", "lengths")
    data = (("lengths", lengths, np.int64), ("key_mask", key_mask, bool), ("alibi_slopes", alibi_slopes, np.float32))
    return [
        np.asarray(array, dtype=dtype) if isinstance(array, (list, tuple)) else _prepared(name, array)
        for name, array, dtype in data
    ]


def _seed_arguments(q: Any, dropout: float, seed: Any) -> dict[str, int]:
    """What decides which pairs are dropped: the caller's seed, for torch tensors one of torch's generator instead."""
    if not dropout:
        return {}
    if _is_torch(q):
        from .torch.operator import call_seed, seed_arguments

        value, pointer = seed_arguments(q, call_seed(q, seed))
        return {"seed": value, "seed_pointer": pointer}
    if seed is None:
        raise InvalidArgument(
            f"seed is None with dropout {dropout}: give a whole number, another one for each call, and for "
            "attention_backward that of its forward",
            "seed",
        )
    if not isinstance(seed, (int, np.integer)) or not -(2**63) <= int(seed) < 2**64:
        raise InvalidArgument(f"seed is {seed!r}: give a whole number of 64 bits", "seed")
    return {"seed": int(seed) % 2**64}


def _heads_first(layout: str) -> bool:
    if layout not in ("bnhd", "bhnd"):
        raise InvalidArgument(f"layout is {layout!r}: give 'bnhd' or 'bhnd'", "layout")
    return layout == "bhnd"


def _on_gpu(array: Any) -> bool:
    device = getattr(array, "__dlpack_device__", None)
    return device is not None and device()[0] == CUDA_DEVICE


def _library(array: Any) -> Any:
    """The package that an array comes from, where outputs are made by the same."""
    return sys.modules.get(type(array).__module__.partition(".")[0])


def _new(array: Any, shape: Sequence[int], dtype: Any) -> Any:
    """An output where an input is: by torch or CuPy on a GPU, by NumPy on the host."""
    if _is_torch(array):
        return array.new_empty(shape, dtype=dtype)
    if not _on_gpu(array):
        return np.empty(tuple(shape), np.dtype(dtype))
    library = _library(array)
    if not hasattr(library, "cuda") or not hasattr(library, "empty"):
        raise InvalidArgument(
            f"q is a {type(array).__name__} on a GPU, whose outputs cannot be made here: pass out= (and lse=), or CuPy "
            "or torch arrays (torch.from_dlpack takes this one without a copy)",
            "q",
        )
    with library.cuda.Device(array.__dlpack_device__()[1]):
        return library.empty(tuple(shape), dtype=dtype)


def _empty_like(array: Any) -> Any:
    """An output for an input: of its shape and type, where it is."""
    if isinstance(array, (list, tuple)) or not hasattr(array, "shape"):
        raise InvalidArgument(f"q is {type(array).__name__}: give a NumPy array or anything with DLPack", "q")
    return _new(array, array.shape, array.dtype)


def _placement(array: Any) -> dict[str, Any]:
    """Where a call runs on a GPU: the current stream of the array's package; of packages without one the default
    stream, on which DLPack arrays are ready."""
    if _is_torch(array):
        from .torch.operator import placement

        return placement(array)
    if _on_gpu(array) and hasattr(getattr(_library(array), "cuda", None), "get_current_stream"):
        return {"stream": _library(array).cuda.get_current_stream().ptr}
    return {}


def _as_input(array: Any, like: Any) -> Any:
    """An output handed back as the kind of array that came in."""
    if isinstance(array, type(like)) or not hasattr(like, "__array_namespace__"):
        return array
    return like.__array_namespace__().asarray(array)


def _empty_lse(q: Any, heads_first: bool) -> Any:
    wide = str(q.dtype).endswith("float64")
    if _is_torch(q):
        dtype = q.dtype if wide else sys.modules["torch"].float32
    else:
        dtype = np.float64 if wide else np.float32
    if len(q.shape) != 4:
        return np.empty((0, 0, 0), np.float32)  # q itself is refused a moment later, by name
    batch, first, second, _ = q.shape
    rows, heads = (second, first) if heads_first else (first, second)
    return _new(q, (batch, heads, rows), dtype)


def attention(
    q: Any,
    k: Any,
    v: Any,
    pattern: Pattern | str | None = None,
    *,
    causal: bool = False,
    scale: float | None = None,
    output_scale: float | None = None,
    dropout: float = 0.0,
    seed: Any = None,
    lengths: Any = None,
    key_mask: Any = None,
    alibi_slopes: Any = None,
    query_ranges: Sequence[tuple[int, int]] | None = None,
    return_lse: bool = False,
    out: Any = None,
    lse: Any = None,
    kernel: str | None = None,
    deterministic: bool = False,
    detached_mix: bool = False,
    allow_tf32: bool = False,
    layout: str = "bnhd",
) -> Any:
    """Attention of q over k and v along a pattern (None: dense, a longspan.Pattern, or its text).

    q is [batch, rows, heads, head_dim], k and v [batch, tokens, kv_heads, head_dim] ('bhnd': heads before rows);
    float32, bfloat16, float16 or float64. The last dimension must be contiguous, all other strides are free.

    causal: a position sees itself and what comes before it. scale: factor on scores, by default 1 / sqrt(head_dim).
    output_scale: factor on the output, by default the pattern's own. dropout, seed: probability of dropping a pair, and
    which pairs; for torch tensors drawn from torch's generator unless given. lengths [batch]: tokens each entry has. key_mask [batch, tokens]: true where a key may be attended.
    alibi_slopes [heads]. query_ranges: (start, count) positions of q's rows, by default 0 .. tokens.
    out, lse: arrays to fill instead of new ones. kernel: run this one or raise. deterministic: same gradient bits on
    every run of a GPU. detached_mix: gradients as torchscale has them.

    Returns out, or (out, lse) with lse [batch, heads, rows] if return_lse. Rows without any key: out 0, lse -inf.
    """
    if _is_torch(q) and out is None and lse is None:
        from .torch import attention as torch_attention

        return torch_attention(
            q, k, v, pattern, causal=causal, scale=scale, output_scale=output_scale, dropout=dropout, seed=seed,
            lengths=lengths, key_mask=key_mask, alibi_slopes=alibi_slopes, query_ranges=query_ranges,
            return_lse=return_lse, kernel=kernel, deterministic=deterministic, detached_mix=detached_mix,
            allow_tf32=allow_tf32, layout=layout,
        )  # fmt: skip
    heads_first = _heads_first(layout)
    operator = compiled(
        pattern, causal, scale, output_scale, dropout, deterministic, detached_mix, allow_tf32, kernel
    )
    result = _empty_like(q) if out is None else out
    sums = _empty_lse(q, heads_first) if return_lse and lse is None else lse
    operator.forward(
        *map(_prepared, ("q", "k", "v", "out", "lse"), (q, k, v, result, sums)),
        *_call_data(lengths, key_mask, alibi_slopes), query_ranges, heads_first=heads_first,
        **_seed_arguments(q, dropout, seed), **_placement(q),
    )  # fmt: skip
    result = _as_input(result, q) if out is None else out
    if not return_lse:
        return result
    return result, (_as_input(sums, q) if lse is None else lse)


def attention_backward(
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    lse: Any,
    dout: Any,
    pattern: Pattern | str | None = None,
    *,
    dlse: Any = None,
    causal: bool = False,
    scale: float | None = None,
    output_scale: float | None = None,
    dropout: float = 0.0,
    seed: Any = None,
    lengths: Any = None,
    key_mask: Any = None,
    alibi_slopes: Any = None,
    query_ranges: Sequence[tuple[int, int]] | None = None,
    dq: Any = None,
    dk: Any = None,
    dv: Any = None,
    kernel: str | None = None,
    deterministic: bool = False,
    detached_mix: bool = False,
    allow_tf32: bool = False,
    layout: str = "bnhd",
) -> tuple[Any, Any, Any]:
    """Exact gradients (dq, dk, dv) of longspan.attention, given out and lse as it returned them and the gradient dout
    (and dlse, if lse was used). All other arguments as in the forward call; dq, dk, dv may be arrays to fill."""
    if _is_torch(q) and dq is None and dk is None and dv is None:
        from .torch import attention_backward as torch_attention_backward

        return torch_attention_backward(
            q, k, v, out, lse, dout, pattern, dlse=dlse, causal=causal, scale=scale, output_scale=output_scale,
            dropout=dropout, seed=seed, lengths=lengths, key_mask=key_mask, alibi_slopes=alibi_slopes,
            query_ranges=query_ranges, kernel=kernel, deterministic=deterministic, detached_mix=detached_mix,
            allow_tf32=allow_tf32, layout=layout,
        )  # fmt: skip
    if dropout and seed is None:
        raise InvalidArgument("seed is None with dropout: pass the seed of the forward call", "seed")
    operator = compiled(
        pattern, causal, scale, output_scale, dropout, deterministic, detached_mix, allow_tf32, kernel
    )
    given = (dq, dk, dv)
    inputs = (q, k, v)
    grads = [_empty_like(x) if grad is None else grad for grad, x in zip(given, inputs)]
    operator.backward(
        *map(_prepared, ("q", "k", "v", "out", "lse", "dout", "dlse", "dq", "dk", "dv"),
             (*inputs, out, lse, dout, dlse, *grads)),
        *_call_data(lengths, key_mask, alibi_slopes), query_ranges, heads_first=_heads_first(layout),
        **_seed_arguments(q, dropout, seed), **_placement(q),
    )  # fmt: skip
    return tuple(_as_input(grad, x) if was is None else was for grad, was, x in zip(grads, given, inputs))
