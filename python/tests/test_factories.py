"""Factories: every type by name, arguments and configs reach the class, and mistakes are named."""

import dataclasses
import types

import pytest

import longspan

torch = pytest.importorskip("torch")

import longspan.torch as lt
from longspan.torch.factories import TYPES

LISTS = dict(segment_lengths=[16, 32], dilation_rates=[1, 2])
SPARSE = {"pattern_type": "local_window", "block_size": 16, "local_window_size": 48}


def extra(kind):
    return {"sparse_config": SPARSE} if kind.startswith("block_sparse") else {}


def test_types_are_the_known_ones():
    known = "auto standard improved ring distributed improved_distributed block_sparse block_sparse_ring"
    assert set(TYPES) == set(known.split())


@pytest.mark.filterwarnings("ignore::longspan.LongspanWarning")
@pytest.mark.parametrize("kind", TYPES)
def test_every_type_runs(kind):
    torch.manual_seed(0)
    query, key, value = (torch.randn(2, 64, 4, 8) for _ in range(3))
    module = lt.create_dilated_attention(kind, **LISTS, **extra(kind))
    out = module(query, key, value, is_causal=True)
    wanted = lt.DilatedAttention(**LISTS)(query, key, value, is_causal=True)
    assert out.shape == query.shape
    assert torch.allclose(out, wanted, atol=1e-6) != kind.startswith("block_sparse")

    multihead = lt.create_multihead_dilated_attention(kind, 32, 4, **LISTS, dropout=0.0, **extra(kind))
    out, weights = multihead(torch.randn(2, 64, 32))
    assert out.shape == (2, 64, 32) and weights is None
    assert (multihead.embed_dim, multihead.num_heads) == (32, 4)
    # Each list in its place, although classes take them in different orders.
    assert list(multihead.attention.segment_lengths) == [16, 32] and list(multihead.attention.dilation_rates) == [1, 2]


def test_defaults():
    module = lt.create_dilated_attention()
    assert type(module) is lt.ImprovedDilatedAttention
    assert (module.segment_lengths, module.dilation_rates) == ([2048, 4096, 8192], [1, 2, 4])
    multihead = lt.create_multihead_dilated_attention(device="meta")
    assert type(multihead) is lt.ImprovedMultiheadDilatedAttention
    assert (multihead.embed_dim, multihead.num_heads) == (768, 12)


@pytest.mark.parametrize("kind", ["standard", "improved"])
def test_dropout_goes_by_one_name(kind):
    assert lt.create_dilated_attention(kind, dropout=0.25).dropout == 0.25


@dataclasses.dataclass
class Heads:
    embed_dim: int
    num_heads: int
    bias: bool = True
    gamma_init: float | None = None


def test_configs_of_every_form():
    spans = types.SimpleNamespace(segment_lengths=[8, 16, 24], dilation_rates=[1, 2, 3], dropout=0.1)
    for heads in (Heads(24, 3, bias=False), {"embed_dim": 24, "num_heads": 3, "bias": False}):
        module = lt.create_multihead_dilated_attention("standard", multihead_config=heads, attention_config=spans)
        assert (module.embed_dim, module.num_heads, module.q_proj.bias) == (24, 3, None)
        assert module.attention.segment_lengths == [8, 16, 24] and module.attention.dropout == 0.1
    assert lt.create_dilated_attention("standard", attention_config=spans).dropout == 0.1
    assert lt.create_dilated_attention("standard", attention_config=spans, dropout=0.0).dropout == 0.0


def test_mistakes_are_named():
    for make in (lt.create_dilated_attention, lt.create_multihead_dilated_attention):
        with pytest.raises(longspan.InvalidArgument, match="attention_type is 'fast': give 'auto', 'standard'"):
            make("fast")
        with pytest.raises(longspan.InvalidArgument, match="attention_config is 3"):
            make("standard", attention_config=3)
        with pytest.raises(longspan.InvalidArgument, match="colour"):
            make("standard", colour=1)
    with pytest.raises(longspan.InvalidArgument, match="another config"):
        lt.create_multihead_dilated_attention(multihead_config={"dropout": 0.1}, attention_config={"dropout": 0.2})
    with pytest.raises(longspan.InvalidArgument, match="embed_dim"):
        lt.create_multihead_dilated_attention("standard", 30, 12)
