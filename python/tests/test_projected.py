"""Projections and attention together: equal to the formula, over the rows that head groups read alone. And compiled
layers: one graph of each kind, whatever the number of layers and steps, without copies around the operators."""

import pytest

torch = pytest.importorskip("torch")

from functorch.compile import make_boxed_func
from torch import nn
from torch._dynamo.backends.common import aot_autograd

import longspan
import longspan.torch as lt
from longspan.torch import multihead, projected
from test_longnet import shaken
from test_torch_modules import multihead_formula

CLASSES = [lt.MultiheadDilatedAttention, lt.ImprovedMultiheadDilatedAttention]
CASES = {
    "even": (48, 1, [8, 16, 48], [1, 2, 4]),
    "even_batch": (48, 3, [8, 16, 48], [1, 2, 4]),
    "uneven_batch": (50, 2, [8, 16, 48], [1, 2, 4]),  # 50 rows of an entry are no multiple of 4
    "uneven_segments": (50, 1, [8, 16, 64], [3, 2, 12]),  # nor 8 of 3; the last segment is clipped
    "no_group_reads_all": (20, 1, [4, 8, 64], [4, 2, 2]),
    "one_row": (5, 1, [64, 64, 64], [1, 7, 9]),
    "no_row": (2, 1, [64, 64, 64], [1, 2, 3]),
}


@pytest.fixture(autouse=True)
def together_with_any_rows(monkeypatch):
    monkeypatch.setitem(projected.FEWEST_ROWS, "cpu", 0)


@pytest.fixture
def calls(monkeypatch):
    made = []
    monkeypatch.setattr(multihead, "projected_attention", lambda *x: made.append(1) or projected.projected_attention(*x))
    return made


