"""Wrong arguments: every public callable says which argument is wrong, in the caller's words, and never dies of it."""

import contextlib
import pickle
import random

import numpy as np
import pytest

import longspan

torch = pytest.importorskip("torch")

from torch.utils.flop_counter import FlopCounterMode

import longspan.torch as lt

RNG = np.random.default_rng(0)
Q = RNG.standard_normal((2, 20, 4, 8)).astype(np.float32)
MASK = longspan.BlockMask(np.eye(4, dtype=bool), 16)
PLAN = longspan.plan(tokens=64, heads=2, head_dim=8)
BLOCKS = longspan.local_window(32, 16)
DILATED = longspan.dilated([8, 16], [1, 2])
OUT, LSE = longspan.attention(Q, Q, Q, DILATED, return_lse=True)
RING = longspan.Ring(longspan.Attention(DILATED), None, longspan.Shards.even(20, 1))
X = torch.from_numpy(Q)
TOKENS = torch.randn(2, 20, 16)
IDS = torch.zeros(1, 4, dtype=torch.int64)
MODEL = lt.LongNetLM(8, 8, 2, 1, 1, 8, [4, 8], [1, 2], positions="rotary").eval()

OPTIONS = dict(
    causal=False, scale=None, output_scale=None, dropout=0.0, deterministic=False, detached_mix=False, allow_tf32=False,
)  # fmt: skip
CALL = dict(
    pattern=DILATED, **OPTIONS, kernel=None, seed=1, lengths=[20, 9], key_mask=np.ones((2, 20), bool),
    alibi_slopes=np.ones(4, np.float32), query_ranges=[(0, 20)], layout="bnhd",
)  # fmt: skip
TORCH_CALL = CALL | dict(key_mask=torch.ones(2, 20, dtype=torch.bool), alibi_slopes=torch.ones(4))
LOOK = dict(q=Q, k=Q, pattern=DILATED, causal=True, lengths=None, key_mask=None, query_ranges=None)
MULTIHEAD = dict(
    embed_dim=16, num_heads=4, dilation_rates=[1, 2], segment_lengths=[8, 16], dropout=0.0, bias=True, layer_norm=True,
    layer_norm_eps=1e-5, gamma_init=1.0,
)  # fmt: skip
LAYER = dict(
    d_model=16, nhead=4, segment_lengths=[8, 16], dilation_rates=[1, 2], dim_feedforward=8, dropout=0.0,
    activation="relu", layer_norm_eps=1e-5, gamma_init=1.0,
)  # fmt: skip
GROUPS = dict(segment_lengths=[8, 16], dilation_rates=[1, 2])
CONFIG = {"block_size": 16, "sparsity_ratio": 0.5}
QKV = dict(query=X, key=X, value=X)


def attend(module):
    return lambda **keywords: module(**(QKV | keywords))


