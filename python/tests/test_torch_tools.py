"""What torch's tools see of the operators: patterns inside compiled functions, FLOP counts, copies of strided tensors."""

import functools

import pytest

import longspan

torch = pytest.importorskip("torch")

from torch.utils.flop_counter import FlopCounterMode

import longspan.torch as lt

PATTERN = longspan.dilated([8, 12], [1, 2])


def tensors(shape=(2, 21, 4, 8), kv_heads=None, dtype=torch.float32, grad=False):
    generator = torch.Generator().manual_seed(0)
    kv_shape = (*shape[:2], kv_heads or shape[2], shape[3])
    made = [torch.randn(s, generator=generator, dtype=torch.float64).to(dtype) for s in (shape, kv_shape, kv_shape)]
    return [x.requires_grad_(grad) for x in made]


MAKERS = {
    "dilated": lambda: longspan.dilated([8, 12], [1, 2]),
    "dense": lambda: longspan.dense(),
    "longnet": lambda: longspan.longnet([8, 16], [1, 3], phase="torchscale", pad_keys=True),
    "changed": lambda: longspan.dilated([8], [2]).with_output_scale(0.5).with_long_segments("skip"),
    "static_method": lambda: longspan.Pattern.dilated([8, 12], [1, 2]),
    "parsed": lambda: longspan.Pattern.parse("longnet 8/1 16/2"),
    "blocks": lambda: longspan.block_sparse(longspan.local_window(32, block_size=16)),
    "block_pattern": lambda: longspan.strided(32, block_size=16),
    "union": lambda: longspan.Pattern.parse("block=16 global_local(16,32)+random(0.5,3)"),
    "bigbird": lambda: longspan.bigbird(block_size=16),
    "united": lambda: longspan.local_window(32, block_size=16) | longspan.strided(32, block_size=16),
    "masked": lambda: longspan.dilated([32], [1]).with_mask(0, longspan.strided(16, 16) | longspan.local_window(0, 16)),
}


@pytest.mark.parametrize("maker", MAKERS)
def test_patterns_are_made_inside_compiled_functions(maker):
    torch._dynamo.reset()  # every maker is another version of one function
    make, qkv = MAKERS[maker], tensors()

    def step(q, k, v):
        pattern = make()
        return lt.attention(q, k, v, pattern, causal=True), lt.attention(q, k, v, str(pattern), causal=True)

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(*qkv), step(*qkv), rtol=0, atol=0)


USES = {
    "format": lambda pattern: "{}".format(pattern),
    "format to a width": lambda pattern: f"{str(pattern):>40} {pattern!s}",
    "branches": lambda pattern: len(pattern.branches) + pattern.branches[1][0],
    "properties": lambda pattern: [pattern.output_scale, pattern.assignment, pattern.pad_keys],
    "equal": lambda pattern: [pattern == PATTERN, pattern == longspan.dense(), pattern != PATTERN],
    "block size": lambda pattern: (longspan.strided(32, 16) | longspan.local_window(32, 16)).block_size,
}


@pytest.mark.parametrize("made", ["outside", "inside"])
@pytest.mark.parametrize("use", USES)
def test_patterns_are_looked_at_inside_compiled_functions(use, made):
    torch._dynamo.reset()
    look, outside = USES[use], longspan.dilated([8, 12], [1, 2])

    def step(x):
        return x + 1, look(longspan.dilated([8, 12], [1, 2]) if made == "inside" else outside)

    x = torch.zeros(3)
    out, seen = torch.compile(step, fullgraph=True, backend="aot_eager")(x)
    assert torch.equal(out, x + 1) and seen == look(outside)


def test_another_pattern_compiles_anew():
    def step(x, pattern):
        return x + len(pattern.branches)

    compiled, x = torch.compile(step, fullgraph=True, backend="aot_eager"), torch.zeros(3)
    for pattern in (PATTERN, longspan.dense(), longspan.dilated([8, 12], [1, 2]), longspan.dilated([4, 8, 12], [1, 2, 3])):
        assert torch.equal(compiled(x, pattern), step(x, pattern))


