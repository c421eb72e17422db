"""Values can be pickled and deep-copied, alone and within modules; what belongs to a process says so."""

import copy
import multiprocessing
import pickle

import numpy as np
import pytest

import longspan

torch = pytest.importorskip("torch")

import longspan.torch as lt

MASK = longspan.BlockMask(np.tri(4, dtype=bool), 16)
PATTERN = longspan.longnet([64, 128], [1, 2], phase="torchscale", pad_keys=True)
OPTIONS = longspan.Options(causal=True, scale=0.5, output_scale=2.0, dropout=0.1, deterministic=True, kernel="plain")
PROBLEM = dict(tokens=64, heads=4, head_dim=8, batch=3, kv_heads=2, query_rows=5, dtype="bf16", device="cuda:1")
VALUES = {
    "mask": MASK,
    "block_pattern": longspan.global_local(16, 64, block_size=16) | longspan.random_blocks(0.25, 7, block_size=16),
    "block_pattern_of_a_mask": longspan.BlockPattern(MASK),
    "pattern": PATTERN,
    "pattern_with_a_mask": longspan.dilated([64], [2]).with_mask(0, longspan.strided(32, 16)),
    "options": OPTIONS,
    "attention": longspan.Attention(PATTERN, OPTIONS),
    "plan": longspan.plan(PATTERN, options=longspan.Options(causal=True), lengths=True, alibi=True, **PROBLEM),
    "even": longspan.Shards.even(10, 3),
    "more_ranks_than_rows": longspan.Shards.even(2, 4),
    "zigzag": longspan.Shards.zigzag(17, 3),
    "zigzag_with_empty_chunks": longspan.Shards.zigzag(3, 2),
    "contiguous": longspan.Shards.contiguous([0, 3, 3, 10]),
}


def described(value):
    if isinstance(value, longspan.Attention):
        return value.pattern, value.options
    if isinstance(value, longspan.Plan):
        return str(value), value.totals, value.options, [value.workspace_bytes(one) for one in ("forward", "backward")]
    return value


@pytest.mark.parametrize("name", VALUES)
@pytest.mark.parametrize("way", ["pickle", "oldest_pickle", "copy", "deepcopy", "torch"])
def test_values_survive(name, way, tmp_path):
    value = VALUES[name]
    if way == "torch":
        torch.save({"value": value}, tmp_path / "file")
        again = torch.load(tmp_path / "file", weights_only=False)["value"]
    else:
        again = {
            "pickle": lambda: pickle.loads(pickle.dumps(value)),
            "oldest_pickle": lambda: pickle.loads(pickle.dumps(value, 0)),
            "copy": lambda: copy.copy(value),
            "deepcopy": lambda: copy.deepcopy(value),
        }[way]()
    assert type(again) is type(value)
    assert described(again) == described(value)


class Holder(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.values = dict(VALUES)
        self.attention = lt.BlockSparseRingDilatedAttention([32, 64], [1, 2], {"block_size": 16, "sparsity_ratio": 0.5})
        self.multihead = lt.MultiheadDilatedAttention(16, 4, [1, 2], [16, 32])

    def forward(self, q):
        return longspan.attention(q, q, q, self.values["block_pattern"])


def test_modules_that_hold_values_are_saved_and_copied(tmp_path):
    holder, q = Holder(), torch.randn(1, 60, 4, 8)
    torch.save(holder, tmp_path / "module")
    for again in (torch.load(tmp_path / "module", weights_only=False), copy.deepcopy(holder)):
        torch.testing.assert_close(again(q), holder(q), rtol=0, atol=0)
        torch.testing.assert_close(again.attention(q, q, q), holder.attention(q, q, q), rtol=0, atol=0)


def _texts(values):
    return [str(described(value)) for value in values]


def test_values_travel_to_another_process():
    sent = [value for name, value in VALUES.items() if "even" not in name and not isinstance(value, longspan.Shards)]
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        assert pool.apply(_texts, (sent,)) == _texts(sent)


def test_caches_are_copied_without_their_model():
    model = lt.LongNetLM(
        16, 8, 2, 1, 1, 16, segment_lengths=[4, 8], dilation_rates=[1, 2], positions="rotary"
    ).eval()  # fmt: skip
    cache = model.new_cache()
    ids = torch.arange(6)[None]
    model.decode(ids, cache)
    for other in (copy.deepcopy(cache), copy.copy(cache)):
        assert other.position == 6
    other = copy.deepcopy(cache)
    step = torch.tensor([[3]])
    torch.testing.assert_close(model.decode(step, other), model.decode(step, cache), rtol=0, atol=0)
    assert other.position == cache.position == 7
    again_model, again_cache = copy.deepcopy((model, cache))
    torch.testing.assert_close(again_model.decode(step, again_cache), model.decode(step, cache), rtol=0, atol=0)


UNPICKLABLE = {
    "communicator": lambda: longspan.local_ring(1)[0],
    "ring": lambda: longspan.Ring(longspan.Attention(PATTERN), None, longspan.Shards.even(8, 1)),
    "halo": longspan.RingHalo,
}


@pytest.mark.parametrize("name", UNPICKLABLE)
def test_what_belongs_to_a_process_says_so(name):
    made = UNPICKLABLE[name]()
    for copied in (pickle.dumps, copy.deepcopy, copy.copy):
        with pytest.raises(TypeError, match="belongs to"):
            copied(made)