#: name -> (callable, keyword arguments of a call that works)
CALLS = {
    "attention": (longspan.attention, dict(q=Q, k=Q, v=Q, **CALL, return_lse=False, out=None, lse=None)),
    "attention_backward": (
        longspan.attention_backward,
        dict(q=Q, k=Q, v=Q, out=OUT, lse=LSE, dout=Q, dlse=None, dq=None, dk=None, dv=None, **CALL),
    ),
    "torch.attention": (lt.attention, dict(**QKV, **TORCH_CALL, return_lse=False)),
    "torch.attention_backward": (
        lt.attention_backward,
        dict(**QKV, out=torch.from_numpy(OUT), lse=torch.from_numpy(LSE), grad_out=X, dlse=None, **TORCH_CALL),
    ),
    "attention_blocks": (longspan.attention_blocks, dict(**LOOK, scale=None, alibi_slopes=None, block_size=16)),
    "attention_received": (longspan.attention_received, dict(**LOOK, scale=None, alibi_slopes=None)),
    "adaptive_mask": (longspan.adaptive_mask, LOOK | dict(pattern=longspan.adaptive(0.5, 16))),
    "dilated": (longspan.dilated, dict(segments=[8, 16], dilations=[1, 2])),
    "longnet": (longspan.longnet, dict(segments=[8, 16], dilations=[1, 2], phase="paper", pad_keys=False)),
    "block_sparse": (longspan.block_sparse, dict(mask=np.eye(4, dtype=bool), block_size=16)),
    "local_window": (longspan.local_window, dict(window=32, block_size=16)),
    "strided": (longspan.strided, dict(stride=32, block_size=16)),
    "dilated_sparse": (longspan.dilated_sparse, dict(rates=[1, 2], block_size=16)),
    "global_local": (longspan.global_local, dict(global_tokens=16, window=32, block_size=16)),
    "hierarchical": (longspan.hierarchical, dict(levels=[(16, 32)], block_size=16)),
    "random_blocks": (longspan.random_blocks, dict(density=0.5, seed=1, block_size=16)),
    "adaptive": (longspan.adaptive, dict(density=0.5, block_size=16)),
    "bigbird": (longspan.bigbird, dict(global_tokens=16, window=32, density=0.1, seed=1, block_size=16)),
    "longformer": (longspan.longformer, dict(window=32, global_tokens=16, block_size=16)),
    "draw": (longspan.draw, dict(pattern=DILATED, tokens=64, heads=2, head=0, causal=True, cells=8, svg=False, ascii=True)),
    "plan": (
        longspan.plan,
        dict(pattern=DILATED, options=None, tokens=64, heads=2, head_dim=8, batch=1, kv_heads=1, query_rows=3,
             dtype="f32", device="cpu", lengths=False, key_mask=False, alibi=False),
    ),
    "kernels": (longspan.kernels, dict(pattern=DILATED, pass_="forward", options=None, tokens=64)),
    "num_threads": (longspan.set_num_threads, dict(threads=0)),
    "Options": (longspan.Options, OPTIONS | dict(kernel="plain")),
    "Attention": (longspan.Attention, dict(pattern=DILATED, options=longspan.Options())),
    "Attention.plan": (longspan.Attention(DILATED).plan, dict(tokens=64, heads=2, head_dim=8, dtype="f32", device="cpu")),
    "Attention.forward": (longspan.Attention(DILATED).forward, dict(q=Q, k=Q, v=Q, out=np.empty_like(Q), seed=0)),
    "BlockMask": (longspan.BlockMask, dict(mask=np.eye(4, dtype=bool), block_size=16)),
    "BlockMask.from_rows": (longspan.BlockMask.from_rows, dict(block_size=16, heads=1, blocks=2, rows=[[0], [0, 1]])),
    "BlockMask.active": (MASK.active, dict(head=0, block_row=1, block_column=1)),
    "BlockMask.row": (MASK.row, dict(head=0, block_row=1)),
    "BlockMask.column": (MASK.column, dict(head=0, block_column=1)),
    "BlockPattern": (longspan.BlockPattern, dict(mask=MASK)),
    "BlockPattern.mask": (BLOCKS.mask, dict(rows=64, heads=1, causal=False)),
    "BlockPattern.parse": (longspan.BlockPattern.parse, dict(text="block=16 local_window(32)")),
    "Pattern.dilated": (longspan.Pattern.dilated, dict(segments=[8, 16], dilations=[1, 2])),
    "Pattern.longnet": (longspan.Pattern.longnet, dict(segments=[8, 16], dilations=[1, 2], phase="paper")),
    "Pattern.block_sparse": (longspan.Pattern.block_sparse, dict(mask=BLOCKS)),
    "Pattern.parse": (longspan.Pattern.parse, dict(text="dilated 8/1")),
    "Pattern.with_pad_keys": (DILATED.with_pad_keys, dict(pad_keys=True)),
    "Pattern.with_long_segments": (DILATED.with_long_segments, dict(policy="clip")),
    "Pattern.with_output_scale": (DILATED.with_output_scale, dict(output_scale=0.5)),
    "Pattern.with_mask": (DILATED.with_mask, dict(branch=0, mask=BLOCKS)),
    "Plan.workspace_bytes": (PLAN.workspace_bytes, dict(pass_="forward")),
    "Plan.kernel": (PLAN.kernel, dict(pass_="forward")),
    "Plan.verdicts": (PLAN.verdicts, dict(pass_="forward")),
    "Shards.even": (longspan.Shards.even, dict(tokens=10, ranks=2)),
    "Shards.zigzag": (longspan.Shards.zigzag, dict(tokens=10, ranks=2)),
    "Shards.contiguous": (longspan.Shards.contiguous, dict(offsets=[0, 4, 10])),
    "Shards.rows": (longspan.Shards.even(10, 2).rows, dict(rank=1)),
    "Shards.ranges": (longspan.Shards.even(10, 2).ranges, dict(rank=1)),
    "local_ring": (longspan.local_ring, dict(ranks=2)),
    "Ring": (
        longspan.Ring,
        dict(attention=longspan.Attention(DILATED), communicator=None, shards=longspan.Shards.even(20, 1), deadline=1.0,
             halo_limit_bytes=0, checksums=True),
    ),
    "Ring.forward": (RING.forward, dict(q=Q, k=Q, v=Q, out=np.empty_like(Q), lse=None, seed=0)),
    "plan_cache.set_limit_bytes": (longspan.plan_cache.set_limit_bytes, dict(limit=64 << 20)),
    "torch.DilatedAttention": (lt.DilatedAttention, GROUPS | dict(softmax_scale=None, attention_dropout=0.0)),
    "torch.DilatedAttention()": (attend(lt.DilatedAttention(**GROUPS)), QKV | dict(is_causal=False, attention_mask=None)),
    "torch.ImprovedDilatedAttention": (lt.ImprovedDilatedAttention, GROUPS | dict(dropout=0.0, use_tf32=True)),
    "torch.MultiheadDilatedAttention": (lt.MultiheadDilatedAttention, MULTIHEAD),
    "torch.MultiheadDilatedAttention()": (
        lt.MultiheadDilatedAttention(**MULTIHEAD),
        dict(query=TOKENS, key=TOKENS, value=TOKENS, key_padding_mask=None, attn_mask=None, is_causal=False),
    ),
    "torch.ImprovedMultiheadDilatedAttention": (lt.ImprovedMultiheadDilatedAttention, MULTIHEAD),
    "torch.EncoderLayer": (lt.DilatedTransformerEncoderLayer, LAYER),
    "torch.DecoderLayer": (lt.DilatedTransformerDecoderLayer, LAYER),
    "torch.LongNet": (
        lt.LongNet,
        dict(d_model=16, nhead=4, num_encoder_layers=1, num_decoder_layers=1, dim_feedforward=8, **GROUPS, dropout=0.0),
    ),
    "torch.LongNetLM": (
        lt.LongNetLM,
        dict(num_tokens=8, d_model=16, nhead=4, num_encoder_layers=1, num_decoder_layers=1, dim_feedforward=8, **GROUPS,
             positions="rotary"),
    ),
    "torch.LongNetLM()": (MODEL, dict(x=IDS)),
    "torch.LongNetLM.generate": (
        MODEL.generate, dict(ids=IDS, max_new_tokens=1, temperature=1.0, top_k=2, top_p=0.5, seed=1, prefill_chunk=2)
    ),
    "torch.SparsePatternConfig": (
        lt.SparsePatternConfig, dict(block_size=16, local_window_size=32, global_tokens=16)
    ),
    "torch.BlockSparseRingDilatedAttention": (
        lt.BlockSparseRingDilatedAttention, GROUPS | dict(sparse_config=CONFIG, dropout=0.0, ring_size=1)
    ),
    "torch.BlockSparseHierarchical": (
        lt.BlockSparseHierarchical, GROUPS | dict(hierarchical_config=None, sparse_config=CONFIG, dropout=0.0)
    ),
    "torch.BlockSparseAdaptive": (
        lt.BlockSparseAdaptive, GROUPS | dict(num_heads=4, head_dim=8, adaptive_config=None, sparse_config=CONFIG)
    ),
    "torch.create_block_sparse_attention": (
        lt.create_block_sparse_attention,
        dict(sparsity_ratio=0.5, pattern_type="random", embed_dim=16, num_heads=4, **GROUPS, block_size=16),
    ),
    "torch.create_dilated_attention": (lt.create_dilated_attention, dict(attention_type="auto", **GROUPS)),
    "torch.DilatedCache": (lt.DilatedCache, dict(module=DILATED, heads=4, scale=None)),
    "torch.shard": (lt.shard, dict(tensor=X, rank=0, ring_size=2, dim=1, layout="contiguous")),
}  # fmt: skip

