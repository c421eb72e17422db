"""The operator on CUDA tensors against the float64 formula: gradients, streams, graphs, compile, autocast, memory,
errors. Skipped aloud where there is no GPU, or no CUDA in this build."""

import pytest

import longspan

torch = pytest.importorskip("torch")

from torch.utils.checkpoint import checkpoint

import longspan.torch as lt
import oracle
from longspan.bench import language_model
from longspan.bench.variants import Variant, captured, prepare
from longspan.torch import multihead, projected

WHY_NOT = "torch sees no GPU" if not torch.cuda.is_available() else longspan.info()["why_no_gpu"]
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(bool(WHY_NOT), reason=f"needs a GPU: {WHY_NOT}")]

SEGMENTS, DILATIONS = [32, 48, 300], [1, 2, 5]
GROUPS = longspan.dilated(SEGMENTS, DILATIONS)
MIXED = longspan.longnet(SEGMENTS, DILATIONS)
#: What a relative error (of norms) may be. 16-bit: unit roundoff u, since outputs and probabilities are each rounded
#: once, with a root mean square of 0.4 u; gradients, which pass more roundings, get twice that. float32 is not rounded:
#: there the exponential of a score of up to 10 has an error of ten units in the last place, 2^-21.
ALLOWED = {torch.float32: 2.0**-20, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}


def tensors(shape=(2, 130, 6, 64), kv_heads=None, dtype=torch.bfloat16, grad=True, seed=0):
    generator = torch.Generator().manual_seed(seed)
    kv_shape = (*shape[:2], kv_heads or shape[2], shape[3])
    made = [torch.randn(s, generator=generator).to(dtype).cuda() for s in (shape, kv_shape, kv_shape)]
    return [x.requires_grad_(grad) for x in made]


def relative(actual, expected):
    actual, expected = actual.detach().double().cpu(), expected.detach().double().cpu()
    return ((actual - expected).norm() / expected.norm()).item()


def counts(pattern, tokens, heads):
    if pattern is GROUPS:
        return oracle.dilated_counts(tokens, heads, SEGMENTS, DILATIONS)
    if pattern is MIXED:
        return oracle.longnet_counts(tokens, heads, SEGMENTS, DILATIONS)
    return torch.ones(heads, tokens, tokens, dtype=torch.float64)


