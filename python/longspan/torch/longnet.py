"""LongNet in torch: pre-norm encoder and decoder layers with dilated attention, the model, and its language model.

Names of modules and parameters are those of the older package, so its weights load. Norms before the output projection
and before the second linear layer, and the gains of the initialisation, are MAGNETO's.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from .._errors import InvalidArgument, invalid
from .._named import flag, refused
from .cache import DilatedCache
from .multihead import MultiheadDilatedAttention
from .options import at_least, at_least_zero, check_dropout, inner_norm, integers, made_from
from .positions import Positions
from .sampling import Sampler

__all__ = [
    "DilatedTransformerDecoderLayer", "DilatedTransformerEncoderLayer", "LongNet", "LongNetCache", "LongNetLM",
]  # fmt: skip

SEGMENT_LENGTHS = (2048, 4096, 8192, 16384, 32768)
DILATION_RATES = (1, 2, 4, 6, 12)

_STEPS_WORTH_A_GRAPH = 32  # of generate on a GPU
_STEPS_BETWEEN_LOOKS = 16  # at whether all entries have ended, which waits for the GPU

_ACTIVATIONS = {"relu": functional.relu, "gelu": functional.gelu, "silu": functional.silu}


def _activation(given: str | Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    function = _ACTIVATIONS.get(given) if isinstance(given, str) else given
    if not callable(function):
        raise invalid("activation", f"is {given!r}: give 'relu', 'gelu', 'silu' or a function")
    return function


@dataclass
class LayerArguments:
    d_model: int
    nhead: int
    segment_lengths: Sequence[int]
    dilation_rates: Sequence[int]
    dim_feedforward: int = 2048
    dropout: float = 0.1
    activation: str | Callable[[Tensor], Tensor] = functional.relu
    layer_norm_eps: float = 1e-5
    gamma_init: float = 1.0
    device: Any = None
    dtype: torch.dtype | None = None


@dataclass
class ModelArguments:
    """The defaults are the paper's base model."""

    d_model: int = 768
    nhead: int = 12
    num_encoder_layers: int = 12
    num_decoder_layers: int = 12
    dim_feedforward: int = 3072
    segment_lengths: Sequence[int] = SEGMENT_LENGTHS
    dilation_rates: Sequence[int] = DILATION_RATES
    dropout: float = 0.0
    activation: str | Callable[[Tensor], Tensor] = "relu"
    layer_norm_eps: float = 1e-5
    device: Any = None
    dtype: torch.dtype | None = None
    gradient_checkpointing: bool = field(default=False, kw_only=True)


@dataclass
class _Vocabulary:
    num_tokens: int


@dataclass
class LanguageModelArguments(ModelArguments, _Vocabulary):
    positions: str = field(default="xpos", kw_only=True)


class _Layer(nn.Module):
    """What both layers share: arguments, attention blocks and the feed-forward block, its norms numbered from `norm`."""

    def __init__(self, a: LayerArguments, inner_norms: dict[str, bool]) -> None:
        """inner_norms: the attention modules by name, and whether each has a norm before its output projection."""
        super().__init__()
        self.d_model, heads = at_least("d_model", a.d_model, 1), at_least("nhead", a.nhead, 1)
        if self.d_model % heads:
            raise invalid("d_model", f"is {a.d_model}, nhead is {a.nhead}: d_model must be a multiple of nhead")
        hidden = at_least("dim_feedforward", a.dim_feedforward, 1)
        self.gamma_init = at_least_zero("gamma_init", a.gamma_init)
        self.activation = _activation(a.activation)
        self.dropout = nn.Dropout(check_dropout("dropout", a.dropout))
        epsilon = at_least_zero("layer_norm_eps", a.layer_norm_eps)
        placement: dict[str, Any] = {"device": a.device, "dtype": a.dtype}

        for number, (name, inner) in enumerate(inner_norms.items(), start=1):
            setattr(self, f"norm{number}", nn.LayerNorm(self.d_model, epsilon, **placement))
            module = MultiheadDilatedAttention(
                self.d_model, heads, a.dilation_rates, a.segment_lengths, dropout=a.dropout, layer_norm=inner,
                layer_norm_eps=epsilon, gamma_init=self.gamma_init, **placement,
            )  # fmt: skip
            setattr(self, name, module)
        self._feed_forward_norms = f"norm{len(inner_norms) + 1}", f"norm{len(inner_norms) + 2}"
        setattr(self, self._feed_forward_norms[0], nn.LayerNorm(self.d_model, epsilon, **placement))
        self.linear1 = nn.Linear(self.d_model, hidden, **placement)
        setattr(self, self._feed_forward_norms[1], nn.LayerNorm(hidden, epsilon, **placement))
        self.linear2 = nn.Linear(hidden, self.d_model, **placement)
        for linear in (self.linear1, self.linear2):
            nn.init.xavier_normal_(linear.weight, gain=self.gamma_init)
            nn.init.zeros_(linear.bias)

    def _check(self, name: str, x: Tensor) -> None:
        if not isinstance(x, Tensor):
            raise refused(name, x, "a torch tensor")
        if x.dim() != 3 or x.shape[2] != self.d_model:
            raise invalid(name, f"has shape {list(x.shape)}: give [batch, tokens, d_model = {self.d_model}]")

    def _attend(
        self, module: MultiheadDilatedAttention, x: Tensor, memory: Tensor, is_causal: bool, cache: DilatedCache | None
    ) -> Tensor:
        if cache is None:
            return self.dropout(module(x, memory, memory, is_causal=is_causal)[0])
        split = (*x.shape[:2], module.num_heads, module.head_dim)
        rows = cache.attend(*(part.view(split) for part in module._project(x, memory, memory))).reshape(x.shape)
        return module._finish(rows)

    def _feed_forward(self, x: Tensor) -> Tensor:
        outer, inner = (getattr(self, name) for name in self._feed_forward_norms)
        hidden = self.dropout(self.activation(self.linear1(outer(x))))
        return self.dropout(self.linear2(inner_norm(inner, hidden)))


