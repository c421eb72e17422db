"""Block-sparse patterns, inspection and the drop-in classes against float64 formulas over whole score matrices."""

import pickle
import warnings

import numpy as np
import pytest

import longspan

torch = pytest.importorskip("torch")

import longspan.torch as lt
import oracle


SIZE = 16
PATTERNS = {
    "local_window": longspan.local_window(48, SIZE),
    "strided": longspan.strided(48, SIZE),
    "dilated_sparse": longspan.dilated_sparse([1, 3], SIZE),
    "global_local": longspan.global_local(20, 32, SIZE),
    "hierarchical": longspan.hierarchical([(16, 32), (64, -1)], SIZE),
    "random": longspan.random_blocks(0.3, 7, SIZE),
    "bigbird": longspan.bigbird(16, 32, 0.2, 1, SIZE),
}


def inputs(tokens=101, heads=4, kv_heads=2, head_dim=8, batch=2):
    generator = torch.Generator().manual_seed(1)
    shapes = [(batch, tokens, h, head_dim) for h in (heads, kv_heads, kv_heads)]
    return [torch.randn(shape, generator=generator).requires_grad_() for shape in shapes]


def counts_of(mask, tokens, heads):
    """[heads, tokens, tokens] of a mask for one batch entry."""
    dense = torch.from_numpy(mask.to_dense()).double()
    whole = dense.repeat_interleave(mask.block_size, 1).repeat_interleave(mask.block_size, 2)[:, :tokens, :tokens]
    return whole.expand(heads, -1, -1)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", PATTERNS)
def test_patterns_match_formula(name, causal):
    query, key, value = inputs()
    pattern = PATTERNS[name]
    out = longspan.attention(query, key, value, pattern, causal=causal)
    counts = counts_of(pattern.mask(101, 4, causal), 101, 4)
    want, _ = oracle.counted_attention(query, key, value, counts, causal=causal)
    torch.testing.assert_close(out.double(), want, atol=3e-6, rtol=0)
    weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(2))
    pairs = zip(
        torch.autograd.grad(out, [query, key, value], weight),
        torch.autograd.grad(want, [query, key, value], weight.double()),
    )
    for mine, theirs in pairs:
        torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=0)


def test_patterns_are_values():
    pattern = longspan.local_window(128, 32) | longspan.random_blocks(0.1, 3, 32)
    assert str(pattern) == "block=32 local_window(128)+random(0.1,3)"
    assert longspan.BlockPattern.parse(str(pattern)) == pattern
    assert longspan.block_sparse(str(pattern)) == longspan.block_sparse(pattern)
    whole = longspan.block_sparse(pattern)
    assert pickle.loads(pickle.dumps(whole)) == whole and longspan.Pattern.parse(str(whole)) == whole
    assert longspan.Pattern.parse("bigbird") == longspan.block_sparse(longspan.bigbird())
    with pytest.raises(longspan.InvalidArgument, match="density"):
        longspan.random_blocks(0.0)
    with pytest.raises(longspan.InvalidArgument, match="block_size 24"):
        longspan.local_window(64, 24)
    with pytest.raises(longspan.InvalidArgument, match="global_tokens is 200"):
        longspan.plan(longspan.global_local(200, 64), tokens=100, heads=1, head_dim=8)
    with pytest.raises(longspan.InvalidArgument, match="give booleans"):
        longspan.block_sparse(np.ones((3, 3)))


