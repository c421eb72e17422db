"""The operator registered with torch.library: longspan::attention and longspan::attention_backward.

Tensors are [batch, rows, heads, head_dim] in any strides; the pattern travels as its canonical text, so that graphs can
be compiled, exported and pickled. Dropout takes its seed as a tensor, drawn inside the graph from torch's generator.

The dispatcher costs 20 to 150 microseconds for an operator written in Python, so plain tensors in plain eager mode go
past it, to the same functions; everything that must see the operator (compile, export, modes, autocast, ...) does. What
stands between a call and its kernel is compiled (TorchCalls) where torch has DLPack's C exchange API, else below.

CUDA tensors run on torch's current stream, with workspace from torch's allocator: so graphs can be captured and
replayed, and torch's memory statistics count everything.
"""

from __future__ import annotations

import enum
import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, overload

import torch
from torch import Tensor

from .._arguments import DATA_NAMES, NO_DATA, OPTION_NAMES, SCHEMA
from .._arguments import Arguments, CallData, Settings, check_seed, listed, refuse_names
from .._diagnosis import diagnosed
from .._errors import InvalidArgument, Unsupported, invalid
from .._longspan import Attention, BlockPattern, CacheMemory, Pattern, TorchCalls
from .._named import choice, flag, is_number, refused
from .._patterns import as_pattern, cached, compiled, whole_seed

if TYPE_CHECKING:
    from typing_extensions import Unpack

library = torch.library.Library("longspan", "DEF")
library.define(f"attention(Tensor query, Tensor key, Tensor value, {SCHEMA}) -> (Tensor, Tensor)")
library.define(
    "attention_backward(Tensor grad_out, Tensor? grad_lse, Tensor query, Tensor key, Tensor value, Tensor out, "
    f"Tensor lse, {SCHEMA}) -> (Tensor, Tensor, Tensor)"
)

for _class in (Pattern, BlockPattern):  # values to the compiler, which formats and compares them while it traces
    getattr(torch.utils._pytree, "register_constant", lambda kind: None)(_class)

_forward_op = torch.ops.longspan.attention.default
_backward_op = torch.ops.longspan.attention_backward.default

# The words of C++ messages as the arguments of this module are called.
_NAMES = {
    "q": "query", "k": "key", "v": "value", "dout": "grad_out", "dlse": "grad_lse",
    "f32": "float32", "bf16": "bfloat16", "f16": "float16", "f64": "float64",
}  # fmt: skip
# The numbers of longspan::DType.
_DTYPES = {
    torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.float64: 3, torch.int32: 4, torch.int64: 5,
    torch.bool: 6,
}  # fmt: skip
_CPU, _CUDA = 1, 2  # DLPack's device types


def _dtype_number(name: str, tensor: Tensor) -> int:
    number = _DTYPES.get(tensor.dtype)
    if number is None:
        raise invalid(
            name,
            f"has dtype {str(tensor.dtype).removeprefix('torch.')}: attention runs on float32, bfloat16, "
            "float16 and float64 (bool for key_mask, int32 or int64 for lengths)",
        )
    return number


def raw_tensor(name: str, tensor: Tensor) -> tuple:
    """What the compiled module takes without the cost of a DLPack capsule."""
    dtype = _dtype_number(name, tensor)
    check_dense(name, tensor)
    if tensor.is_cpu:
        return (tensor.data_ptr(), dtype, _CPU, 0, tensor.shape, tensor.stride())
    if tensor.is_cuda:
        return (tensor.data_ptr(), dtype, _CUDA, tensor.device.index, tensor.shape, tensor.stride())
    raise Unsupported(f"{name} is on {tensor.device}: Longspan runs on cpu and cuda")


def _raw(**tensors: Tensor | None) -> list[tuple | None]:
    return [None if tensor is None else raw_tensor(name, tensor) for name, tensor in tensors.items()]


_STRIDED = torch.strided