MESSAGES = [
    (dict(lengths=torch.tensor([3])), r"^lengths has shape \[1\]: give \[2\] \(batch\)$"),
    (dict(lengths=[1, 2, 3]), r"^lengths has (3 entries: give 2, one for each of batch|shape \[3\]: give \[2\] \(batch\))$"),
    (dict(lengths=torch.tensor([1.0, 2.0])), "^lengths has dtype float32: give int64 or int32$"),
    (dict(key_mask=torch.ones(2, 20)), "^key_mask has dtype float32: give bool$"),
    (dict(key_mask=torch.ones(2, 19, dtype=torch.bool)), r"^key_mask has shape \[2, 19\]: give \[2, 20\] \(batch, tokens\)$"),
    (dict(alibi_slopes=torch.ones(3)), r"^alibi_slopes has shape \[3\]: give \[4\] \(heads\)$"),
    (dict(alibi_slopes=torch.ones(4).double()), "^alibi_slopes has dtype float64: give float32$"),
    (dict(query=X[0]), r"^query has shape \[20, 4, 8\]: give \[batch, tokens, heads, head_dim\]$"),
    (dict(key=X[:, :19]), r"^key has shape \[2, 19, 4, 8\], value has \[2, 20, 4, 8\]: they must be equal$"),
    (dict(value=X[:, :19]), r"^value has shape \[2, 19, 4, 8\], key has \[2, 20, 4, 8\]: they must be equal$"),
    (dict(key=X.half()), "^key has dtype float16, query and value have float32: give all the same type$"),
    (dict(query=X.half()), "^query has dtype float16, key and value have float32: give all the same type$"),
    (dict(key=X[..., :4], value=X[..., :4]), "^key has head_dim 4, query has 8: they must be equal$"),
    (dict(key=X[:1], value=X[:1]), "^key has batch 1, query has 2: they must be equal$"),
    (dict(key=X[:, :, :3], value=X[:, :, :3]), "^key has 3 heads, query has 4: give a number of heads that divides 4$"),
    (dict(causal="yes"), "^causal is 'yes': give True or False$"),
    (dict(scale="big"), "^scale is 'big': give a number, or None$"),
    (dict(kernel=3), "^kernel is 3: give text$"),
    (dict(dropout=0.5, seed=1.5), "^seed is 1.5: give a whole number of 64 bits$"),
    (dict(query_ranges=[(0, "a")]), "^query_ranges is .*: give a list of pairs"),
    (dict(pattern=3), "^pattern is 3: give a longspan.Pattern, a BlockPattern, the text of one, or None for dense$"),
    (dict(pattern="dialted 8/1"), "did you mean dilated\\?$"),
    (dict(pattern="long_net 8/1"), "did you mean longnet\\?$"),
    (dict(pattern="bigbrid(1)"), "did you mean bigbird\\?$"),
    (dict(pattern="locl_window(64)"), "did you mean local_window\\?$"),
]


