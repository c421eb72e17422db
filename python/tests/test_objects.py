"""Patterns, plans, statistics and errors as Python objects."""

import ast
import pickle
from pathlib import Path

import numpy as np
import pytest

import longspan
from longspan import _longspan


@pytest.mark.parametrize(
    "pattern",
    [
        longspan.dense(),
        longspan.dilated([64, 128], [1, 2]),
        longspan.longnet([64, 128], [1, 2], phase="torchscale", pad_keys=True),
        longspan.dilated([64], [3]).with_output_scale(0.25).with_long_segments("skip"),
        longspan.block_sparse(np.eye(4, dtype=bool) | np.eye(4, k=-1, dtype=bool), block_size=16),
    ],
    ids=str,
)
def test_pattern_is_its_own_text(pattern):
    assert longspan.Pattern.parse(str(pattern)) == pattern
    assert pickle.loads(pickle.dumps(pattern)) == pattern
    assert hash(longspan.Pattern.parse(str(pattern))) == hash(pattern)
    assert eval(repr(pattern), {"Pattern": longspan.Pattern}) == pattern


def test_pattern_says_what_it_is():
    pattern = longspan.longnet([64, 128], [1, 2], phase="torchscale")
    assert pattern.branches == [(64, 1), (128, 2)]
    assert (pattern.assignment, pattern.phase, pattern.long_segments, pattern.pad_keys) == (
        "all", "torchscale", "clip", False,
    )  # fmt: skip
    assert longspan.dense().branches == [(None, 1)]
    assert pattern != longspan.longnet([64, 128], [1, 2])


def test_block_mask():
    mask = longspan.BlockMask(np.tri(8, dtype=bool), 32)
    assert (mask.block_size, mask.heads, mask.blocks, mask.active_blocks) == (32, 1, 8, 36)
    assert mask.density == 36 / 64 and mask.active(0, 3, 3) and not mask.active(0, 3, 4)
    with pytest.raises(longspan.InvalidArgument, match="3 block rows and 4 block columns"):
        longspan.BlockMask(np.ones((3, 4), bool), 16)
    with pytest.raises(longspan.InvalidArgument, match="17"):
        longspan.BlockMask(np.ones((3, 3), bool), 17)


def test_plan_is_inspectable():
    plan = longspan.plan(longspan.dilated([2048, 4096], [1, 2]), tokens=8192, heads=4, head_dim=64)
    assert plan.totals["pairs"] == 2 * 4 * 2048**2 + 2 * 2 * 2048**2
    assert plan.totals["forward_flops"] == 4 * 64 * plan.totals["pairs"]
    assert "8192 tokens" in repr(plan) and "branch 1" in str(plan)
    assert plan.kernel() in [name for name, runs, _ in plan.verdicts() if runs]
    assert plan.workspace_bytes("backward") >= 0
    assert longspan.plan(tokens=2**40, heads=8, head_dim=64).totals["pairs"] == 8 * 2.0**80


def test_kernels_say_why_not():
    verdicts = {name: (runs, why) for name, runs, why in longspan.kernels(dtype="f64")}
    assert verdicts["reference"] == (True, "")
    assert all(why for runs, why in verdicts.values() if not runs)
    info = longspan.info()
    assert info["version"] == longspan.__version__ and info["threads"] == longspan.num_threads()
    assert {kernel["name"] for kernel in info["kernels"]} == set(verdicts)


def test_second_identical_call_plans_and_allocates_nothing():
    q = np.zeros((1, 64, 2, 16), np.float32)
    out = np.empty_like(q)

    def call():
        longspan.attention(q, q, q, longspan.dilated([32], [2]), out=out)

    call()
    plans, memory = longspan.plan_cache.statistics(), longspan.host_memory.statistics()
    call()
    assert longspan.plan_cache.statistics()["misses"] == plans["misses"]
    assert longspan.plan_cache.statistics()["hits"] == plans["hits"] + 1
    assert longspan.host_memory.statistics()["allocations"] == memory["allocations"]


def test_threads_can_be_set_and_restored():
    before = longspan.num_threads()
    longspan.set_num_threads(1)
    assert longspan.num_threads() == 1
    longspan.set_num_threads(0)
    assert longspan.num_threads() == before