class DilatedTransformerEncoderLayer(_Layer):
    """norm1, self_attn, then norm2, linear1, activation, norm3, linear2, each block added to its input."""

    @made_from(LayerArguments)
    def __init__(self, arguments: LayerArguments) -> None:
        super().__init__(arguments, {"self_attn": True})

    def forward(self, src: Tensor, is_causal: bool = False, *, caches: Sequence[DilatedCache] = ()) -> Tensor:
        """src [batch, tokens, d_model] -> the same shape. caches: those of new_caches(), when decoding; the layer is causal
        then, and src holds the next positions."""
        self._check("src", src)
        (own,) = caches or (None,)
        normed = self.norm1(src)
        x = src + self._attend(self.self_attn, normed, normed, is_causal, own)
        return x + self._feed_forward(x)

    def new_caches(self) -> tuple[DilatedCache, ...]:
        return (_new_cache(self.self_attn),)


class DilatedTransformerDecoderLayer(_Layer):
    """norm1, self_attn (without inner norm), norm2, multihead_attn over memory, then norm3, linear1, activation, norm4,
    linear2, each block added to its input."""

    @made_from(LayerArguments)
    def __init__(self, arguments: LayerArguments) -> None:
        super().__init__(arguments, {"self_attn": False, "multihead_attn": True})

    def forward(
        self, tgt: Tensor, memory: Tensor, tgt_is_causal: bool = False, memory_is_causal: bool = False, *,
        caches: Sequence[DilatedCache] = (),
    ) -> Tensor:  # fmt: skip
        """tgt and memory [batch, tokens, d_model], equal in shape -> the same shape. caches as in the encoder layer."""
        self._check("tgt", tgt)
        if memory.shape != tgt.shape:
            raise invalid("memory", f"has shape {list(memory.shape)}, tgt has {list(tgt.shape)}: they must be equal")
        own, over_memory = caches or (None, None)
        normed = self.norm1(tgt)
        x = tgt + self._attend(self.self_attn, normed, normed, tgt_is_causal, own)
        x = x + self._attend(self.multihead_attn, self.norm2(x), memory, memory_is_causal, over_memory)
        return x + self._feed_forward(x)

    def new_caches(self) -> tuple[DilatedCache, ...]:
        return _new_cache(self.self_attn), _new_cache(self.multihead_attn)


def _new_cache(module: MultiheadDilatedAttention) -> DilatedCache:
    return DilatedCache(module.attention, module.num_heads)


