"""install() on a stand-in for torchscale, against an independent formula; and on the real one where it is importable:
LONGSPAN_TORCHSCALE=path/to/checkout (or to prov-gigapath/gigapath)."""

import importlib
import os
import sys
from types import SimpleNamespace

import pytest

import longspan

torch = pytest.importorskip("torch")

import longspan.torchscale
import oracle
import torchscale_stub

SEGMENTS, DILATIONS = [8, 16, 64], [1, 2, 4]


@pytest.fixture(autouse=True)
def restored_imports():
    """Every test starts and ends without torchscale and without our hook."""
    path = list(sys.path)

    def forget():
        longspan.torchscale.uninstall()
        for name in list(sys.modules):
            if "torchscale" in name.split(".") and not name.startswith("longspan"):
                del sys.modules[name]

    forget()
    yield
    forget()
    sys.path[:] = path
    importlib.invalidate_caches()


@pytest.fixture
def stub(tmp_path):
    torchscale_stub.write(tmp_path)
    sys.path.insert(0, str(tmp_path))
    importlib.invalidate_caches()
    return tmp_path


def make(dtype=torch.float64, embed_dim=24, heads=4, **options):
    module = importlib.import_module("torchscale.component.dilated_attention")
    args = SimpleNamespace(segment_length=SEGMENTS, dilated_ratio=DILATIONS, seq_parallel=False)
    torch.manual_seed(0)
    return module.DilatedAttention(args, embed_dim, heads, **options).to(dtype).eval()


def formula(module, x, **options):
    """The whole module in float64, from its parameters."""
    split = (*x.shape[:2], module.num_heads, module.head_dim)
    q, k, v = (p(x).view(split) for p in (module.q_proj, module.k_proj, module.v_proj))
    out = oracle.torchscale_attention(q, k, v, SEGMENTS, DILATIONS, **options).reshape(x.shape)
    return module.out_proj(out if module.inner_attn_ln is None else module.inner_attn_ln(out))


def tokens(batch=2, count=43, width=24, dtype=torch.float64):
    return torch.randn(batch, count, width, generator=torch.Generator().manual_seed(4), dtype=torch.float64).to(dtype)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("subln", [False, True])
def test_forward_equals_formula(stub, causal, subln):
    longspan.torchscale.install()
    module, x = make(subln=subln), tokens()
    out, weights = module(x, x, x, is_causal=causal)
    assert weights is None
    torch.testing.assert_close(out, formula(module, x, causal=causal))


@pytest.mark.parametrize("detached", [False, True])
def test_gradients_exact_or_as_torchscale_has_them(stub, detached):
    longspan.torchscale.install(detached_mix=detached)
    module, x = make(), tokens().requires_grad_()
    (mine,) = torch.autograd.grad(module(x, x, x)[0].square().sum(), x)
    (want,) = torch.autograd.grad(formula(module, x, detached=detached).square().sum(), x)
    (other,) = torch.autograd.grad(formula(module, x, detached=not detached).square().sum(), x)
    torch.testing.assert_close(mine, want)
    assert (mine - other).abs().max() > 1e-6


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_float32_and_half(stub, dtype):
    longspan.torchscale.install()
    x = tokens()
    out = make(dtype)(*(x.to(dtype),) * 3)[0]
    tolerance = {torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 4e-2}[dtype]
    assert out.dtype is dtype
    torch.testing.assert_close(out.double(), formula(make(), x), atol=tolerance, rtol=0)


def test_padded_entries_equal_the_entry_alone(stub):
    longspan.torchscale.install()
    module, x = make(), tokens(batch=3)
    padding = torch.zeros(3, 43, dtype=torch.bool)
    padding[1, 30:] = True
    padding[2, 1:] = True
    out = module(x, x, x, key_padding_mask=padding)[0]
    for entry, count in enumerate((43, 30, 1)):
        alone = x[entry : entry + 1, :count]
        torch.testing.assert_close(out[entry : entry + 1, :count], module(alone, alone, alone)[0])
        torch.testing.assert_close(out[entry : entry + 1, :count], formula(module, alone))


def test_padding_inside_hides_keys(stub):
    longspan.torchscale.install()
    module, x = make(), tokens()
    padding = torch.zeros(2, 43, dtype=torch.bool)
    padding[0, 5:9] = True
    padding[1, 40:] = True  # a suffix: this entry is run as if alone
    out = module(x, x, x, key_padding_mask=padding)[0]
    garbage = x.masked_fill(padding[..., None], 1e3)
    torch.testing.assert_close(module(x, garbage, garbage, key_padding_mask=padding)[0], out)
    alone = x[1:, :40]
    torch.testing.assert_close(out[1:, :40], formula(module, alone))


