"""The registered operator: gradients, compile, export, autocast, checkpoints, dropout, errors."""

import inspect
import io
import pickle

import pytest

import longspan

torch = pytest.importorskip("torch")

from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import longspan.torch as lt
from longspan import _longspan
import oracle

PATTERN = longspan.dilated([8, 12], [1, 2])
TEXT = str(PATTERN)
TORCH = tuple(int(part) for part in torch.__version__.split(".")[:2])
LONGNET = longspan.longnet([4, 16], [1, 3], phase="torchscale", pad_keys=True)


def tensors(shape=(2, 21, 4, 8), kv_heads=None, dtype=torch.float32, grad=True, seed=0):
    generator = torch.Generator().manual_seed(seed)
    kv_shape = (*shape[:2], kv_heads or shape[2], shape[3])
    made = [torch.randn(s, generator=generator, dtype=torch.float64).to(dtype) for s in (shape, kv_shape, kv_shape)]
    return [x.requires_grad_(grad) for x in made]


def settings(**changes):
    """Positional arguments of the operator's schema after its tensors."""
    defaults = dict(
        pattern=str(PATTERN), causal=False, scale=None, output_scale=None, dropout=0.0, seed=None, lengths=None,
        key_mask=None, alibi_slopes=None, query_ranges=None, deterministic=False, detached_mix=False, allow_tf32=False,
        kernel="",
    )  # fmt: skip
    assert set(changes) <= set(defaults)
    return tuple((defaults | changes).values())


CASES = {
    "plain": dict(),
    "causal": dict(causal=True, scale=0.2, output_scale=0.5),
    "longnet": dict(pattern=str(LONGNET)),
    "masked": dict(key_mask=torch.arange(42).reshape(2, 21) % 3 > 0, lengths=torch.tensor([21, 9])),
    "slopes": dict(alibi_slopes=torch.linspace(0.1, 0.5, 4)),
    "dropout": dict(dropout=0.4, seed=torch.tensor(7)),
}


@pytest.fixture(params=["compiled", "raw"])
def calls(request, monkeypatch):
    """Both ways from tensors to kernels: compiled, and the one in Python for older versions of torch."""
    if request.param == "raw":
        monkeypatch.setattr(lt.operator, "_calls", lt.operator._RawCalls)
    elif lt.operator._calls is lt.operator._RawCalls:
        pytest.skip("this torch has no C exchange API")


def test_compiled_calls_are_taken_where_torch_has_the_exchange_api():
    assert hasattr(torch.Tensor, "__dlpack_c_exchange_api__") == isinstance(lt.operator._calls, _longspan.TorchCalls)


def test_schema_stays_what_saved_graphs_were_made_with():
    settings_text = (
        "str pattern, bool causal, float? scale, float? output_scale, float dropout, Tensor? seed, Tensor? lengths, "
        "Tensor? key_mask, Tensor? alibi_slopes, SymInt[]? query_ranges, bool deterministic, bool detached_mix, "
        "bool allow_tf32, str kernel"
    )
    for operator in ("attention", "attention_backward", "stacked_attention", "stacked_attention_backward"):
        assert settings_text in str(getattr(torch.ops.longspan, operator).default._schema)


def test_signatures_show_every_argument():
    for function in (longspan.attention, lt.attention, longspan.attention_backward, lt.attention_backward):
        parameters = inspect.signature(function).parameters
        assert {"pattern", "causal", "scale", "key_mask", "query_ranges", "kernel", "layout"} <= set(parameters)
        assert parameters["dropout"].default == 0.0 and parameters["causal"].default is False


@pytest.mark.parametrize("case", CASES)
def test_opcheck(case):
    query, key, value = tensors()
    arguments = settings(**CASES[case])
    torch.library.opcheck(torch.ops.longspan.attention.default, (query, key, value, *arguments))
    plain = [x.detach() for x in (query, key, value)]
    out, lse = torch.ops.longspan.attention(*plain, *arguments)
    torch.library.opcheck(
        torch.ops.longspan.attention_backward.default,
        (torch.ones_like(out), torch.ones_like(lse), *plain, out, lse, *arguments),
        test_utils=("test_schema", "test_autograd_registration", "test_faketensor"),
    )