@pytest.mark.parametrize("made", [PATTERN, longspan.strided(32, block_size=16)], ids=str)
def test_text_of_a_pattern_from_outside_a_compiled_function(made):
    qkv = tensors(grad=True)

    def step(q, k, v):
        return lt.attention(q * 2, k, v, str(made))

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    grads = [torch.autograd.grad(f(*qkv).square().sum(), qkv) for f in (compiled, step)]
    for mine, theirs in zip(*grads):
        torch.testing.assert_close(mine, theirs)


def test_a_module_that_holds_a_pattern_compiles():
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.pattern = longspan.longnet([8, 16], [1, 2])

        def forward(self, q, k, v):
            return longspan.attention(q, k, v, self.pattern, causal=True) + len(str(self.pattern))

    model, qkv = Model(), tensors()
    torch.testing.assert_close(torch.compile(model, fullgraph=True, backend="aot_eager")(*qkv), model(*qkv))


# FLOPs --------------------------------------------------------------------------------------------------------------


def counted(function):
    with FlopCounterMode(display=False) as counter:
        function()
    return counter.get_total_flops()


CASES = {
    "dense": (longspan.dense(), {}),
    "dilated": (PATTERN, dict(causal=True)),
    "longnet": (longspan.longnet([8, 16], [1, 3]), dict(key_mask=[[True] * 21] * 2, dropout=0.5)),
    "blocks": (longspan.local_window(32, block_size=16), {}),
}


@pytest.mark.parametrize("case", CASES)
def test_flops_are_those_of_the_plan(case):
    pattern, options = CASES[case]
    qkv = tensors(kv_heads=2, grad=True)
    causal = longspan.Options(causal=options.get("causal", False))
    totals = longspan.plan(pattern, options=causal, tokens=21, heads=4, kv_heads=2, head_dim=8, batch=2).totals
    forward, backward = totals["forward_flops"], totals["backward_flops"]
    assert forward > 0
    assert counted(lambda: lt.attention(*qkv, pattern, **options)) == forward
    assert counted(lambda: lt.attention(*qkv, pattern, **options).sum().backward()) == forward + backward
    compiled = torch.compile(lambda *x: lt.attention(*x, str(pattern), causal=causal.causal), backend="aot_eager")
    assert counted(lambda: compiled(*(x.detach() for x in qkv))) == forward


def test_flops_of_decoding_are_those_of_its_rows():
    q, k, v = tensors()
    whole = counted(lambda: lt.attention(q, k, v, PATTERN, causal=True))
    parts = [
        counted(lambda: lt.attention(q[:, a:b], k, v, PATTERN, causal=True, query_ranges=[(a, b - a)]))
        for a, b in ((0, 5), (5, 13), (13, 20), (20, 21))
    ]
    assert all(parts) and sum(parts) == whole


@pytest.mark.parametrize("memory", [None, torch.randn(1, 256, 32)], ids=["self", "cross"])
def test_flops_of_projections_are_those_of_the_rows_they_take(memory):
    """A counter's own hooks keep modules from joining projections and attention, so this asks for it."""
    module = lt.MultiheadDilatedAttention(32, 4, [1, 2], [64, 128])
    x = torch.randn(1, 256, 32, requires_grad=True)
    memory = x if memory is None else memory.requires_grad_()

    def run():
        weights, biases = module._projection_weights(), module._projection_biases()
        return lt.projected.projected_attention(x, memory, weights, biases, module.attention, 4, False, None)

    attention = longspan.plan(longspan.dilated([64, 128], [1, 2]), tokens=256, heads=4, head_dim=8).totals
    products = 2 * 32 * 3 * (16 * 256 + 16 * 128)
    with torch.no_grad():
        assert counted(run) == products + attention["forward_flops"]
    both = attention["forward_flops"] + attention["backward_flops"]
    assert counted(lambda: run().sum().backward()) == 3 * products + both


def test_flops_of_a_module_count_its_layers_once():
    module = lt.MultiheadDilatedAttention(32, 4, [1, 2], [64, 128])
    x = torch.randn(1, 256, 32)
    attention = longspan.plan(longspan.dilated([64, 128], [1, 2]), tokens=256, heads=4, head_dim=8).totals
    assert counted(lambda: module(x)) == 4 * 2 * 256 * 32 * 32 + attention["forward_flops"]