def test_padding_in_a_compiled_graph(stub):
    longspan.torchscale.install()
    module, x = make(), tokens()
    padding = torch.zeros(2, 43, dtype=torch.bool)
    padding[0, 5:9] = True
    padding[1, 40:] = True
    compiled = torch.compile(
        lambda x, padding: module(x, x, x, key_padding_mask=padding)[0], fullgraph=True, backend="aot_eager"
    )
    torch.testing.assert_close(compiled(x, padding), module(x, x, x, key_padding_mask=padding)[0])


def test_a_mask_changed_in_place_is_looked_at_again(stub):
    longspan.torchscale.install()
    module, x = make(), tokens()
    padding = torch.zeros(2, 43, dtype=torch.bool)
    whole = module(x, x, x, key_padding_mask=padding)[0]
    padding[1, 30:] = True
    assert not torch.equal(module(x, x, x, key_padding_mask=padding)[0][1], whole[1])
    with torch.inference_mode():
        fresh = padding.clone()
        torch.testing.assert_close(
            module(x, x, x, key_padding_mask=fresh)[0], module(x, x, x, key_padding_mask=padding)[0]
        )
        fresh[1] = False  # inference tensors change, too, and do not count it
        torch.testing.assert_close(module(x, x, x, key_padding_mask=fresh)[0], whole)


@pytest.mark.parametrize("chunks", [[43], [20] + [1] * 23, [9, 7, 1, 26]])
def test_decoding_equals_the_full_forward(stub, chunks):
    longspan.torchscale.install()
    module, x = make(), tokens()
    whole = module(x, x, x, is_causal=True)[0]
    state, parts, start = {}, [], 0
    for index, count in enumerate(chunks):
        part = x[:, start : start + count]
        parts.append(module(part, part, part, incremental_state=state, is_first_step=index == 0, is_causal=True)[0])
        start += count
    torch.testing.assert_close(torch.cat(parts, dim=1), whole)
    assert state["prev_key"].shape == (2, 4, 43, 6)


def test_dropout_is_off_in_evaluation(stub):
    longspan.torchscale.install()
    module, x = make(dropout=0.5), tokens()
    torch.testing.assert_close(module(x, x, x)[0], formula(module, x))
    module.train()
    assert (module(x, x, x)[0] - formula(module, x)).abs().max() > 1e-3


@pytest.mark.parametrize("package", ["torchscale", "pathology.torchscale"])
def test_install_before_the_package_can_be_imported(tmp_path, package):
    longspan.torchscale.install()
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module(f"{package}.component.dilated_attention")
    torchscale_stub.write(tmp_path, package)
    sys.path.insert(0, str(tmp_path))
    importlib.invalidate_caches()
    cls = importlib.import_module(f"{package}.component.dilated_attention").DilatedAttention
    assert cls.forward.__module__ == "longspan.torchscale"
    longspan.torchscale.uninstall()
    assert cls.forward.__module__ != "longspan.torchscale"


def test_uninstall_restores_and_stays_away(stub):
    module, x = make(), tokens()
    assert module(x, x, x)[0] == "original"
    longspan.torchscale.install()
    longspan.torchscale.install(detached_mix=True)
    assert torch.is_tensor(module(x, x, x)[0])
    longspan.torchscale.uninstall()
    longspan.torchscale.uninstall()
    assert module(x, x, x)[0] == "original"
    del sys.modules["torchscale.component.dilated_attention"]
    assert make()(x, x, x)[0] == "original"


def test_what_is_not_taken_over_is_refused_by_name(stub):
    longspan.torchscale.install()
    module, x = make(), tokens()
    with pytest.raises(longspan.Unsupported, match="rel_pos"):
        module(x, x, x, rel_pos=torch.zeros(1))
    with pytest.raises(longspan.Unsupported, match="attn_mask"):
        module(x, x, x, attn_mask=torch.zeros(43, 43))
    with pytest.raises(longspan.InvalidArgument, match="key has shape"):
        module(x, x[:, :5], x)
    with pytest.raises(longspan.InvalidArgument, match="key_padding_mask has shape"):
        module(x, x, x, key_padding_mask=torch.zeros(2, 5, dtype=torch.bool))


COPIES = {
    "project.longnet.dilated_attention": "longnet/dilated_attention.py",
    "project.attn": "attn.py",
}