@pytest.mark.parametrize("through_dispatcher", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_gradcheck(case, through_dispatcher, calls):
    inputs = tensors(shape=(2, 21, 4, 3), kv_heads=2, dtype=torch.float64)
    arguments = settings(**CASES[case])
    covered = torch.isfinite(torch.ops.longspan.attention(*(x.detach() for x in inputs), *arguments)[1])

    def run(*qkv):
        if through_dispatcher:
            out, lse = torch.ops.longspan.attention(*qkv, *arguments)
        else:
            out, lse = lt.attention(*qkv, **({"pattern": PATTERN} | CASES[case]), return_lse=True)
        return out, lse[covered]

    assert torch.autograd.gradcheck(run, inputs, fast_mode=True)


def test_eager_calls_and_the_dispatcher_agree(calls):
    query, key, value = tensors()
    fast = lt.attention(query, key, value, PATTERN, causal=True)
    slow = torch.ops.longspan.attention(query, key, value, *settings(causal=True))[0]
    torch.testing.assert_close(fast, slow, rtol=0, atol=0)
    weight = torch.randn_like(fast)
    for one, two in zip(*(torch.autograd.grad(x, (query, key, value), weight) for x in (fast, slow))):
        torch.testing.assert_close(one, two, rtol=0, atol=0)


def test_gradient_of_lse_alone(calls):
    query, key, value = tensors(dtype=torch.float64)
    _, lse = lt.attention(query, key, value, longspan.dense(), return_lse=True)
    counts = torch.ones(4, 21, 21, dtype=torch.float64)
    _, want = oracle.counted_attention(query, key, value, counts)
    for mine, theirs in zip(*(torch.autograd.grad(x.square().sum(), (query, key)) for x in (lse, want))):
        torch.testing.assert_close(mine, theirs)


def test_explicit_backward_equals_autograd():
    query, key, value = tensors()
    out, lse = lt.attention(query, key, value, PATTERN, return_lse=True)
    grad_out = torch.randn_like(out)
    want = torch.autograd.grad(out, (query, key, value), grad_out)
    got = longspan.attention_backward(query, key, value, out, lse, grad_out, PATTERN)
    for mine, theirs in zip(got, want):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=0)


def test_second_derivative_is_refused(calls):
    query, key, value = tensors()
    (grad,) = torch.autograd.grad(lt.attention(query, key, value).sum(), query, create_graph=True)
    with pytest.raises(longspan.Unsupported, match="first derivatives"):
        grad.sum().backward()