def test_memory_limit_is_a_memory_error():
    q = np.zeros((1, 64, 2, 64), np.float32)
    out, lse = longspan.attention(q, q, q, return_lse=True)
    longspan.host_memory.trim()
    longspan.host_memory.set_limit_bytes(1)
    try:
        with pytest.raises(MemoryError) as caught:
            longspan.attention_backward(q, q, q, out, lse, q)
        assert isinstance(caught.value, longspan.OutOfMemory)
    finally:
        longspan.host_memory.set_limit_bytes(0)
    longspan.attention_backward(q, q, q, out, lse, q)


def test_errors_are_the_types_users_catch():
    assert issubclass(longspan.InvalidArgument, ValueError)
    assert issubclass(longspan.Unsupported, RuntimeError)
    assert issubclass(longspan.OutOfMemory, MemoryError)
    assert issubclass(longspan.CommError, RuntimeError) and issubclass(longspan.CudaError, RuntimeError)
    with pytest.raises(longspan.InvalidArgument) as caught:
        longspan.dilated([1, 2], [1])
    again = pickle.loads(pickle.dumps(caught.value))
    assert str(again) == str(caught.value) and again.argument == caught.value.argument == "dilations"


def test_options_repr_round_trip():
    options = longspan.Options(causal=True, scale=0.5, kernel="plain")
    assert eval(repr(options), {"Options": longspan.Options}) == options


def test_stub_names_what_the_module_has():
    stub = ast.parse((Path(longspan.__file__).parent / "_longspan.pyi").read_text())
    classes = {node.name: node for node in stub.body if isinstance(node, ast.ClassDef)}
    functions = {node.name for node in stub.body if isinstance(node, ast.FunctionDef)}
    public = {name for name in vars(_longspan) if not name.startswith("_")}
    assert public == classes.keys() | functions
    for name, node in classes.items():
        stubbed = {item.name for item in node.body if isinstance(item, ast.FunctionDef)}
        members = {member for member in vars(getattr(_longspan, name)) if not member.startswith("_")}
        assert members == {item for item in stubbed if not item.startswith("_")}


def test_what_is_known_of_gpus():
    info = longspan.info()
    assert bool(info["gpus"]) != bool(info["why_no_gpu"])  # some, or the reason
    assert longspan.device_memory.statistics()["used_bytes"] == 0
    longspan.device_memory.trim()
    if not info["gpus"]:
        plan = longspan.plan(tokens=64, heads=1, head_dim=64, dtype="bf16", device="cuda")
        assert plan.kernel() is None
        q = np.zeros((1, 64, 1, 64), np.float32)
        raw = (q.__array_interface__["data"][0], 0, 2, 0, q.shape, (4096, 64, 64, 1))  # says that it is on cuda:0
        with pytest.raises(longspan.Unsupported, match="configure with|driver|nvidia-smi"):
            longspan.Attention(longspan.dense()).forward(raw, raw, raw, (raw[0] + q.nbytes, *raw[1:]))


def test_workspace_may_come_from_the_caller():
    q, k, v = (np.random.default_rng(i).standard_normal((1, 100, 4, 16)).astype(np.float32) for i in range(3))
    operator = longspan.Attention(longspan.longnet([16, 64], [1, 3]))
    memory = []

    def allocate(count):
        memory.append(np.zeros(count + 64, np.uint8))
        return -(-memory[-1].ctypes.data // 64) * 64

    out = np.empty_like(q)
    operator.forward(q, k, v, out, allocate=allocate)
    assert len(memory) == 1
    np.testing.assert_array_equal(out, longspan.attention(q, k, v, operator.pattern))
    with pytest.raises(longspan.OutOfMemory, match="caller's allocator"):
        operator.forward(q, k, v, out, allocate=lambda count: 0)
    with pytest.raises(KeyError, match="mine"):  # what the allocator raises arrives as it is
        operator.forward(q, k, v, out, allocate=lambda count: {}["mine"])


def test_arrays_of_a_gpu_without_an_allocator_are_refused_by_name():
    class Elsewhere:
        shape, dtype = (1, 2, 1, 8), "float32"

        def __dlpack_device__(self):
            return 2, 0

    with pytest.raises(longspan.InvalidArgument, match="Elsewhere on a GPU.*pass out="):
        longspan.attention(Elsewhere(), Elsewhere(), Elsewhere())