@pytest.mark.parametrize("first", ["install", "import"])
def test_copies_under_any_module_name_are_replaced_several_at_once(tmp_path, first, monkeypatch):
    for file in COPIES.values():
        torchscale_stub.write(tmp_path, "project", file)
    monkeypatch.syspath_prepend(str(tmp_path))
    if first == "install":
        assert not set(COPIES) & {cls.__module__ for cls in longspan.torchscale.install()}
    classes = [importlib.import_module(name).DilatedAttention for name in COPIES]
    if first == "import":
        assert set(classes) <= set(longspan.torchscale.install())
    assert set(classes) <= set(longspan.torchscale.installed())
    assert all(cls.forward.__module__ == "longspan.torchscale" for cls in classes)
    longspan.torchscale.uninstall()
    assert longspan.torchscale.installed() == []
    assert all(cls.forward.__module__ in COPIES for cls in classes)
    for name in [*COPIES, "project.longnet", "project"]:
        del sys.modules[name]


HIDING = {
    "the base": "class MultiheadAttention(nn.Module):\n    def __init_subclass__(cls): ...",
    "a class beside it": "class Hiding:\n    def __init_subclass__(cls): ...\nclass MultiheadAttention(Hiding, nn.Module):",
}


@pytest.mark.parametrize("hiding", HIDING)
@pytest.mark.parametrize("first", ["install", "define"])
def test_a_copy_is_found_though_a_base_hides_its_subclasses(hiding, first):
    source = torchscale_stub.SOURCE.replace("class MultiheadAttention(nn.Module):", HIDING[hiding])
    assert source != torchscale_stub.SOURCE
    names = {"__name__": f"hidden.{first}"}
    if first == "install":
        longspan.torchscale.install()
    exec(source, names)
    if first == "define":
        longspan.torchscale.install()
    args = SimpleNamespace(segment_length=SEGMENTS, dilated_ratio=DILATIONS, seq_parallel=False)
    module, x = type("Mine", (names["DilatedAttention"],), {})(args, 24, 4).double(), tokens()
    assert names["DilatedAttention"] in longspan.torchscale.installed()
    torch.testing.assert_close(module(x, x, x)[0], formula(module, x))
    longspan.torchscale.uninstall()
    assert module(x, x, x)[0] == "original" and torch.nn.Module.__init__.__module__ == "torch.nn.modules.module"


def test_install_says_what_it_replaced_and_nothing_stays_behind(stub):
    hook = torch.nn.Module.__init_subclass__
    module = make()
    assert type(module) in longspan.torchscale.install()
    longspan.torchscale.uninstall()
    assert torch.nn.Module.__init_subclass__ == hook
    assert type(module).forward.__module__ == "torchscale.component.dilated_attention"


def lookalike(module="somebody.attention"):
    class MultiheadAttention(torch.nn.Module):
        def __init__(self, args, embed_dim, num_heads): ...

    class DilatedAttention(MultiheadAttention):
        __module__ = module

        def forward(self, query, key, value, is_causal=False):
            return "mine"

    return DilatedAttention


@pytest.mark.parametrize("first", ["install", "define"])
def test_a_class_that_only_looks_similar_is_left_alone_aloud(first, request):
    name = f"somebody.{first}"
    if first == "define":
        cls = lookalike(name)
    with pytest.warns(longspan.LongspanWarning, match=f"{name}.*left alone.*no method dense_to_sparse.*by hand"):
        longspan.torchscale.install()
        if first == "install":
            cls = lookalike(name)
    assert cls.forward(None, 1, 2, 3) == "mine" and cls not in longspan.torchscale.installed()


def test_a_class_or_module_can_be_named_by_hand(stub):
    cls = type(make())
    for target in (cls, sys.modules[cls.__module__]):
        assert longspan.torchscale.install(target) == [cls]
        module, x = make(), tokens()
        torch.testing.assert_close(module(x, x, x)[0], formula(module, x))
        longspan.torchscale.uninstall()
    # Classes that the new forward itself is made of would call themselves without end.
    for wrong in (sys, torch.nn.Linear(2, 2), None.__class__, torch.nn.Linear, longspan.torch, longspan.torch.DilatedAttention):
        with pytest.raises(longspan.InvalidArgument, match="target is .*DilatedAttention"):
            longspan.torchscale.install(wrong)


# The real thing -----------------------------------------------------------------------------------------------------