def test_masks_are_sets(tmp_path):
    rng = np.random.default_rng(0)
    a, b = (longspan.BlockMask(rng.random((2, 5, 5)) < 0.5, 32) for _ in range(2))
    assert ((a | b).to_dense() == (a.to_dense() | b.to_dense())).all()
    assert ((a & b).to_dense() == (a.to_dense() & b.to_dense())).all()
    assert ((a - b).to_dense() == (a.to_dense() & ~b.to_dense())).all()
    np.save(tmp_path / "mask.npy", a.to_dense())
    assert longspan.BlockMask(np.load(tmp_path / "mask.npy"), 32) == a == pickle.loads(pickle.dumps(a))
    assert a.row(1, 2) == list(np.flatnonzero(a.to_dense()[1, 2]))
    assert a.column(0, 3) == list(np.flatnonzero(a.to_dense()[0, :, 3]))
    assert (a.indices() == np.argwhere(a.to_dense())).all()
    assert longspan.BlockMask.from_rows(16, 1, 2, [[0], [0, 1]]).density == 0.75
    with pytest.raises(longspan.InvalidArgument, match="ascending"):
        longspan.BlockMask.from_rows(16, 1, 2, [[0], [1, 0]])


def test_draw():
    text = longspan.draw(longspan.local_window(32, 16), 128, heads=1, ascii=True)
    assert text.splitlines()[0] == "####" + "." * 12 and len(text.splitlines()) == 8
    assert longspan.draw("bigbird", 2048, svg=True).startswith("<svg")
    assert longspan.plan("bigbird", tokens=512, heads=2, head_dim=8).masks[0].heads == 2
    assert longspan.plan("adaptive(0.5)", tokens=512, heads=2, head_dim=8).masks == [None]


@pytest.mark.parametrize("causal", [False, True])
def test_adaptive_uses_the_mask_it_returns(causal):
    query, key, value = inputs(batch=2)
    pattern = longspan.adaptive(0.4, SIZE)
    mask = longspan.adaptive_mask(query, key, pattern, causal=causal)
    assert mask.heads == 8 and abs(mask.density - 0.4) < 0.2
    out = longspan.attention(query, key, value, pattern, causal=causal)
    fixed = longspan.attention(query, key, value, mask, causal=causal)
    assert torch.equal(out, fixed)
    for mine, theirs in zip(*(torch.autograd.grad(x.sum(), [query, key, value]) for x in (out, fixed))):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("pattern", [PATTERNS["bigbird"], longspan.dilated([32, 101], [1, 3]), None])
def test_inspection(pattern):
    query, key, value = inputs()
    out, lse = longspan.attention(query, key, value, pattern, return_lse=True)
    found = longspan.attention_blocks(query, key, pattern, block_size=SIZE)
    weights = torch.zeros(2, 4, 7 * SIZE, 7 * SIZE)
    for (entry, head, row, column), values in zip(found["block_indices"].tolist(), found["block_values"]):
        weights[entry, head, row * SIZE : (row + 1) * SIZE, column * SIZE : (column + 1) * SIZE] = values
    weights = weights[:, :, :101, :101]
    covered = torch.isfinite(lse).float()
    torch.testing.assert_close(weights.sum(-1), covered, atol=1e-5, rtol=0)
    scale = 1.0 if pattern is None or isinstance(pattern, longspan.BlockPattern) else pattern.output_scale
    mixed = torch.einsum("bhij,bjhd->bihd", weights, value.repeat_interleave(2, 2)) * scale
    torch.testing.assert_close(mixed, out, atol=1e-5, rtol=0)
    received = longspan.attention_received(query, key, pattern)
    torch.testing.assert_close(received, weights.sum(2), atol=1e-4, rtol=0)
    as_numpy = longspan.attention_received(query.detach().numpy(), key.detach().numpy(), pattern)
    assert isinstance(as_numpy, np.ndarray) and np.array_equal(as_numpy, received.numpy())


