"""longspan.attention and its gradient on NumPy arrays and through DLPack, against the float64 formula."""

import numpy as np
import pytest

import longspan

torch = pytest.importorskip("torch")

import oracle

SEGMENTS, DILATIONS = [16, 24, 64], [1, 2, 3]


def arrays(shape=(2, 50, 7, 16), kv_heads=None, dtype=np.float32, seed=0):
    rng = np.random.default_rng(seed)
    batch, tokens, heads, head_dim = shape
    kv_shape = (batch, tokens, kv_heads or heads, head_dim)
    return [rng.standard_normal(s).astype(dtype) for s in (shape, kv_shape, kv_shape)]


def expected(q, k, v, **options):
    counts = oracle.dilated_counts(q.shape[1], q.shape[2], SEGMENTS, DILATIONS)
    return oracle.counted_attention(*(torch.from_numpy(x.astype(np.float64)) for x in (q, k, v)), counts, **options)


PATTERN = longspan.dilated(SEGMENTS, DILATIONS)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("kv_heads", [7, 1])
def test_forward_matches_formula(causal, kv_heads):
    q, k, v = arrays(kv_heads=kv_heads)
    out, lse = longspan.attention(q, k, v, PATTERN, causal=causal, return_lse=True)
    want, want_lse = expected(q, k, v, causal=causal)
    assert out.dtype == np.float32 and lse.dtype == np.float32
    np.testing.assert_allclose(out, want.numpy(), atol=2e-6)
    np.testing.assert_allclose(lse, want_lse.numpy(), atol=2e-6)


def test_backward_matches_formula():
    q, k, v = arrays(dtype=np.float64)
    dout = arrays(seed=1, dtype=np.float64)[0]
    out, lse = longspan.attention(q, k, v, PATTERN, causal=True, return_lse=True)
    got = longspan.attention_backward(q, k, v, out, lse, dout, PATTERN, causal=True)
    leaves = [torch.from_numpy(x).requires_grad_() for x in (q, k, v)]
    counts = oracle.dilated_counts(50, 7, SEGMENTS, DILATIONS)
    want, _ = oracle.counted_attention(*leaves, counts, causal=True)
    grads = torch.autograd.grad(want, leaves, torch.from_numpy(dout))
    for mine, theirs in zip(got, grads):
        np.testing.assert_allclose(mine, theirs.numpy(), atol=1e-12)


def test_options_reach_the_operator():
    q, k, v = arrays()
    mask = np.random.default_rng(3).random((2, 50)) < 0.7
    slopes = np.linspace(0.01, 0.5, 7, dtype=np.float32)
    out = longspan.attention(
        q, k, v, PATTERN, scale=0.3, output_scale=0.5, key_mask=mask, alibi_slopes=slopes.tolist()
    )
    want, _ = expected(
        q, k, v, scale=0.3, output_scale=0.5, key_mask=torch.from_numpy(mask), slopes=torch.from_numpy(slopes)
    )
    np.testing.assert_allclose(out, want.numpy(), atol=2e-6)


def test_lengths_equal_the_entry_alone():
    q, k, v = arrays()
    out = longspan.attention(q, k, v, PATTERN, lengths=[50, 31])
    alone = longspan.attention(*(np.ascontiguousarray(x[1:, :31]) for x in (q, k, v)), PATTERN)
    np.testing.assert_allclose(out[1:, :31], alone, atol=1e-6)
    assert not out[1, 31:].any()


def test_query_ranges_equal_the_whole():
    q, k, v = arrays()
    whole = longspan.attention(q, k, v, PATTERN, causal=True)
    rows = np.concatenate([q[:, 5:9], q[:, 40:50]], axis=1)
    part = longspan.attention(rows, k, v, PATTERN, causal=True, query_ranges=[(5, 4), (40, 10)])
    np.testing.assert_allclose(part, np.concatenate([whole[:, 5:9], whole[:, 40:50]], axis=1), atol=1e-6)


def test_no_query_rows():
    q, k, v = arrays()
    assert longspan.attention(q[:, :0], k, v, query_ranges=[]).shape == (2, 0, 7, 16)


def test_heads_first_layout_is_the_same_numbers():
    q, k, v = arrays()
    out, lse = longspan.attention(q, k, v, PATTERN, return_lse=True)
    flipped = [np.ascontiguousarray(x.transpose(0, 2, 1, 3)) for x in (q, k, v)]
    out_flipped, lse_flipped = longspan.attention(*flipped, PATTERN, return_lse=True, layout="bhnd")
    np.testing.assert_array_equal(out_flipped.transpose(0, 2, 1, 3), out)
    np.testing.assert_array_equal(lse_flipped, lse)


