"""Drop-ins for the block-sparse classes, their configs and factory: modules over the one operator."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from .._errors import InvalidArgument, Unsupported, invalid
from .._inspect import attention_blocks
from .._named import choice, flag
from .._longspan import BlockPattern, Pattern
from .._patterns import LEVELS, dilated, draw
from .chosen import blocks_attention, choose_blocks, pattern_of
from .multihead import Heads, Layers, MultiheadDilatedAttention
from .operator import attention
from .options import Branches, Placed, at_least, check_dropout, check_pairs, finite, integer, integers, key_mask
from .options import made_from, require_tensors, warn_once
from .ring_calls import RingArguments, RingCalls, RingSettings

__all__ = [
    "AdaptiveConfig", "BlockSparseAdaptive", "BlockSparseHierarchical", "BlockSparseRingDilatedAttention",
    "BlockSparseRingMultiheadDilatedAttention", "HierarchicalConfig", "SparsePatternConfig",
    "create_block_sparse_attention",
]  # fmt: skip


@dataclass
class SparsePatternConfig:
    """sparsity_ratio is the fraction of blocks KEPT. random takes it as it is; the other patterns follow their
    geometry, and say so if that keeps more than twice or less than half of it."""

    pattern_type: str = "dilated_sparse"
    sparsity_ratio: float = 0.1
    block_size: int = 128
    local_window_size: int = 512
    global_tokens: int = 64

    def __post_init__(self) -> None:
        self.block_size = at_least("block_size", self.block_size, 1)
        self.local_window_size = at_least("local_window_size", self.local_window_size, 0)
        self.global_tokens = at_least("global_tokens", self.global_tokens, 0)


@dataclass
class HierarchicalConfig:
    """Levels {"stride": tokens, "window_size": tokens, or -1 for everything}."""

    level_configs: list[dict[str, int]] = field(
        default_factory=lambda: [{"stride": stride, "window_size": window} for stride, window in LEVELS]
    )

    @property
    def num_levels(self) -> int:
        return len(self.level_configs)


@dataclass
class AdaptiveConfig:
    """base_sparsity is the fraction of blocks PRUNED. The rest, except share_across_heads, acts with learned=True alone:
    temperature of gate and exploration, and whether it learns; hard_sparsity: the gate only carries gradients
    (straight-through); hidden_dim, num_layers (128, 2) of the scorer; sparsity_reg_weight of get_sparsity_loss()."""

    base_sparsity: float = 0.9
    temperature: float = 1.0
    share_across_heads: bool = False
    hard_sparsity: bool = False
    learnable_temperature: bool = False
    hidden_dim: int | None = None
    num_layers: int | None = None
    min_temperature: float = 0.1
    sparsity_reg_weight: float = 0.01


def _warn_unlearned(config: Any) -> None:
    ignored = [
        item.name
        for item in fields(AdaptiveConfig)
        if item.name not in ("base_sparsity", "share_across_heads") and getattr(config, item.name) != item.default
    ]
    if ignored:
        names = ", ".join(ignored)
        warn_once(
            "adaptive",
            f"AdaptiveConfig: {names} have no effect: blocks are ranked by their means; BlockSparseAdaptive(learned=True) "
            "learns them",
        )


SparseConfig: TypeAlias = "SparsePatternConfig | Mapping[str, Any] | None"


@dataclass
class _BlockSparseArguments(Placed, Branches):
    sparse_config: SparseConfig = None
    dropout: float = 0.0
    compose: bool = False
    ring_size: int | None = None


@dataclass
class _HierarchicalArguments(Placed, Branches):
    hierarchical_config: HierarchicalConfig | Mapping[str, Any] | None = None
    sparse_config: SparseConfig = None
    dropout: float = 0.0
    num_heads: int | None = None
    head_dim: int | None = None
    ring_size: int | None = field(default=None, kw_only=True)


@dataclass
class _AdaptiveArguments(Placed, Branches):
    num_heads: int
    head_dim: int
    adaptive_config: AdaptiveConfig | Mapping[str, Any] | None = None
    sparse_config: SparseConfig = None
    dropout: float = 0.0
    ring_size: int | None = field(default=None, kw_only=True)
    learned: bool = field(default=False, kw_only=True)


@dataclass
class _Sparse:
    sparse_config: SparseConfig = None


@dataclass
class _MultiheadArguments(Layers, _Sparse, Branches, Heads):
    compose: bool = False
    ring_size: int | None = None


def _config(kind: type, given: Any, name: str) -> Any:
    """A config object, from one, a mapping of its fields, or nothing."""
    if given is None:
        return kind()
    if isinstance(given, Mapping):
        known = {item.name for item in fields(kind)}
        for key in given:
            if key not in known:
                raise invalid(name, f"has no field {key!r}: it has {', '.join(sorted(known))}")
        return kind(**given)
    if isinstance(given, type) or not all(hasattr(given, item.name) for item in fields(kind)):
        raise invalid(name, f"is {given!r}: give a {kind.__name__} or a dict of its fields")
    return given


def _fraction(name: str, value: float, *, zero: bool = False) -> float:
    result = finite(name, value)
    if not (0 < result <= 1 or (zero and result == 0)):
        least = "from 0" if zero else "above 0"
        raise invalid(name, f"is {value}: give a fraction of blocks, {least} to 1")
    return result


def _kept(name: str, pruned: float) -> float:
    """Of a fraction of blocks pruned."""
    if _fraction(name, pruned, zero=True) == 1:
        raise invalid(name, "is 1: nothing would be kept; give less")
    return 1.0 - pruned


def _small_blocks(sparse_config: Any) -> int:
    return 64 if sparse_config is None else _config(SparsePatternConfig, sparse_config, "sparse_config").block_size


def _block_size(value: int) -> int:
    size = integer("block_size", value)
    if size not in (16, 32, 64, 128):
        raise invalid("block_size", f"is {size}: use 16, 32, 64 or 128")
    return size


class _BlockSparse(RingCalls, nn.Module):
    """What the classes share: arguments, the pattern of a length, and a forward. With ring_size above 1 it runs over a
    ring as RingDilatedAttention does: local ranks over the whole sequence, or the ranks of the process group, each with
    its own rows."""

    def __init__(self, arguments: Any, block_size: int) -> None:
        nn.Module.__init__(self)
        self._init_ring(RingArguments(1 if arguments.ring_size is None else arguments.ring_size))
        self.segment_lengths = integers("segment_lengths", arguments.segment_lengths)
        self.dilation_rates = integers("dilation_rates", arguments.dilation_rates)
        check_pairs(self.segment_lengths, self.dilation_rates)
        self.block_size = _block_size(block_size)
        self.dropout = check_dropout("dropout", arguments.dropout)

    def block_pattern(self, tokens: int) -> BlockPattern:
        """The blocks of a sequence."""
        raise NotImplementedError

    def pattern(self, tokens: int) -> Pattern:
        return Pattern.block_sparse(self.block_pattern(tokens))

    def _attend(
        self, query: Tensor, key: Tensor, value: Tensor, is_causal: bool, mask: Tensor | None,
        chosen: Tensor | None = None, scale: float | None = None,
    ) -> Tensor:  # fmt: skip
        """chosen: blocks [batch * heads, blocks, blocks] instead of the sequence's own pattern."""
        require_tensors(query=query, key=key, value=value)
        is_causal = flag("is_causal", is_causal)
        dropout = self.dropout if self.training else 0.0
        settings = RingSettings(
            lambda tokens: self.pattern(tokens) if chosen is None else pattern_of(chosen, self.block_size),
            is_causal, scale, dropout,
        )  # fmt: skip
        out = self._over_ring(query, key, value, settings, mask)
        if out is not None:
            return out
        allowed = key_mask("attention_mask", mask, key.shape[0], key.shape[1])
        if chosen is not None:
            return blocks_attention(query, key, value, chosen, self.block_size, is_causal, scale, dropout, allowed)
        pattern = self.pattern(key.shape[1])
        return attention(query, key, value, pattern, causal=is_causal, scale=scale, dropout=dropout, key_mask=allowed)