def test_wrong_inputs_of_inspection_are_named():
    query, key, _ = (x.detach() for x in inputs())
    adaptive, ok = longspan.adaptive(0.4, SIZE), torch.ones(2, 101, dtype=torch.bool)
    looks = [
        lambda q, k, **data: longspan.adaptive_mask(q, k, adaptive, **data),
        lambda q, k, **data: longspan.attention_blocks(q, k, PATTERNS["bigbird"], **data),
        lambda q, k, **data: longspan.attention_received(q, k, PATTERNS["bigbird"], **data),
    ]
    for look in looks:
        look(query, key, key_mask=ok)
        for q, k, data, name in (
            (query, key[:1], {}, "k"),
            (query, key[..., :4], {}, "k"),
            (query, key.half(), {}, "k"),
            (query, key[:, :, :1].expand(-1, -1, 3, -1), {}, "k"),
            (query[:, :50], key, {}, "q"),
            (query[0], key, {}, "q"),
            (query, key, {"key_mask": ok[:, :50]}, "key_mask"),
            (query, key, {"key_mask": ok.float()}, "key_mask"),
            (query, key, {"lengths": torch.tensor([5, 102])}, "lengths"),
            (query, key, {"lengths": torch.tensor([5])}, "lengths"),
            (query, key, {"query_ranges": [(60, 50)]}, "query_ranges"),
        ):
            with pytest.raises(longspan.InvalidArgument) as error:
                look(q, k, **data)
            assert error.value.argument == name, str(error.value)
    with pytest.raises(longspan.InvalidArgument, match="use adaptive"):
        longspan.adaptive_mask(query, key, PATTERNS["bigbird"])
    mask = longspan.adaptive_mask(query, key, adaptive)
    for place in ((8, 0, 0), (-1, 0, 0), (0, 7, 0), (0, 0, 7), (0, 0, -1)):
        with pytest.raises(longspan.InvalidArgument, match="blocks 0 to 6"):
            mask.active(*place)
    assert longspan.adaptive_mask(query.repeat(1, 1, 1, 40), key.repeat(1, 1, 1, 40), adaptive).blocks == 7  # any head dim


def test_short_sequences_are_all_global():
    assert longspan.bigbird().mask(100).density == 1.0 == longspan.longformer().mask(50).density
    assert longspan.BlockPattern.parse(str(longspan.longformer())) == longspan.longformer()
    with pytest.raises(longspan.InvalidArgument, match="give at most"):
        longspan.longformer(512, 64).mask(50)


@pytest.fixture
def fresh_warnings():
    longspan._errors._warned.clear()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield caught


CONFIG = {"sparsity_ratio": 0.3, "block_size": SIZE, "local_window_size": 48, "global_tokens": 20}


