"""Our multihead classes as self_attn of torch's own transformer layers: training, evaluation, and torch's fast paths."""

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

import longspan.torch as lt  # noqa: E402

WIDTH, HEADS, TOKENS = 32, 4, 48
SEGMENTS, RATES = [8, 16, 48], [1, 2, 4]
CLASSES = {
    "multihead": lambda **kw: lt.MultiheadDilatedAttention(WIDTH, HEADS, RATES, SEGMENTS, **kw),
    "no_bias": lambda **kw: lt.MultiheadDilatedAttention(WIDTH, HEADS, RATES, SEGMENTS, bias=False, **kw),
    "improved": lambda **kw: lt.ImprovedMultiheadDilatedAttention(WIDTH, HEADS, RATES, SEGMENTS, **kw),
    "ring": lambda **kw: lt.RingMultiheadDilatedAttention(WIDTH, HEADS, RATES, SEGMENTS, ring_size=2, **kw),
    "block_sparse": lambda **kw: lt.BlockSparseRingMultiheadDilatedAttention(
        WIDTH, HEADS, SEGMENTS, RATES, sparse_config={"block_size": 16, "sparsity_ratio": 1.0}
    ),
}


def encoder_layer(make, **arguments):
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 64, dropout=0.0, **{"batch_first": True, **arguments})
    layer.self_attn = make()
    layer.self_attn.batch_first = arguments.get("batch_first", True)
    return layer


def by_hand(layer, x, **call):
    """A post-norm layer."""
    x = layer.norm1(x + layer.self_attn(x, **call)[0])
    return layer.norm2(x + layer.linear2(layer.activation(layer.linear1(x))))


@pytest.mark.parametrize("make", CLASSES.values(), ids=CLASSES)
@pytest.mark.parametrize("grad", [False, True], ids=["no_grad", "grad"])
def test_evaluation_has_the_numbers_of_training(make, grad):
    layer = encoder_layer(make)
    x = torch.randn(2, TOKENS, WIDTH)
    padding = torch.arange(TOKENS) >= torch.tensor([[TOKENS], [30]])
    with torch.set_grad_enabled(grad):
        for call in ({}, {"is_causal": True}, {"src_key_padding_mask": padding}):
            trained, evaluated = layer.train()(x, **call), layer.eval()(x, **call)
            own = {"key_padding_mask": padding} if "src_key_padding_mask" in call else call
            assert torch.equal(trained, evaluated) and torch.equal(trained, by_hand(layer, x, **own))


def test_a_causal_mask_beside_is_causal_is_the_same():
    layer = encoder_layer(CLASSES["multihead"]).eval()
    encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
    x, mask = torch.randn(2, TOKENS, WIDTH), nn.Transformer.generate_square_subsequent_mask(TOKENS)
    want = by_hand(encoder.layers[1], by_hand(encoder.layers[0], x, is_causal=True), is_causal=True)
    for call in ({"mask": mask}, {"mask": mask.isinf()}, {"mask": mask, "is_causal": True}):  # torch sees that it is causal
        assert torch.equal(encoder(x, **call), want)
    with pytest.raises(ValueError, match="is_causal"):
        layer(x, src_mask=torch.randn(TOKENS, TOKENS))


