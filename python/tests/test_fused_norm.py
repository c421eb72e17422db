"""Activation and norm in one operator: its formula and registration here, its Triton kernels in Triton's interpreter."""

import os
import subprocess
import sys

import pytest

torch = pytest.importorskip("torch")

from torch.nn import functional

import longspan
import longspan.torch as lt
from longspan.torch import fused_norm, longnet
from test_longnet import shaken

OP = torch.ops.longspan.relu_norm.default

KERNELS = """
import torch
from longspan.torch import fused_norm

for dtype in (torch.float32, torch.float16):
    for rows, width, programs in ((5, 48, 2), (7, 64, 7), (1, 3, 4), (20, 1000, 3)):
        torch.manual_seed(rows)
        x, grad = (torch.randn(rows, width).to(dtype) for _ in range(2))
        x[0, 0], x[-1, -1] = 0.0, -0.0
        weight, bias = torch.randn(2, width)
        want = fused_norm._run_plain(x, weight, bias, 1e-5)
        got = fused_norm._run_fused(x, weight, bias, 1e-5)
        want_grads = fused_norm._run_plain_backward(grad, x, weight, *want[1:])
        got_grads = fused_norm._run_fused_backward(grad, x, weight, *got[1:], programs=programs)
        # Sums of up to 1000 numbers in another order; 16 bits are rounded once on both sides.
        close = dict(atol=2**-11 if dtype is torch.float16 else 1e-5, rtol=2**-10 if dtype is torch.float16 else 1e-5)
        for one, other in zip((*got, *got_grads), (*want, *want_grads)):
            assert one.dtype is other.dtype and one.shape == other.shape
            torch.testing.assert_close(one, other, **close)
x = torch.randn(3, 8)
x[1, 2] = torch.nan
out = fused_norm._run_fused(x, torch.ones(8), torch.zeros(8), 1e-5)[0]
assert out[1].isnan().all() and not out[0].isnan().any(), "relu keeps NaN, and a row is its own"
"""


@pytest.mark.skipif(fused_norm.triton is None, reason="needs Triton")
def test_kernels_in_the_interpreter():
    """In another process, since Triton asks once, when kernels are made."""
    command = [sys.executable, "-c", KERNELS]
    done = subprocess.run(command, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]


def test_matches_formula():
    torch.manual_seed(0)
    leaves = [torch.randn(s, requires_grad=True) for s in ((2, 5, 24), (24,), (24,))]
    wide = [x.detach().double().requires_grad_() for x in leaves]
    out = OP(*leaves, 1e-5)[0]
    want = functional.layer_norm(wide[0].relu(), (24,), *wide[1:], 1e-5)
    torch.testing.assert_close(out.double(), want, atol=1e-5, rtol=1e-5)
    weight = torch.randn(2, 5, 24)
    grads = torch.autograd.grad(out, leaves, weight), torch.autograd.grad(want, wide, weight.double())
    for got, expected in zip(*grads):
        torch.testing.assert_close(got.double(), expected, atol=1e-5, rtol=1e-5)


def test_operators_keep_torchs_rules():
    x, weight, bias = (torch.randn(s, requires_grad=True) for s in ((6, 4), (4,), (4,)))
    utilities = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(OP, (x, weight, bias, 1e-5), test_utils=utilities)
    out, mean, scale = OP(x.detach(), weight.detach(), bias.detach(), 1e-5)
    backward = torch.ops.longspan.relu_norm_backward.default
    torch.library.opcheck(backward, (out, x.detach(), weight.detach(), mean, scale), test_utils=utilities)
    (grad,) = torch.autograd.grad(OP(x, weight, bias, 1e-5)[0].sum(), x, create_graph=True)
    with pytest.raises(longspan.Unsupported, match="create_graph"):
        grad.sum().backward()


@pytest.fixture
def fused(monkeypatch):
    """The CPU takes the operator, too; how often is counted."""
    made = []
    monkeypatch.setattr(longnet, "can_fuse", lambda norm, activation, x: activation is functional.relu)
    monkeypatch.setattr(longnet, "relu_norm", lambda *x: made.append(1) or fused_norm.relu_norm(*x))
    return made


@pytest.mark.parametrize("cls", [lt.DilatedTransformerEncoderLayer, lt.DilatedTransformerDecoderLayer])
def test_layers_are_the_same_with_it(cls, fused, monkeypatch):
    torch.manual_seed(0)
    layer = shaken(cls(32, 4, [8, 16], [1, 2], dim_feedforward=48, dropout=0.0))
    inputs = [torch.randn(1, 16, 32, requires_grad=True) for _ in range(1 + (cls is lt.DilatedTransformerDecoderLayer))]
    wanted = [*inputs, *layer.parameters()]
    results = []
    for _ in range(2):
        out = layer(*inputs)
        results.append([out, *torch.autograd.grad(out.square().sum(), wanted)])
        monkeypatch.setattr(longnet, "can_fuse", lambda *x: False)
    assert len(fused) == 1
    for got, want in zip(*results):
        torch.testing.assert_close(got, want, atol=2e-5 * max(1.0, want.abs().max().item()), rtol=0)


def test_dropout_other_activations_and_watched_modules_run_as_they_are(fused):
    x = torch.randn(1, 16, 32)
    layer = lt.DilatedTransformerEncoderLayer(32, 4, [8, 16], [1, 2], dim_feedforward=48, dropout=0.5)
    layer(x)
    lt.DilatedTransformerEncoderLayer(32, 4, [8, 16], [1, 2], dim_feedforward=48, dropout=0.0, activation="gelu")(x)
    assert not fused
    layer.eval()(x)
    assert len(fused) == 1
    seen = []
    layer.dropout.register_forward_hook(lambda *call: seen.append(1))
    layer(x)
    assert len(fused) == 1 and len(seen) == 3


@pytest.fixture
def anywhere(monkeypatch):
    """What is for 16 bits on a GPU, for 32 on the CPU."""
    monkeypatch.setattr(fused_norm, "triton", fused_norm.triton or object())
    monkeypatch.setattr(fused_norm, "_DEVICES", ("cpu",))
    monkeypatch.setattr(fused_norm, "_DTYPES", (torch.float32,))
    monkeypatch.setattr(fused_norm, "FEWEST_ROWS", 4)


def test_what_can_be_fused(anywhere, monkeypatch):
    norm, relu, x = torch.nn.LayerNorm(8), functional.relu, torch.zeros(2, 2, 8)
    watched = torch.nn.LayerNorm(8)
    watched.register_forward_hook(lambda *call: None)
    assert fused_norm.can_fuse(norm, relu, x)
    for arguments in (
        (norm, functional.gelu, x),
        (norm, relu, x[:1]),
        (norm, relu, x.double()),
        (torch.nn.LayerNorm(8, bias=False), relu, x),
        (torch.nn.LayerNorm((2, 8)), relu, x),
        (watched, relu, x),
    ):
        assert not fused_norm.can_fuse(*arguments)
    monkeypatch.undo()
    assert not fused_norm.can_fuse(norm, relu, x)


def test_compiled_layers_take_it(anywhere):
    torch._dynamo.reset()
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

    layer = lt.DilatedTransformerEncoderLayer(32, 4, [8, 16], [1, 2], dim_feedforward=48, dropout=0.0)
    x = torch.randn(1, 16, 32, requires_grad=True)
    (want,) = torch.autograd.grad(layer(x).square().sum(), x)
    layer.compile(fullgraph=True, backend=backend)
    (got,) = torch.autograd.grad(layer(x).square().sum(), x)
    torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)
    assert len(graphs) == 1 and any(node.target is OP for node in graphs[0].graph.nodes)
