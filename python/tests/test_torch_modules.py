"""The drop-in classes against an independent float64 formula, and the calls of both older packages."""

import copy
import warnings

import pytest

import longspan

torch = pytest.importorskip("torch")

from torch import nn

import longspan.torch as lt
import oracle

SHAPES = {
    "even": dict(tokens=32, heads=4, segments=[8, 16], dilations=[1, 2]),
    "short last segment": dict(tokens=37, heads=5, segments=[8, 16], dilations=[1, 3]),
    "unequal groups": dict(tokens=24, heads=12, segments=[4, 8, 12, 16, 24], dilations=[1, 2, 3, 4, 6]),
    "longer than the sequence": dict(tokens=11, heads=2, segments=[64, 4096], dilations=[1, 4]),
    "lists swapped": dict(tokens=20, heads=3, segments=[1, 2, 4], dilations=[8, 16, 32]),
    "one token": dict(tokens=1, heads=2, segments=[4, 8], dilations=[1, 2]),
}


def formula(query, key, value, segments, dilations, **options):
    counts = oracle.dilated_counts(query.shape[1], query.shape[2], segments, dilations)
    return oracle.counted_attention(query, key, value, counts, output_scale=1 / len(segments), **options)[0]


def inputs(tokens, heads, kv_heads=None, head_dim=8, dtype=torch.float32):
    generator = torch.Generator().manual_seed(1)
    shape = (2, tokens, heads, head_dim)
    kv_shape = (2, tokens, kv_heads or heads, head_dim)
    return [torch.randn(s, generator=generator).to(dtype).requires_grad_() for s in (shape, kv_shape, kv_shape)]


@pytest.mark.filterwarnings("ignore:.*Were the lists swapped")
@pytest.mark.parametrize("cls", [lt.DilatedAttention, lt.ImprovedDilatedAttention])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("case", SHAPES)
def test_dilated_attention_matches_formula(case, causal, cls):
    shape = SHAPES[case]
    qkv = inputs(shape["tokens"], shape["heads"])
    module = cls(shape["segments"], shape["dilations"])
    out = module(*qkv, is_causal=causal)
    want = formula(*qkv, shape["segments"], shape["dilations"], causal=causal)
    torch.testing.assert_close(out.double(), want, atol=2e-6, rtol=0)
    weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(2))
    for mine, theirs in zip(*(torch.autograd.grad(x, qkv, w) for x, w in ((out, weight), (want, weight.double())))):
        torch.testing.assert_close(mine, theirs, atol=5e-6, rtol=0)


def test_grouped_queries_scale_and_mask():
    qkv = inputs(19, 6, kv_heads=2)
    mask = torch.rand(2, 19, generator=torch.Generator().manual_seed(3)) < 0.6
    module = lt.DilatedAttention([8, 16], [1, 2], softmax_scale=0.11)
    want = formula(*qkv, [8, 16], [1, 2], scale=0.11, key_mask=mask)
    for form in (mask, mask[:, None, None, :], mask.long()):
        torch.testing.assert_close(module(*qkv, attention_mask=form).double(), want, atol=2e-6, rtol=0)


def test_dropout_is_off_in_eval_and_repeats_with_manual_seed():
    qkv = inputs(16, 2)
    module = lt.DilatedAttention([8, 16], [1, 2], attention_dropout=0.5)
    results = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        results.append(module(*qkv))
    assert torch.equal(results[0], results[1]) and not torch.equal(results[0], results[2])
    torch.testing.assert_close(
        module.eval()(*qkv).double(), formula(*qkv, [8, 16], [1, 2]), atol=2e-6, rtol=0
    )


def multihead_formula(module, query, key, value, causal=False, key_mask=None):
    """Float64, from the parameters alone."""
    state = {name: parameter.double() for name, parameter in module.named_parameters()}
    batch, tokens, width = query.shape
    if "qkv_proj.weight" in state:
        weights, biases = state["qkv_proj.weight"].chunk(3), state["qkv_proj.bias"].chunk(3)
    else:
        weights = [state[f"{name}_proj.weight"] for name in "qkv"]
        biases = [state[f"{name}_proj.bias"] for name in "qkv"]
    heads = [
        nn.functional.linear(x.double(), w, b).view(batch, tokens, module.num_heads, -1)
        for x, w, b in zip((query, key, value), weights, biases)
    ]
    attention = module.attention
    out = formula(*heads, attention.segment_lengths, attention.dilation_rates, causal=causal, key_mask=key_mask)
    out = out.reshape(batch, tokens, width)
    if "norm.weight" in state:
        out = nn.functional.layer_norm(out, (width,), state["norm.weight"], state["norm.bias"], module.norm.eps)
    return nn.functional.linear(out, state["out_proj.weight"], state["out_proj.bias"])