@pytest.mark.parametrize(("change", "words"), MESSAGES, ids=[words[:40] for _, words in MESSAGES])
@pytest.mark.parametrize("kind", ["torch", "heads first", "through the dispatcher", "arrays"])
def test_messages_are_in_the_callers_words(change, words, kind):
    call = QKV | change
    if kind == "arrays":
        names = dict(query="q", key="k", value="v")
        call = {names.get(name, name): x.numpy() if isinstance(x, torch.Tensor) else x for name, x in call.items()}
        for theirs, ours in names.items():
            words = words.replace(theirs + " ", ours + " ")
        words = words.replace("\\[\\[", "\\[").replace("query", "q").replace("q_ranges", "query_ranges")
        function = longspan.attention
    else:
        function = lt.attention
    if kind == "heads first":
        call = {name: x.transpose(1, 2) if name in QKV and x.dim() == 4 else x for name, x in call.items()}
        words = words.replace("19, 4, 8", "4, 19, 8").replace("20, 4, 8\\], value", "4, 20, 8\\], value")
        words = words.replace("has \\[2, 20, 4, 8", "has \\[2, 4, 20, 8").replace("tokens, heads, head_dim", "heads, tokens, head_dim")
        call["layout"] = "bhnd"
    with FlopCounterMode(display=False) if kind == "through the dispatcher" else contextlib.nullcontext():
        with pytest.raises(longspan.InvalidArgument, match=words) as caught:
            function(**call)
    assert caught.value.argument