def test_outputs_may_be_given_and_are_filled_in_place():
    q, k, v = arrays()
    out = np.full_like(q, np.nan)
    lse = np.full((2, 7, 50), np.nan, np.float32)
    result = longspan.attention(q, k, v, PATTERN, out=out, lse=lse)
    assert result is out
    np.testing.assert_array_equal(out, longspan.attention(q, k, v, PATTERN))
    assert not np.isnan(lse).any()


def test_read_only_inputs_and_strided_views_are_taken_without_copies():
    q, k, v = arrays(shape=(2, 100, 7, 16))
    q.setflags(write=False)
    out = longspan.attention(q[:, ::2], k[:, ::2], v[:, ::2], PATTERN)
    want, _ = expected(q[:, ::2], k[:, ::2], v[:, ::2])
    np.testing.assert_allclose(out, want.numpy(), atol=2e-6)
    with pytest.raises(longspan.InvalidArgument, match="out"):
        longspan.attention(k, k, v, out=q)


@pytest.mark.parametrize("name", ["float16", "bfloat16"])
def test_half_types(name):
    dtype = np.float16 if name == "float16" else pytest.importorskip("ml_dtypes").bfloat16
    q, k, v = arrays(dtype=dtype)
    out = longspan.attention(q, k, v, PATTERN, causal=True)
    want, _ = expected(q, k, v, causal=True)
    assert out.dtype == dtype
    np.testing.assert_allclose(out.astype(np.float64), want.numpy(), atol=2e-2 if name == "bfloat16" else 3e-3)


def test_torch_tensors_through_dlpack_into_a_given_output():
    q, k, v = (torch.from_numpy(x) for x in arrays())
    out = torch.empty_like(q)
    longspan.attention(q, k, v, PATTERN, out=out)
    torch.testing.assert_close(out, longspan.attention(q, k, v, PATTERN))


def test_uncovered_rows_are_zero_with_infinite_lse():
    q, k, v = arrays(shape=(1, 8, 1, 4))
    out, lse = longspan.attention(q, k, v, longspan.dilated([8], [4]), return_lse=True)
    assert not out[0, 1:4].any() and np.isneginf(lse[0, 0, 1:4]).all() and np.isfinite(lse[0, 0, ::4]).all()


def test_same_dropout_for_the_same_seed():
    q, k, v = arrays()
    one, two, other = (longspan.attention(q, k, v, dropout=0.3, seed=seed) for seed in (1, 1, 2))
    np.testing.assert_array_equal(one, two)
    assert np.abs(one - other).max() > 1e-3


def test_dropout_without_a_seed_is_refused_by_name():
    q, k, v = arrays()
    with pytest.raises(longspan.InvalidArgument, match="seed is None with dropout 0.3") as caught:
        longspan.attention(q, k, v, dropout=0.3)
    assert caught.value.argument == "seed"
    for seed in (1.5, "x", 2**64):
        with pytest.raises(longspan.InvalidArgument, match="seed is .*give a whole number"):
            longspan.attention(q, k, v, dropout=0.3, seed=seed)
    out, lse = longspan.attention(q, k, v, dropout=0.3, seed=2**64 - 1, return_lse=True)
    np.testing.assert_array_equal(out, longspan.attention(q, k, v, dropout=0.3, seed=-1))
    with pytest.raises(longspan.InvalidArgument, match="seed of the forward"):
        longspan.attention_backward(q, k, v, out, lse, q, dropout=0.3)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (dict(q=lambda q: q[0]), r"q has shape \[50, 7, 16\]: give \[batch"),
        (dict(k=lambda k: k.astype(np.float64)), "k has dtype float64, q and v have float32"),
        (dict(v=lambda v: v[:, :49]), "v has shape"),
        (dict(k=lambda k: k[..., ::2]), "k"),
        (dict(q=lambda q: q.astype(np.complex64)), "q has dtype complex64"),
        (dict(q=lambda q: q.tolist()), r"q is \[.*give an array"),
        (dict(lengths=[50, 51]), r"lengths\[1\] is 51"),
        (dict(dropout=1.0), "dropout is 1"),
        (dict(scale=float("nan")), "scale is nan"),
        (dict(layout="nbhd"), "layout is 'nbhd'"),
        (dict(pattern=7), "pattern is 7"),
        (dict(pattern="dilated 8/0"), "0"),
        (dict(query_ranges=[(48, 5)]), "query range"),
    ],
)
def test_bad_input_is_refused_by_name(change, words):
    call = dict(zip("qkv", arrays()))
    for name, value in change.items():
        call[name] = value(call[name]) if callable(value) else value
    with pytest.raises(longspan.InvalidArgument, match=words) as caught:
        longspan.attention(**call)
    assert isinstance(caught.value, ValueError) and isinstance(caught.value, longspan.Error)


def test_unknown_kernel_is_unsupported():
    with pytest.raises(longspan.Unsupported, match="nothing-like-it"):
        longspan.attention(*arrays(), kernel="nothing-like-it")