MULTIHEAD = [lt.MultiheadDilatedAttention, lt.ImprovedMultiheadDilatedAttention]


@pytest.mark.parametrize("cls", MULTIHEAD)
@pytest.mark.parametrize("layer_norm", [True, False])
def test_multihead_matches_formula(cls, layer_norm):
    torch.manual_seed(0)
    module = cls(24, 3, [1, 2], [8, 16], layer_norm=layer_norm)
    for parameter in module.parameters():  # biases and norms start at 0 and 1, which would hide mistakes
        nn.init.normal_(parameter, std=0.3)
    query, key, value = (torch.randn(2, 21, 24) for _ in range(3))
    for causal in (False, True):
        out, weights = module(query, key, value, is_causal=causal)
        assert weights is None
        want = multihead_formula(module, query, key, value, causal)
        torch.testing.assert_close(out.double(), want, atol=2e-5, rtol=0)
    torch.testing.assert_close(module(query)[0], module(query, query.clone(), query.clone())[0], atol=1e-6, rtol=0)


@pytest.mark.parametrize("cls", MULTIHEAD)
@pytest.mark.parametrize("case", SHAPES)
def test_multihead_gradients_match_formula(case, cls):
    torch.manual_seed(0)
    shape = SHAPES[case]
    width = 8 * shape["heads"]
    module = cls(width, shape["heads"], shape["dilations"], shape["segments"])
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.3)
    qkv = [torch.randn(2, shape["tokens"], width, requires_grad=True) for _ in range(3)]
    wanted = qkv + list(module.parameters())
    weight = torch.randn(2, shape["tokens"], width)
    out = module(*qkv, is_causal=True)[0]
    want = multihead_formula(module, *qkv, causal=True)
    torch.testing.assert_close(out.double(), want, atol=5e-5, rtol=0)
    ours, theirs = torch.autograd.grad(out, wanted, weight), torch.autograd.grad(want, wanted, weight.double())
    scale = max(gradient.abs().max().item() for gradient in theirs)
    for mine, expected in zip(ours, theirs):
        torch.testing.assert_close(mine, expected, atol=2e-5 * scale, rtol=0)


@pytest.mark.parametrize("cls", MULTIHEAD)
def test_state_dict_round_trip(cls):
    torch.manual_seed(0)
    first, second = cls(16, 4, [1, 2], [8, 16]), cls(16, 4, [1, 2], [8, 16])
    x = torch.randn(2, 12, 16)
    assert not torch.equal(first(x)[0], second(x)[0])
    second.load_state_dict(first.state_dict())
    assert torch.equal(first(x)[0], second(x)[0])


def test_wrong_arguments_are_refused_by_name():
    for arguments, name in (
        (dict(softmax_scale=float("nan")), "softmax_scale"),
        (dict(softmax_scale="x"), "softmax_scale"),
        (dict(attention_dropout="x"), "attention_dropout"),
    ):
        with pytest.raises(longspan.InvalidArgument, match=name) as error:
            lt.DilatedAttention([8, 16], [1, 2], **arguments)
        assert error.value.argument == name
    with pytest.raises(longspan.InvalidArgument, match="segment_lengths"):
        lt.DilatedAttention([8, 2**70], [1, 2])
    for embed_dim in ("16", 16.5, None):
        with pytest.raises(longspan.InvalidArgument, match="embed_dim"):
            lt.MultiheadDilatedAttention(embed_dim, 4, [1, 2], [8, 16])
    module = lt.MultiheadDilatedAttention(16, 4, [1, 2], [8, 16])
    with pytest.raises(longspan.InvalidArgument, match="query is torch.float64, the module is torch.float32"):
        module(torch.randn(2, 12, 16, dtype=torch.float64))
    with pytest.raises(longspan.InvalidArgument, match="query is on meta, the module is on cpu"):
        module(torch.randn(2, 12, 16, device="meta"))
    with torch.autocast("cpu", torch.bfloat16):
        assert module(torch.randn(2, 12, 16, dtype=torch.bfloat16))[0].dtype is torch.bfloat16


