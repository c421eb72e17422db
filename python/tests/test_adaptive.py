"""Learned blocks: the gate and its gradients are exact, causal rows see nothing ahead, options act, and training learns."""

import copy

import pytest

import longspan

torch = pytest.importorskip("torch")

import longspan.torch as lt
from longspan.torch.adaptive import FEATURES, AdaptiveSparsityTrainer, ImportanceScorer

SIZE, HEADS, WIDTH, TOKENS = 16, 2, 8, 60


def module(**config):
    torch.manual_seed(0)
    fields = {"base_sparsity": 0.5, "hidden_dim": 8, **config}
    return lt.BlockSparseAdaptive([64], [1], HEADS, WIDTH, fields, {"block_size": SIZE}, learned=True)


def inputs(dtype=torch.float64):
    torch.manual_seed(1)
    return [torch.randn(2, TOKENS, HEADS, WIDTH, dtype=dtype, requires_grad=True) for _ in range(3)]


def dense(one, query, key, value, chosen, q_side, k_side):
    """The definition: scores of the chosen blocks plus the gate, one softmax."""
    scores = (torch.einsum("bihd,bjhd->bhij", query, key) + torch.einsum("bihf,bjhf->bhij", q_side, k_side)) / WIDTH**0.5
    mask = chosen.repeat_interleave(SIZE, 2).repeat_interleave(SIZE, 3)[:, :, :TOKENS, :TOKENS]
    return torch.einsum("bhij,bjhd->bihd", scores.masked_fill(~mask, -torch.inf).softmax(-1), value)


@pytest.mark.parametrize("hard", [False, True])
@pytest.mark.parametrize("share", [False, True])
def test_gate_and_gradients_equal_the_definition(hard, share):
    one = module(hard_sparsity=hard, share_across_heads=share).double().eval()
    tensors = inputs()
    out = one(*tensors)
    wanted = dense(one, *tensors, *one.learned(*tensors[:2], SIZE, False, None))
    assert torch.allclose(out, wanted, atol=1e-12)
    sources = [*tensors, *one.learned.importance_scorer.parameters(), one.learned.q_summary_proj.weight]
    torch.manual_seed(2)
    grad = torch.randn_like(out)
    found, right = torch.autograd.grad(out, sources, grad), torch.autograd.grad(wanted, sources, grad)
    for a, b in zip(found, right):
        assert torch.allclose(a, b, atol=1e-10) and b.abs().max() > 0


def test_the_gate_is_the_scorers_score_of_the_means_over_the_temperature():
    one = module(temperature=0.5).double().eval()
    query, key, _ = inputs()
    _, q_side, k_side = one.learned(query, key, SIZE, False, None)
    gate = torch.einsum("bihf,bjhf->bhij", q_side[:, ::SIZE], k_side[:, ::SIZE]) / WIDTH**0.5
    means = [torch.stack([part.mean(1) for part in x.split(SIZE, 1)], 1) for x in (query, key)]
    for head in range(HEADS):
        wanted = one.learned.importance_scorer(means[0][:, :, head], means[1][:, :, head], head) / 0.5
        assert torch.allclose(gate[:, head], wanted, atol=1e-12) and wanted.abs().max() > 0.01


def test_gradients_equal_differences():
    one = module(num_layers=1).double().eval()
    tensors = inputs()
    assert torch.autograd.gradcheck(lambda *x: one(*x), tensors, fast_mode=True)
    weights = list(one.learned.importance_scorer.parameters())
    fixed = [x.detach() for x in tensors]

    def of_weights(*given):
        return torch.func.functional_call(
            one, dict(zip((f"learned.importance_scorer.{name}" for name, _ in one.learned.importance_scorer.named_parameters()), given)),
            tuple(fixed),
        )  # fmt: skip

    assert torch.autograd.gradcheck(of_weights, weights, fast_mode=True)