@pytest.mark.filterwarnings("ignore:enable_nested_tensor is True")
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("make", [CLASSES["multihead"], CLASSES["improved"]])
def test_stacks_take_padding_whenever_the_attention_was_replaced(make, when):
    """After: the stack still takes its layers for torch's own, and gives them nested tensors."""
    layer = encoder_layer(make)
    if when == "after":
        theirs = nn.TransformerEncoderLayer(WIDTH, HEADS, 64, dropout=0.0, batch_first=True)
        encoder = nn.TransformerEncoder(theirs, 2)
        for one in encoder.layers:
            one.load_state_dict({name: x for name, x in layer.state_dict().items() if "self_attn" not in name}, strict=False)
            one.self_attn = make()
            one.self_attn.load_state_dict(layer.self_attn.state_dict())
    else:
        encoder = nn.TransformerEncoder(layer, 2)
    x = torch.randn(3, TOKENS, WIDTH)
    padding = torch.arange(TOKENS) >= torch.tensor([[TOKENS - 5], [30], [17]])
    want = x
    for _ in range(2):
        want = by_hand(layer, want, key_padding_mask=padding)
    for grad in (True, False):
        with torch.set_grad_enabled(grad):
            out = encoder.eval()(x, src_key_padding_mask=padding)
        torch.testing.assert_close(out[~padding], want[~padding], rtol=1e-5, atol=1e-5)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_nested_tensors_with_gradients(layout):
    torch.manual_seed(0)
    module = CLASSES["multihead"]()
    rows = [torch.randn(n, WIDTH, requires_grad=True) for n in (40, 17)]
    out, _ = module(torch.nested.as_nested_tensor(rows, layout=layout))
    assert out.is_nested and out.layout is layout
    for one, result in zip(rows, out.unbind()):
        want, _ = module(one[None])
        torch.testing.assert_close(result, want[0], rtol=1e-5, atol=1e-6)
        grads = [torch.autograd.grad(x.sum(), one, retain_graph=True)[0] for x in (result, want)]
        torch.testing.assert_close(*grads, rtol=1e-4, atol=1e-5)
    with pytest.raises(ValueError, match="query is nested"):
        module(torch.nested.as_nested_tensor(rows), torch.randn(2, 40, WIDTH))


def test_layers_without_batch_first():
    torch.manual_seed(0)
    first, second = (encoder_layer(CLASSES["multihead"], batch_first=one).eval() for one in (True, False))
    second.load_state_dict(first.state_dict())
    x = torch.randn(3, TOKENS, WIDTH)
    padding = torch.arange(TOKENS) >= torch.tensor([[TOKENS - 5], [30], [17]])
    want = first(x, src_key_padding_mask=padding)
    assert torch.equal(second(x.transpose(0, 1), src_key_padding_mask=padding).transpose(0, 1), want)


def test_decoder_layers():
    torch.manual_seed(0)
    layer = nn.TransformerDecoderLayer(WIDTH, HEADS, 64, dropout=0.0, batch_first=True)
    layer.self_attn = CLASSES["multihead"]()
    x, memory = torch.randn(2, TOKENS, WIDTH), torch.randn(2, 7, WIDTH)
    mask = nn.Transformer.generate_square_subsequent_mask(TOKENS)
    want = layer.train()(x, memory, tgt_mask=mask, tgt_is_causal=True)
    torch.testing.assert_close(layer.eval()(x, memory, tgt_mask=mask, tgt_is_causal=True), want)
    first = layer.norm1(x + layer.self_attn(x, is_causal=True)[0])
    second = layer.norm2(first + layer.multihead_attn(first, memory, memory)[0])
    torch.testing.assert_close(layer.norm3(second + layer.linear2(layer.activation(layer.linear1(second)))), want)
    stack = nn.TransformerDecoder(layer, 1).eval()
    torch.testing.assert_close(stack(x, memory, tgt_mask=mask), want)


def test_autocast_and_padding_of_numbers():
    layer = encoder_layer(CLASSES["improved"])
    x = torch.randn(2, TOKENS, WIDTH)
    padding = torch.arange(TOKENS) >= torch.tensor([[TOKENS], [30]])
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        assert torch.equal(layer.train()(x, src_key_padding_mask=padding), layer.eval()(x, src_key_padding_mask=padding))
    with pytest.raises(ValueError, match="numbers other than 0 and -inf"):
        layer(x, src_key_padding_mask=torch.randn(2, TOKENS))


@pytest.mark.parametrize("training", [False, True])
def test_compiled_layers(training):
    torch._dynamo.reset()
    layer = encoder_layer(CLASSES["multihead"]).train(training)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    x = torch.randn(2, TOKENS, WIDTH)
    padding = torch.arange(TOKENS) >= torch.tensor([[TOKENS], [30]])
    for call in ({}, {"is_causal": True}, {"src_key_padding_mask": padding}):
        torch.testing.assert_close(compiled(x, **call), layer(x, **call))
