"""LongNet's layers, model and language model against float64 formulas made from their parameters alone."""

import copy
import math

import pytest

import longspan

torch = pytest.importorskip("torch")

from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

import longspan.torch as lt
from longspan.torch.options import inner_norm
from longspan.torch.positions import Positions
from test_torch_modules import multihead_formula

SEGMENTS, RATES = [8, 16, 7], [1, 2, 3]


def shaken(module, std=0.3):
    """Biases and norms start at 0 and 1, which would hide mistakes."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(std * torch.randn(parameter.shape, generator=generator))
    return module


def norm(module, x):
    return functional.layer_norm(x, x.shape[-1:], module.weight.double(), module.bias.double(), module.eps)


def linear(module, x):
    return functional.linear(x, module.weight.double(), module.bias.double())


def feed_forward(layer, x, outer, inner, activation=torch.relu):
    return linear(layer.linear2, norm(inner, activation(linear(layer.linear1, norm(outer, x)))))


def encoder_formula(layer, x, causal, activation=torch.relu):
    y = norm(layer.norm1, x.double())
    x = x.double() + multihead_formula(layer.self_attn, y, y, y, causal)
    return x + feed_forward(layer, x, layer.norm2, layer.norm3, activation)


def decoder_formula(layer, x, memory, causal, memory_causal):
    y = norm(layer.norm1, x.double())
    x = x.double() + multihead_formula(layer.self_attn, y, y, y, causal)
    y = norm(layer.norm2, x)
    x = x + multihead_formula(layer.multihead_attn, y, memory.double(), memory.double(), memory_causal)
    return x + feed_forward(layer, x, layer.norm3, layer.norm4)


def longnet_formula(model, x, causal):
    memory = x
    for layer in model.encoder.layers:
        memory = encoder_formula(layer, memory, causal)
    for layer in model.decoder.layers:
        x = decoder_formula(layer, x, memory, causal, causal)
    return x


def turned(x, length, kind):
    """Pairs of channels as complex numbers."""
    pairs = torch.view_as_complex(x.double().reshape(*x.shape[:2], -1, 2))
    width = x.shape[2]
    channel = torch.arange(width // 2, dtype=torch.float64)
    position = torch.arange(length, dtype=torch.float64)[:, None]
    factor = torch.exp(1j * position * 10000 ** (-2 * channel / width))
    if kind == "xpos":
        base = (2 * channel + 0.4 * width) / (1.4 * width)
        factor = factor * base ** ((position + (-length // 2)) / 512)
    return torch.view_as_real(pairs * factor).reshape(x.shape)


def lm_formula(model, ids, causal, kind):
    x = model.token_embedding.weight.double()[ids]
    if kind != "none":
        x = x + turned(x, ids.shape[1], kind)
    return linear(model.out, norm(model.norm, longnet_formula(model.long_net, x, causal)))


def compare(out, want, leaves, tolerance=3e-5):
    """Values and gradients, relative to the largest."""
    weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(2))
    pairs = [(out, want)]
    ours = torch.autograd.grad(out, leaves, weight)
    theirs = torch.autograd.grad(want, leaves, weight.double())
    pairs += zip(ours, theirs)
    scale = max(gradient.abs().max().item() for gradient in theirs)
    for index, (mine, expected) in enumerate(pairs):
        size = expected.abs().max().item() if index == 0 else scale
        torch.testing.assert_close(mine.double(), expected.double(), atol=tolerance * size, rtol=0)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("activation", ["relu", "gelu", torch.tanh])
def test_encoder_layer_matches_formula(activation, causal):
    torch.manual_seed(0)
    layer = shaken(lt.DilatedTransformerEncoderLayer(24, 3, SEGMENTS, RATES, 40, 0.0, activation))
    x = torch.randn(2, 37, 24, requires_grad=True)
    function = getattr(functional, activation) if isinstance(activation, str) else activation
    compare(layer(x, is_causal=causal), encoder_formula(layer, x, causal, function), [x, *layer.parameters()])


@pytest.mark.parametrize("causal, memory_causal", [(False, False), (True, False), (False, True), (True, True)])
def test_decoder_layer_matches_formula(causal, memory_causal):
    torch.manual_seed(0)
    layer = shaken(lt.DilatedTransformerDecoderLayer(24, 3, SEGMENTS, RATES, 40, 0.0))
    x, memory = (torch.randn(2, 37, 24, requires_grad=True) for _ in range(2))
    out = layer(x, memory, tgt_is_causal=causal, memory_is_causal=memory_causal)
    compare(out, decoder_formula(layer, x, memory, causal, memory_causal), [x, memory, *layer.parameters()])


def small_lm(positions="xpos", **arguments):
    torch.manual_seed(0)
    settings = dict(d_model=24, nhead=3, num_encoder_layers=2, num_decoder_layers=2, dim_feedforward=32,
                    segment_lengths=SEGMENTS, dilation_rates=RATES)  # fmt: skip
    return lt.LongNetLM(50, **{**settings, **arguments}, positions=positions)


@pytest.mark.parametrize("kind", ["xpos", "rotary", "none"])
@pytest.mark.parametrize("tokens", [1, 31, 64])
def test_language_model_matches_formula(tokens, kind):
    model = shaken(small_lm(kind), 0.1)
    ids = torch.randint(50, (2, tokens))
    leaves = list(model.parameters())
    for causal in (True, False):
        out = model(ids) if causal else model(ids, is_causal=False)
        compare(out, lm_formula(model, ids, causal, kind), leaves, 1e-4)


def test_gradient_checkpointing_changes_nothing():
    plain, saving = small_lm(dropout=0.2), small_lm(dropout=0.2, gradient_checkpointing=True)
    ids = torch.randint(50, (2, 33))
    results = []
    for model in (plain, saving):
        torch.manual_seed(3)
        model(ids).square().sum().backward()
        results.append([parameter.grad for parameter in model.parameters()])
    assert all(map(torch.equal, *results))


def test_defaults_are_the_papers_base_model():
    model = lt.LongNet(device="meta")
    assert len(model.encoder.layers) == len(model.decoder.layers) == 12
    attention = model.encoder.layers[0].self_attn
    assert (attention.embed_dim, attention.num_heads) == (768, 12)
    assert attention.attention.segment_lengths == [2048, 4096, 8192, 16384, 32768]
    assert attention.attention.dilation_rates == [1, 2, 4, 6, 12]
    assert model.encoder.layers[0].linear1.out_features == 3072
    assert model.encoder.layers[0].dropout.p == 0.0 and model.encoder.layers[0].activation is functional.relu
    layer = lt.DilatedTransformerEncoderLayer(24, 3, [8], [1])
    assert layer.linear1.out_features == 2048 and layer.dropout.p == 0.1 and layer.self_attn.attention.dropout == 0.1


def test_initialisation_has_magnetos_gains():
    encoders, decoders = 3, 5
    torch.manual_seed(0)
    model = lt.LongNet(192, 3, encoders, decoders, 256, [8], [1])
    wanted = {
        "encoder": math.sqrt(math.log(3 * decoders) * math.log(2 * encoders) / 3),
        "decoder": math.sqrt(math.log(3 * decoders)),
    }
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1:
            assert (parameter == (1.0 if "norm" in name and name.endswith("weight") else 0.0)).all(), name
            continue
        gain = 1.0 if "q_proj" in name or "k_proj" in name else wanted[name.split(".")[0]]
        xavier = gain * math.sqrt(2 / sum(parameter.shape))
        # The standard error of a standard deviation over n numbers is 1 / sqrt(2n): 0.4% for the smallest matrix.
        assert parameter.std().item() == pytest.approx(xavier, rel=0.02), name
    first, second = (layer.linear1.weight for layer in model.encoder.layers[:2])
    assert not torch.equal(first, second)


def test_state_dict_has_the_older_names_and_round_trips():
    model, other = small_lm(), shaken(small_lm())
    names = set(model.state_dict())
    attention = [f"{part}.{kind}" for part in ("q_proj", "k_proj", "v_proj", "out_proj") for kind in ("weight", "bias")]
    inner = ["norm.weight", "norm.bias"]
    expected = {"token_embedding.weight", "pos_embedding.scale"}
    expected |= {f"{part}.{kind}" for part in ("norm", "out") for kind in ("weight", "bias")}
    for stack, blocks, norms in (
        ("encoder", {"self_attn": attention + inner}, 3),
        ("decoder", {"self_attn": attention, "multihead_attn": attention + inner}, 4),
    ):
        parts = [f"{block}.{name}" for block, members in blocks.items() for name in members]
        parts += [f"norm{number}.{kind}" for number in range(1, norms + 1) for kind in ("weight", "bias")]
        parts += [f"linear{number}.{kind}" for number in (1, 2) for kind in ("weight", "bias")]
        expected |= {f"long_net.{stack}.layers.{layer}.{part}" for layer in range(2) for part in parts}
    assert names == expected
    ids = torch.randint(50, (2, 20))
    assert not torch.equal(model(ids), other(ids))
    other.load_state_dict(copy.deepcopy(model.state_dict()))
    assert torch.equal(model(ids), other(ids))
    with pytest.raises(RuntimeError, match="size mismatch"):
        small_lm(dim_feedforward=16).load_state_dict(model.state_dict())


@pytest.mark.parametrize("kind", ["xpos", "rotary"])
def test_language_model_is_causal_to_the_bit(kind):
    model = shaken(small_lm(kind))
    ids = torch.randint(50, (2, 70))
    want = model(ids)
    for cut in (1, 8, 33, 69):
        changed = ids.clone()
        changed[:, cut:] = (changed[:, cut:] + 7) % 50
        got = model(changed)
        assert torch.equal(got[:, :cut], want[:, :cut])
        assert not torch.equal(got[:, cut:], want[:, cut:])


def test_xpos_keeps_float32_in_half_precision_models_and_refuses_to_overflow():
    x = torch.randn(1, 8000, 16)
    positions = Positions(16)
    want = turned(x, 8000, "xpos")
    # Products of float32: angles, powers up to e**10 and the sum each add a few roundings of 6e-8.
    assert ((positions(x) - want).abs() / want.abs().amax(-1, keepdim=True)).max() < 1e-5
    half = Positions(16).half()(x.half())
    assert ((half - want).abs() / want.abs().amax(-1, keepdim=True)).max() < 2e-3
    for dtype, most in ((torch.float16, 9064), (torch.float32, 72508)):
        with pytest.raises(longspan.InvalidArgument, match="rotary"):
            positions(torch.zeros(1, 1, 16, dtype=dtype), 0, most + 400)
        assert positions(torch.ones(1, 1, 16, dtype=dtype), 0, most - 400).isfinite().all()


def test_dropout_follows_torchs_generator_and_is_off_in_eval():
    model = small_lm(dropout=0.3)
    ids = torch.randint(50, (2, 20))
    results = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        results.append(model(ids))
    assert torch.equal(results[0], results[1]) and not torch.equal(results[0], results[2])
    assert torch.equal(model.eval()(ids), model(ids))
    torch.testing.assert_close(model(ids).double(), lm_formula(model, ids, True, "xpos"), atol=1e-4, rtol=0)


def test_autocast_and_bfloat16():
    model = small_lm()
    ids = torch.randint(50, (2, 40))
    with torch.autocast("cpu", torch.bfloat16):
        out = model(ids)
    out.float().sum().backward()
    want = model(ids)
    torch.testing.assert_close(out.float(), want, atol=0.05 * want.abs().max().item(), rtol=0)
    low = small_lm(dtype=torch.bfloat16)(ids)
    assert low.dtype is torch.bfloat16 and low.isfinite().all()


class Copies(TorchDispatchMode):
    """Numbers that become tensors on the way."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        self.count += "lift_fresh" in str(function)
        return function(*arguments, **(options or {}))