def test_observers_that_come_with_the_backward_alone(calls):
    query, key, value = tensors()
    out = lt.attention(query, key, value, PATTERN)
    grads = torch.randn(3, *out.shape)
    want = [torch.autograd.grad(out, (query, key, value), grad, retain_graph=True) for grad in grads]
    together = torch.autograd.grad(out, (query, key, value), grads, retain_graph=True, is_grads_batched=True)
    for mine, theirs in zip(together, zip(*want)):
        torch.testing.assert_close(mine, torch.stack(theirs))
    seen = []

    class Watching(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            seen.append(function)
            return function(*args, **(kwargs or {}))

    with Watching():
        mine = torch.autograd.grad(out, (query, key, value), grads[0])
    assert torch.ops.longspan.attention_backward.default in seen
    torch.testing.assert_close(mine, want[0])


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_compile_whole_graph(backend):
    query, key, value = tensors()

    def step(query, key, value):
        return lt.attention(query * 2, key, value, TEXT, causal=True).tanh()

    compiled = torch.compile(step, fullgraph=True, backend=backend)
    torch.testing.assert_close(compiled(query, key, value), step(query, key, value))
    grads = [torch.autograd.grad(f(query, key, value).sum(), (query, key, value)) for f in (compiled, step)]
    for mine, theirs in zip(*grads):
        torch.testing.assert_close(mine, theirs)


@pytest.mark.skipif(TORCH < (2, 15), reason="older versions compile patterns as text only")
def test_compile_takes_pattern_objects():
    qkv = tensors(grad=False)
    compiled = torch.compile(lambda *x: lt.attention(*x, PATTERN), fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(*qkv), lt.attention(*qkv, PATTERN))


def test_compile_with_changing_lengths_of_sequence():
    compiled = torch.compile(
        lambda *x: lt.attention(*x, TEXT, causal=True) + 1, fullgraph=True, backend="aot_eager", dynamic=True
    )
    for tokens in (21, 34, 55):
        qkv = tensors(shape=(1, tokens, 4, 8), grad=False)
        torch.testing.assert_close(compiled(*qkv), lt.attention(*qkv, PATTERN, causal=True) + 1)


def test_compiled_dropout_follows_manual_seed():
    qkv = tensors(grad=False)
    compiled = torch.compile(lambda *x: lt.attention(*x, TEXT, dropout=0.5), fullgraph=True, backend="aot_eager")
    results = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        results.append(compiled(*qkv))
    assert torch.equal(results[0], results[1]) and not torch.equal(results[0], results[2])


def test_export_round_trip():
    module = lt.DilatedAttention([8, 12], [1, 2]).eval()
    qkv = tuple(tensors(grad=False))
    buffer = io.BytesIO()
    torch.export.save(torch.export.export(module, qkv), buffer)
    buffer.seek(0)
    torch.testing.assert_close(torch.export.load(buffer).module()(*qkv), module(*qkv))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_casts_and_gradients_come_back_in_their_own_type(dtype, calls):
    query, key, value = tensors()
    with torch.autocast("cpu", dtype=dtype):
        out = lt.attention(query, key, value, PATTERN, alibi_slopes=torch.full((4,), 0.01))
    assert out.dtype is dtype
    out.sum().backward()
    assert query.grad.dtype is torch.float32
    want = lt.attention(query, key, value, PATTERN, alibi_slopes=torch.full((4,), 0.01))
    torch.testing.assert_close(out.float(), want, atol=3e-2, rtol=0)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoint_recomputes_the_same_dropout(reentrant):
    query, key, value = tensors()

    def block(query, key, value):
        return lt.attention(query, key, value, PATTERN, dropout=0.3).square()

    results = []
    for wrap in (lambda *x: block(*x), lambda *x: checkpoint(block, *x, use_reentrant=reentrant)):
        torch.manual_seed(5)
        out = wrap(query, key, value)
        results.append(_backward(out, query))
    for mine, theirs in zip(*results):
        torch.testing.assert_close(mine, theirs)


def _backward(out, leaf):
    """With backward(), since reentrant checkpoints know nothing else."""
    leaf.grad = None
    out.sum().backward()
    return out, leaf.grad.clone()


def test_selective_checkpoint_sees_the_operator(calls):
    if TORCH < (2, 5):
        pytest.skip("selective checkpoints have another interface")
    from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

    seen = []

    def policy(context, operator, *args, **kwargs):
        seen.append(operator)
        return CheckpointPolicy.MUST_SAVE

    query, key, value = tensors()
    out = checkpoint(
        lambda *x: lt.attention(*x, PATTERN), query, key, value, use_reentrant=False,
        context_fn=lambda: create_selective_checkpoint_contexts(policy),
    )  # fmt: skip
    out.sum().backward()
    assert torch.ops.longspan.attention.default in seen


def test_dropout_is_governed_by_manual_seed_and_matches_its_rate():
    value = torch.ones(1, 64, 8, 64)
    query = torch.zeros_like(value)
    results = []
    for seed in (3, 3, 4):
        torch.manual_seed(seed)
        results.append(lt.attention(query, query, value, dropout=0.25))
    assert torch.equal(results[0], results[1]) and not torch.equal(results[0], results[2])
    # Each of 512 rows averages 64 equal pairs, each kept with 3/4 and scaled by 4/3: deviation of the mean 0.0032.
    assert abs(results[0].mean().item() - 1) < 5 * (0.25 / 0.75 / 64 / 512) ** 0.5


@pytest.mark.parametrize("filled", [False, True])
def test_longspan_attention_draws_dropout_from_torch(filled):
    """As longspan.torch.attention does, also into a tensor of the caller's."""
    q, k, v = tensors(grad=False)
    arguments = {"out": torch.empty_like(q)} if filled else {}

    def run(**others):
        return longspan.attention(q, k, v, PATTERN, dropout=0.5, **arguments, **others).clone()

    torch.manual_seed(1)
    first, second = run(), run()
    torch.manual_seed(1)
    torch.testing.assert_close(run(), first, rtol=0, atol=0)
    torch.manual_seed(1)
    torch.testing.assert_close(lt.attention(q, k, v, PATTERN, dropout=0.5), first, rtol=0, atol=0)
    assert not torch.equal(first, second)
    torch.testing.assert_close(run(seed=torch.tensor(7)), run(seed=7), rtol=0, atol=0)
    with pytest.raises(longspan.InvalidArgument, match="seed"):
        run(seed="x")


def test_layouts_and_expanded_gradients(calls):
    query, key, value = tensors()
    flipped = [x.detach().transpose(1, 2).contiguous().requires_grad_() for x in (query, key, value)]
    out = lt.attention(query, key, value, PATTERN)
    other = lt.attention(*flipped, PATTERN, layout="bhnd")
    torch.testing.assert_close(other.transpose(1, 2), out)
    out.sum().backward()
    other.sum().backward()
    torch.testing.assert_close(flipped[1].grad.transpose(1, 2), key.grad)


def test_meta_tensors_and_flop_free_shapes(calls):
    query, key, value = (x.to("meta") for x in tensors(grad=False))
    out, lse = lt.attention(query, key, value, PATTERN, return_lse=True)
    assert out.shape == query.shape and lse.shape == (2, 4, 21) and out.is_meta


def test_profiler_names_the_operator(calls):
    qkv = tensors(grad=False)
    with torch.profiler.profile() as profile:
        lt.attention(*qkv, PATTERN)
    assert "longspan::attention" in {event.key for event in profile.key_averages()}


def test_subclasses_of_tensors_see_the_operator(calls):
    seen = []

    class Watching(torch.Tensor):
        @classmethod
        def __torch_function__(cls, function, types, args=(), kwargs=None):
            seen.append(function)
            return super().__torch_function__(function, types, args, kwargs or {})

    query, key, value = tensors(grad=False)
    out = lt.attention(query.as_subclass(Watching), key, value, PATTERN)
    assert torch.ops.longspan.attention.default in seen and type(out) is Watching
    torch.testing.assert_close(out.as_subclass(torch.Tensor), lt.attention(query, key, value, PATTERN))


def test_outputs_own_memory_that_torch_can_resize(calls):
    """Outputs are torch's own, not wrapped memory: streams can be recorded for them, and storages replaced."""
    query, key, value = tensors(grad=False)
    out, lse = lt.attention(query.transpose(1, 2).contiguous().transpose(1, 2), key, value, PATTERN, return_lse=True)
    assert out.is_contiguous() and lse.is_contiguous()
    assert out.untyped_storage().resizable() and lse.untyped_storage().resizable()


def test_longspan_attention_takes_torch_tensors_with_gradients():
    query, key, value = tensors()
    out, lse = longspan.attention(query, key, value, PATTERN, return_lse=True)
    assert out.requires_grad and isinstance(lse, torch.Tensor)


def test_ranges_and_lists(calls):
    query, key, value = tensors(grad=False)
    whole = lt.attention(query, key, value, PATTERN, causal=True)
    part = lt.attention(query[:, 13:], key, value, PATTERN, causal=True, query_ranges=[(13, 8)])
    torch.testing.assert_close(part, whole[:, 13:])
    assert not lt.attention(query, key, value, PATTERN, lengths=[21, 5])[1, 5:].any()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (dict(query=lambda x: x[0]), r"query has shape \[21, 4, 8\]: give \[batch"),
        (dict(key=lambda x: x.double()), "key has dtype float64, query and value have float32"),
        (dict(key=lambda x: x.to("meta")), "key is on meta, query is on cpu"),
        (dict(value=lambda x: x[:, :20]), "value has shape .* key has"),
        (dict(query=lambda x: x[:, :5]), "query has 5 rows, key has 21"),
        (dict(query=lambda x: x.to(torch.int8)), "query has dtype int8"),
        (dict(layout="hbnd"), "layout"),
        (dict(key_mask=torch.ones(2, 20, dtype=torch.bool)), "key_mask has shape"),
        (dict(lengths=torch.tensor([3, 22])), r"lengths\[1\] is 22"),
        (dict(pattern="dilated 4"), "dilated 4"),
        (dict(dropout=0.5, seed=torch.tensor(1.0)), "seed is a tensor of 1 float32"),
        (dict(dropout=0.5, seed=torch.tensor([1, 2])), "seed is a tensor of 2 int64"),
    ],
)
def test_bad_input_is_refused_by_name(change, words, calls):
    call = dict(zip(("query", "key", "value"), tensors(grad=False)))
    for name, value in change.items():
        call[name] = value(call[name]) if callable(value) else value
    with pytest.raises(longspan.InvalidArgument, match=words) as caught:
        lt.attention(**call)
    assert isinstance(caught.value, ValueError)


def test_pattern_objects_pickle_inside_modules():
    module = lt.MultiheadDilatedAttention(16, 4, [1, 2], [8, 12])
    again = pickle.loads(pickle.dumps(module))
    x = torch.randn(1, 20, 16)
    torch.testing.assert_close(again.eval()(x)[0], module.eval()(x)[0])