def test_messages_of_backward_name_its_tensors():
    with pytest.raises(longspan.InvalidArgument, match=r"^dout has shape \[2, 19, 4, 8\]: give \[2, 20, 4, 8\] \(q\)$"):
        longspan.attention_backward(Q, Q, Q, OUT, LSE, Q[:, :19], DILATED)
    with pytest.raises(longspan.InvalidArgument, match=r"^lse has shape \[2, 20, 4\]: give \[2, 4, 20\]"):
        longspan.attention_backward(Q, Q, Q, OUT, LSE.transpose(0, 2, 1), Q, DILATED)
    x, out, lse = (torch.from_numpy(array) for array in (Q, OUT, LSE))
    with pytest.raises(longspan.InvalidArgument, match=r"^grad_out has shape \[2, 19, 4, 8\]: give .* \(query\)$"):
        lt.attention_backward(x, x, x, out, lse, x[:, :19], DILATED)
    with pytest.raises(longspan.InvalidArgument, match=r"^dout has shape \[2, 19, 4, 8\]"):
        longspan.attention_backward(x, x, x, out, lse, x[:, :19], DILATED)


ELSEWHERE = {
    "is_causal": "causal=", "attn_mask": "key_mask=", "dropout_p": "dropout=", "enable_gqa": "grouped queries",
    "softmax_scale": "scale=", "causual": "did you mean 'causal'", "key_masks": "did you mean 'key_mask'",
}  # fmt: skip


@pytest.mark.parametrize("name", ELSEWHERE)
def test_arguments_of_other_packages_are_answered_with_ours(name):
    x = torch.from_numpy(Q)
    for function, arguments in (
        (longspan.attention, (Q, Q, Q)),
        (longspan.attention, (x, x, x)),
        (lt.attention, (x, x, x)),
        (longspan.attention_backward, (Q, Q, Q, OUT, LSE, Q)),
        (lt.attention_backward, (x, x, x, torch.from_numpy(OUT), torch.from_numpy(LSE), x)),
    ):
        with pytest.raises(TypeError, match=rf"has no argument '{name}'.*{ELSEWHERE[name]}"):
            function(*arguments, **{name: None})
    with FlopCounterMode(display=False), pytest.raises(TypeError, match=ELSEWHERE[name]):
        lt.attention(x, x, x, **{name: None})


def test_tensors_to_fill_are_taken_by_the_functions_of_the_package_alone():
    x, lse = torch.from_numpy(Q), torch.from_numpy(LSE)
    for name in ("out", "lse"):
        with pytest.raises(TypeError, match=f"no argument '{name}': give it to longspan.attention, "):
            lt.attention(x, x, x, **{name: x})
    for name in ("dq", "dk", "dv"):
        with pytest.raises(TypeError, match=f"no argument '{name}': give it to longspan.attention_backward, "):
            lt.attention_backward(x, x, x, x, lse, x, **{name: x})