def check_dense(name: str, tensor: Tensor) -> None:
    if tensor.layout is not _STRIDED:
        raise invalid(name, f"is a tensor of layout {tensor.layout}: give a dense one")


def _check_data(name: str, tensor: Tensor, query: Tensor) -> None:
    check_dense(name, tensor)
    if tensor.is_meta and not query.is_meta:
        raise invalid(name, f"is on meta, query is on {query.device}: move them to one device")


def with_contiguous_rows(tensor: Tensor) -> Tensor:
    """The tensor, or a copy of it where its head dimension is not contiguous, as kernels need it."""
    return tensor if tensor.shape[-1] <= 1 or tensor.stride(-1) == 1 else tensor.contiguous()


def _pairs(ranges: Sequence[int] | None) -> list[tuple[int, int]] | None:
    return None if ranges is None else list(zip(ranges[::2], ranges[1::2]))


# Five times faster than making a Stream object; private, so it may be missing.
_current_stream = getattr(
    torch._C, "_cuda_getCurrentRawStream", lambda index: torch.cuda.current_stream(index).cuda_stream
)


def placement(tensor: Tensor) -> dict[str, Any]:
    """Stream and allocator of a call: torch's own for CUDA tensors. Memory goes back to torch when the call returns;
    torch lends it again to later work of the same stream only."""
    if not tensor.is_cuda:
        return {}
    device = tensor.device
    memory = []

    def allocate(count: int) -> int:
        memory.append(torch.empty(count, dtype=torch.uint8, device=device))
        return memory[0].data_ptr()

    return {"stream": _current_stream(device.index), "allocate": allocate}


def seed_arguments(query: Tensor, seed: Tensor | None) -> tuple[int, int]:
    """(value, 0) where the host knows the seed; (0, address) where the GPU reads it when the kernel runs."""
    if seed is None:
        return 0, 0
    if seed.dtype is not torch.int64 or seed.numel() != 1:
        raise invalid("seed", f"is a tensor of {seed.numel()} {str(seed.dtype).removeprefix('torch.')}: give one int64")
    if not (seed.is_cuda and query.is_cuda):
        return int(seed) & 0xFFFF_FFFF_FFFF_FFFF, 0
    if seed.device != query.device:
        raise invalid("seed", f"is on {seed.device}, query is on {query.device}: move them to one device")
    return 0, seed.data_ptr()


def _check_capture(query: Tensor, lengths: Tensor | None) -> None:
    """A replay finds on the GPU what was there at the capture; what the host lent then may be gone."""
    if lengths is None or lengths.is_cuda or not query.is_cuda:
        return
    with torch.cuda.device(query.device):  # where the call runs, whichever device is current
        capturing = torch.cuda.is_current_stream_capturing()
    if capturing:
        raise invalid("lengths", "is on the host inside a graph capture: move it to the GPU, where replays can read it")


def _empty_lse(query: Tensor) -> Tensor:
    batch, rows, heads, _ = query.shape
    return query.new_empty((batch, heads, rows), dtype=torch.float64 if query.dtype is torch.float64 else torch.float32)


_empty_like = functools.partial(torch.empty_like, memory_format=torch.contiguous_format)


def _check_shapes(**tensors: Tensor) -> None:
    for name, tensor in tensors.items():
        if tensor.dim() != 4:
            raise invalid(name, f"has {tensor.dim()} dimensions: {name} is [batch, tokens, heads, head_dim]")
        _dtype_number(name, tensor)


def _arguments(query: Tensor, data: CallData) -> tuple:
    """A call's data as compiled calls take it, after everything else."""
    if data is NO_DATA:
        return ()
    _check_capture(query, data.lengths)
    ranges, seed = _pairs(data.query_ranges), seed_arguments(query, data.seed)
    return (data.lengths, data.key_mask, data.alibi_slopes, ranges, *seed)