@pytest.mark.parametrize("cls", MULTIHEAD)
def test_multihead_takes_the_calls_of_both_packages(cls):
    torch.manual_seed(0)
    module = cls(16, 4, [1, 2], [8, 16])
    x = torch.randn(2, 12, 16)
    causal = module(x, x, x, is_causal=True)[0]
    torch.testing.assert_close(module(x, x, x, True)[0], causal, rtol=0, atol=0)
    padding = torch.zeros(2, 12, dtype=torch.bool)
    padding[1, 3:7] = True
    out, weights = module(x, key_padding_mask=padding, need_weights=False, average_attn_weights=False)
    assert weights is None
    torch.testing.assert_close(out.double(), multihead_formula(module, x, x, x, key_mask=~padding), atol=2e-5, rtol=0)
    torch.testing.assert_close(module(x, x, x, padding)[0], out)
    torch.testing.assert_close(module(x, attn_mask=~padding[:, None, None, :])[0], out)


def test_improved_equals_standard_with_the_same_weights():
    torch.manual_seed(0)
    standard = lt.MultiheadDilatedAttention(16, 4, [1, 2], [8, 16])
    fused = lt.ImprovedMultiheadDilatedAttention(16, 4, [1, 2], [8, 16])
    state = standard.state_dict()
    fused.load_state_dict(
        {f"qkv_proj.{part}": torch.cat([state[f"{name}_proj.{part}"] for name in "qkv"]) for part in ("weight", "bias")}
        | {name: state[name] for name in state if name.startswith(("norm", "out_proj"))}
    )
    x = torch.randn(2, 30, 16)
    torch.testing.assert_close(fused(x)[0], standard(x)[0], atol=1e-6, rtol=0)


def test_state_dict_keys_are_those_people_have():
    standard = lt.MultiheadDilatedAttention(16, 4, [1, 2], [8, 16]).state_dict()
    names = ["q_proj", "k_proj", "v_proj", "out_proj", "norm"]
    assert set(standard) == {f"{name}.{part}" for name in names for part in ("weight", "bias")}
    fused = lt.ImprovedMultiheadDilatedAttention(16, 4, [1, 2], [8, 16], bias=False, layer_norm=False).state_dict()
    assert set(fused) == {"qkv_proj.weight", "out_proj.weight"}


def test_initialisation_is_magneto():
    torch.manual_seed(0)
    for cls in MULTIHEAD:
        module = cls(256, 4, [1, 2], [8, 16], gamma_init=0.5)
        query_weight, key_weight, value_weight = module._projection_weights()
        deviation = (2 / 512) ** 0.5  # xavier_normal of [256, 256]
        for weight, gain in ((query_weight, 1), (key_weight, 1), (value_weight, 0.5), (module.out_proj.weight, 0.5)):
            assert abs(weight.std().item() / (gain * deviation) - 1) < 0.02
        assert not any(p.any() for name, p in module.named_parameters() if name.endswith("proj.bias"))


@pytest.mark.parametrize("cls", MULTIHEAD)
def test_compiled_module_equals_eager(cls):
    torch.manual_seed(0)
    module = cls(16, 4, [1, 2], [8, 16])
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    x = torch.randn(2, 20, 16)
    padding = torch.arange(20).expand(2, 20) > 14
    for arguments in (dict(), dict(is_causal=True), dict(key_padding_mask=padding)):
        torch.testing.assert_close(compiled(x, **arguments)[0], module(x, **arguments)[0])


def test_modules_copy_move_and_say_what_they_are():
    module = lt.MultiheadDilatedAttention(16, 4, [1, 2], [8, 16], dtype=torch.float64, device="cpu")
    assert module.q_proj.weight.dtype is torch.float64
    assert (module.embed_dim, module.num_heads) == (16, 4)
    x = torch.randn(1, 9, 16, dtype=torch.float64)
    torch.testing.assert_close(copy.deepcopy(module)(x)[0], module(x)[0])
    assert "segment_lengths=[8, 16]" in repr(module)


def test_pool_arguments_are_ignored_with_one_warning():
    longspan._errors._warned.clear()
    with pytest.warns(longspan.LongspanWarning, match="enable_memory_pool") as caught:
        lt.DilatedAttention([8], [1], enable_memory_pool=True)
        lt.ImprovedDilatedAttention([8], [1], lightweight_pool=False)
        lt.MultiheadDilatedAttention(8, 2, [1], [8], enable_profiling=True)
    assert len(caught) == 1