# Strides ------------------------------------------------------------------------------------------------------------

STRIDED = {
    "transposed": lambda x: x.transpose(2, 3).contiguous().transpose(2, 3),
    "every_second": lambda x: torch.stack([x, x], dim=-1).flatten(-2)[..., ::2],
    "expanded": lambda x: x[..., :1].expand(x.shape),
}
CALLS = {
    "function": lambda q, k, v: longspan.attention(q, k, v, PATTERN, causal=True),
    "heads_first": lambda q, k, v: lt.attention(
        *(x.transpose(1, 2) for x in (q, k, v)), PATTERN, causal=True, layout="bhnd"
    ).transpose(1, 2),
    "dilated": lambda q, k, v: lt.DilatedAttention([8, 12], [1, 2])(q, k, v, is_causal=True),
    "block_sparse": lambda q, k, v: lt.BlockSparseHierarchical([8], [1], sparse_config={"block_size": 16})(q, k, v),
    "adaptive": lambda q, k, v: lt.BlockSparseAdaptive([8], [1], 4, 8, {"base_sparsity": 0.5}, {"block_size": 16})(q, k, v),
    "ring": lambda q, k, v: lt.RingDilatedAttention([8, 12], [1, 2], ring_size=2)(q, k, v),
    "compiled": torch.compile(
        lambda q, k, v: lt.attention(q, k, v, PATTERN, causal=True), fullgraph=True, backend="aot_eager"
    ),
}


@pytest.fixture(params=["compiled_calls", "raw_calls"])
def calls(request, monkeypatch):
    if request.param == "raw_calls":
        monkeypatch.setattr(lt.operator, "_calls", lt.operator._RawCalls)
    elif lt.operator._calls is lt.operator._RawCalls:
        pytest.skip("this torch has no C exchange API")


@pytest.mark.parametrize("way", STRIDED)
@pytest.mark.parametrize("name", CALLS)
def test_tensors_without_contiguous_rows_are_copied(name, way, calls):
    call, strided = CALLS[name], STRIDED[way]
    leaves = tensors(grad=True)
    assert all(strided(x).stride(-1) != 1 for x in leaves)
    weight = torch.randn(leaves[0].shape, generator=torch.Generator().manual_seed(3))
    results = []
    for made in (strided, lambda x: strided(x).contiguous()):
        inputs = [made(x) for x in leaves]
        with torch.no_grad():
            alone = call(*inputs)
        out = call(*inputs)
        assert torch.equal(alone, out)
        grads = torch.autograd.grad(out, leaves, strided(weight) if way != "expanded" else weight)
        results.append((out, *grads))
    for mine, theirs in zip(*results):
        torch.testing.assert_close(mine, theirs)


@pytest.mark.parametrize("way", STRIDED)
def test_explicit_outputs_and_inspection_take_strided_tensors(way):
    q, k, v = (STRIDED[way](x) for x in tensors())
    plain = [x.contiguous() for x in (q, k, v)]
    out = torch.empty(q.shape)
    longspan.attention(q, k, v, PATTERN, out=out)
    want, lse = lt.attention(*plain, PATTERN, return_lse=True)
    torch.testing.assert_close(out, want, rtol=0, atol=0)
    grads = [torch.empty(x.shape) for x in plain]
    options = dict(zip(("dq", "dk", "dv"), grads))
    longspan.attention_backward(q, k, v, out, lse, STRIDED[way](out), PATTERN, **options)
    wanted = lt.attention_backward(*plain, out, lse, STRIDED[way](out).contiguous(), PATTERN)
    for mine, theirs in zip(grads, wanted):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=0)
    torch.testing.assert_close(longspan.attention_received(q, k, PATTERN), longspan.attention_received(*plain[:2], PATTERN))
    blocks = functools.partial(longspan.attention_blocks, pattern=PATTERN, block_size=16)
    torch.testing.assert_close(blocks(q, k)["block_values"], blocks(*plain[:2])["block_values"])
    assert longspan.adaptive_mask(q, k, longspan.adaptive(0.5, 16)) == longspan.adaptive_mask(
        *plain[:2], longspan.adaptive(0.5, 16)
    )