# Whether something beside plain eager execution wants to see operators. Private names, so each may be missing: then
# every call goes through the dispatcher.
_observers = tuple(
    getattr(torch._C, name, lambda: True)
    for name in ("_len_torch_dispatch_stack", "_are_functorch_transforms_active", "_get_tracing_state")
) + (getattr(torch.autograd, "_profiler_enabled", lambda: True),)
_PLAIN_TYPES = (Tensor, torch.nn.Parameter)
_has_storage = getattr(torch._C, "_has_storage", lambda tensor: True)  # batches of gradients have none


class Route(enum.IntEnum):
    """How a call runs."""

    DISPATCHER = 0
    DIRECT = 1
    RECORDING = 2  # past the dispatcher, with gradients to record


_DISPATCHER, _DIRECT, _RECORDING = map(int, Route)  # members are slow to look up and compare


class _RawCalls:
    """TorchCalls in Python, for torch without the exchange API."""

    @staticmethod
    def route(query: Tensor, key: Tensor, value: Tensor) -> int:
        for tensor in (query, key, value):
            if type(tensor) not in _PLAIN_TYPES or not (tensor.is_cpu or tensor.is_cuda) or not _has_storage(tensor):
                return _DISPATCHER
        if torch.is_autocast_enabled(query.device.type) or any(observes() for observes in _observers):
            return _DISPATCHER
        records = torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad)
        return _RECORDING if records else _DIRECT

    @staticmethod
    def forward(operator, query, key, value, with_lse, lengths=None, key_mask=None, alibi_slopes=None, *rest):
        query, key, value = map(with_contiguous_rows, (query, key, value))
        out, lse = _empty_like(query), _empty_lse(query) if with_lse else None
        operator.forward(
            *_raw(query=query, key=key, value=value, out=out, lse=lse),
            *_raw(lengths=lengths, key_mask=key_mask, alibi_slopes=alibi_slopes), *rest, **placement(query),
        )  # fmt: skip
        return out, lse

    @staticmethod
    def backward(operator, grad_out, grad_lse, query, key, value, *rest):
        grads = tuple(map(_empty_like, (query, key, value)))
        _backward_into(grads, operator, grad_out, grad_lse, query, key, value, *rest)
        return grads


def _backward_into(
    grads, operator, grad_out, grad_lse, query, key, value, out, lse, lengths=None, key_mask=None, alibi_slopes=None, *rest
) -> None:
    # Autograd hands over expanded scalars as grad_out, for example from sum().
    query, key, value, out, grad_out = map(with_contiguous_rows, (query, key, value, out, grad_out))
    operator.backward(
        *_raw(query=query, key=key, value=value, out=out, lse=lse, grad_out=grad_out, grad_lse=grad_lse),
        *_raw(**dict(zip(("dq", "dk", "dv"), grads))),
        *_raw(lengths=lengths, key_mask=key_mask, alibi_slopes=alibi_slopes), *rest, **placement(query),
    )  # fmt: skip


def _make_calls() -> Any:
    exchange = getattr(Tensor, "__dlpack_c_exchange_api__", None)
    if exchange is None:
        return _RawCalls
    try:
        return TorchCalls(
            exchange=exchange, types=_PLAIN_TYPES, observers=_observers, autocast_enabled=torch.is_autocast_enabled,
            grad_enabled=torch.is_grad_enabled, empty_like=torch.empty_like, contiguous_empty_like=_empty_like,
            empty_f32=functools.partial(Tensor.new_empty, dtype=torch.float32),
            empty_f64=functools.partial(Tensor.new_empty, dtype=torch.float64),
        )  # fmt: skip
    except Unsupported:
        return _RawCalls


_calls = _make_calls()


def run_forward(query, key, value, *settings):
    settings = Settings(*settings)
    try:
        _check_shapes(query=query, key=key, value=value)
        operator = compiled(settings.pattern, **settings.options)
        return _calls.forward(operator, query, key, value, True, *_arguments(query, settings.data))
    except InvalidArgument as error:
        raise explained(error, settings._asdict(), query=query, key=key, value=value) from None


