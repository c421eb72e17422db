"""longspan.attention and its gradient for NumPy arrays and anything with DLPack. No copies are made."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeVar, overload

import numpy as np

from ._arguments import DATA_NAMES, NAMES, Arguments, CallData, listed, refuse_names, check_seed
from ._diagnosis import diagnosed, only_dlpack
from ._errors import InvalidArgument, invalid, renamed
from ._longspan import Attention, BlockPattern, Pattern
from ._named import choice, flag
from ._patterns import compiled, whole_seed

__all__ = ["attention", "attention_backward"]

if TYPE_CHECKING:
    from typing_extensions import Unpack

Array = TypeVar("Array")

# The numbers of longspan::DType; a raw tensor is (address, number, DLPack device, device index, shape, strides).
BFLOAT16 = 1
CPU_DEVICE, CUDA_DEVICE = 1, 2
# Arguments of longspan.torch as they are called here.
_FROM_TORCH = {"query": "q", "key": "k", "value": "v", "grad_out": "dout"}


def is_torch(array: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(array, torch.Tensor)


def prepared(name: str, array: Any) -> Any:
    """What the compiled module takes. bfloat16 arrays (ml_dtypes) have neither buffer nor DLPack, so they go raw; torch
    tensors too, since that is faster and every version of torch can."""
    if is_torch(array):
        from .torch.operator import raw_tensor

        return raw_tensor(name, array)
    if isinstance(array, np.ndarray) and array.dtype.name == "bfloat16":
        strides = tuple(stride // array.itemsize for stride in array.strides)
        return (array.__array_interface__["data"][0], BFLOAT16, CPU_DEVICE, 0, array.shape, strides)
    return array


def call_data(lengths: Any, key_mask: Any, alibi_slopes: Any) -> list[Any]:
    """Lists and tuples become arrays; arrays stay what they are."""
    if isinstance(lengths, (list, tuple)) and not all(isinstance(length, (int, np.integer)) for length in lengths):
        raise invalid("lengths", f"is {lengths}: give whole numbers")
    data = (("lengths", lengths, np.int64), ("key_mask", key_mask, bool), ("alibi_slopes", alibi_slopes, np.float32))
    return [_as_array(name, array, dtype) for name, array, dtype in data]


def _as_array(name: str, array: Any, dtype: Any) -> Any:
    if not isinstance(array, (list, tuple)):
        return prepared(name, array)
    try:
        return np.asarray(array, dtype=dtype)
    except (TypeError, ValueError, OverflowError):
        raise invalid(name, f"is {array!r}: give a list of numbers") from None


def _seed_arguments(q: Any, dropout: float, seed: Any) -> dict[str, int]:
    """What decides which pairs are dropped: the caller's seed, for torch tensors one of torch's generator instead."""
    if not dropout:
        return {}
    if is_torch(q):
        from .torch.operator import call_seed, seed_arguments

        value, pointer = seed_arguments(q, call_seed(q, seed))
        return {"seed": value, "seed_pointer": pointer}
    if seed is None:
        raise invalid(
            "seed",
            f"is None with dropout {dropout}: give a whole number, another one for each call, and for "
            "attention_backward that of its forward",
        )
    return {"seed": whole_seed(seed) % 2**64}


def _heads_first(layout: str) -> bool:
    return choice("layout", layout, ("bnhd", "bhnd")) == "bhnd"


def _on_gpu(array: Any) -> bool:
    device = getattr(array, "__dlpack_device__", None)
    return device is not None and device()[0] == CUDA_DEVICE


def _library(array: Any) -> Any:
    """The package that an array comes from, where outputs are made by the same."""
    return sys.modules.get(type(array).__module__.partition(".")[0])


def new_array(array: Any, shape: Sequence[int], dtype: Any) -> Any:
    """An output where an input is: by torch or CuPy on a GPU, by NumPy on the host."""
    if is_torch(array):
        return array.new_empty(shape, dtype=dtype)
    if not _on_gpu(array):
        return np.empty(tuple(shape), np.dtype(dtype))
    library = _library(array)
    if not hasattr(library, "cuda") or not hasattr(library, "empty"):
        raise invalid(
            "q",
            f"is a {type(array).__name__} on a GPU, whose outputs cannot be made here: pass out= (and lse=), or CuPy "
            "or torch arrays (torch.from_dlpack takes this one without a copy)",
        )
    with library.cuda.Device(array.__dlpack_device__()[1]):
        return library.empty(tuple(shape), dtype=dtype)


def placement(array: Any) -> dict[str, Any]:
    """Where a call runs on a GPU: the current stream of the array's package; of packages without one the default
    stream, on which DLPack arrays are ready."""
    if is_torch(array):
        from .torch import operator

        return operator.placement(array)
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
    if is_torch(q):
        dtype = q.dtype if wide else sys.modules["torch"].float32
    else:
        dtype = np.float64 if wide else np.float32
    if len(q.shape) != 4:
        return np.empty((0, 0, 0), np.float32)  # q itself is refused a moment later, by name
    batch, first, second, _ = q.shape
    rows, heads = (second, first) if heads_first else (first, second)
    return new_array(q, (batch, heads, rows), dtype)


def rows_of(array: Any) -> Any:
    """A torch tensor whose head dimension is contiguous; of other packages the array as it is."""
    if not is_torch(array) or array.dim() != 4:
        return array
    from .torch.operator import with_contiguous_rows

    return with_contiguous_rows(array)


def check_arrays(heads_first: bool, bare: Sequence[str] = (), **arrays: Any) -> None:
    """What calls look at before the library does. bare: those of which the library reads what only DLPack tells."""
    for name, array in arrays.items():
        shape, on_meta = getattr(array, "shape", None), getattr(array, "is_meta", False)
        if isinstance(shape, tuple) and len(shape) == 4 and hasattr(array, "dtype") and not on_meta:
            continue
        if only_dlpack(array) and name not in bare:
            text = "has no shape that could be read: give an array that has, or arrays to fill for what is returned"
            raise invalid(name, f"{text}")
        if not only_dlpack(array) and (shape is None or len(shape) != 4 or not hasattr(array, "dtype") or on_meta):
            error = InvalidArgument("arrays have 4 dimensions")
            raise diagnosed(error, arrays, heads_first, required=tuple(arrays))


def _made_call(
    function: str, q: Any, pattern: Any, heads_first: bool, arguments: Any
) -> tuple[Attention, tuple[Any, ...], dict[str, Any]]:
    """The operator, what follows its arrays, and keywords of both passes."""
    if not NAMES.issuperset(arguments):
        refuse_names(function, arguments)
    options = {name: value for name, value in arguments.items() if name not in DATA_NAMES}
    operator = compiled(pattern, **options)
    given = CallData(**{name: value for name, value in arguments.items() if name in DATA_NAMES})
    data = (*call_data(given.lengths, given.key_mask, given.alibi_slopes), given.query_ranges)
    seed = _seed_arguments(q, options.get("dropout", 0.0), given.seed)
    return operator, data, {"heads_first": heads_first, **seed, **placement(q)}


@overload
def attention(
    q: Array, k: Array, v: Array, pattern: Pattern | BlockPattern | str | None = ..., *,
    return_lse: Literal[False] = ..., out: Any = ..., lse: Any = ..., layout: str = ..., **arguments: Unpack[Arguments],
) -> Array: ...
@overload
def attention(
    q: Array, k: Array, v: Array, pattern: Pattern | BlockPattern | str | None = ..., *,
    return_lse: Literal[True], out: Any = ..., lse: Any = ..., layout: str = ..., **arguments: Unpack[Arguments],
) -> tuple[Array, Array]: ...
@overload
def attention(
    q: Array, k: Array, v: Array, pattern: Pattern | BlockPattern | str | None = ..., *,
    return_lse: bool, out: Any = ..., lse: Any = ..., layout: str = ..., **arguments: Unpack[Arguments],
) -> Array | tuple[Array, Array]: ...
@listed
def attention(q, k, v, pattern=None, *, return_lse=False, out=None, lse=None, layout="bnhd", **arguments):
    """Attention of q over k and v along a pattern (None: dense, a longspan.Pattern, a BlockPattern, or its text).

    q is [batch, rows, heads, head_dim], k and v [batch, tokens, kv_heads, head_dim] ('bhnd': heads before rows);
    float32, bfloat16, float16 or float64. The last dimension must be contiguous (torch tensors are copied where it is
    not), all other strides are free. out, lse: arrays to fill instead of new ones.

    Returns out, or (out, lse) with lse [batch, heads, rows] if return_lse. Rows without any key: out 0, lse -inf.
    """
    arrays = {"q": q, "k": k, "v": v}
    if is_torch(q) and out is None and lse is None:
        from .torch import attention as torch_attention

        try:
            return torch_attention(q, k, v, pattern, return_lse=return_lse, layout=layout, **arguments)
        except InvalidArgument as error:
            raise renamed(error, _FROM_TORCH) from None
    heads_first, return_lse = _heads_first(layout), flag("return_lse", return_lse)
    made = out is None or (return_lse and lse is None)  # like q
    check_arrays(heads_first, ("k", "v") if made else ("q", "k", "v"), **arrays)
    operator, data, keywords = _made_call("attention", q, pattern, heads_first, arguments)
    result = new_array(q, q.shape, q.dtype) if out is None else out
    sums = _empty_lse(q, heads_first) if return_lse and lse is None else lse
    inputs = [rows_of(x) for x in (q, k, v)]  # kept alive: what is prepared is an address
    try:
        operator.forward(
            *map(prepared, ("q", "k", "v", "out", "lse"), (*inputs, result, sums)),
            *data, **keywords,
        )  # fmt: skip
    except InvalidArgument as error:
        raise diagnosed(error, {**arrays, "out": out, "lse": lse, **arguments}, heads_first) from None
    result = _as_input(result, q) if out is None else out
    if not return_lse:
        return result
    return result, (_as_input(sums, q) if lse is None else lse)


@listed
def attention_backward(
    q: Array, k: Array, v: Array, out: Array, lse: Array, dout: Array,
    pattern: Pattern | BlockPattern | str | None = None, *, dlse: Any = None, dq: Any = None, dk: Any = None,
    dv: Any = None, layout: str = "bnhd", **arguments: Unpack[Arguments],
) -> tuple[Array, Array, Array]:  # fmt: skip
    """Exact gradients (dq, dk, dv) of longspan.attention, given out and lse as it returned them and the gradient dout
    (and dlse, if lse was used). All other arguments as in the forward call; dq, dk, dv may be arrays to fill."""
    if is_torch(q) and dq is None and dk is None and dv is None:
        from .torch import attention_backward as torch_attention_backward

        try:
            tensors: Any = (q, k, v, out, lse, dout)
            return torch_attention_backward(*tensors, pattern, dlse=dlse, layout=layout, **arguments)  # type: ignore
        except InvalidArgument as error:
            raise renamed(error, _FROM_TORCH) from None
    check_seed(arguments)
    heads_first = _heads_first(layout)
    arrays = {"q": q, "k": k, "v": v, "out": out, "dout": dout}
    filled = [name for name, grad in (("q", dq), ("k", dk), ("v", dv)) if grad is not None]
    check_arrays(heads_first, ("out", "dout", *filled), **arrays)
    operator, data, keywords = _made_call("attention_backward", q, pattern, heads_first, arguments)
    given = {"dq": dq, "dk": dk, "dv": dv}
    inputs: Any = (q, k, v)
    grads = [new_array(x, x.shape, x.dtype) if grad is None else grad for grad, x in zip(given.values(), inputs)]
    names = ("q", "k", "v", "out", "lse", "dout", "dlse", "dq", "dk", "dv")
    q_rows, k_rows, v_rows, out_rows, dout_rows = (rows_of(x) for x in (*inputs, out, dout))
    try:
        operator.backward(
            *map(prepared, names, (q_rows, k_rows, v_rows, out_rows, lse, dout_rows, dlse, *grads)),
            *data, **keywords,
        )  # fmt: skip
    except InvalidArgument as error:
        raise diagnosed(error, {**arrays, "lse": lse, "dlse": dlse, **given, **arguments}, heads_first) from None
    dq, dk, dv = (_as_input(grad, x) if was is None else was for grad, was, x in zip(grads, given.values(), inputs))
    return dq, dk, dv