CHECKOUT = os.environ.get("LONGSPAN_TORCHSCALE")
needs_checkout = pytest.mark.skipif(not CHECKOUT, reason="set LONGSPAN_TORCHSCALE to a source checkout of torchscale")


def plain_flash(q, k, v, dropout=0.0, bias=None, softmax_scale=None, is_causal=False):
    """What torchscale expects of flash attention: (out, lse), without the package and on any type."""
    scores = torch.einsum("bihd,bjhd->bhij", q, k) * (softmax_scale or q.shape[-1] ** -0.5)
    if is_causal:
        rows, columns = scores.shape[-2:]
        scores = scores.masked_fill(torch.ones(rows, columns, dtype=torch.bool).triu(1 + columns - rows), -torch.inf)
    return torch.einsum("bhij,bjhd->bihd", scores.softmax(-1), v), scores.logsumexp(-1)


@pytest.fixture
def real():
    sys.path.insert(0, CHECKOUT)
    importlib.invalidate_caches()
    attention = importlib.import_module("torchscale.component.multihead_attention")
    attention.flash_attn_func = plain_flash
    return [importlib.import_module(f"torchscale.{name}") for name in ("model.LongNet", "architecture.config")]


SHAPE = dict(
    segment_length="[16, 32, 128]", dilated_ratio="[1, 2, 4]", flash_attention=True, dropout=0.0, drop_path_rate=0.0,
    vocab_size=-1, no_output_layer=True,
)  # fmt: skip


@needs_checkout
@pytest.mark.parametrize("xpos", [False, True])
def test_real_encoder_equals_the_original(real, xpos):
    model, config = real
    torch.manual_seed(0)
    arguments = config.EncoderConfig(
        encoder_layers=2, encoder_embed_dim=96, encoder_ffn_embed_dim=64, encoder_attention_heads=16, xpos_rel_pos=xpos,
        **SHAPE,
    )  # fmt: skip
    encoder = model.LongNetEncoder(arguments).double().eval()
    x = torch.randn(1, 107, 96, dtype=torch.float64, requires_grad=True)

    def run():
        out = encoder(src_tokens=None, token_embeddings=x)["encoder_out"]
        return out, torch.autograd.grad(out.square().sum(), x)[0]

    original = run()
    longspan.torchscale.install(detached_mix=True)
    for mine, theirs in zip(run(), original):
        torch.testing.assert_close(mine, theirs)
    longspan.torchscale.install()
    out, grad = run()
    torch.testing.assert_close(out, original[0])
    assert not torch.allclose(grad, original[1], rtol=1e-9, atol=0)


@needs_checkout
def test_real_encoder_with_padding_equals_each_entry_alone(real):
    model, config = real
    longspan.torchscale.install()
    torch.manual_seed(0)
    encoder = model.LongNetEncoder(
        config.EncoderConfig(
            encoder_layers=2, encoder_embed_dim=96, encoder_ffn_embed_dim=64, encoder_attention_heads=16, **SHAPE
        )
    ).eval()
    x = torch.randn(2, 90, 96)
    padding = torch.zeros(2, 90, dtype=torch.bool)
    padding[1, 41:] = True
    out = encoder(src_tokens=None, token_embeddings=x, encoder_padding_mask=padding)["encoder_out"]
    alone = encoder(src_tokens=None, token_embeddings=x[1:, :41])["encoder_out"]
    torch.testing.assert_close(out[1:, :41], alone, atol=1e-5, rtol=0)


@needs_checkout
@pytest.mark.parametrize("xpos", [False, True])
def test_real_decoder_decodes_what_it_computes_at_once(real, xpos):
    model, config = real
    longspan.torchscale.install()
    torch.manual_seed(0)
    arguments = config.DecoderConfig(
        decoder_layers=2, decoder_embed_dim=64, decoder_ffn_embed_dim=64, decoder_attention_heads=8, xpos_rel_pos=xpos,
        **SHAPE,
    )  # fmt: skip
    decoder = model.LongNetDecoder(arguments, embed_tokens=torch.nn.Embedding(50, 64)).double().eval()
    text = torch.randint(50, (2, 60))
    whole = decoder(text, features_only=True)[0]
    state = {"is_first_step": True}
    parts = [decoder(text[:, :20], incremental_state=state, features_only=True)[0]]
    state["is_first_step"] = False
    for end in range(21, 61):
        parts.append(decoder(text[:, :end], incremental_state=state, features_only=True)[0])
    torch.testing.assert_close(torch.cat(parts, dim=1), whole)