def run_backward(grad_out, grad_lse, query, key, value, out, lse, *settings, into=None):
    """into: where the gradients go, in any strides; without it they are new."""
    settings = Settings(*settings)
    try:
        _check_shapes(query=query, key=key, value=value, out=out, grad_out=grad_out)
        operator = compiled(settings.pattern, **settings.options)
        call = (operator, grad_out, grad_lse, query, key, value, out, lse, *_arguments(query, settings.data))
        return _calls.backward(*call) if into is None else _backward_into(into, *call)
    except InvalidArgument as error:
        tensors = dict(query=query, key=key, value=value, out=out, lse=lse, grad_out=grad_out, grad_lse=grad_lse)
        raise explained(error, settings._asdict(), **tensors) from None


def _fake_forward(query, key, value, *settings):
    _check_shapes(query=query, key=key, value=value)
    return _empty_like(query), _empty_lse(query)


def _fake_backward(grad_out, grad_lse, query, key, value, *rest):
    return _empty_like(query), _empty_like(key), _empty_like(value)


def _setup_context(ctx, inputs, output) -> None:
    ctx.settings, tensors = Settings(*inputs[3:]).split()
    ctx.save_for_backward(*inputs[:3], *output, *tensors)
    ctx.set_materialize_grads(False)


def _differentiate(ctx, grad_out, grad_lse):
    query, key, value, out, lse, *tensors = ctx.saved_tensors
    nothing = (None,) * len(ctx.settings)
    if grad_out is None:
        if grad_lse is None:
            return (None, None, None, *nothing)
        grad_out = torch.zeros_like(out)
    settings = ctx.settings.joined(tensors)
    return *_backward_op(grad_out, grad_lse, query, key, value, out, lse, *settings), *nothing


def refuse_second_derivative(ctx, *grads):
    raise Unsupported("longspan::attention has first derivatives only: call backward without create_graph")


def _autocast(device_type: str):
    """Under autocast query, key and value take its dtype; slopes stay float32."""

    def cast(query, key, value, *settings):
        dtype = torch.get_autocast_dtype(device_type)
        with torch.autocast(device_type, enabled=False):
            query, key, value = (
                x.to(dtype) if x.is_floating_point() and x.dtype is not torch.float64 else x
                for x in (query, key, value)
            )
            return _forward_op(query, key, value, *settings)

    return cast


for _device in ("CPU", "CUDA"):
    library.impl("attention", run_forward, _device)
    library.impl("attention_backward", run_backward, _device)
    library.impl("attention", _autocast(_device.lower()), f"Autocast{_device}")
torch.library.register_fake("longspan::attention", _fake_forward, lib=library)
torch.library.register_fake("longspan::attention_backward", _fake_backward, lib=library)
torch.library.register_autograd("longspan::attention", _differentiate, setup_context=_setup_context, lib=library)
torch.library.register_autograd("longspan::attention_backward", refuse_second_derivative, lib=library)


class _Eager(torch.autograd.Function):
    """The operator's own functions without the dispatcher. (A separate setup_context would cost another 100 us.)"""

    @staticmethod
    def forward(ctx, query, key, value, operator, data, with_lse):
        out, lse = _calls.forward(operator, query, key, value, True, *_arguments(query, data))
        ctx.save_for_backward(query, key, value, out, lse, *(() if data is NO_DATA else data.tensors))
        ctx.call = (operator, data.query_ranges)
        ctx.set_materialize_grads(False)
        return (out, lse) if with_lse else out

    @staticmethod
    def backward(ctx, grad_out, grad_lse=None):
        query, key, value, out, lse, *tensors = ctx.saved_tensors
        operator, ranges = ctx.call
        data = CallData(*tensors, ranges) if tensors else NO_DATA
        if grad_out is None:
            if grad_lse is None:
                return (None,) * 6
            grad_out = torch.zeros_like(out)
        # What observes may come with the backward alone, and with create_graph the registered operator refuses.
        if torch.is_grad_enabled() or torch.compiler.is_compiling() or _calls.route(grad_out, query, value) != _DIRECT:
            settings = Settings.of(operator, data)
            return *_backward_op(grad_out, grad_lse, query, key, value, out, lse, *settings), None, None, None
        grads = _calls.backward(operator, grad_out, grad_lse, query, key, value, out, lse, *_arguments(query, data))
        return *grads, None, None, None