@pytest.fixture
def poisoned():
    """Memory that nobody wrote is NaN."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("cross", [False, True], ids=["self", "cross"])
@pytest.mark.parametrize("cls", CLASSES)
def test_matches_formula(cls, cross, case, calls, poisoned):
    torch.manual_seed(0)
    tokens, batch, segments, rates = CASES[case]
    module = shaken(cls(32, 4, rates, segments))
    inputs = [torch.randn(batch, tokens, 32, requires_grad=True) for _ in range(1 + cross)]
    padding = torch.arange(tokens) >= torch.randint(1, tokens + 1, (batch, 1))
    wanted = [*inputs, *module.parameters()]
    weight = torch.randn(batch, tokens, 32)
    for causal, mask in ((False, None), (True, None), (False, padding)):
        out = module(inputs[0], inputs[-1], inputs[-1], key_padding_mask=mask, is_causal=causal)[0]
        key_mask = None if mask is None else ~mask
        want = multihead_formula(module, inputs[0], inputs[-1], inputs[-1], causal=causal, key_mask=key_mask)
        torch.testing.assert_close(out.double(), want, atol=5e-5, rtol=0)
        grads, want_grads = torch.autograd.grad(out, wanted, weight), torch.autograd.grad(want, wanted, weight.double())
        scale = max(x.abs().max().item() for x in want_grads)
        for got, expected in zip(grads, want_grads):
            torch.testing.assert_close(got, expected, atol=2e-5 * scale, rtol=0)
    assert len(calls) == 3


def test_rows_that_nobody_reads_are_not_computed(monkeypatch):
    """8 tokens, 4 heads: two groups, of which the second reads every fourth row."""
    module = lt.MultiheadDilatedAttention(16, 4, [1, 4], [8, 8], bias=False)
    rows = []
    product = torch.mm
    monkeypatch.setattr(torch, "mm", lambda x, y, **out: rows.append(x.shape[0]) or product(x, y, **out))
    module(torch.randn(1, 8, 16))
    assert rows == [8, 2]


def test_operators_keep_torchs_rules():
    x, weight = (torch.randn(s, requires_grad=True) for s in ((6, 4), (16, 4)))
    utilities = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(torch.ops.longspan.strand_linear.default, (x, weight, 4, [8, 0, 1, 8, 0, 1]), test_utils=utilities)
    grad = torch.randn(6, 16)
    for given in ((x, weight), (x, None), (None, weight)):
        arguments = (grad, *(t if t is None else t.detach() for t in given), 4, [8, 0, 1, 8, 0, 1])
        torch.library.opcheck(torch.ops.longspan.strand_linear_backward.default, arguments, test_utils=utilities)
    pattern = str(longspan.dilated([4, 8], [1, 2]))
    settings = (pattern, True, None, None, 0.0, None, None, None, None, None, False, False, False, "")
    for sizes in ((3, None), (1, 2)):
        made = [None if size is None else torch.randn(2, 8, 2, size, 4, requires_grad=True) for size in sizes]
        torch.library.opcheck(torch.ops.longspan.stacked_attention.default, (*made, *settings), test_utils=utilities)


def test_second_derivatives_are_refused():
    module = lt.MultiheadDilatedAttention(16, 4, [1, 2], [8, 16])
    x = torch.randn(1, 16, 16, requires_grad=True)
    (grad,) = torch.autograd.grad(module(x)[0].sum(), x, create_graph=True)
    with pytest.raises(longspan.Unsupported, match="create_graph"):
        grad.sum().backward()


def test_dropout_follows_torchs_generator():
    module = lt.MultiheadDilatedAttention(16, 4, [1, 2], [8, 16], dropout=0.5)
    x = torch.randn(1, 16, 16)
    outs = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        outs.append(module(x)[0])
    assert torch.equal(outs[0], outs[1]) and not torch.equal(outs[0], outs[2])
    assert torch.equal(module.eval()(x)[0], module(x)[0])


def test_layers_of_others_and_hooks_are_called(calls):
    module = lt.MultiheadDilatedAttention(16, 4, [1, 2], [8, 16])
    x = torch.randn(1, 16, 16)
    want = module(x)[0]
    assert len(calls) == 1
    seen = []
    for watched in (module.k_proj, module.attention):
        hook = watched.register_forward_hook(lambda *call: seen.append(1))
        torch.testing.assert_close(module(x)[0], want)
        hook.remove()
    assert len(seen) == 2

    class Doubled(nn.Linear):
        def forward(self, x):
            return 2 * super().forward(x)

    module.v_proj.__class__ = Doubled
    assert not torch.allclose(module(x)[0], want)
    assert len(calls) == 1


def test_forwards_of_others_and_hooks_on_all_modules_are_called():
    """As tools have them that move weights, count operations or name what runs."""
    module = lt.MultiheadDilatedAttention(16, 4, [1, 2], [8, 16])
    x = torch.randn(1, 16, 16)
    want = module(x)[0]
    for name in ("v_proj", "attention"):
        watched = getattr(module, name)
        plain = watched.forward
        watched.forward = lambda *tensors, **options: 2 * plain(*tensors, **options)
        with torch.no_grad():
            assert not torch.allclose(module(x)[0], want), name
        del watched.forward
    seen = []
    hook = nn.modules.module.register_module_forward_hook(lambda called, *call: seen.append(called))
    try:
        module(x)
    finally:
        hook.remove()
    assert all(child in seen for child in module.children())


@pytest.mark.parametrize("cross", [False, True], ids=["self", "cross"])
@pytest.mark.parametrize("frozen", ["inputs", "weights", "biases"])
def test_only_gradients_that_are_wanted_are_computed(frozen, cross, monkeypatch):
    """The products of a training step, counted; gradients are those that come if all are wanted."""
    module = shaken(lt.MultiheadDilatedAttention(16, 4, [1, 2], [8, 16]))
    layers = [*module.q_proj.parameters(), *module.k_proj.parameters(), *module.v_proj.parameters()]
    x, memory = (torch.randn(1, 16, 16, requires_grad=True) for _ in range(2))
    inputs = [x, memory] if cross else [x]
    weight = torch.randn(1, 16, 16)
    out = module(inputs[0], inputs[-1], inputs[-1])[0]
    all_wanted = dict(zip([*inputs, *layers], torch.autograd.grad(out, [*inputs, *layers], weight)))
    for tensor in {"inputs": inputs, "weights": layers, "biases": [p for p in layers if p.dim() == 1]}[frozen]:
        tensor.requires_grad_(False)
    out = module(inputs[0], inputs[-1], inputs[-1])[0]
    products = []
    product = torch.mm
    monkeypatch.setattr(torch, "mm", lambda *x, **out: products.append(1) or product(*x, **out))
    wanted = [tensor for tensor in all_wanted if tensor.requires_grad]
    for tensor, grad in zip(wanted, torch.autograd.grad(out, wanted, weight)):
        torch.testing.assert_close(grad, all_wanted[tensor])
    # Of the input the first of two groups, of weights both; twice where key and value come from elsewhere.
    assert len(products) == {"inputs": 2, "weights": 1, "biases": 3}[frozen] * (1 + cross)


def test_who_looks_for_nan_finds_none(poisoned):
    module = lt.MultiheadDilatedAttention(16, 4, [1, 2], [8, 16])
    x = torch.randn(1, 16, 16, requires_grad=True)
    with torch.autograd.set_detect_anomaly(True):
        module(x)[0].sum().backward()
    assert x.grad.isfinite().all()


def make_lm(**arguments):
    torch.manual_seed(0)
    return lt.LongNetLM(50, 24, 3, 2, 3, 32, [8, 16, 32], [1, 2, 4], positions="rotary", **arguments)


def train_step(model, ids, autocast):
    model.zero_grad()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        logits = model(ids)
    logits.float().square().mean().backward()
    return [logits.detach(), *(x.grad for x in model.parameters())]


@pytest.mark.parametrize("autocast", [False, True], ids=["float32", "autocast"])
@pytest.mark.parametrize("together", [False, True])
def test_compiled_layers_are_one_graph_of_each_kind(together, autocast, monkeypatch):
    """New tensors of the same sizes in every layer and step: a graph that remembers one of them would be made again."""
    if not together:
        monkeypatch.setitem(projected.FEWEST_ROWS, "cpu", 1 << 30)
    torch._dynamo.reset()
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

    model, plain = make_lm(), make_lm()
    for layer in [*model.long_net.encoder.layers, *model.long_net.decoder.layers]:
        layer.compile(fullgraph=True, backend=backend)
    for seed in range(3):
        ids = torch.randint(50, (1, 32), generator=torch.Generator().manual_seed(seed))
        got, want = train_step(model, ids, autocast), train_step(plain, ids, autocast)
    assert len(graphs) == 2
    for one, other in zip(got, want):
        torch.testing.assert_close(one, other, rtol=2**-6 if autocast else 1e-4, atol=2**-6 if autocast else 1e-5)


def test_whole_model_is_one_graph():
    torch._dynamo.reset()
    model, plain = make_lm(), make_lm()
    ids = torch.randint(50, (1, 32))
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(ids), plain(ids))


@pytest.mark.parametrize("fewest", [0, 30])
def test_graphs_for_any_length_promise_nothing(fewest, monkeypatch):
    """Sizes that decide how projections run must not become conditions of a graph for sequences of any length."""
    monkeypatch.setitem(projected.FEWEST_ROWS, "cpu", fewest)
    torch._dynamo.reset()
    module = lt.MultiheadDilatedAttention(24, 3, [1, 2, 4], [8, 16, 32])
    x = torch.randn(2, 40, 24)
    tokens = torch.export.Dim("tokens", min=2, max=1 << 20)
    exported = torch.export.export(module, (x,), dynamic_shapes={"query": {1: tokens}}).module()
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(module, dynamic=True, fullgraph=True, backend=backend)
    for length in (40, 7, 33, 64):
        x = torch.randn(2, length, 24)
        for function in (exported, compiled):
            torch.testing.assert_close(function(x)[0], module(x)[0])
    assert len(graphs) == 1


VIEWS = ("view", "_unsafe_view", "reshape", "unsqueeze", "squeeze", "getitem", "alias", "detach")


def source(node):
    """What a node of a graph is a view of."""
    while node.op == "call_function" and node.target.__name__.split(".")[0] in VIEWS:
        node = node.args[0]
    return node


def test_only_views_lie_between_products_and_attention():
    torch._dynamo.reset()
    graphs = []

    def keep(graph, inputs):
        graphs.append(graph)
        return make_boxed_func(graph.forward)

    layer = lt.DilatedTransformerDecoderLayer(24, 3, [8, 16, 32], [1, 2, 4])
    layer.compile(fullgraph=True, backend=aot_autograd(fw_compiler=keep, bw_compiler=keep))
    x, memory = (torch.randn(1, 32, 24, requires_grad=True) for _ in range(2))
    layer(x, memory).sum().backward()
    forward, backward = graphs
    op = torch.ops.longspan

    def calls_of(graph, target):
        return [node for node in graph.graph.nodes if node.target is target.default]

    attentions = calls_of(forward, op.stacked_attention)
    assert len(attentions) == 2
    for node in attentions:
        assert all(source(x).target is op.strand_linear.default for x in node.args[:2] if x is not None)
    products = calls_of(backward, op.strand_linear_backward)
    assert len(products) == 3  # of the row itself, and of query and of key and value over memory
    for node in products:
        assert source(node.args[0]).target is op.stacked_attention_backward.default


def test_together_only_where_it_pays(calls, monkeypatch):
    """Outside of graphs on some devices, in graphs on all."""
    monkeypatch.setattr(multihead, "EAGER_DEVICES", set())
    torch._dynamo.reset()
    module = lt.MultiheadDilatedAttention(16, 4, [1, 2], [8, 16])
    x = torch.randn(1, 16, 16)
    want = module(x)[0]
    assert not calls
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    torch.testing.assert_close(torch.compile(module, fullgraph=True, backend=backend)(x)[0], want)
    assert any(node.target is torch.ops.longspan.strand_linear.default for node in graphs[0].graph.nodes)