@pytest.mark.parametrize(
    "name", ["DilatedAttention", "ImprovedDilatedAttention", "RingDilatedAttention", "BlockSparseHierarchical"]
)
def test_unknown_arguments_are_refused_in_the_name_of_the_class(name):
    with pytest.raises(longspan.InvalidArgument, match=f"^{name} has no argument 'zero_stage'"):
        getattr(lt, name)([8], [1], zero_stage=3)


@pytest.mark.parametrize(
    "name",
    ["MultiheadDilatedAttention", "ImprovedMultiheadDilatedAttention", "RingMultiheadDilatedAttention",
     "RingAdvancedDistributedDilatedAttention", "BlockSparseRingMultiheadDilatedAttention"],
)  # fmt: skip
def test_unknown_arguments_of_multihead_classes_too(name):
    with pytest.raises(longspan.InvalidArgument, match=f"^{name} has no argument 'zero_stage'"):
        getattr(lt, name)(16, 4, [8], [8], zero_stage=3)


def test_unknown_arguments_are_listed_in_the_order_of_the_signature():
    with pytest.raises(TypeError, match="no argument 'zzzz'; it has causal, scale, output_scale, dropout, seed, lengths, "):
        longspan.attention(Q, Q, Q, zzzz=1)


@pytest.mark.parametrize(
    ("function", "array", "key"), [(longspan.attention, Q, "k"), (longspan.attention, X, "k"), (lt.attention, X, "key")]
)
def test_query_ranges_are_called_so_whatever_the_query_is_called(function, array, key):
    with pytest.raises(longspan.InvalidArgument, match=rf"^query range \(start 1, count 20\) .*: {key} has rows 0 to 19$"):
        function(array, array, array, query_ranges=[(1, 20)])


class OnlyDLPack:
    def __init__(self, array):
        self.array = array

    def __dlpack__(self, **keywords):
        return self.array.__dlpack__(**keywords)

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()


def test_arrays_may_tell_their_shape_by_dlpack_alone():
    x, out = OnlyDLPack(Q), np.empty_like(Q)
    np.testing.assert_array_equal(longspan.attention(Q, x, x, DILATED), OUT)
    assert longspan.attention(x, x, x, DILATED, out=out) is out
    np.testing.assert_array_equal(out, OUT)
    grads = [np.empty_like(Q) for _ in range(3)]
    longspan.attention_backward(x, x, x, OnlyDLPack(OUT), LSE, x, DILATED, **dict(zip(("dq", "dk", "dv"), grads)))
    wanted = longspan.attention_backward(Q, Q, Q, OUT, LSE, Q, DILATED)
    assert all(np.array_equal(one, other) for one, other in zip(grads, wanted))
    with pytest.raises(longspan.InvalidArgument, match="^q has no shape that could be read"):
        longspan.attention(x, x, x, DILATED)
    with pytest.raises(longspan.InvalidArgument, match="^seed is None"):
        longspan.attention(Q, x, x, DILATED, dropout=0.5)
    with pytest.raises(longspan.InvalidArgument, match="^head_dim 4 of k|^k "):
        longspan.attention(Q, OnlyDLPack(Q[..., :4]), OnlyDLPack(Q[..., :4]), DILATED)


ATTENDING = {
    "dilated": lambda: lt.DilatedAttention(**GROUPS),
    "ring": lambda: lt.RingDilatedAttention(**GROUPS, ring_size=2),
    "block sparse": lambda: lt.BlockSparseRingDilatedAttention(**GROUPS, sparse_config=CONFIG),
    "block sparse ring": lambda: lt.BlockSparseRingDilatedAttention(**GROUPS, sparse_config=CONFIG, ring_size=2),
    "hierarchical": lambda: lt.BlockSparseHierarchical(**GROUPS, sparse_config=CONFIG),
    "adaptive": lambda: lt.BlockSparseAdaptive(**GROUPS, num_heads=4, head_dim=8, sparse_config=CONFIG),
}


