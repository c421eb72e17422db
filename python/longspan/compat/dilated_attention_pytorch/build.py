"""Classes of the fork from the table's rows: a constructor with its arguments, a forward with its names and return form."""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable, Mapping
from dataclasses import asdict, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ... import host_memory, plan_cache
from ... import torch as longspan_torch
from ..._errors import CommError, InvalidArgument, invalid, warn_once
from ...torch.multihead import _Multihead
from .caches import get_global_memory_pool
from .functions import get_flash_attention_support
from .table import ARGUMENTS, Ignored, Refused, Row
from .validation import ValidationMixin

logger = logging.getLogger("longspan.memory")

#: q, k, v, as some of the fork's classes call them.
_LONG = {"q": "query", "k": "key", "v": "value"}

#: Query rows of the first attempt after a call that ran out of memory; halved until it fits, down to the last.
_FIRST_CHUNK, _LAST_CHUNK = 1 << 16, 1 << 10


def parameters_of_ours(row: Row) -> set[str]:
    """Names that our constructor takes; one that hands the rest on takes its base's, too."""
    names: set[str] = set()
    for kind in getattr(longspan_torch, row.ours).__mro__:
        parameters = inspect.signature(kind.__init__).parameters
        names |= set(parameters)
        if all(one.kind is not inspect.Parameter.VAR_KEYWORD for one in parameters.values()):
            return names
    return names