# Function.apply looks for functorch's wrappers and for setup_context first, which costs as much as the rest of it.
_record = super(torch.autograd.Function, _Eager).apply


def _text(pattern: Pattern | BlockPattern | str | None) -> str:
    if isinstance(pattern, str):
        return pattern
    return str(pattern if isinstance(pattern, (Pattern, BlockPattern)) else as_pattern(pattern))


def _as_tensor(name: str, value: Any, dtype: torch.dtype, query: Tensor) -> Tensor:
    """Lists and tuples become tensors, but numbers of another kind are not rounded in silence."""
    if isinstance(value, Tensor):
        if value.layout is not _STRIDED or value.is_meta:
            _check_data(name, value, query)
        return value
    if not isinstance(value, (list, tuple)):
        raise invalid(name, f"is {type(value).__name__}: give a torch tensor or a list")
    try:
        result = torch.tensor(value)
    except (TypeError, ValueError, RuntimeError):
        raise invalid(name, f"is {value!r}: give a list of numbers") from None
    if result.is_floating_point() and not dtype.is_floating_point and result.numel() > 0:
        raise invalid(name, f"is {value}: give whole numbers")
    return result.to(dtype)


def call_seed(query: Tensor, seed: Any) -> Tensor:
    """A seed as the schema has it; without one a draw from torch's generator, so that torch.manual_seed governs it."""
    if seed is None:
        return torch.randint(0x7FFF_FFFF_FFFF_FFFF, (), dtype=torch.int64, device=query.device)
    if isinstance(seed, Tensor):
        _check_data("seed", seed, query)
        return seed
    seed = whole_seed(seed)  # the host hands it over by value
    return torch.tensor(seed - 2**64 if seed >= 2**63 else seed, dtype=torch.int64)


def _flat(query_ranges: Any) -> list[int]:
    try:
        flat = [number for start, count in query_ranges for number in (start, count)]
    except (TypeError, ValueError):
        flat = [None]
    if not all(isinstance(number, (int, torch.SymInt)) for number in flat):
        raise invalid("query_ranges", f"is {query_ranges!r}: give a list of pairs of whole numbers (start, count)")
    return flat


def call_data(
    query: Tensor, dropout, seed=None, lengths=None, key_mask=None, alibi_slopes=None, query_ranges=None
) -> CallData:
    """The data of a call as the schema has it."""
    return CallData(
        call_seed(query, seed) if dropout else None,
        None if lengths is None else _as_tensor("lengths", lengths, torch.int64, query),
        None if key_mask is None else _as_tensor("key_mask", key_mask, torch.bool, query),
        None if alibi_slopes is None else _as_tensor("alibi_slopes", alibi_slopes, torch.float32, query),
        None if query_ranges is None else _flat(query_ranges),
    )  # fmt: skip


_BNHD = "bnhd"
_CALL_NAMES = DATA_NAMES | {"dropout"}


def _separated(query: Tensor, arguments: Any) -> tuple[dict[str, Any], CallData]:
    """What is fixed for an operator, and the data of a call."""
    options = {name: value for name, value in arguments.items() if name not in DATA_NAMES}
    dropout = options.get("dropout", 0.0)
    if dropout.__class__ is not float and not is_number(dropout):
        raise refused("dropout", dropout, "a number")
    data = {name: value for name, value in arguments.items() if name in DATA_NAMES and name != "seed" and value is not None}
    if not dropout and not data:
        return options, NO_DATA
    return options, call_data(query, dropout, arguments.get("seed"), **data)