@pytest.mark.parametrize("name", ATTENDING)
@pytest.mark.filterwarnings("ignore::longspan.LongspanWarning")
def test_modules_name_the_arguments_of_their_forward(name):
    module = ATTENDING[name]()
    for change, words in (
        (dict(is_causal="yes"), "^is_causal is 'yes': give True or False$"),
        (dict(query=X[0]), r"^query (has|is of) shape \[20, 4, 8\]: give .*\[batch, tokens, heads, head_dim\]$"),
        (dict(key=None), "^key is None: give a "),
    ):
        with pytest.raises(longspan.InvalidArgument, match=words):
            module(**(QKV | change))


SWAPPED = {
    "dilated": lambda: longspan.dilated([1, 2], [32, 64]),
    "longnet": lambda: longspan.longnet([1, 2], [32, 64]),
    "text": lambda: longspan.attention(Q, Q, Q, "dilated 1/32 2/64"),
    "object": lambda: longspan.attention(Q, Q, Q, longspan.Pattern.dilated([1, 2], [32, 64])),
    "module": lambda: lt.DilatedAttention([1, 2], [32, 64]),
    "multihead": lambda: lt.MultiheadDilatedAttention(16, 4, [32, 64], [1, 2]),
    "composed": lambda: lt.BlockSparseRingDilatedAttention([1, 2], [32, 64], CONFIG, compose=True).pattern(20),
}


@pytest.mark.parametrize("name", SWAPPED)
def test_swapped_lists_warn_once_at_the_callers_line(name):
    longspan._errors._warned.clear()
    with pytest.warns(longspan.LongspanWarning, match="dilation 32 in segments of 1.*lists swapped") as caught:
        SWAPPED[name]()
        SWAPPED[name]()
    assert len(caught) == 1 and caught[0].filename == __file__


TINY_DROPOUT = {
    "numpy": lambda: longspan.attention(Q, Q, Q, dropout=1e-5, seed=1),
    "options": lambda: longspan.Options(dropout=1e-5),
    "module": lambda: lt.DilatedAttention([4], [1], attention_dropout=1e-5)(*[torch.zeros(1, 8, 2, 4)] * 3),
}


@pytest.mark.parametrize("name", TINY_DROPOUT)
def test_dropout_too_small_to_drop_anything_warns(name):
    longspan._errors._warned.clear()
    longspan._patterns.cached.cache_clear()
    with pytest.warns(longspan.LongspanWarning, match="dropout is 1e-05.*drop nothing") as caught:
        TINY_DROPOUT[name]()
    assert len(caught) == 1 and caught[0].filename == __file__


def test_dropout_that_drops_does_not_warn():
    longspan._errors._warned.clear()
    longspan.Options(dropout=2**-16)


def test_sensible_lists_do_not_warn():
    longspan._errors._warned.clear()
    longspan.dilated([32, 64], [32, 1])
    pickled = pickle.dumps(longspan.Pattern.parse("dilated 1/32"))
    pickle.loads(pickled)  # whoever made it was warned then


@pytest.mark.parametrize("size", [0, -16, 2.5, "a", None])
def test_configs_refuse_block_sizes_that_are_none(size):
    with pytest.raises(longspan.InvalidArgument, match="block_size is"):
        lt.SparsePatternConfig(block_size=size)
    with pytest.raises(longspan.InvalidArgument, match="block_size is"):
        lt.BlockSparseRingDilatedAttention([8], [1], {"block_size": size})


def test_configs_take_sizes_that_the_module_then_refuses():
    config = lt.SparsePatternConfig(block_size=24)
    with pytest.raises(longspan.InvalidArgument, match="block_size is 24: use 16, 32, 64 or 128"):
        lt.BlockSparseRingDilatedAttention([8], [1], config)
    for wrong in (dict(local_window_size=-1), dict(global_tokens=-1)):
        with pytest.raises(longspan.InvalidArgument, match=f"{next(iter(wrong))} is -1"):
            lt.SparsePatternConfig(**wrong)
    with pytest.raises(longspan.InvalidArgument, match="^base_sparsity is 1.5"):
        lt.BlockSparseAdaptive([8], [1], 4, 8, {"base_sparsity": 1.5})
    with pytest.raises(longspan.InvalidArgument, match="^sparse_config is 5"):
        lt.BlockSparseAdaptive([8], [1], 4, 8, sparse_config=5)