class _Stack(nn.Module):
    """encoder.layers and decoder.layers, as in torch's own stacks."""

    def __init__(self, layers: list[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)


class LongNet(nn.Module):
    """Encoder layers over x, then decoder layers over x that also attend to what the encoder made of it. The defaults are
    the paper's base model. gradient_checkpointing recomputes each layer in the backward pass instead of keeping it."""

    @made_from(ModelArguments)
    def __init__(self, arguments: ModelArguments) -> None:
        super().__init__()
        encoders = at_least("num_encoder_layers", arguments.num_encoder_layers, 1)
        decoders = at_least("num_decoder_layers", arguments.num_decoder_layers, 1)
        self.d_model = arguments.d_model
        self.gradient_checkpointing = flag("gradient_checkpointing", arguments.gradient_checkpointing)
        layer = {item.name: getattr(arguments, item.name, None) for item in fields(LayerArguments)}
        layer["gamma_init"] = math.sqrt(math.log(3 * decoders) * math.log(2 * encoders) / 3)
        self.encoder = _Stack([DilatedTransformerEncoderLayer(**layer) for _ in range(encoders)])
        layer["gamma_init"] = math.sqrt(math.log(3 * decoders))
        self.decoder = _Stack([DilatedTransformerDecoderLayer(**layer) for _ in range(decoders)])

    def forward(self, x: Tensor, is_causal: bool = True, *, cache: LongNetCache | None = None) -> Tensor:
        """x [batch, tokens, d_model] -> the same shape. With a cache x holds the next positions, causal in any case."""

        def run(layer: nn.Module, *inputs: Any) -> Tensor:
            if cache is not None:
                return layer(*inputs, caches=cache.of(layer))
            if self.gradient_checkpointing and torch.is_grad_enabled():
                return checkpoint(layer, *inputs, use_reentrant=False)
            return layer(*inputs)

        if cache is not None:
            cache.catch_up()
        memory = x
        for layer in self.encoder.layers:
            memory = run(layer, memory, is_causal)
        for layer in self.decoder.layers:
            x = run(layer, x, memory, is_causal, is_causal)
        return x

    def new_cache(self, length: int | None = None) -> LongNetCache:
        """An empty cache for decoding; length: the sequence's final length, where something depends on it."""
        return LongNetCache(self, length)


class LongNetCache:
    """The past of a LongNet: one DilatedCache for each attention. `position` tokens were seen, `bytes` are kept. A step of
    one token may be captured as a CUDA graph, after reserve(tokens): replays go on with the next position."""

    def __init__(self, model: LongNet, length: int | None = None) -> None:
        self.length: Any = None if length is None else at_least("length", length, 0)
        self._take({layer: layer.new_caches() for layer in (*model.encoder.layers, *model.decoder.layers)})

    def _take(self, layers: dict[nn.Module, tuple[DilatedCache, ...]]) -> None:
        self._layers = layers
        self._all = [cache for caches in layers.values() for cache in caches]
        for cache in self._all[1:]:
            cache.follows = True

    @classmethod
    def joined(cls, parts: Sequence[LongNetCache]) -> LongNetCache:
        """Caches of single sequences, each at a position of its own, as one for their batch; position and length are
        lists then."""
        result = cls.__new__(cls)
        lengths = [part.length for part in parts]
        result.length = None if None in lengths else lengths
        each = {layer: zip(*(part._layers[layer] for part in parts)) for layer in parts[0]._layers}
        result._take({layer: tuple(map(DilatedCache.joined, caches)) for layer, caches in each.items()})
        return result

    def __deepcopy__(self, memo: dict[int, Any]) -> LongNetCache:
        """The model is not copied along, but a copy of it that is made at the same time is taken."""
        result = copy.copy(self)
        result._take({memo.get(id(layer), layer): copy.deepcopy(caches, memo) for layer, caches in self._layers.items()})
        return result

    def of(self, layer: nn.Module) -> tuple[Any, ...]:
        if layer not in self._layers:
            raise invalid("cache", "belongs to another model: make one with this model's new_cache()")
        return self._layers[layer]

    @property
    def position(self) -> Any:
        return self._all[0].position

    def next_position(self) -> Any:
        return self._all[0].next_position()

    def catch_up(self) -> None:
        self._all[0].catch_up()
        for cache in self._all[1:]:
            cache.catch_up(self._all[0])

    def reserve(self, tokens: int) -> None:
        """Room for so many tokens in all; needs one token taken before."""
        for cache in self._all:
            cache.reserve(tokens)

    @property
    def bytes(self) -> int:
        return sum(cache.bytes for cache in self._all)

    def check_room(self, count: int) -> None:
        """Whether so many tokens more stay within the final length, where there is one."""
        if self.length is None:
            return
        positions, lengths = (x if isinstance(x, list) else [x] for x in (self.position, self.length))
        for position, length in zip(positions, lengths):
            if position + count > length:
                raise invalid(
                    "ids",
                    f"would end at position {position + count}, the cache's length is {length}: make the cache with "
                    "the final length",
                )

    def reset(self) -> None:
        for cache in self._all:
            cache.reset()


class LongNetLM(nn.Module):
    """A language model: token_embedding plus positions, long_net, norm, out. Causal by default.

    positions: 'xpos' as old weights were trained, which depends on the sequence's length and overflows when it is large
    (float32 beyond 72,500 tokens); 'rotary', the same without the part that does; or 'none'.
    """

    @made_from(LanguageModelArguments)
    def __init__(self, arguments: LanguageModelArguments) -> None:
        super().__init__()
        self.num_tokens = at_least("num_tokens", arguments.num_tokens, 1)
        placement: dict[str, Any] = {"device": arguments.device, "dtype": arguments.dtype}
        width = at_least("d_model", arguments.d_model, 1)
        self.token_embedding = nn.Embedding(self.num_tokens, width, **placement)
        self.pos_embedding = Positions(width, arguments.positions, device=arguments.device)
        self.long_net = LongNet(**{item.name: getattr(arguments, item.name) for item in fields(ModelArguments)})
        layer_norm_eps = at_least_zero("layer_norm_eps", arguments.layer_norm_eps)
        self.norm = nn.LayerNorm(width, layer_norm_eps, **placement)
        self.out = nn.Linear(width, self.num_tokens, **placement)
        nn.init.kaiming_normal_(self.out.weight)
        nn.init.zeros_(self.out.bias)

    def _check(self, ids: Tensor) -> None:
        if not isinstance(ids, Tensor):
            raise refused("ids", ids, "a torch tensor of whole numbers [batch, tokens]")
        if ids.dim() != 2 or ids.dtype not in (torch.int64, torch.int32):
            raise invalid(
                "ids", f"is {list(ids.shape)} {ids.dtype}: give whole numbers [batch, tokens], int64 or int32"
            )
        if ids.is_cpu and ids.numel() and not torch.compiler.is_compiling():  # a GPU would have to be waited for
            low, high = (int(x) for x in ids.aminmax())
            if low < 0 or high >= self.num_tokens:
                raise invalid("ids", f"has {low if low < 0 else high}: give tokens from 0 to {self.num_tokens - 1}")

    def _hidden(
        self, ids: Tensor, is_causal: bool, first: Any, length: Any, cache: LongNetCache | None = None
    ) -> Tensor:
        self._check(ids)
        x = self.token_embedding(ids)
        if self.pos_embedding.kind != "none":
            x = x + self.pos_embedding(x, first, length)
        return self.long_net(x, is_causal=is_causal, cache=cache)

    def forward(self, x: Tensor, is_causal: bool = True, *, first: int = 0, length: int | None = None) -> Tensor:
        """Tokens [batch, tokens] -> logits [batch, tokens, num_tokens]. first, length: where x begins in a sequence of so
        many tokens, if a ring has given its attention the rest."""
        return self.out(self.norm(self._hidden(x, is_causal, first, length)))

    def new_cache(self, length: int | None = None) -> LongNetCache:
        """An empty cache for decode. positions='xpos' needs the final length of the sequence, prompt included."""
        if length is None and self.pos_embedding.kind == "xpos":
            raise invalid(
                "length",
                "is None: positions='xpos' depends on the final length of the sequence; give it, or use "
                "positions='rotary'",
            )
        return self.long_net.new_cache(length)

    @torch.no_grad()
    def decode(self, ids: Tensor, cache: LongNetCache, *, last_only: bool = False) -> Tensor:
        """The next tokens [batch, tokens], one or many -> their logits (last_only: of the last one), as the full forward
        of the whole sequence gives them. Inference only: call eval() first if the model has dropout."""
        if self.training and self.long_net.encoder.layers[0].dropout.p > 0:
            raise InvalidArgument("the model is in training mode: decoding has no dropout; call eval() first", "cache")
        cache.check_room(ids.shape[-1])
        x = self._hidden(ids, True, cache.next_position(), cache.length, cache)
        return self.out(self.norm(x[:, -1:] if last_only else x))

    def generate(
        self, ids: Tensor, max_new_tokens: int, temperature: float = 1.0, top_k: int | None = None,
        top_p: float | None = None, seed: int | None = None, *, end_token: int | None = None,
        prefill_chunk: int = 4096, lengths: Sequence[int] | Tensor | None = None, graph: bool = True,
    ) -> Tensor:  # fmt: skip
        """Prompts ids [batch, tokens] -> [batch, tokens (with lengths: the longest) + max_new_tokens], the prompt included.

        temperature 0 takes the likeliest token. top_k: choose among so many; top_p: among the likeliest that together reach
        this probability. seed: repeats the draw; without one torch's generator is used. end_token: after it an entry holds
        nothing else, and when all entries do, the result may be shorter. prefill_chunk: prompt tokens taken at a time.
        lengths: how many tokens of each entry are its prompt, if they differ; an entry's new tokens follow its own prompt,
        and what is behind them is 0 (or end_token). Its logits are those of the entry alone, and so are its tokens with
        temperature 0; draws are one for the whole batch. graph: on a GPU, many tokens are replays of one CUDA graph of a
        step; False where the model does what a graph cannot hold, in a hook for example. The final length is prompt + max_new_tokens from the start
        (positions='xpos' depends on it).
        """
        self._check(ids)
        if ids.shape[1] < 1:
            raise invalid("ids", "has no tokens: give a prompt of at least one")
        count = at_least("max_new_tokens", max_new_tokens, 0)
        chunk = at_least("prefill_chunk", prefill_chunk, 1)
        sampler = Sampler(temperature, top_k, top_p, seed, ids.device)
        prompts = self._prompt_lengths(ids, lengths)
        training = self.training
        self.eval()
        try:
            with torch.no_grad():
                return self._generate(ids, prompts, count, sampler, end_token, chunk, flag("graph", graph))
        finally:
            self.train(training)

    @staticmethod
    def _prompt_lengths(ids: Tensor, lengths: Sequence[int] | Tensor | None) -> list[int]:
        batch, tokens = ids.shape
        if lengths is None:
            return [tokens] * batch
        result = integers("lengths", lengths.tolist() if isinstance(lengths, Tensor) else lengths)
        if len(result) != batch or not all(1 <= length <= tokens for length in result):
            raise invalid(
                "lengths",
                f"is {result}: give a number from 1 to the {tokens} tokens of ids for each of {batch} entries",
            )
        return result

    def _prefill(self, ids: Tensor, length: int, chunk: int) -> tuple[Tensor, LongNetCache]:
        """Logits of the last token, and the cache behind it."""
        cache = self.new_cache(length)
        for part in ids.split(chunk, dim=1):
            logits = self.decode(part, cache, last_only=True)
        return logits, cache

    def _generate(
        self, ids: Tensor, prompts: list[int], count: int, sampler: Sampler, end_token: int | None, chunk: int,
        graph: bool,
    ) -> Tensor:  # fmt: skip
        batch, longest = ids.shape[0], max(prompts, default=ids.shape[1])
        result = ids.new_full((batch, longest + count), 0 if end_token is None else end_token)
        own = torch.tensor(prompts, device=ids.device)
        inside = torch.arange(longest, device=ids.device) < own[:, None]
        result[:, :longest] = torch.where(inside, ids[:, :longest], result[:, :longest])
        if count == 0 or batch == 0:
            return result
        if len(set(prompts)) == 1:
            logits, cache = self._prefill(ids[:, : prompts[0]], prompts[0] + count, chunk)
        else:  # one by one, since a chunk would end at other positions in each
            parts = [self._prefill(row[None, :length], length + count, chunk) for row, length in zip(ids, prompts)]
            logits, cache = torch.cat([part[0] for part in parts]), LongNetCache.joined([part[1] for part in parts])
        ended, at = torch.zeros(batch, dtype=torch.bool, device=ids.device), own.clone()
        token, entries = ids.new_empty(batch, 1), torch.arange(batch, device=ids.device)

        def pick(logits: Tensor) -> None:
            drawn = sampler(logits[:, -1]).to(ids.dtype)
            if end_token is not None:
                drawn = drawn.masked_fill(ended, end_token)
                ended.logical_or_(drawn == end_token)
            result.index_put_((entries, at), drawn)
            at.add_(1)
            token.copy_(drawn[:, None])

        def step() -> None:
            pick(self.decode(token, cache))

        pick(logits)
        every = _STEPS_BETWEEN_LOOKS if ids.is_cuda else 1
        own_lengths = self.pos_embedding.kind == "xpos" and len(set(prompts)) > 1  # come from the host
        graph = graph and ids.is_cuda and not own_lengths and count >= _STEPS_WORTH_A_GRAPH
        for index in range(1, count):
            if end_token is not None and index % every == 0 and bool(ended.all()):
                break
            if index == 2 and graph:
                cache.reserve(longest + count)
                step = self._captured(step, sampler)
            step()
        if end_token is None:
            return result
        new = result.gather(1, own[:, None] + torch.arange(count, device=ids.device))
        last = torch.where((new == end_token).any(1), (new == end_token).int().argmax(1), count - 1)
        return result[:, : longest + int(last.max()) + 1]

    @staticmethod
    def _captured(step: Callable[[], None], sampler: Sampler) -> Callable[[], None]:
        graph = torch.cuda.CUDAGraph()
        if sampler.generator is not None:
            graph.register_generator_state(sampler.generator)
        with torch.cuda.graph(graph):
            step()
        return graph.replay