def test_no_warning_in_ordinary_use():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        lt.MultiheadDilatedAttention(8, 2, [1], [8])(torch.randn(1, 8, 8))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: lt.DilatedAttention([8, 16], [1]), "segment_lengths has 2 entries, dilation_rates has 1"),
        (lambda: lt.DilatedAttention([], []), "segment_lengths is empty"),
        (lambda: lt.DilatedAttention([8, 0], [1, 2]), "segment_lengths has 0"),
        (lambda: lt.DilatedAttention([8], [-2]), "dilation_rates has -2"),
        (lambda: lt.DilatedAttention([8.5], [1]), "segment_lengths is"),
        (lambda: lt.DilatedAttention(8, [1]), "segment_lengths is 8"),
        (lambda: lt.DilatedAttention([8], [1], attention_dropout=1.0), "attention_dropout is 1.0"),
        (lambda: lt.ImprovedDilatedAttention([8], [1], dropout=-0.1), "dropout is -0.1"),
        (lambda: lt.DilatedAttention([8], [1], colour="red"), "no argument 'colour'"),
        (lambda: lt.MultiheadDilatedAttention(10, 3, [1], [8]), "embed_dim is 10, num_heads is 3"),
        (lambda: lt.MultiheadDilatedAttention(8, 1, [1, 2], [8, 16]), "num_heads is 1"),
    ],
)
def test_wrong_module_arguments_are_refused_by_name(make, words):
    with pytest.raises(longspan.InvalidArgument, match=words):
        make()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (dict(attn_mask=torch.ones(12, 12, dtype=torch.bool)), "attn_mask has shape .*is_causal or a pattern"),
        (dict(attn_mask=torch.ones(8, 12, 12)), "attn_mask has shape .*is_causal or a pattern"),
        (dict(key_padding_mask=torch.ones(2, 11, dtype=torch.bool)), "key_padding_mask has shape"),
        (dict(key_padding_mask=torch.ones(2, 12)), "key_padding_mask has numbers other than 0 and -inf"),
        (dict(key=torch.randn(2, 11, 16)), "key has shape"),
        (dict(value=torch.randn(2, 12, 15)), "value has shape"),
        (dict(key=torch.randn(2, 12, 16, device="meta")), "key is on meta"),
        (dict(query=torch.randn(12, 16)), "query has shape"),
    ],
)
def test_wrong_calls_are_refused_by_name(arguments, words):
    module = lt.MultiheadDilatedAttention(16, 4, [1, 2], [8, 16])
    with pytest.raises(longspan.InvalidArgument, match=words):
        module(**(dict(query=torch.randn(2, 12, 16)) | arguments))


def test_square_mask_is_refused_by_dilated_attention():
    with pytest.raises(longspan.InvalidArgument, match="attention_mask has shape .*use is_causal or a pattern"):
        lt.DilatedAttention([8], [1])(*inputs(12, 2), attention_mask=torch.ones(12, 12, dtype=torch.bool))


def test_too_few_heads_for_the_groups():
    with pytest.raises(longspan.InvalidArgument, match="1 heads for 2 branches"):
        lt.DilatedAttention([8, 16], [1, 2])(*inputs(12, 1))


def test_operator_arguments_of_another_kind_are_refused_by_name():
    q = torch.randn(2, 8, 2, 4)
    for name, arguments in {
        "key": dict(key=None),
        "value": dict(value=q.numpy()),
        "lengths": dict(lengths=[7.5, 8]),
        "key_mask": dict(key_mask="x"),
        "seed": dict(dropout=0.5, seed="x"),
        "query_ranges": dict(query_ranges=[(0.0, 8)]),
    }.items():
        with pytest.raises(longspan.InvalidArgument, match=name) as error:
            lt.attention(**(dict(query=q, key=q, value=q) | arguments))
        assert error.value.argument == name
    torch.testing.assert_close(
        lt.attention(q, q, q, lengths=[5, 8], key_mask=[[True] * 8, [False] * 4 + [True] * 4]),
        lt.attention(q, q, q, lengths=torch.tensor([5, 8]), key_mask=torch.arange(8) >= torch.tensor([[0], [4]])),
    )
    with pytest.raises(longspan.InvalidArgument, match="pattern"):
        longspan.attention(q.numpy(), q.numpy(), q.numpy(), ([4], [1]))
    with pytest.raises(longspan.InvalidArgument, match="lengths"):
        longspan.attention(q.numpy(), q.numpy(), q.numpy(), lengths=[7.5, 8])