def _settings(function: str, query: Tensor, pattern: Any, arguments: Any) -> Settings:
    refuse_names(function, arguments)
    options, data = _separated(query, arguments)
    if not torch.compiler.is_compiling():
        return Settings.of(compiled(pattern, **options), data)  # refused by name, where a schema has words of torch's
    if options.get("kernel", "") is None:
        options = {**options, "kernel": ""}
    return Settings(_text(pattern), **options, **data._asdict())


def check_tensors(**tensors: Any) -> None:
    """That all are dense tensors, where the first is."""
    first = None
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor):
            raise refused(name, tensor, "a torch tensor")
        check_dense(name, tensor)
        if first is None:
            first, place = name, tensor.device
        elif tensor.device != place:
            raise invalid(name, f"is on {tensor.device}, {first} is on {place}: move them to one device")


def explained(
    error: Exception, arguments: Any, function: str = "attention", layout: str = "bnhd", **tensors: Any
) -> Exception:
    """The error in the caller's words: his arguments, his shapes."""
    if isinstance(error, TypeError):
        refuse_names(function, arguments, ("pattern",))
        if "unhashable" in str(error):
            try:
                options = {name: arguments[name] for name in OPTION_NAMES if name in arguments}
                compiled(arguments.get("pattern"), **options)
            except InvalidArgument as named:
                return named
    return diagnosed(error, {**tensors, **arguments}, layout == "bhnd")


def _heads_first(layout: Any, function: Any, tensors: dict[str, Any], *rest: Any, **arguments: Any) -> Any:
    """The function on views with rows before heads."""
    if any(not isinstance(x, Tensor) or x.dim() != 4 for x in tensors.values()):
        raise explained(InvalidArgument("tensors have 4 dimensions"), {}, layout=layout, **tensors)
    views = {name: x.transpose(1, 2) if name != "lse" else x for name, x in tensors.items()}
    if torch.compiler.is_compiling():
        return function(*views.values(), *rest, **arguments)
    try:
        return function(*views.values(), *rest, **arguments)
    except InvalidArgument as error:
        raise explained(error, arguments, layout=layout, **tensors) from None


@overload
def attention(
    query: Tensor, key: Tensor, value: Tensor, pattern: Pattern | BlockPattern | str | None = ..., *,
    return_lse: Literal[False] = ..., layout: str = ..., **arguments: Unpack[Arguments],
) -> Tensor: ...
@overload
def attention(
    query: Tensor, key: Tensor, value: Tensor, pattern: Pattern | BlockPattern | str | None = ..., *,
    return_lse: Literal[True], layout: str = ..., **arguments: Unpack[Arguments],
) -> tuple[Tensor, Tensor]: ...
@overload
def attention(
    query: Tensor, key: Tensor, value: Tensor, pattern: Pattern | BlockPattern | str | None = ..., *,
    return_lse: bool, layout: str = ..., **arguments: Unpack[Arguments],
) -> Tensor | tuple[Tensor, Tensor]: ...
@listed
def attention(query, key, value, pattern=None, *, return_lse=False, layout=_BNHD, **arguments):
    """longspan.attention for torch tensors, with gradients; see there for the arguments. Without a seed, dropout draws
    one from torch's generator, so that torch.manual_seed governs it."""
    if layout is not _BNHD and choice("layout", layout, ("bnhd", "bhnd")) != "bnhd":
        tensors = {"query": query, "key": key, "value": value}
        result = _heads_first(layout, attention, tensors, pattern, return_lse=return_lse, **arguments)
        return (result[0].transpose(1, 2), result[1]) if return_lse else result.transpose(1, 2)
    if return_lse is not False and return_lse is not True:
        return_lse = flag("return_lse", return_lse)
    route = _DISPATCHER if torch.compiler.is_compiling() else _calls.route(query, key, value)
    if route == _DISPATCHER:
        check_tensors(query=query, key=key, value=value)
        result = _forward_op(query, key, value, *_settings("attention", query, pattern, arguments))
        return result if return_lse else result[0]
    try:
        options, data = arguments, NO_DATA
        if not _CALL_NAMES.isdisjoint(arguments):
            options, data = _separated(query, arguments)
        operator = cached(pattern, **options)
        if route == _RECORDING:
            return _record(query, key, value, operator, data, return_lse)
        out, lse = _calls.forward(operator, query, key, value, return_lse, *_arguments(query, data))
    except (InvalidArgument, TypeError) as error:
        raise explained(error, {**arguments, "pattern": pattern}, query=query, key=key, value=value) from None
    return (out, lse) if return_lse else out