BAD = {
    "none": None, "text": "nonsense", "empty text": "", "lone surrogate": "\ud800", "fraction": 3.7, "negative": -1,
    "huge": 2**70, "nearly 2**63": 2**63 - 1, "nan": float("nan"), "true": True, "bytes": b"abc", "object": object(),
    "class": dict, "dict": {"a": 1}, "empty list": [], "mixed list": [1, "a"], "list of none": [None],
    "list of lists": [[1], [2, 3]], "pairs": [(1, "x")], "scalar array": np.float32(1), "flat array": np.zeros(3),
    "complex array": np.zeros((2, 20, 4, 8), np.complex64), "wide array": np.zeros((2, 20, 4, 8, 1), np.float32),
    "doubles": np.zeros((2, 20, 4, 8)), "tensor": torch.zeros(3), "doubles of torch": torch.zeros(2, 20, 4, 8).double(),
    "meta tensor": torch.zeros(2, 20, 4, 8, device="meta"), "sparse tensor": torch.zeros(2, 20).to_sparse(),
    "module": torch.nn.Linear(1, 1),
}  # fmt: skip
# Not tried, since they are right and would take all memory or time.
EXPENSIVE = {"huge", "nearly 2**63"}


def judge(name, argument, error):
    """The error is ours and names the argument."""
    text = str(error)
    assert isinstance(error, (longspan.Error, TypeError)), f"{type(error).__name__}: {text}"
    assert "nanobind" not in text and "incompatible function" not in text, text
    assert "_longspan." not in text, text
    if isinstance(error, longspan.InvalidArgument):
        assert error.argument, text
    assert argument in text or (isinstance(error, longspan.Error) and getattr(error, "argument", None)), text


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.filterwarnings("ignore::longspan.LongspanWarning", "ignore::UserWarning", "ignore::DeprecationWarning")
def test_one_bad_argument_is_named(name):
    function, good = CALLS[name]
    function(**good)
    wrong = []
    for argument in good:
        for kind, value in BAD.items():
            if kind in EXPENSIVE and not name.startswith(("attention", "torch.attention", "Options", "dilated")):
                continue
            try:
                function(**good | {argument: value})
            except Exception as error:
                try:
                    judge(name, argument, error)
                except AssertionError as reason:
                    wrong.append(f"{argument}={kind}: {type(error).__name__}: {reason}")
    longspan.plan_cache.set_limit_bytes(64 << 20)
    longspan.set_num_threads(0)
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("name", CALLS)
def test_names_that_do_not_exist_and_arguments_that_are_missing(name):
    function, good = CALLS[name]
    with pytest.raises((TypeError, longspan.InvalidArgument), match="zero_stage"):
        function(**good, zero_stage=3)
    for argument in good:
        rest = {key: value for key, value in good.items() if key != argument}
        try:
            function(**rest)
        except (TypeError, longspan.Error) as error:
            judge(name, argument, error)


@pytest.mark.filterwarnings("ignore::longspan.LongspanWarning", "ignore::UserWarning", "ignore::DeprecationWarning")
def test_several_bad_arguments_at_once():
    rng = random.Random(5)
    for _ in range(1500):
        name = rng.choice(["attention", "attention_backward", "torch.attention", "torch.attention_backward"])
        function, good = CALLS[name]
        changed = {key: BAD[rng.choice(list(BAD))] for key in rng.sample(list(good), rng.randint(1, 4))}
        try:
            function(**good | changed)
        except (TypeError, longspan.Error) as error:
            assert "nanobind" not in str(error) and "incompatible function" not in str(error), error