KINDS = ["dilated_sparse", "local_window", "global_local", "random", "bigbird", "strided", "hierarchical"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("causal", [False, True])
def test_module_matches_formula(kind, causal, fresh_warnings):
    query, key, value = inputs()
    module = lt.BlockSparseRingDilatedAttention([64, 128], [1, 2], {"pattern_type": kind, **CONFIG})
    out, weights = module(query, key, value, is_causal=causal, return_attention_weights=True)
    counts = counts_of(module.block_pattern(101).mask(101, 4, causal), 101, 4)
    want, _ = oracle.counted_attention(query, key, value, counts, causal=causal)
    torch.testing.assert_close(out.double(), want, atol=3e-6, rtol=0)
    assert weights["block_size"] == SIZE and set(weights) == {"block_indices", "block_values", "block_size"}
    assert float(weights["block_values"].sum()) == pytest.approx(2 * 4 * 101, rel=1e-4)


def test_composed_with_dilation(fresh_warnings):
    query, key, value = inputs(kv_heads=4)
    config = lt.SparsePatternConfig("local_window", 0.3, SIZE, 32, 16)
    module = lt.BlockSparseRingDilatedAttention([48, 101], [1, 3], config, compose=True)
    counts = oracle.dilated_counts(101, 4, [48, 101], [1, 3])
    position = torch.arange(101)
    for index, owned in enumerate(oracle.group_ranges(4, 2)):
        segment, rate = ([48, 101][index], [1, 3][index])
        block = position % segment // rate // SIZE
        for head in owned:
            counts[head] *= (block[:, None] - block[None, :]).abs() <= 1
    want, _ = oracle.counted_attention(query, key, value, counts)
    torch.testing.assert_close(module(query, key, value).double(), want, atol=3e-6, rtol=0)


def test_meanings_of_ratio(fresh_warnings):
    # Kept in the config, pruned in the factory and in AdaptiveConfig.
    query, key, value = inputs(tokens=320, kv_heads=4, batch=1)
    kept = lt.BlockSparseRingDilatedAttention([64], [1], {"pattern_type": "random", **CONFIG, "sparsity_ratio": 0.2})
    assert kept.block_pattern(320).mask(320).density == pytest.approx(0.2)
    module = lt.create_block_sparse_attention(0.8, "random", 32, 4, block_size=SIZE)
    assert module.attention.block_pattern(320).mask(320).density == pytest.approx(0.2)
    adaptive = lt.BlockSparseAdaptive([64], [1], 4, 8, lt.AdaptiveConfig(base_sparsity=0.75), {"block_size": SIZE})
    _, chosen = adaptive(query, key, value, return_pattern=True)
    assert [len(rows) for rows, _ in chosen["patterns"]] == [20 * 5] * 4
    assert not fresh_warnings


def test_density_far_from_the_ratio_warns_once(fresh_warnings):
    query, key, value = inputs(tokens=640, batch=1)
    module = lt.BlockSparseRingDilatedAttention([64], [1], {"pattern_type": "local_window", **CONFIG})
    for _ in range(2):
        module(query, key, value)
    assert len(fresh_warnings) == 1
    text = str(fresh_warnings[0].message)
    assert "0.3" in text and f"{module.block_pattern(640).mask(640).density:.3g}" in text


def test_hierarchical():
    config = lt.HierarchicalConfig([{"stride": 16, "window_size": 32}, {"stride": 64, "window_size": -1}])
    module = lt.BlockSparseHierarchical([64], [1], config, {"block_size": SIZE}, num_heads=4, head_dim=8)
    assert (config.num_levels, module.block_size, module.num_heads, module.head_dim) == (2, SIZE, 4, 8)
    query, key, value = inputs()
    counts = counts_of(longspan.hierarchical([(16, 32), (64, -1)], SIZE).mask(101), 101, 4)
    want, _ = oracle.counted_attention(query, key, value, counts)
    torch.testing.assert_close(module(query, key, value).double(), want, atol=3e-6, rtol=0)
    stats = module.get_pattern_stats(160)
    assert stats["total_blocks"] == 100 and stats["active_blocks"] == 28 + 30 - (2 + 3 + 3)
    assert stats["sparsity"] == pytest.approx(1 - stats["active_blocks"] / 100)
    assert [level["coverage"] for level in stats["levels"]] == [0.28, 0.3]
    assert lt.BlockSparseHierarchical([64], [1]).block_size == 64
    assert len(module.visualize_pattern(160).splitlines()) == 10
    with pytest.raises(longspan.InvalidArgument, match="level_configs"):
        lt.BlockSparseHierarchical([64], [1], {"level_configs": [{"stride": 3}]})


def test_adaptive_module(fresh_warnings):
    query, key, value = inputs(batch=2)
    module = lt.BlockSparseAdaptive([64], [1], 4, 8, {"base_sparsity": 0.6}, {"block_size": SIZE})
    out, patterns = module(query, key, value, return_pattern=True)
    assert torch.equal(out, module(query, key, value)) and len(patterns) == 2 and len(patterns[0]["patterns"]) == 4
    shared = lt.BlockSparseAdaptive(
        [64], [1], 4, 8, lt.AdaptiveConfig(0.6, share_across_heads=True), {"block_size": SIZE}
    )
    _, (first, second) = shared(query, key, value, return_pattern=True)
    for entry, found in enumerate((first, second)):
        means = [
            torch.stack([part.mean(0) for part in x[entry].detach().split(SIZE)])
            for x in (query, key.repeat_interleave(2, 2))
        ]
        scores = torch.einsum("ihd,jhd->ij", *means)
        scores.fill_diagonal_(torch.inf)
        want = scores.topk(3).indices.sort().values  # floor(0.4 * 7 + 0.5)
        for rows, columns in found["patterns"]:
            assert torch.equal(columns.reshape(7, 3), want) and torch.equal(rows.reshape(7, 3)[:, 0], torch.arange(7))
    assert not fresh_warnings
    config = lt.AdaptiveConfig(temperature=0.5, hard_sparsity=True)
    lt.BlockSparseAdaptive([64], [1], 4, 8, config, learned=True)
    assert not fresh_warnings
    lt.BlockSparseAdaptive([64], [1], 4, 8, config)
    assert "temperature, hard_sparsity" in str(fresh_warnings[0].message)


def test_multihead_and_factory(fresh_warnings):
    module = lt.create_block_sparse_attention(0.7, "local_window", 32, 4, block_size=SIZE, local_window_size=32)
    assert isinstance(module, lt.BlockSparseRingMultiheadDilatedAttention)
    assert (module.embed_dim, module.num_heads) == (32, 4) and "q_proj.weight" in module.state_dict()
    x = torch.randn(2, 70, 32)
    out, weights = module(x, x, x, is_causal=True)
    assert out.shape == x.shape and weights is None
    changed = x.clone()
    changed[:, 40:] = 5.0
    torch.testing.assert_close(module(changed, changed, changed, is_causal=True)[0][:, :40], out[:, :40])
    out.sum().backward()
    assert all(parameter.grad is not None for parameter in module.parameters())


def test_bad_arguments_are_named():
    assert lt.SparsePatternConfig(block_size=100).block_size == 100  # only the module refuses
    for config, name in (({"block_size": 100}, "block_size"), ({"pattern_type": "cubist"}, "pattern_type"),
                         ({"sparsity_ratio": 0.0}, "sparsity_ratio"), ({"colour": 1}, "sparse_config")):  # fmt: skip
        with pytest.raises(longspan.InvalidArgument) as caught:
            lt.BlockSparseRingDilatedAttention([64], [1], config)
        assert caught.value.argument == name
    with pytest.raises(longspan.InvalidArgument, match="sparsity_ratio is 1"):
        lt.create_block_sparse_attention(1.0, embed_dim=32, num_heads=4)
    with pytest.raises(longspan.InvalidArgument, match="ring_size is 0"):
        lt.BlockSparseRingDilatedAttention([64], [1], ring_size=0)


@pytest.mark.parametrize("compose", [False, True])
@pytest.mark.parametrize("kind", ["local_window", "global_local", "random", "dilated_sparse"])
def test_fixed_masks_run_over_rings(kind, compose):
    config = {"pattern_type": kind, "block_size": 16, "local_window_size": 48, "global_tokens": 16, "sparsity_ratio": 0.3}
    torch.manual_seed(0)
    whole = [torch.randn(2, 170, 4, 16) for _ in range(3)]
    results = []
    for ring_size in (1, 3):
        own = [x.clone().requires_grad_() for x in whole]
        module = lt.BlockSparseRingDilatedAttention([64, 170], [1, 2], config, compose=compose, ring_size=ring_size)
        out = module(*own, is_causal=True)
        out.square().sum().backward()
        results.append((out.detach(), *(x.grad for x in own)))
        assert module.monitor.calls == (0 if ring_size == 1 else 6)
    one, ring = results
    assert torch.equal(one[0], ring[0])
    for mine, theirs in zip(ring[1:], one[1:]):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)


def test_adaptive_masks_over_a_ring_are_refused():
    q = torch.randn(1, 64, 2, 16)
    with pytest.raises(longspan.Unsupported, match="adaptive block masks over a ring"):
        lt.BlockSparseAdaptive([64], [1], 2, 16, ring_size=2)(q, q, q)