def memory_of_cache(rows: Tensor, counts: Tensor, strands: Tensor) -> CacheMemory:
    """rows [2, entries, branches, heads, rows, columns], counts [2, entries, branches, heads], strands [3, branches, heads];
    the memory does not keep them."""
    device = rows.device.index if rows.is_cuda else -1
    addresses = (rows.data_ptr(), counts.data_ptr(), counts[1].data_ptr(), strands.data_ptr())
    return CacheMemory(*addresses, rows.shape[1:], _dtype_number("key", rows), device)


def step_of_cache(
    operator: Attention, memory: CacheMemory, query: Any, key: Any, value: Any, with_lse: bool
) -> tuple[Tensor, Tensor | None] | None:
    """A token of a cache in one call: its rows for each branch, and their lse. None, and nothing done, where the tensors
    are not the next token's or the operator has to be seen."""
    if torch.compiler.is_compiling() or _calls is _RawCalls:
        return None
    return _calls.step(operator, memory, query, key, value, with_lse)


def append_to_cache(memory: CacheMemory, key: Tensor, value: Tensor) -> None:
    """The same without a query."""
    key, value = with_contiguous_rows(key), with_contiguous_rows(value)
    memory.append(raw_tensor("key", key), raw_tensor("value", value), placement(key).get("stream", 0))


def attention_of_first_rows(
    operator: Attention, query: Tensor, key: Tensor, value: Tensor, lengths: Tensor, with_lse: bool
) -> Tensor | tuple[Tensor, Tensor]:
    """attention of one row for each batch entry, at position 0, without what the host does for arguments that vary."""
    if not torch.compiler.is_compiling() and _calls.route(query, key, value) == _DIRECT:
        try:
            out, lse = _calls.forward(operator, query, key, value, with_lse, lengths, None, None, [(0, 1)])
            return (out, lse) if with_lse else out
        except InvalidArgument:
            pass  # said again below in the caller's words
    out, lse = _forward_op(query, key, value, *Settings.of(operator, CallData(lengths=lengths, query_ranges=[0, 1])))
    return (out, lse) if with_lse else out


@listed
def attention_backward(
    query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, grad_out: Tensor,
    pattern: Pattern | BlockPattern | str | None = None, *, dlse: Tensor | None = None, layout: str = _BNHD,
    **arguments: Unpack[Arguments],
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of attention for query, key and value without autograd; for those who keep out and lse themselves."""
    if layout is not _BNHD and choice("layout", layout, ("bnhd", "bhnd")) != "bnhd":
        tensors = {"query": query, "key": key, "value": value, "out": out, "lse": lse, "grad_out": grad_out}
        grads = _heads_first(layout, attention_backward, tensors, pattern, dlse=dlse, **arguments)
        return tuple(x.transpose(1, 2) for x in grads)  # type: ignore[return-value]
    check_seed(arguments)
    check_tensors(query=query, key=key, value=value, out=out, lse=lse, grad_out=grad_out)
    if dlse is not None:
        check_tensors(query=query, dlse=dlse)
    settings = _settings("attention_backward", query, pattern, arguments)
    with torch.no_grad():
        return _backward_op(grad_out, dlse, query, key, value, out, lse, *settings)