def test_straight_through_leaves_the_values_of_plain_attention():
    one = module(hard_sparsity=True).eval()
    query, key, value = (x.float() for x in inputs())
    chosen = one.learned(query, key, SIZE, False, None)[0]
    mask = longspan.BlockMask(chosen.flatten(0, 1).numpy(), SIZE)
    plain = lt.attention(query, key, value, longspan.Pattern.block_sparse(mask))
    assert torch.allclose(one(query, key, value), plain, atol=1e-5)


def test_causal_rows_do_not_see_the_rows_behind_them():
    one = module(base_sparsity=0.0).eval()  # all blocks, so that the choice is out of play
    query, key, value = (x.detach().float() for x in inputs())
    out = one(query, key, value, is_causal=True)
    for x in (query, key, value):
        x[:, 40:] = 7.0
    assert torch.equal(one(query, key, value, is_causal=True)[:, :40], out[:, :40])


def test_masked_rows_enter_neither_means_nor_gates():
    one = module().eval()
    query, key, value = (x.detach().float() for x in inputs())
    mask = torch.ones(2, TOKENS, dtype=torch.bool)
    mask[:, 50:] = False
    out = one(query, key, value, attention_mask=mask)
    for x in (query, key, value):
        x[:, 50:] = torch.nan
    assert torch.equal(one(query, key, value, attention_mask=mask)[:, :48], out[:, :48])


def test_modules_and_tensors_of_16_bits():
    one = module().to(torch.bfloat16)
    tensors = [x.detach().bfloat16().requires_grad_() for x in inputs()]
    out = one(*tensors)
    (out.float().square().sum() + one.get_sparsity_loss()).backward()
    assert out.dtype is torch.bfloat16 and one.learned.importance_scorer.query[0].grad.abs().max() > 0


def test_density_and_the_diagonal_are_kept():
    one = module(base_sparsity=0.75)
    query, key, value = (x.float() for x in inputs())
    for causal, wanted in ((False, [1, 1, 1, 1]), (True, [1, 1, 1, 1])):
        _, patterns = one(query, key, value, is_causal=causal, return_pattern=True)
        for entry in patterns:
            for rows, columns in entry["patterns"]:
                assert torch.bincount(rows).tolist() == wanted and torch.equal(rows, columns)


def test_temperature_scales_gate_and_noise_and_can_be_learned():
    query, key, value = (x.float() for x in inputs())
    warm, cold = module(temperature=1.0).eval(), module(temperature=0.25, learnable_temperature=True).eval()
    gates = [one.learned(query, key, SIZE, False, None)[1] for one in (warm, cold)]
    assert torch.allclose(4 * gates[0], gates[1])
    cold(query, key, value).sum().backward()
    assert cold.learned.log_temperature.grad.abs() > 0

    warm.train()
    torch.manual_seed(3)
    drawn = {tuple(warm.learned(query, key, SIZE, False, None)[0].flatten().tolist()) for _ in range(5)}
    assert len(drawn) > 1  # training tries other blocks
    warm.eval()
    assert torch.equal(*(warm.learned(query, key, SIZE, False, None)[0] for _ in range(2)))


def test_sparsity_loss_moves_scores_into_the_chosen_blocks():
    one = module(sparsity_reg_weight=1.0)
    query, key, value = (x.detach().float() for x in inputs())
    assert one.get_sparsity_loss() == 0 and one.get_sparsity_loss().requires_grad
    optimizer = torch.optim.Adam(one.parameters(), 0.05)
    torch.manual_seed(4)
    losses = []
    for _ in range(30):
        one(query, key, value)
        loss = one.get_sparsity_loss()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert sum(losses[-5:]) < 0.5 * sum(losses[:5])
    copy.deepcopy(one)