@pytest.mark.parametrize("kind", ["xpos", "rotary"])
def test_positions_copy_no_numbers_to_the_device(kind):
    """A GPU would be waited for in every step, and a graph of the step could not be captured."""
    positions, x = Positions(16, kind), torch.randn(2, 5, 16)
    with Copies() as copies:
        one = positions(x, 3, 9)
    assert copies.count == 0
    with copies:
        each = positions(x, [3, 3], [9, 9])
    assert copies.count > 0 and torch.equal(one, each)


def test_inner_norms_under_autocast():
    x = torch.randn(3, 16).to(torch.bfloat16)
    module = shaken(torch.nn.LayerNorm(16))
    seen = []
    with torch.autocast("cpu", torch.bfloat16):
        for norm in (module, torch.nn.LayerNorm(16, elementwise_affine=False), torch.nn.LayerNorm(16, bias=False)):
            torch.testing.assert_close(inner_norm(norm, x).float(), norm(x.float()), rtol=2**-7, atol=2**-7)
        hook = module.register_forward_hook(lambda *call: seen.append(call))
        assert torch.equal(inner_norm(module, x), module(x))
        hook.remove()
        inner_norm(module, x)
    assert len(seen) == 2


@pytest.mark.parametrize(
    "arguments, name",
    [
        (dict(d_model=25), "d_model"),
        (dict(d_model=0), "d_model"),
        (dict(nhead=0), "nhead"),
        (dict(nhead=2), "num_heads"),
        (dict(activation="swoosh"), "activation"),
        (dict(activation=3), "activation"),
        (dict(dropout=1.5), "dropout"),
        (dict(dim_feedforward=0), "dim_feedforward"),
        (dict(num_encoder_layers=0), "num_encoder_layers"),
        (dict(num_decoder_layers=0.5), "num_decoder_layers"),
        (dict(dilation_rates=[1]), "dilation_rates"),
        (dict(positions="sine"), "positions"),
    ],
)
def test_wrong_arguments_are_refused_by_name(arguments, name):
    with pytest.raises(longspan.InvalidArgument) as error:
        small_lm(**arguments)
    assert name in str(error.value) and error.value.argument == name


def test_wrong_inputs_are_refused_by_name():
    model = small_lm()
    for ids in (torch.zeros(3, dtype=torch.int64), torch.zeros(2, 3), torch.tensor([[0, 50]]), torch.tensor([[-1]])):
        with pytest.raises(longspan.InvalidArgument, match="ids"):
            model(ids)
    layer = lt.DilatedTransformerDecoderLayer(24, 3, SEGMENTS, RATES)
    with pytest.raises(longspan.InvalidArgument, match="memory"):
        layer(torch.zeros(1, 4, 24), torch.zeros(1, 5, 24))
    with pytest.raises(longspan.InvalidArgument, match="tgt"):
        layer(torch.zeros(1, 4, 20), torch.zeros(1, 4, 20))
    with pytest.raises(longspan.InvalidArgument, match="src"):
        lt.DilatedTransformerEncoderLayer(24, 3, SEGMENTS, RATES)(torch.zeros(4, 24))