class BlockSparseRingDilatedAttention(_BlockSparse):
    """Attention over the active blocks of sparse_config (a SparsePatternConfig or a dict of its fields), one softmax
    over all of them. The mask covers the whole sequence; with compose=True it lies in the strands of dilated attention
    instead, group by group of the heads. dilated_sparse takes its distances, in blocks, from dilation_rates.
    """

    @made_from(_BlockSparseArguments)
    def __init__(self, arguments: _BlockSparseArguments) -> None:
        config = _config(SparsePatternConfig, arguments.sparse_config, "sparse_config")
        super().__init__(arguments, config.block_size)
        self.sparse_config = config
        self.compose = bool(arguments.compose)
        self.density = _fraction("sparsity_ratio", config.sparsity_ratio)
        self._compared: set[int] = set()  # lengths whose density was looked at
        self.block_pattern(1 << 20)  # refuses unknown types before any call

    def block_pattern(self, tokens: int) -> BlockPattern:
        config, size = self.sparse_config, self.block_size
        window, shared = config.local_window_size, min(config.global_tokens, tokens)
        makers = {
            "dilated_sparse": lambda: BlockPattern.dilated_sparse(self.dilation_rates, size),
            **dict.fromkeys(("local_window", "local"), lambda: BlockPattern.local_window(window, size)),
            **dict.fromkeys(("global_local", "longformer"), lambda: BlockPattern.global_local(shared, window, size)),
            "strided": lambda: BlockPattern.strided(window, size),
            "hierarchical": lambda: BlockPattern.hierarchical(LEVELS, size),
            "random": lambda: BlockPattern.random(self.density, 0, size),
            "bigbird": lambda: BlockPattern.bigbird(shared, window, self.density, 0, size),
        }  # fmt: skip
        return makers[choice("pattern_type", config.pattern_type, list(makers))]()

    def pattern(self, tokens: int) -> Pattern:
        if not self.compose:
            return super().pattern(tokens)
        result = dilated(self.segment_lengths, self.dilation_rates)
        for index, (segment, rate) in enumerate(zip(self.segment_lengths, self.dilation_rates)):
            rows = -(-min(segment, tokens) // rate)
            result = result.with_mask(index, self.block_pattern(rows))
        return result

    def _compare_density(self, tokens: int, causal: bool) -> None:
        """Geometry decides what a structured pattern keeps; says so where that is far from what was asked."""
        if tokens in self._compared or self.sparse_config.pattern_type == "random" or torch.compiler.is_compiling():
            return
        self._compared.add(tokens)
        kept = self.block_pattern(tokens).mask(tokens, 1, causal).density
        if not self.density / 2 <= kept <= self.density * 2:
            warn_once(
                "density",
                f"{type(self).__name__}: pattern_type {self.sparse_config.pattern_type!r} keeps {kept:.3g} of blocks "
                f"of {tokens} tokens, sparsity_ratio asks for {self.density:.3g}; geometry decides. Use 'random' for "
                "an exact ratio",
            )

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, is_causal: bool = False, attention_mask: Tensor | None = None,
        return_attention_weights: bool = False,
    ) -> Any:  # fmt: skip
        """query [b, n, h, d], key and value [b, n, h or fewer, d] -> [b, n, h, d]. return_attention_weights adds a dict
        of block_indices (entry, head, block row, block column), block_values and block_size."""
        require_tensors(query=query, key=key, value=value)
        is_causal = flag("is_causal", is_causal)
        tokens = key.shape[1]
        if self._group() is None:
            self._compare_density(tokens, is_causal)
        elif return_attention_weights:
            raise Unsupported("return_attention_weights over a process group: no rank has all keys; ask one process")
        out = self._attend(query, key, value, is_causal, attention_mask)
        if not return_attention_weights:
            return out
        pattern = self.pattern(tokens)
        with torch.no_grad():
            weights = attention_blocks(
                query, key, pattern, causal=is_causal, block_size=self.block_size,
                key_mask=key_mask("attention_mask", attention_mask, key.shape[0], tokens),
            )  # fmt: skip
        return out, weights

    def extra_repr(self) -> str:
        return f"{self.sparse_config}, dilation_rates={self.dilation_rates}, compose={self.compose}"