def test_scorer_and_trainer_alone():
    scorer = ImportanceScorer(WIDTH, 16, 3, HEADS)
    q, k = torch.randn(2, 5, WIDTH), torch.randn(2, 7, WIDTH)
    each = [scorer(q, k, head) for head in range(HEADS)]
    assert each[0].shape == (2, 5, 7) and torch.allclose(scorer(q, k), sum(each) / HEADS, atol=1e-6)
    assert FEATURES % 8 == 0  # columns that GPUs take
    one = module()
    trainer = AdaptiveSparsityTrainer(one, 1.0, 0.1, 10)
    for _ in range(5):
        trainer.step()
    assert one.learned.temperature.item() == pytest.approx(0.55)
    stats = trainer.analyze_patterns([[x.float() for x in inputs()]])
    assert stats["sparsity_ratios"] == [0.5] * 4 and one.training
    assert stats["head_similarity"][0] + stats["pattern_diversity"][0] == pytest.approx(1)


def test_wrong_arguments_are_named():
    with pytest.raises(longspan.InvalidArgument, match="hidden_dim"):
        module(hidden_dim=-1)
    with pytest.raises(longspan.InvalidArgument, match="learned for 2 of 8"):
        module()(*[torch.randn(1, 32, 2, 16)] * 3)


# ---- retrieval: each block of queries needs one row of one block; the address of a block is written in its keys in other
# ---- coordinates than in the queries, and the row that matches has its opposite beside it, so that means tell nothing.

BLOCKS = 8


def retrieval(generator, basis):
    def unit(*shape):
        return torch.nn.functional.normalize(torch.randn(*shape, generator=generator), dim=-1)

    batch, rows = 16, BLOCKS * SIZE
    address, content = unit(batch, BLOCKS, 8), unit(batch, BLOCKS, 8)
    order = torch.stack([torch.randperm(BLOCKS, generator=generator) for _ in range(batch)])[..., None]
    key = torch.cat([2 * address @ basis, torch.zeros(batch, BLOCKS, 8)], -1)[:, :, None].repeat(1, 1, SIZE, 1)
    key[..., 8:] += 0.1 * torch.randn(batch, BLOCKS, SIZE, 8, generator=generator)
    key[:, :, 3, 8:] += 5 * content
    key[:, :, 4, 8:] -= 5 * content
    value = torch.randn(batch, BLOCKS, SIZE, 16, generator=generator)
    asked = [torch.gather(x, 1, order.expand(-1, -1, x.shape[-1])) for x in (address, content, value[:, :, 3])]
    query = torch.cat([2 * asked[0], 5 * asked[1]], -1)[:, :, None].expand(-1, -1, SIZE, -1)
    target = asked[2][:, :, None].expand(-1, -1, SIZE, -1)
    return [x.reshape(batch, rows, 1, 16) for x in (query, key, value, target)]


def test_learned_blocks_reach_dense_attention_where_fixed_ones_do_not():
    torch.manual_seed(0)
    basis = torch.linalg.qr(torch.randn(8, 8))[0]
    config = {"base_sparsity": 5 / 8}
    fixed = lt.BlockSparseAdaptive([128], [1], 1, 16, config, {"block_size": SIZE})
    learned = lt.BlockSparseAdaptive([128], [1], 1, 16, {**config, "num_layers": 1}, {"block_size": SIZE}, learned=True)

    def loss(function, seed):
        query, key, value, target = retrieval(torch.Generator().manual_seed(seed), basis)
        return (function(query, key, value) - target).square().mean()

    trainer = AdaptiveSparsityTrainer(learned, 1.0, 0.3, 120)
    optimizer = torch.optim.Adam(learned.parameters(), 0.03)
    for step in range(120):
        optimizer.zero_grad()
        (loss(learned, step) + learned.get_sparsity_loss()).backward()
        optimizer.step()
        trainer.step()
    learned.eval()
    with torch.no_grad():
        with_all, with_means, with_learned = (loss(f, 1000).item() for f in (lt.attention, fixed, learned))
    assert with_learned <= with_all < 0.3 < 0.7 < with_means, (with_learned, with_all, with_means)
