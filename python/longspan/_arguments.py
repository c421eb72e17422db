"""The arguments of attention, once: for the functions of the package, the operator's schema and the cache of operators."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypedDict, TypeVar

from ._errors import invalid
from ._named import suggestion

Function = TypeVar("Function", bound=Callable[..., Any])


class CallData(NamedTuple):
    """What a call brings besides its main tensors."""

    seed: Tensor | None = None
    lengths: Tensor | None = None
    key_mask: Tensor | None = None
    alibi_slopes: Tensor | None = None
    query_ranges: Sequence[int] | None = None

    @property
    def tensors(self) -> tuple:
        return self.seed, self.lengths, self.key_mask, self.alibi_slopes


class Settings(NamedTuple):
    """What the operator takes after its tensors, in the order of its schema."""

    pattern: str
    causal: bool = False
    scale: float | None = None
    output_scale: float | None = None
    dropout: float = 0.0
    seed: Tensor | None = None
    lengths: Tensor | None = None
    key_mask: Tensor | None = None
    alibi_slopes: Tensor | None = None
    query_ranges: Sequence[int] | None = None
    deterministic: bool = False
    detached_mix: bool = False
    allow_tf32: bool = False
    kernel: str = ""

    @classmethod
    def of(cls, operator: Attention, data: CallData) -> Settings:
        options = {name: getattr(operator.options, name) for name in OPTION_NAMES}
        return cls(str(operator.pattern), **options, **data._asdict())

    @property
    def options(self) -> dict[str, Any]:
        """What `compiled` takes after the pattern."""
        return {name: getattr(self, name) for name in OPTION_NAMES}

    @property
    def data(self) -> CallData:
        return CallData(*(getattr(self, name) for name in CallData._fields))

    def split(self) -> tuple[Settings, tuple]:
        """Settings without tensors, and the tensors, which autograd keeps apart; `joined` puts them together again."""
        return self._replace(**dict.fromkeys(TENSOR_NAMES)), self.data.tensors

    def joined(self, tensors: Sequence[Any]) -> Settings:
        return self._replace(**dict(zip(TENSOR_NAMES, tensors)))


class Arguments(TypedDict, total=False):
    """Keyword arguments of every attention function.

    causal: a position sees itself and what comes before it. scale: factor on scores, by default 1 / sqrt(head_dim).
    output_scale: factor on the output, by default the pattern's own. dropout, seed: probability of dropping a pair, and
    which pairs; for torch tensors drawn from torch's generator unless given. lengths [batch]: tokens each entry has.
    key_mask [batch, tokens]: true where a key may be attended. alibi_slopes [heads]. query_ranges: (start, count)
    positions of q's rows, by default 0 .. tokens. kernel: run this one or raise. deterministic: same gradient bits on
    every run of a GPU. detached_mix: gradients as torchscale has them. allow_tf32: GPUs may round float32 to TF32.
    """

    causal: bool
    scale: float | None
    output_scale: float | None
    dropout: float
    seed: Any
    lengths: Any
    key_mask: Any
    alibi_slopes: Any
    query_ranges: Sequence[tuple[int, int]] | None
    kernel: str | None
    deterministic: bool
    detached_mix: bool
    allow_tf32: bool


if TYPE_CHECKING:
    from torch import Tensor

    from ._longspan import Attention

_SCHEMA_TYPES = {
    "str": "str", "bool": "bool", "float": "float", "float | None": "float?", "Tensor | None": "Tensor?",
    "Sequence[int] | None": "SymInt[]?",
}  # fmt: skip
#: Settings as a schema of torch.library has them.
SCHEMA = ", ".join(f"{_SCHEMA_TYPES[kind.__forward_arg__]} {name}" for name, kind in Settings.__annotations__.items())
NAMES = frozenset(Arguments.__annotations__)
#: Of those, what belongs to a call, and what is fixed for an operator.
DATA_NAMES = frozenset(CallData._fields)
TENSOR_NAMES = tuple(name for name in CallData._fields if name != "query_ranges")
OPTION_NAMES = tuple(name for name in Settings._fields[1:] if name not in DATA_NAMES)
NO_DATA = CallData()

# What other packages call things: the argument here, and how it differs.
_ELSEWHERE = {
    "is_causal": "causal=",
    "softmax_scale": "scale=",
    "sm_scale": "scale=",
    "dropout_p": "dropout=",
    "attn_mask": "key_mask= (booleans [batch, tokens], true where a key may be attended); a pattern for what depends on the "
    "query, alibi_slopes= for a bias by distance",
    "attention_mask": "key_mask= (booleans [batch, tokens], true where a key may be attended)",
    "key_padding_mask": "key_mask= with the opposite sense (true where a key may be attended)",
    "mask": "key_mask= (booleans [batch, tokens]), or a pattern",
    "enable_gqa": "nothing: key and value with fewer heads than query are grouped queries",
    "return_softmax_lse": "return_lse=",
    "return_attn_probs": "return_lse=, or longspan.attention_blocks for the probabilities",
    "window_size": "a pattern: longspan.local_window(...)",
    **dict.fromkeys(("out", "lse"), "it to longspan.attention, which fills tensors and records no gradients"),
    **dict.fromkeys(("dq", "dk", "dv"), "it to longspan.attention_backward, which fills tensors"),
    "segment_lengths": "a pattern: longspan.dilated(segments, dilations)",
    "dilation_rates": "a pattern: longspan.dilated(segments, dilations)",
}


def refuse_names(function: str, given: Mapping[str, Any], others: Sequence[str] = ()) -> None:
    """Refuses keywords that no attention function has; says what they are called here."""
    for name in given:
        if name in NAMES or name in others:
            continue
        known = [*Arguments.__annotations__, *others]
        hint = f": give {_ELSEWHERE[name]}" if name in _ELSEWHERE else suggestion(name, known)
        if not hint:
            hint = f"; it has {', '.join(known)}"
        raise TypeError(f"{function}() has no argument {name!r}{hint}")


def listed(function: Function) -> Function:
    """Gives the function the signature and the words that help() and editors show: Arguments with their defaults."""
    function.__doc__ = f"{inspect.getdoc(function)}\n\n{(inspect.getdoc(Arguments) or '').partition('.')[2].strip()}"
    signature = inspect.signature(function)
    defaults = Settings._field_defaults | {"kernel": None}
    kept = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
    listed = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=defaults[name], annotation=kind.__forward_arg__)
        for name, kind in Arguments.__annotations__.items()
        if name not in signature.parameters
    ]
    function.__signature__ = signature.replace(parameters=[*kept, *listed])  # type: ignore[attr-defined]
    return function


def check_seed(arguments: Mapping[str, Any]) -> None:
    """Of a backward, which repeats its forward's dropout."""
    dropout = arguments.get("dropout", 0.0)
    if isinstance(dropout, (int, float)) and dropout and arguments.get("seed") is None:
        raise invalid("seed", "is None with dropout: pass the seed of the forward call")