class BlockSparseHierarchical(_BlockSparse):
    """Block rows at coarser strides see wider windows. sparse_config gives the block size (default 64)."""

    @made_from(_HierarchicalArguments)
    def __init__(self, arguments: _HierarchicalArguments) -> None:
        super().__init__(arguments, _small_blocks(arguments.sparse_config))
        self.hierarchical_config = _config(HierarchicalConfig, arguments.hierarchical_config, "hierarchical_config")
        self.num_heads = arguments.num_heads
        self.head_dim = arguments.head_dim
        self._levels()

    def _levels(self) -> list[tuple[int, int]]:
        try:
            return [(level["stride"], level["window_size"]) for level in self.hierarchical_config.level_configs]
        except (KeyError, TypeError):
            raise invalid(
                "level_configs",
                f"is {self.hierarchical_config.level_configs!r}: give dicts with stride and window_size",
            ) from None

    def block_pattern(self, tokens: int) -> BlockPattern:
        return BlockPattern.hierarchical(self._levels(), self.block_size)

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, is_causal: bool = False, attention_mask: Tensor | None = None
    ) -> Tensor:
        return self._attend(query, key, value, is_causal, attention_mask)

    def get_pattern_stats(self, seq_len: int) -> dict[str, Any]:
        """total_blocks, active_blocks, sparsity (the fraction pruned); of each level stride, window_size, coverage."""
        mask = self.block_pattern(seq_len).mask(seq_len, 1, False)
        total = mask.blocks**2
        diagonal = BlockPattern.local_window(0, self.block_size).mask(seq_len, 1, False)
        levels = []
        for stride, window in self._levels():
            own = BlockPattern.hierarchical([(stride, window)], self.block_size).mask(seq_len, 1, False)
            if stride // self.block_size > 1:  # rows between the strides have the diagonal from no level
                rows = range(0, mask.blocks, stride // self.block_size)
                count = sum(len(own.row(0, row)) for row in rows)
            else:
                count = (own | diagonal).active_blocks
            levels.append({"stride": stride, "window_size": window, "coverage": count / total if total else 0.0})
        return {
            "total_blocks": total, "active_blocks": mask.active_blocks,
            "sparsity": 1.0 - mask.density if total else 0.0, "levels": levels,
        }  # fmt: skip

    def visualize_pattern(self, seq_len: int) -> str:
        """A picture in characters: queries down, keys across."""
        return draw(self.pattern(seq_len), seq_len, heads=1)

    def extra_repr(self) -> str:
        return f"{self.hierarchical_config}, block_size={self.block_size}"


class BlockSparseAdaptive(_BlockSparse):
    """Every call chooses its blocks: per batch entry, head and block row those whose mean key fits the mean query best. That
    choice carries no gradient. learned=True adds a learned score, which also weighs the chosen blocks and so is trained
    (longspan/torch/adaptive.py says how)."""

    learned: Any

    @made_from(_AdaptiveArguments)
    def __init__(self, arguments: _AdaptiveArguments) -> None:
        super().__init__(arguments, _small_blocks(arguments.sparse_config))
        self.num_heads = integer("num_heads", arguments.num_heads)
        self.head_dim = integer("head_dim", arguments.head_dim)
        self.adaptive_config = _config(AdaptiveConfig, arguments.adaptive_config, "adaptive_config")
        self.density = _kept("base_sparsity", self.adaptive_config.base_sparsity)
        if flag("learned", arguments.learned):
            from .adaptive import LearnedBlocks

            self.learned = LearnedBlocks(self.adaptive_config, self.num_heads, self.head_dim, self.density).to(
                device=arguments.device, dtype=arguments.dtype
            )
        else:
            self.learned = None
            _warn_unlearned(self.adaptive_config)

    def block_pattern(self, tokens: int) -> BlockPattern:
        return BlockPattern.adaptive(self.density, self.block_size)

    def get_sparsity_loss(self) -> Tensor:
        """To be added to the loss: sparsity_reg_weight times the share of the blocks' scores outside the chosen ones."""
        return torch.zeros(()) if self.learned is None else self.learned.loss()

    def _attend_learned(
        self, query: Tensor, key: Tensor, value: Tensor, is_causal: bool, mask: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        width, heads = query.shape[3], query.shape[2]
        if heads != self.num_heads or width != self.head_dim:
            raise invalid("query", f"has {heads} heads of {width}: learned for {self.num_heads} of {self.head_dim}")
        key, value = (x.repeat_interleave(heads // x.shape[2], dim=2) for x in (key, value))
        chosen, q_side, k_side = self.learned(query, key, self.block_size, is_causal, mask)
        blocks = chosen.flatten(0, 1)
        value = torch.cat([value, value.new_zeros(k_side.shape)], -1)
        out = self._attend(
            torch.cat([query, q_side], -1), torch.cat([key, k_side], -1), value, is_causal, mask, blocks, width**-0.5
        )  # fmt: skip
        return out[..., :width], blocks

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, is_causal: bool = False, attention_mask: Tensor | None = None,
        return_pattern: bool = False,
    ) -> Any:  # fmt: skip
        """return_pattern adds {"patterns": (block rows, block columns) of each head}; for several batch entries a list
        of those."""
        require_tensors(query=query, key=key, value=value)
        is_causal = flag("is_causal", is_causal)
        mask = key_mask("attention_mask", attention_mask, key.shape[0], key.shape[1])
        if self.learned is None and not (self.adaptive_config.share_across_heads or return_pattern):
            return self._attend(query, key, value, is_causal, mask)
        if self._group() is not None:
            raise Unsupported("adaptive blocks over a process group: no rank has all queries and keys to choose from")
        if self.learned is not None:
            out, chosen = self._attend_learned(query, key, value, is_causal, mask)
        else:
            shared = self.adaptive_config.share_across_heads
            chosen = choose_blocks(query, key, mask, self.density, self.block_size, is_causal, shared)
            out = self._attend(query, key, value, is_causal, mask, chosen)
        if not return_pattern:
            return out
        patterns = [
            {"patterns": [head.nonzero(as_tuple=True) for head in entry]} for entry in chosen.unflatten(0, (len(query), -1))
        ]
        return out, patterns[0] if len(query) == 1 else patterns

    def extra_repr(self) -> str:
        return f"{self.adaptive_config}, block_size={self.block_size}"


class BlockSparseRingMultiheadDilatedAttention(MultiheadDilatedAttention):
    """Projections around BlockSparseRingDilatedAttention. Note the order of the lists: segment_lengths first."""

    @made_from(_MultiheadArguments)
    def __init__(self, arguments: _MultiheadArguments) -> None:
        a = arguments
        MultiheadDilatedAttention.__init__(
            self, a.embed_dim, a.num_heads, [1], [1], a.dropout, a.bias, a.layer_norm, a.layer_norm_eps, a.gamma_init,
            a.device, a.dtype,
        )  # fmt: skip
        self.attention = BlockSparseRingDilatedAttention(
            a.segment_lengths, a.dilation_rates, a.sparse_config, a.dropout, a.compose, a.ring_size
        )


def create_block_sparse_attention(
    sparsity_ratio: float = 0.9, pattern_type: str = "dilated_sparse", embed_dim: int = 768, num_heads: int = 12,
    segment_lengths: Sequence[int] = (2048, 4096, 8192), dilation_rates: Sequence[int] = (1, 2, 4),
    block_size: int = 128, local_window_size: int = 512, global_tokens: int = 64, **arguments: Any,
) -> BlockSparseRingMultiheadDilatedAttention:  # fmt: skip
    """A multihead module. sparsity_ratio is the fraction of blocks PRUNED here, the other way round than in
    SparsePatternConfig; both meanings are those of the older packages."""
    kept = _kept("sparsity_ratio", sparsity_ratio)
    config = SparsePatternConfig(pattern_type, kept, block_size, local_window_size, global_tokens)
    return BlockSparseRingMultiheadDilatedAttention(
        embed_dim, num_heads, segment_lengths, dilation_rates, config, **arguments
    )