def in_query_chunks(call: Callable[[list[tuple[int, int]]], Tensor], rows: int) -> Tensor:
    """The rows of `call` in chunks that fit into memory; each has the bits of one call over all."""
    chunk = min(_FIRST_CHUNK, -(-rows // 2))
    while True:
        try:
            return torch.cat([call([(at, min(chunk, rows - at))]) for at in range(0, rows, chunk)], 1)
        except (MemoryError, torch.OutOfMemoryError):
            if chunk <= _LAST_CHUNK:
                raise
            chunk //= 2
            _give_back_memory()


def _give_back_memory() -> None:
    host_memory.trim()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


class Compatible:
    """What all classes of the fork have here: its argument names in forward, its methods, and options that act."""

    embed_dim: int
    _recompute = _recovers = _logs = False
    _half: torch.dtype | None = None
    _returns = ""
    recoveries = 0

    # ---- forward
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        kwargs = {_LONG.get(name, name): value for name, value in kwargs.items()}
        first = args[0] if args else kwargs.get("query")
        if not torch.compiler.is_compiling():
            self._check_shapes([*args, *(kwargs[name] for name in ("query", "key", "value") if name in kwargs)][:3])
        dtype = first.dtype if self._half and isinstance(first, Tensor) and first.is_cuda else None
        if dtype is torch.float32:
            args = tuple(self._cast(one, self._half) for one in args)
            kwargs = {name: self._cast(one, self._half) for name, one in kwargs.items()}
        weighs = isinstance(self, longspan_torch.BlockSparseRingMultiheadDilatedAttention) and kwargs.pop("need_weights", False)
        result = self._run(args, kwargs)
        if weighs:
            return result[0], self._block_weights(*args, **kwargs)
        if dtype is torch.float32:
            result = self._cast(result, dtype)
        if self._logs and not torch.compiler.is_compiling():
            logger.info("%s: %s", type(self).__name__, self.get_memory_info())
        return self._returned(result, kwargs.get("need_weights") or (len(args) > 4 and args[4] is True))

    @torch.no_grad()
    def _block_weights(
        self, query: Tensor, key: Tensor | None = None, value: Tensor | None = None, *_: Any, is_causal: bool = False, **__: Any
    ) -> Any:
        """Of a multihead module: the probabilities of its active blocks."""
        given = [query, query if key is None else key, query if value is None else value]
        if not self.batch_first:
            given = [x.transpose(0, 1) for x in given]
        heads = [x.unflatten(-1, (self.num_heads, -1)) for x in self._project(*given)]  # type: ignore[attr-defined]
        return self.attention(*heads, is_causal=is_causal, return_attention_weights=True)[1]  # type: ignore[attr-defined]

    @staticmethod
    def _cast(value: Any, dtype: torch.dtype | None) -> Any:
        return value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value

    def _check_shapes(self, tensors: list[Any]) -> None:
        dimensions = 3 if isinstance(self, _Multihead) else 4
        given = [one for one in tensors if isinstance(one, Tensor) and not one.is_nested]
        names = ["query", "key", "value"]
        for name, tensor in zip(names, given):
            if tensor.dim() != dimensions:
                raise invalid(
                    name, f"has shape {list(tensor.shape)}: Expected 3D tensors" if dimensions == 3 else
                    f"has shape {list(tensor.shape)}: expected 4D tensor [batch, tokens, heads, head_dim]",
                )  # fmt: skip
            if dimensions == 3 and tensor.shape[-1] != self.embed_dim:
                raise invalid(name, f"has shape {list(tensor.shape)}: its embedding dimension must be {self.embed_dim}")
        if dimensions == 4 and len(given) == 3:
            ValidationMixin.validate_tensor_shapes_match(given, names, [0, 1, 3])

    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        forward = super().forward  # type: ignore[misc]
        if self._recompute and torch.is_grad_enabled():
            return checkpoint(forward, *args, use_reentrant=False, **kwargs)
        if not self._recovers or torch.compiler.is_compiling():
            return forward(*args, **kwargs)
        try:
            return forward(*args, **kwargs)
        except (MemoryError, torch.OutOfMemoryError):
            self._tell("ran out of memory, again in query chunks")
        except CommError:
            if self._over_group():
                raise  # no transport of torch rebuilds a group: every rank raises
            self._tell("lost a message of its local ring, again")
            return forward(*args, **kwargs)
        _give_back_memory()
        return self._again(args, kwargs)

    def _over_group(self) -> bool:
        ring: Any = self if hasattr(self, "_group") else getattr(self, "attention", None)
        return hasattr(ring, "_group") and ring._group() is not None

    def _tell(self, what: str) -> None:
        self.recoveries += 1
        monitor = getattr(self, "monitor", None)
        if monitor is not None:
            monitor.recoveries = getattr(monitor, "recoveries", 0) + 1
        logging.getLogger("longspan").warning("%s %s", type(self).__name__, what)

    def _again(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """After out of memory: attention modules in query chunks, others once more with the memory that came back."""
        one: Any = getattr(self, "attention", self)
        if isinstance(self, _Multihead) or self._over_group() or not hasattr(one, "pattern") or callable(one.pattern):
            return super().forward(*args, **kwargs)  # type: ignore[misc]
        bound = inspect.signature(super().forward).bind(*args, **kwargs).arguments  # type: ignore[misc]
        query, key, value, mask = bound["query"], bound["key"], bound["value"], bound.get("attention_mask")
        options: dict[str, Any] = {"causal": bool(bound.get("is_causal", False)), "scale": one.softmax_scale}
        if mask is not None:
            options["key_mask"] = longspan_torch.options.key_mask("attention_mask", mask, key.shape[0], key.shape[1])
        if one.dropout and one.training:
            options.update(dropout=one.dropout, seed=torch.randint(2**62, ()))

        def call(ranges: list[tuple[int, int]]) -> Tensor:
            start, count = ranges[0]
            part = query[:, start : start + count]
            return longspan_torch.attention(part, key, value, one.pattern, query_ranges=ranges, **options)

        return in_query_chunks(call, query.shape[1])

    def _returned(self, result: Any, need_weights: Any) -> Any:
        if self._returns == "bare" and isinstance(result, tuple) and not need_weights:
            return result[0]
        return result

    # ---- methods of the fork's classes
    @property
    def num_groups(self) -> int:
        return len(self._branches().segment_lengths)

    @property
    def ring_attention(self) -> Any:
        return self._branches()

    @property
    def flash_support(self) -> dict[str, Any]:
        return get_flash_attention_support("cuda" if torch.cuda.is_available() else "cpu")

    flash_backend = property(lambda self: self.flash_support["recommended_backend"])

    @property
    def _memory_pool(self) -> Any:
        """For users' own buffers: the process's pool, where it was asked for."""
        shared = get_global_memory_pool() if getattr(self, "enable_memory_pool", False) else None
        return self.__dict__.get("_own_pool", shared)

    @_memory_pool.setter
    def _memory_pool(self, pool: Any) -> None:
        self.__dict__["_own_pool"] = pool

    def _branches(self) -> Any:
        return self if hasattr(self, "segment_lengths") else self.attention  # type: ignore[attr-defined]

    @property
    def mode(self) -> str:
        if self._over_group():
            return "distributed"
        return "single" if (getattr(self, "ring_size", None) or 1) == 1 else "simulated"

    def get_memory_info(self) -> dict[str, Any]:
        inherited: dict[str, Any] = getattr(super(), "get_memory_info", dict)()
        return {**inherited, "memory_complexity": "O(n) for sequence length n", "plans": plan_cache.statistics()["entries"],
                "workspace_bytes": host_memory.statistics()["reserved_bytes"]}  # fmt: skip

    def visualize_pattern(self, seq_len: int = 1024) -> str:
        size, stats = self.block_size, self.get_pattern_stats(seq_len)  # type: ignore[attr-defined]
        return (
            f"Hierarchical Attention Pattern: {seq_len} tokens, blocks of {size}\n"
            f"{super().visualize_pattern(seq_len)}\n"  # type: ignore[misc]
            f"Sparsity: {stats['sparsity']:.1%}. Legend: a full block attends, a dot does not"
        )

    get_performance_metrics = get_optimization_stats = get_memory_info

    def clear_cache(self, force: bool = False) -> None:
        """Forgets rings and gives idle workspace back."""
        getattr(super(), "clear_cache", lambda: None)()
        _give_back_memory()

    cleanup = cleanup_buffers = clear_cache

    def clear_caches(self) -> None:
        self.clear_cache()

    def get_memory_estimate(
        self, seq_len: int, batch_size: int = 1, num_heads: int = 8, head_dim: int = 64
    ) -> dict[str, Any]:
        """Of one rank's float32 tensors; no scores are stored."""
        ranks = getattr(self, "ring_size", None) or 1
        one = 4 * batch_size * -(-seq_len // ranks) * num_heads * head_dim / 2**30
        return {"mode": self.mode, "ring_size": ranks, "q_memory_gb": one, "kv_memory_gb": 2 * one, "output_memory_gb": one,
                "total_per_device_gb": 4 * one, "total_gb": 4 * one * ranks, "memory_reduction_factor": float(ranks),
                "reduction_factor": float(ranks)}  # fmt: skip

    get_memory_usage = get_memory_estimate

    @property
    def multihead_config(self) -> Any:
        return self._config("MultiheadConfig")

    @property
    def attention_config(self) -> Any:
        return self._config("DilatedAttentionConfig")

    def _config(self, kind: str) -> Any:
        from . import configs

        return configs.of_fields(getattr(configs, kind), self._arguments)  # type: ignore[attr-defined]

    def _calculate_head_groups(self, num_heads: int) -> list[int]:
        few, more = divmod(num_heads, self.num_groups)
        return [few + (index < more) for index in range(self.num_groups)]

    def _generate_hierarchical_pattern(self, seq_len: int, num_heads: int = 1, device: Any = None) -> tuple[Tensor, ...]:
        """Block rows and columns that attend."""
        mask = self.block_pattern(seq_len).mask(seq_len, 1, False)  # type: ignore[attr-defined]
        return tuple(torch.from_numpy(mask.indices()).to(device)[:, 1:].unbind(1))

    # ---- arguments that act; each takes the value it was given
    def _act(self, name: str, value: Any) -> None:
        if name in ("use_gradient_checkpointing", "activation_checkpointing"):
            self._recompute = bool(value)
        elif name in ("enable_error_recovery", "enable_fault_tolerance"):
            self._recovers = bool(value)
        elif name == "use_tf32":
            self.use_tf32 = bool(value)
            if hasattr(self._branches(), "allow_tf32"):
                self._branches().allow_tf32 = bool(value)
        elif name == "compile_model":
            if value:
                self.compile()  # type: ignore[attr-defined]
        elif name == "batch_first":
            self.batch_first = bool(value)
        elif name not in ("device", "dtype", "sequence_parallel", "distributed_config", "layer_norm"):
            raise KeyError(name)


class QueryKeyNorms:
    """The fork's multihead classes have q_ln and k_ln. q_ln comes before the output projection; the class with separate
    projections also puts both on queries and keys. Loads `norm`, as fkodom's and Longspan's classes have it."""

    _NORMS_PROJECTIONS = False

    def _adopt_norm(self) -> None:
        norm = self._modules.pop("norm")  # type: ignore[attr-defined]
        self.q_ln = norm
        self.k_ln = None
        if norm is not None:
            weight = norm.weight
            self.k_ln = torch.nn.LayerNorm(self.embed_dim, norm.eps, device=weight.device, dtype=weight.dtype)  # type: ignore[attr-defined]

    @property
    def norm(self) -> Any:
        return self.q_ln

    def _project(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = super()._project(query, key, value)  # type: ignore[misc]
        if self.q_ln is not None and self._NORMS_PROJECTIONS:
            q, k = self.q_ln(q), self.k_ln(k)
        return q, k, v

    def _runs_together(self, *tensors: Tensor) -> bool:
        return not (self._NORMS_PROJECTIONS and self.q_ln is not None) and super()._runs_together(*tensors)  # type: ignore[misc]

    def _load_from_state_dict(self, state: dict[str, Any], prefix: str, *rest: Any) -> None:
        for name in ("weight", "bias"):
            if f"{prefix}norm.{name}" in state and self.q_ln is not None:
                state[f"{prefix}q_ln.{name}"] = state.pop(f"{prefix}norm.{name}")
                state.setdefault(f"{prefix}k_ln.{name}", getattr(self.k_ln, name).detach())
        super()._load_from_state_dict(state, prefix, *rest)  # type: ignore[misc]


def _checked(row: Row, given: dict[str, Any]) -> None:
    """What the fork's classes check, with its phrases."""
    lists = [given[name] for name in ("segment_lengths", "dilation_rates")]
    if all(isinstance(one, (list, tuple)) for one in lists):
        ValidationMixin.validate_segment_dilation_match(*lists)
        for name in ("segment_lengths", "dilation_rates"):
            ValidationMixin.validate_positive_values(given[name], name)
    dropout = given.get("dropout", given.get("attention_dropout", 0.0))
    if isinstance(dropout, (int, float)):
        ValidationMixin.validate_dropout_prob(dropout)
    if "embed_dim" in given and isinstance(given["num_heads"], int):
        ValidationMixin.validate_head_dim(given["embed_dim"], given["num_heads"])


def _sparse_config(given: dict[str, Any], fields: dict[str, Any]) -> Any:
    """sparse_config with the fields that were given beside it."""
    fields = {name: value for name, value in fields.items() if value is not None}
    config = given.get("distributed_config")
    if config is not None:
        fields = {"sparsity_ratio": config.sparsity_ratio, "block_size": config.block_size, "pattern_type": "bigbird", **fields}
    base: Any = given.get("sparse_config")
    if not fields:
        return base
    if fields.get("pattern_type") == "learned":
        raise invalid("pattern_type", "is 'learned': blocks that are learned need BlockSparseAdaptive(learned=True)")
    if base is None:
        return longspan_torch.SparsePatternConfig(**fields)
    return {**base, **fields} if isinstance(base, Mapping) else replace(base, **fields)


def _take(row: Row, ours: set[str], given: dict[str, Any], defaults: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Arguments for our constructor, and those that act after it. Warns of what is ignored, raises what is refused."""
    passed: dict[str, Any] = {}
    acts: dict[str, Any] = {}
    fields: dict[str, Any] = {}
    ignored = []
    for name, value in given.items():
        known = ARGUMENTS.get(name)
        target = row.renamed.get(name, name)
        if "." in target:
            fields[target.split(".")[1]] = value
        elif isinstance(known, Refused):
            if not any(value is one or value == one for one in known.nothing):
                raise InvalidArgument(f"{row.name}: {name} is {value!r}: {known.do}", name)
        elif target in ours:
            passed[target] = value
        elif isinstance(known, Ignored):
            if value != defaults.get(name, value):
                ignored.append(f"{name}: {known.why}")
        else:
            acts[name] = value
    if ignored:
        warn_once(f"compat {row.name}", f"{row.name}: no effect have " + "; ".join(ignored))
    if fields or given.get("distributed_config") is not None:
        passed["sparse_config"] = _sparse_config(given, fields)
    if given.get("sequence_parallel") is False and "ring_size" not in given:
        passed["ring_size"] = 1
    return passed, acts


def make(row: Row) -> type:
    """The class of a row."""
    ours: Any = getattr(longspan_torch, row.ours)
    known, listed = parameters_of_ours(row), row.parameters()
    signature = inspect.Signature(listed)
    defaults = {one.name: one.default for one in listed if one.default is not inspect.Parameter.empty}
    multihead = issubclass(ours, _Multihead)
    norms = row.name in ("MultiheadDilatedAttention", "ImprovedMultiheadDilatedAttention")

    @functools.wraps(ours.__init__)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        args, kwargs = _from_configs(row, args, kwargs)
        try:
            bound = signature.bind(*args, **kwargs)
        except TypeError as error:
            raise TypeError(f"{row.name}(): {error}") from None
        bound.apply_defaults()
        given = {name: defaults.get(name) if value is None else value for name, value in bound.arguments.items()}
        _checked(row, given)
        passed, acts = _take(row, known, given, defaults)
        ours.__init__(self, **passed)
        if norms:
            self._adopt_norm()
        for name, value in acts.items():
            self._act(name, value)
        for name, value in given.items():  # what code reads back
            if name not in ("device", "dtype", "bias", "layer_norm") and not hasattr(self, name):
                setattr(self, name, value)
        self._arguments = given

    __init__.__signature__ = signature.replace(  # type: ignore[attr-defined]
        parameters=[inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD), *listed]
    )
    from .bases import BaseDilatedAttention, BaseMultiheadDilatedAttention

    mixins: tuple[type, ...] = (Compatible, QueryKeyNorms) if norms else (Compatible,)
    if row.name == "BlockSparseAdaptive":
        from .adaptive import AdaptiveConfig, Attributes

        mixins, defaults = (Compatible, Attributes), {**defaults, "adaptive_config": AdaptiveConfig()}
    body = {
        "__init__": __init__, "__doc__": f"{row.name} of the fork over longspan.torch.{row.ours}: `python -m "
        f"longspan.compat {row.name}` prints its arguments.", "_returns": row.returns,
        "_NORMS_PROJECTIONS": row.name == "MultiheadDilatedAttention",
        "__module__": f"{__package__}.{row.modules[0]}",
    }  # fmt: skip
    made = type(row.name, (*mixins, ours), body)
    (BaseMultiheadDilatedAttention if multihead else BaseDilatedAttention).register(made)
    return made


def _from_configs(row: Row, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Classes of the factories also take (config) or (multihead_config, attention_config)."""
    if not args or not all(is_dataclass(one) for one in args):
        return args, kwargs
    names = {parameter.name for parameter in row.parameters()}
    fields = {name: value for one in args for name, value in asdict(one).items() if value is not None}
    if "attention_dropout" in names:
        fields["attention_dropout"] = fields.pop("dropout", 0.0)
    return (), {**{name: value for name, value in fields.items() if name in names}, **kwargs}
