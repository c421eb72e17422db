"""Every module compiles with fullgraph=True and exports: one graph, the same results, gradients through it."""

import pytest

import longspan

torch = pytest.importorskip("torch")

import longspan.torch as lt
from longspan._arguments import Settings
from longspan.compat import dilated_attention_pytorch as compat

LISTS = ([16, 32], [1, 2])
SPARSE = {"block_size": 16}
HEADS, WIDTH = 4, 32

ATTENTION = {
    "dilated": lambda: lt.DilatedAttention(*LISTS),
    "improved": lambda: lt.ImprovedDilatedAttention(*LISTS),
    "block sparse": lambda: lt.BlockSparseRingDilatedAttention(*LISTS, SPARSE),
    "hierarchical": lambda: lt.BlockSparseHierarchical(*LISTS, None, SPARSE),
    "adaptive": lambda: lt.BlockSparseAdaptive(*LISTS, HEADS, 8, None, SPARSE),
    "adaptive, shared": lambda: lt.BlockSparseAdaptive(*LISTS, HEADS, 8, {"share_across_heads": True}, SPARSE),
    "adaptive, learned": lambda: lt.BlockSparseAdaptive(*LISTS, HEADS, 8, None, SPARSE, learned=True),
    "local ring": lambda: lt.RingDilatedAttention(*LISTS, ring_size=2),
    "local block-sparse ring": lambda: lt.BlockSparseRingDilatedAttention(*LISTS, SPARSE, ring_size=2),
    "production": lambda: compat.find("create_production_ring_attention")(*LISTS),
    "the fork's": lambda: compat.find("RingDilatedAttention")(*LISTS),
}
MULTIHEAD = {
    "multihead": lambda: lt.MultiheadDilatedAttention(WIDTH, HEADS, [1, 2], [16, 32]),
    "improved multihead": lambda: lt.ImprovedMultiheadDilatedAttention(WIDTH, HEADS, [1, 2], [16, 32]),
    "block-sparse multihead": lambda: lt.BlockSparseRingMultiheadDilatedAttention(WIDTH, HEADS, *LISTS, sparse_config=SPARSE),
    "multihead over a local ring": lambda: lt.RingMultiheadDilatedAttention(WIDTH, HEADS, [1, 2], [16, 32], ring_size=2),
    "the fork's multihead": lambda: compat.find("MultiheadDilatedAttention")(WIDTH, HEADS, [1, 2], [16, 32]),
    "encoder layer": lambda: lt.DilatedTransformerEncoderLayer(WIDTH, HEADS, *LISTS),
    "LongNet": lambda: lt.LongNet(WIDTH, HEADS, 1, 1, 64, *LISTS),
}
pytestmark = pytest.mark.filterwarnings("ignore")


def made(name):
    torch.manual_seed(0)
    if name in ATTENTION:
        return ATTENTION[name]().eval(), [torch.randn(1, 64, HEADS, 8) for _ in range(3)]
    return MULTIHEAD[name]().eval(), [torch.randn(1, 64, WIDTH)]


def first(result):
    return result[0] if isinstance(result, tuple) else result


@pytest.mark.parametrize("name", [*ATTENTION, *MULTIHEAD])
def test_every_module_is_one_graph_with_gradients(name):
    module, inputs = made(name)
    torch._dynamo.reset()
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    wanted_inputs, given = ([x.clone().requires_grad_() for x in inputs] for _ in range(2))
    wanted, out = first(module(*wanted_inputs)), first(compiled(*given))
    assert torch.allclose(out, wanted, atol=1e-5)
    wanted.square().sum().backward()
    out.square().sum().backward()
    for a, b in zip(given, wanted_inputs):
        assert torch.allclose(a.grad, b.grad, atol=1e-4) and b.grad.abs().max() > 0


@pytest.mark.parametrize("name", [*ATTENTION, *MULTIHEAD])
def test_every_module_exports(name, tmp_path):
    module, inputs = made(name)
    with torch.no_grad():
        program = torch.export.export(module, tuple(inputs))
        torch.export.save(program, tmp_path / "program.pt2")
        out = torch.export.load(tmp_path / "program.pt2").module()(*inputs)
    assert torch.allclose(first(out), first(module(*inputs)), atol=1e-5)


def test_learned_blocks_train_in_one_graph():
    module, inputs = made("adaptive, learned")
    module.train()
    torch._dynamo.reset()
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    (compiled(*inputs).square().sum() + module.get_sparsity_loss()).backward()
    assert all(one.grad is not None for one in module.learned.importance_scorer.parameters())


def test_operators_of_chosen_blocks_follow_torchs_rules():
    query, key, value = (torch.randn(2, 40, 2, 8, requires_grad=True) for _ in range(3))
    arguments = (query, key, None, 0.5, 16, False)
    torch.library.opcheck(torch.ops.longspan.choose_blocks, arguments, test_utils=("test_schema", "test_faketensor"))
    blocks = torch.ops.longspan.choose_blocks(*arguments)
    mask = longspan.adaptive_mask(query.detach(), key.detach(), longspan.Pattern.block_sparse(longspan.BlockPattern.adaptive(0.5, 16)))
    assert torch.equal(blocks, torch.from_numpy(mask.to_dense()))
    checked = (query, key, value, blocks, 16, *Settings("", True))
    torch.library.opcheck(torch.ops.longspan.blocks_attention, checked, test_utils=("test_schema", "test_faketensor", "test_autograd_registration"))


CHOSEN_ON_THE_HOST = ("adaptive, shared", "adaptive, learned")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("name", [*ATTENTION, *MULTIHEAD])
def test_every_module_is_captured_in_a_cuda_graph_or_says_why_not(name):
    module, inputs = made(name)
    module, inputs = module.to("cuda", torch.bfloat16), [x.to("cuda", torch.bfloat16) for x in inputs]
    stream = torch.cuda.Stream()
    with torch.no_grad(), torch.cuda.stream(stream):
        for _ in range(2):
            module(*inputs)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    if name in CHOSEN_ON_THE_HOST:
        with pytest.raises(Exception, match="captured"), torch.no_grad(), torch.cuda.graph(graph):
            module(*inputs)
        return
    with torch.no_grad(), torch.cuda.graph(graph):
        out = first(module(*inputs))
    for x in inputs:
        x.copy_(torch.randn_like(x))
    graph.replay()
    torch.cuda.synchronize()
    with torch.no_grad():
        assert torch.equal(out, first(module(*inputs)))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("name", CHOSEN_ON_THE_HOST)
def test_chosen_blocks_run_on_gpus_as_on_the_cpu(name):
    module, inputs = made(name)
    here = [x.requires_grad_() for x in inputs]
    there = [x.detach().cuda().requires_grad_() for x in inputs]
    out = module(*here)
    out.square().sum().backward()
    found = module.cuda()(*there)
    found.square().sum().backward()
    assert torch.allclose(found.cpu(), out, atol=2e-3)
    for a, b in zip(there, here):
        assert torch.allclose(a.grad.cpu(), b.grad, atol=2e-2)