def assert_matches(query, key, value, pattern, out, lse, **options):
    """out, lse and the three gradients against the formula on the same (rounded) inputs."""
    leaves = [x.detach().double().cpu().requires_grad_() for x in (query, key, value)]
    want, want_lse = oracle.counted_attention(*leaves, counts(pattern, query.shape[1], query.shape[2]), **options)
    weight = torch.randn(want.shape, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    grads = torch.autograd.grad(out, (query, key, value), weight.to(out.dtype).cuda())
    want_grads = torch.autograd.grad(want, leaves, weight.to(out.dtype).double())
    allowed = ALLOWED[query.dtype]
    assert relative(out, want) < allowed
    finite = torch.isfinite(want_lse)
    assert torch.equal(torch.isfinite(lse).cpu(), finite)
    torch.testing.assert_close(lse.double().cpu()[finite], want_lse[finite], rtol=0, atol=2e-5)
    for name, got, wanted in zip(("query", "key", "value"), grads, want_grads):
        assert relative(got, wanted) < 2 * allowed, name


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("pattern", [GROUPS, MIXED, None], ids=["groups", "mixed", "dense"])
@pytest.mark.parametrize("dtype", ALLOWED, ids=lambda x: str(x).removeprefix("torch."))
def test_forward_and_gradients(dtype, pattern, causal):
    query, key, value = tensors(kv_heads=3, dtype=dtype)
    out, lse = lt.attention(query, key, value, pattern, causal=causal, return_lse=True)
    assert out.is_cuda and out.dtype is dtype and lse.dtype is torch.float32
    assert_matches(query, key, value, pattern, out, lse, causal=causal)


def block_counts(mask, tokens, heads):
    """What a BlockMask of 1 or more heads lets rows see, [heads, tokens, tokens]."""
    dense = torch.from_numpy(mask.to_dense()).double()
    size = mask.block_size
    whole = dense.repeat_interleave(size, 1).repeat_interleave(size, 2)[:, :tokens, :tokens]
    return whole.expand(heads, -1, -1)


BLOCKS = {
    "bigbird": longspan.bigbird(40, 64, 0.2, 3, 32),
    "local": longspan.local_window(128, 64),
    "random": longspan.random_blocks(0.4, 1, 16),
    "wide": longspan.strided(256, 128),
    "adaptive": longspan.adaptive(0.3, 32),
}


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("blocks", BLOCKS)
@pytest.mark.parametrize("dtype", ALLOWED, ids=lambda x: str(x).removeprefix("torch."))
def test_block_sparse(dtype, blocks, causal, monkeypatch):
    query, key, value = tensors(shape=(1, 300, 4, 64), kv_heads=2, dtype=dtype)
    pattern = longspan.block_sparse(BLOCKS[blocks])
    out, lse = lt.attention(query, key, value, pattern, causal=causal, return_lse=True)
    if blocks == "adaptive":
        mask = longspan.adaptive_mask(query, key, pattern, causal=causal)
        assert mask == longspan.adaptive_mask(query.cpu(), key.cpu(), pattern, causal=causal)
    else:
        mask = BLOCKS[blocks].mask(300, 4, causal)
    monkeypatch.setitem(globals(), "counts", lambda *_: block_counts(mask, 300, 4))
    assert_matches(query, key, value, pattern, out, lse, causal=causal)


@pytest.mark.parametrize(
    "pattern", [longspan.block_sparse(BLOCKS["bigbird"]), GROUPS, None], ids=["blocks", "groups", "dense"]
)
def test_inspection(pattern):
    query, key, _ = tensors(shape=(2, 130, 6, 64), kv_heads=3, grad=False)
    received = longspan.attention_received(query, key, pattern)
    assert received.is_cuda and received.shape == (2, 6, 130)
    want = longspan.attention_received(query.cpu(), key.cpu(), pattern)
    torch.testing.assert_close(received.cpu(), want, rtol=1e-4, atol=1e-4)
    blocks = longspan.attention_blocks(query, key, pattern, block_size=16)
    assert blocks["block_values"].is_cuda
    torch.testing.assert_close(blocks["block_values"].sum(), want.sum().cuda(), rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("head_dim", [8, 48, 96, 128, 256])
def test_head_dims(head_dim):
    query, key, value = tensors(shape=(1, 100, 3, head_dim))
    out, lse = lt.attention(query, key, value, GROUPS, return_lse=True)
    assert_matches(query, key, value, GROUPS, out, lse)


def test_masks_slopes_and_scales():
    query, key, value = tensors()
    mask = torch.rand(2, 130, generator=torch.Generator().manual_seed(3)) < 0.7
    slopes = torch.linspace(0.01, 0.3, 6)
    out, lse = lt.attention(
        query, key, value, GROUPS, scale=0.2, output_scale=0.5, key_mask=mask.cuda(), alibi_slopes=slopes.cuda(),
        return_lse=True,
    )  # fmt: skip
    assert_matches(query, key, value, GROUPS, out, lse, scale=0.2, output_scale=0.5, key_mask=mask, slopes=slopes)


@pytest.mark.parametrize("where", ["list", "cpu", "cuda"])
def test_lengths_equal_the_entry_alone(where):
    query, key, value = tensors(grad=False)
    lengths = [130, 77] if where == "list" else torch.tensor([130, 77], device=where)
    out = lt.attention(query, key, value, MIXED, lengths=lengths)
    alone = lt.attention(*(x[1:, :77] for x in (query, key, value)), MIXED)
    torch.testing.assert_close(out[1:, :77], alone, rtol=0, atol=0.02)
    assert not out[1, 77:].any()


def test_ranges_and_layouts():
    query, key, value = tensors(grad=False)
    whole = lt.attention(query, key, value, GROUPS, causal=True)
    part = lt.attention(query[:, 13:77], key, value, GROUPS, causal=True, query_ranges=[(13, 64)])
    assert torch.equal(part, whole[:, 13:77])
    flipped = [x.transpose(1, 2).contiguous() for x in (query, key, value)]
    assert torch.equal(lt.attention(*flipped, GROUPS, causal=True, layout="bhnd").transpose(1, 2), whole)


def test_deterministic_gradients_repeat():
    query, key, value = tensors()
    runs = []
    for _ in range(2):
        out = lt.attention(query, key, value, MIXED, deterministic=True)
        runs.append(torch.autograd.grad(out.sum(), (query, key, value)))
    for first, second in zip(*runs):
        assert torch.equal(first, second)


def test_dropout_is_the_same_on_cpu_and_gpu():
    query, key, value = tensors(dtype=torch.float32, grad=False)
    cpu = [x.cpu() for x in (query, key, value)]
    want = lt.attention(*cpu, MIXED, dropout=0.4, seed=11)
    for seed in (11, torch.tensor(11), torch.tensor(11, device="cuda")):
        got = lt.attention(query, key, value, MIXED, dropout=0.4, seed=seed)
        torch.testing.assert_close(got.cpu(), want, rtol=0, atol=1e-5)


def test_dropout_follows_manual_seed_and_checkpoints_repeat_it():
    query, key, value = tensors()

    def block(*qkv):
        return lt.attention(*qkv, GROUPS, dropout=0.3)

    results = []
    for wrap in (block, lambda *x: checkpoint(block, *x, use_reentrant=False), block):
        torch.manual_seed(5 if len(results) < 2 else 6)
        out = wrap(query, key, value)
        results.append((out, *torch.autograd.grad(out.float().square().sum(), (key, value))))
    for mine, theirs in zip(*results[:2]):
        torch.testing.assert_close(mine, theirs, rtol=0.02, atol=0.02)
    assert not torch.equal(results[0][0], results[2][0])


def test_runs_on_the_current_stream():
    query, key, value = tensors(grad=False)
    want = lt.attention(query, key, value, MIXED)
    late = torch.zeros_like(query)
    given = torch.empty_like(query)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(100_000_000)  # what another stream computes meanwhile sees zeros
        late.copy_(query)
        out = lt.attention(late, key, value, MIXED)
        longspan.attention(late, key, value, MIXED, out=given)
    stream.synchronize()
    assert torch.equal(out, want) and torch.equal(given, want)


def test_several_streams_at_once():
    streams = [torch.cuda.Stream() for _ in range(4)]
    inputs = [tensors(grad=False, seed=i) for i in range(4)]
    wanted = [lt.attention(*qkv, MIXED) for qkv in inputs]
    torch.cuda.synchronize()
    results = [[] for _ in streams]
    for _ in range(20):
        for stream, qkv, into in zip(streams, inputs, results):
            with torch.cuda.stream(stream):
                into.append(lt.attention(*qkv, MIXED))
    torch.cuda.synchronize()
    for want, got in zip(wanted, results):
        assert all(torch.equal(want, one) for one in got)


@pytest.mark.parametrize("pattern", [GROUPS, MIXED], ids=["groups", "mixed"])
def test_graphs_replay_forward_and_backward(pattern):
    leaves = tensors()
    lengths = torch.tensor([130, 60], device="cuda")
    weight = torch.randn_like(leaves[0])

    def step():
        out = lt.attention(*leaves, pattern, lengths=lengths, deterministic=True)
        return out, *torch.autograd.grad(out, leaves, weight)

    graph, results = captured(step)
    fresh = tensors(seed=1)
    with torch.no_grad():
        for leaf, new in zip(leaves, fresh):
            leaf.copy_(new)
        lengths.copy_(torch.tensor([99, 130], device="cuda"))
    graph.replay()
    torch.cuda.synchronize()
    replayed = [x.clone() for x in results]
    for mine, theirs in zip(replayed, step()):
        assert torch.equal(mine, theirs)


def test_dropout_in_a_graph():
    query, key, value = tensors(grad=False)
    seed = torch.tensor(3, device="cuda")
    graph, (drawn, given) = captured(
        lambda: (
            lt.attention(query, key, value, GROUPS, dropout=0.5),
            lt.attention(query, key, value, GROUPS, dropout=0.5, seed=seed),
        )
    )
    results = []
    for number in (3, 4, 3):
        seed.fill_(number)
        graph.replay()
        torch.cuda.synchronize()
        results.append((drawn.clone(), given.clone()))
    assert not torch.equal(results[0][0], results[2][0])  # torch's generator moves on with every replay
    assert torch.equal(results[0][1], results[2][1]) and not torch.equal(results[0][1], results[1][1])


def test_host_lengths_in_a_graph_are_refused():
    query, key, value = tensors(grad=False)
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        with pytest.raises(longspan.InvalidArgument, match="lengths is on the host inside a graph capture"):
            lt.attention(query, key, value, GROUPS, lengths=[130, 60])


@pytest.mark.parametrize("cross", [False, True], ids=["self", "cross"])
def test_projections_and_attention_together(cross, monkeypatch):
    """Rows in steps, gradients side by side, under autocast; against the layers one by one in float32."""
    torch.manual_seed(0)
    module = lt.MultiheadDilatedAttention(256, 4, [1, 2, 4], [128, 256, 512]).cuda()
    torch.nn.init.normal_(module.q_proj.bias)
    inputs = [torch.randn(2, 512, 256, device="cuda", requires_grad=True) for _ in range(1 + cross)]
    weight = torch.randn(2, 512, 256, device="cuda")
    results = []
    monkeypatch.setattr(multihead, "EAGER_DEVICES", {"cuda"})
    for fewest, dtype in ((1 << 30, torch.float32), (0, torch.bfloat16)):
        monkeypatch.setitem(projected.FEWEST_ROWS, "cuda", fewest)
        with torch.autocast("cuda", torch.bfloat16, enabled=dtype is torch.bfloat16):
            out = module(inputs[0], inputs[-1], inputs[-1], is_causal=True)[0]
        results.append([out, *torch.autograd.grad(out, [*inputs, *module.parameters()], weight.to(out.dtype))])
    # Weights, projections, attention, norm and output are each rounded; a key's bias has no gradient but rounding, and
    # the norm's gradients are sums of what cancels.
    names = ["out", *("input",) * len(inputs), *(name for name, _ in module.named_parameters())]
    for name, got, want in zip(names, results[1], results[0]):
        if name != "k_proj.bias" and not name.startswith("norm"):
            assert relative(got, want) < 8 * ALLOWED[torch.bfloat16], name


def test_training_steps_never_wait_for_the_gpu(monkeypatch):
    """The host runs ahead of the GPU, from step to step; torch tells where it would not."""
    monkeypatch.setattr(language_model, "sizes", lambda device: (2, 192, 3))
    step, model = language_model.make_step(1024, torch.bfloat16, "cuda"), language_model.make_model(1024, "cuda", "thirds")
    step(model)
    torch.cuda.set_sync_debug_mode("error")
    try:
        step(model)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("name", ["eager:captured", pytest.param("model:reduce-overhead", marks=pytest.mark.slow)])
def test_training_steps_in_graphs(name, monkeypatch):
    """Loss and gradients of a LongNetLM step that is replayed are those of the step itself."""
    monkeypatch.setattr(language_model, "sizes", lambda device: (2, 192, 3))
    step = language_model.make_step(1024, torch.bfloat16, "cuda")
    models = [language_model.make_model(1024, "cuda", "thirds") for _ in range(2)]
    want = step(models[0])
    replay = prepare(Variant.parse(name), models[1], step, "cuda")
    for _ in range(2):
        got = replay()
    assert relative(got, want) < 2**-12
    grads = [torch.cat([x.grad.flatten() for x in model.parameters()]) for model in models[::-1]]
    assert relative(*grads) < 16 * ALLOWED[torch.bfloat16]  # each layer rounds a few times


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_compiled_equals_eager(backend):
    query, key, value = tensors()
    text = str(GROUPS)

    def step(query, key, value):
        return lt.attention(query * 2, key, value, text, causal=True, deterministic=True).tanh()

    compiled = torch.compile(step, fullgraph=True, backend=backend)
    results = []
    for function in (compiled, step):
        out = function(query, key, value)
        results.append((out, *torch.autograd.grad(out.float().sum(), (query, key, value))))
    for mine, theirs in zip(*results):
        torch.testing.assert_close(mine, theirs, rtol=0.02, atol=0.02)


def test_opcheck():
    query, key, value = tensors(shape=(1, 40, 3, 16), dtype=torch.float32)
    arguments = (str(GROUPS), False, None, None, 0.0, None, None, None, None, None, False, False, False, "")
    torch.library.opcheck(torch.ops.longspan.attention.default, (query, key, value, *arguments))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(dtype):
    query, key, value = tensors(dtype=torch.float32)
    with torch.autocast("cuda", dtype=dtype):
        out = lt.attention(query, key, value, GROUPS)
    assert out.dtype is dtype
    out.float().sum().backward()
    assert query.grad.dtype is torch.float32
    assert relative(out, lt.attention(query, key, value, GROUPS)) < 3 * ALLOWED[dtype]  # inputs are rounded, too


def test_modules_agree_with_the_cpu():
    module = lt.MultiheadDilatedAttention(96, 6, [1, 2, 5], [32, 48, 300]).eval()
    x = torch.randn(2, 130, 96)
    with torch.no_grad():
        want, _ = module(x, is_causal=True)
        got, _ = module.cuda()(x.cuda(), is_causal=True)
    torch.testing.assert_close(got.cpu(), want, rtol=0, atol=1e-3)  # torch's projections may use TF32


def test_workspace_is_torchs_and_comes_back():
    query, key, value = tensors(shape=(1, 4096, 6, 64), grad=False)
    lt.attention(query, key, value, MIXED)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    allocations = longspan.device_memory.statistics()["allocations"]
    out, lse = lt.attention(query, key, value, MIXED, return_lse=True)
    results = out.nbytes + lse.nbytes
    # Merged branches take one float32 accumulator of out's shape, 16-bit outputs half of that.
    assert results + 2 * out.nbytes <= torch.cuda.max_memory_allocated() - before <= results + 2.1 * out.nbytes + 2**20
    assert torch.cuda.memory_allocated() - before <= results + 4096
    assert longspan.device_memory.statistics()["allocations"] == allocations


def test_out_of_memory_leaves_everything_usable():
    query, key, value = tensors(grad=False)
    endless = query[:1, :1].expand(1, 2**31 - 2, 6, 64)  # reads one row, writes 1.5 TiB
    with pytest.raises((torch.OutOfMemoryError, longspan.OutOfMemory)):
        lt.attention(endless, endless, endless, GROUPS)
    assert torch.isfinite(lt.attention(query, key, value, GROUPS)).all()


def test_second_device_is_made_current_for_the_call():
    if torch.cuda.device_count() < 2:
        pytest.skip("one GPU here")
    inputs = tensors(grad=False)
    moved = [x.to("cuda:1") for x in inputs]
    assert torch.equal(lt.attention(*moved, MIXED).to("cuda:0"), lt.attention(*inputs, MIXED))
    assert torch.cuda.current_device() == 0
    with pytest.raises(longspan.InvalidArgument, match="key is on cuda:0, query is on cuda:1"):
        lt.attention(moved[0], inputs[1], inputs[2], MIXED)


@pytest.mark.parametrize(
    ("change", "kind", "words"),
    [
        (dict(key=lambda x: x.cpu()), longspan.InvalidArgument, "key is on cpu, query is on cuda:0"),
        (dict(query=lambda x: x.cpu()), longspan.InvalidArgument, "key is on cuda:0, query is on cpu"),
        (dict(key_mask=torch.ones(2, 130, dtype=torch.bool)), longspan.InvalidArgument, "key_mask is on cpu"),
        (dict(alibi_slopes=torch.ones(6)), longspan.InvalidArgument, "alibi_slopes is on cpu"),
        (dict(value=lambda x: x.float()), longspan.InvalidArgument, "value has dtype float32, query has bfloat16"),
        (dict(seed=torch.tensor(0.5), dropout=0.1), longspan.InvalidArgument, "seed is a tensor"),
        (dict(kernel="avx2"), longspan.Unsupported, "avx2"),
    ],
)
def test_bad_input_is_refused_by_name(change, kind, words):
    call = dict(zip(("query", "key", "value"), tensors(grad=False)))
    for name, value in change.items():
        call[name] = value(call[name]) if callable(value) else value
    with pytest.raises(kind, match=words):
        lt.attention(**call)


def test_types_and_head_dims_that_gpus_do_not_run():
    wide = [x.double() for x in tensors(shape=(1, 8, 2, 8), grad=False)]
    with pytest.raises(longspan.Unsupported, match="f64"):
        lt.attention(*wide)
    odd = tensors(shape=(1, 8, 2, 12), grad=False)
    with pytest.raises(longspan.Unsupported, match="use 16 with zero columns"):
        lt.attention(*odd)


def test_outputs_that_overlap_or_live_elsewhere():
    query, key, value = tensors(grad=False)
    with pytest.raises(longspan.InvalidArgument, match="out overlaps q"):
        longspan.attention(query, key, value, out=query)
    with pytest.raises(longspan.InvalidArgument, match="out is on cpu, q is on cuda:0"):
        longspan.attention(query, key, value, out=torch.empty(query.shape, dtype=query.dtype))
    raw = lt.operator.raw_tensor
    host = torch.empty_like(query, device="cpu")
    lying = (host.data_ptr(), *raw("key", key)[1:])
    with pytest.raises(longspan.InvalidArgument, match="k is said to be on cuda:0, but .* host memory"):
        longspan.Attention(GROUPS).forward(raw("q", query), lying, raw("v", value), raw("out", torch.empty_like(query)))
    shifted = torch.empty(query.numel() + 1, dtype=query.dtype, device="cuda")[1:].view(query.shape)
    longspan.attention(query, key, value, GROUPS, out=shifted)  # two bytes off is fine, only slower
    assert relative(shifted, lt.attention(query, key, value, GROUPS)) < ALLOWED[query.dtype]


def test_cupy_arrays_on_their_current_stream():
    cupy = pytest.importorskip("cupy")
    query, key, value = tensors(dtype=torch.float16, grad=False)
    arrays = [cupy.from_dlpack(x) for x in (query, key, value)]
    with cupy.cuda.Stream(non_blocking=True) as stream:
        out, lse = longspan.attention(*arrays, GROUPS, return_lse=True)
        dq, _, _ = longspan.attention_backward(*arrays, out, lse, arrays[0], GROUPS)
        stream.synchronize()
    assert isinstance(out, cupy.ndarray) and isinstance(dq, cupy.ndarray)
    assert torch.equal(torch.from_dlpack(out), lt.attention(query, key, value, GROUPS))


def test_info_and_plans_know_the_gpu():
    assert longspan.info()["gpus"][0]["name"] == torch.cuda.get_device_name(0)
    plan = longspan.plan(GROUPS, tokens=4096, heads=6, head_dim=64, dtype="bf16", device="cuda")
    able = {name for name, runs, _ in plan.verdicts("forward") if runs}
    assert plan.kernel("forward") in able and "cuda-simt" in able and "plain" not in able


# Decoding ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pattern", [GROUPS.with_output_scale(1 / 3), MIXED], ids=["groups", "mixed"])
def test_replays_of_a_captured_step_go_on_with_the_next_position(pattern):
    query, key, value = tensors((2, 400, 6, 64), grad=False)
    want = lt.attention(query, key, value, pattern, causal=True)
    cache = lt.DilatedCache(pattern, heads=6)
    first = cache.attend(query[:, :17], key[:, :17], value[:, :17])
    cache.reserve(400)
    inputs = [x[:, :1].clone() for x in (query, key, value)]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = cache.attend(*inputs)
    outs = [first]
    for position in range(17, 390):
        for mine, x in zip(inputs, (query, key, value)):
            mine.copy_(x[:, position : position + 1])
        graph.replay()
        outs.append(result.clone())
    assert cache.position == 390
    for position in (390, 391):  # and without the graph
        outs.append(cache.attend(*(x[:, position : position + 1] for x in (query, key, value))))
    outs.append(cache.attend(*(x[:, 392:400] for x in (query, key, value))))
    out = torch.cat(outs, dim=1)
    assert relative(out, want) < 2 * ALLOWED[torch.bfloat16]
    assert (out - want).abs().max() < 8 * ALLOWED[torch.bfloat16] * want.abs().max()  # no position is another's


def test_a_captured_step_needs_room_for_its_memory():
    query, key, value = tensors((1, 65, 2, 64), grad=False)
    cache = lt.DilatedCache(longspan.dense(), heads=2)
    cache.append(key[:, :64], value[:, :64])
    with pytest.raises(longspan.InvalidArgument, match="room for 64 tokens: reserve"):
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            cache.attend(*(x[:, 64:] for x in (query, key, value)))


@pytest.mark.parametrize("arguments", [dict(temperature=0), dict(seed=5, top_k=20, top_p=0.9), dict(seed=5, end_token=3)], ids=str)
@pytest.mark.parametrize("positions", ["rotary", "xpos"])
@pytest.mark.parametrize("lengths", [None, [11, 4, 7]], ids=["equal", "ragged"])
def test_generation_by_a_graph_is_that_without(positions, lengths, arguments):
    torch.manual_seed(0)
    model = lt.LongNetLM(50, 64, 4, 2, 2, 128, [16, 64], [1, 4], positions=positions, device="cuda").eval()
    ids = torch.randint(50, (3, 11), device="cuda")
    with_graph, without = (model.generate(ids, 70, lengths=lengths, graph=graph, **arguments) for graph in (True, False))
    assert torch.equal(with_graph, without)
    torch.manual_seed(1)  # torch's own generator
    first = model.generate(ids, 40)
    torch.manual_seed(1)
    assert torch.equal(first, model.generate(ids, 40, graph=False))


def test_a_captured_step_of_the_language_model_generates_what_the_full_forward_does():
    torch.manual_seed(0)
    model = lt.LongNetLM(50, 64, 4, 2, 2, 128, [16, 64], [1, 4], positions="rotary", device="cuda").eval()
    ids = torch.randint(50, (3, 11), device="cuda")
    cache = model.new_cache()
    token = model.decode(ids, cache, last_only=True).argmax(-1)
    cache.reserve(100)
    graph, tokens = torch.cuda.CUDAGraph(), [token.clone()]
    with torch.cuda.graph(graph):
        logits = model.decode(token, cache)
        token.copy_(logits.argmax(-1))
    for _ in range(60):
        graph.replay()
        tokens.append(token.clone())
    assert cache.position == 71
    whole = torch.cat([ids, *tokens], dim=1)
    torch.testing.assert_close(logits[:, 0], model(whole)[:, 70], atol=1e-4, rtol=0)
    full = model(whole).argmax(-1)
    assert (whole[:, 11:] == full[:, 10:-1]).float().mean() > 0.98  # but for ties to rounding
