"""The older packages' own tests, unmodified, against longspan.compat, and weights exchanged with them. Checkouts are named by
LONGSPAN_DILATED_FORK (DarcStar-Solutions-Tech/dilated-attention-pytorch) and LONGSPAN_DILATED_FKODOM (fkodom's)."""

import fnmatch
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

FORK, FKODOM = os.environ.get("LONGSPAN_DILATED_FORK"), os.environ.get("LONGSPAN_DILATED_FKODOM")
pytestmark = pytest.mark.slow
needs_fork = pytest.mark.skipif(not FORK, reason="set LONGSPAN_DILATED_FORK to a checkout of the fork")
needs_fkodom = pytest.mark.skipif(not FKODOM, reason="set LONGSPAN_DILATED_FKODOM to a checkout of fkodom's package")

#: Files that import what is listed as pointless in the table.
POINTLESS = ("test_fragment_aware_memory", "test_memory_pool_stress", "test_memory_profiler", "test_numa_aware_memory",
             "test_flash_attention_3")  # fmt: skip
PRIVATE = "asserts on private members: "
#: Case -> why it fails. Cases marked (also there) fail with the fork itself, too.
REASONS = {
    "test_distributed_ring_integration.py::*": "asks for a fixture that its file does not define (also there)",
    "test_distributed_ring_attention.py::*test_ring_size_validation": "asks for a missing fixture (also there)",
    "test_distributed_ring_attention.py::*test_communication_error_handling*": "asks for a missing fixture (also there)",
    "test_distributed_ring_attention.py::TestRingAttentionMemoryPool*": "arguments that the pool does not have (also there)",
    "test_distributed_ring_attention.py::*test_single_gpu_fallback": PRIVATE + "ring_group (also there)",
    "test_distributed_ring_attention.py::*": "arguments and names that the classes do not have (also there)",
    "test_performance_regression*.py::*": "compares times with those of another machine",
    "test_benchmark_update.py::*": "reads benchmarks/benchmark_all.py of the checkout",
    "test_ring_optimization.py::*": "needs a GPU",
    "test_pattern_cache_integration.py::test_cache_sharing*": "expects one plan for two modules with different options",
    "test_edge_cases_validation.py::*test_forward_shape_validation": "expects lengths that are no multiple to be refused",
    "test_edge_cases_validation.py::*test_block_size_edge_cases": "expects large blocks to be refused by other words (also there)",
    "test_numerical_stability.py::*test_long_sequence_accumulation_errors": "expects the variance of another normalisation",
    "test_numerical_stability.py::*test_single_hot_attention": "expects scores q_i k_j to be largest at i = j (also there)",
    "test_numerical_stability.py::*test_numerical_consistency*": "on GPUs the improved class rounds to TF32 by default",
    "test_numerical_stability.py::*test_gpu_precision*": "on GPUs the improved class rounds to TF32 by default",
    "test_core_memory_pool.py::*": PRIVATE + "hot cache and statistics of the pool",
    "test_thread_safety.py::*test_hot_cache*": PRIVATE + "hot cache of the pool",
    "test_thread_safety.py::*test_memory_pool_cleanup": "hands a pool to a class that takes none (also there)",
    "test_core_refactoring.py::*test_thread_safe_caching": "assumes that threads end in the order of their start (also there)",
    "test_core_refactoring.py::*test_cache_helper_methods": PRIVATE + "_cache_get",
    "test_block_sparse_adaptive.py::*": PRIVATE + "_compute_block_summaries, _gumbel_softmax_topk, ...; a scorer that moves itself",
    "test_block_sparse_hierarchical.py::*pattern_generation": PRIVATE + "_generate_hierarchical_pattern",
    "test_block_sparse_memory_pool.py::*cleanup": PRIVATE + "_causal_mask_cache",
    "test_dilated_attention_memory_pool.py::*profiling": PRIVATE + "statistics of _memory_pool",
    "test_memory_pool_integration.py::*": PRIVATE + "_memory_pool.allocate, _allocate_tensor",
    "test_ring_dilated_integration.py::*": PRIVATE + "_calculate_head_groups, _apply_dilation",
    "test_ring_pattern_cache.py::*": PRIVATE + "_dilated_indices_cache, keys of indices in the pattern cache",
    "test_factory_integration.py::*test_config_objects*": "expects the config objects to be the ones that were passed",
}


def run(checkout, flavour, tmp_path, *arguments):
    """Cases -> outcomes of the checkout's tests, in a copy without its package."""
    import shutil

    shutil.copytree(Path(checkout) / "tests", tmp_path / "tests")
    (tmp_path / "install_compat.py").write_text(
        f"from longspan.compat import dilated_attention_pytorch\ndilated_attention_pytorch.install({flavour!r})\n"
    )
    command = [sys.executable, "-m", "pytest", "-q", "-rA", "--tb=no", "-p", "install_compat", "-p", "no:cacheprovider",
               "-W", "ignore", "tests", *arguments]  # fmt: skip
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    text = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True).stdout
    lines = re.findall(r"^(PASSED|FAILED|ERROR) tests/(\S+)", text, re.MULTILINE)
    assert lines, text[-2000:]
    return {case: outcome for outcome, case in lines}


def reason(case):
    return next((why for pattern, why in REASONS.items() if fnmatch.fnmatch(case, pattern)), None)


@needs_fork
def test_the_forks_tests_pass_or_are_listed_with_a_reason(tmp_path):
    ignored = [f"--ignore=tests/{name}.py" for name in POINTLESS]
    found = run(FORK, "fork", tmp_path, *ignored)
    failed = [case for case, outcome in found.items() if outcome != "PASSED"]
    assert [case for case in failed if reason(case) is None] == []
    theirs = [case for case in failed if "(also there)" in reason(case) or "times with those" in reason(case)]
    passed = len(found) - len(failed)
    print(f"{passed} of {len(found)} pass; {len(theirs)} of the rest fail with the fork itself, too")
    assert passed >= 0.93 * (len(found) - len(theirs)), f"{passed} of {len(found)}, {len(theirs)} of which fail there, too"


@needs_fkodom
def test_fkodoms_tests_pass(tmp_path):
    found = run(FKODOM, "fkodom", tmp_path)
    failed = [case for case, outcome in found.items() if outcome != "PASSED"]
    if not torch.cuda.is_available():  # there they expect that causal attention does not run on a CPU
        failed = [case for case in failed if "-True-" not in case and "[True-" not in case]
    assert failed == []


@needs_fork
@pytest.mark.parametrize("name, file", [("MultiheadDilatedAttention", "multihead_dilated_attention"),
                                        ("ImprovedMultiheadDilatedAttention", "improved_multihead_dilated_attention")])  # fmt: skip
def test_weights_of_the_fork_load_and_give_its_results(name, file, tmp_path):
    """One segment length and no dilation, where the fork's attention is the ordinary one. Its improved class takes the
    softmax over heads, so there only the weights are the same."""
    script = f"""
import importlib.machinery, sys, types
xpos = types.ModuleType("torchscale.component.xpos_relative_position"); xpos.XPOS = object
for part in ("torchscale", "torchscale.component"): sys.modules[part] = types.ModuleType(part)
sys.modules[xpos.__name__] = xpos
sys.path.insert(0, {str(FORK)!r})
import torch
from dilated_attention_pytorch.{file} import {name}
torch.manual_seed(0)
module = {name}(64, 4, [1], [32]).eval()
torch.nn.init.normal_(module.q_ln.weight); torch.nn.init.normal_(module.k_ln.bias)
x = torch.randn(2, 64, 64)
out = module(x, x, x)
torch.save([module.state_dict(), x, out[0] if isinstance(out, tuple) else out], {str(tmp_path / "module.pt")!r})
"""
    subprocess.run([sys.executable, "-W", "ignore", "-c", script], check=True, capture_output=True)
    state, x, wanted = torch.load(tmp_path / "module.pt")
    from longspan.compat import dilated_attention_pytorch as compat

    module = compat.find(name)(64, 4, [1], [32])
    module.load_state_dict(state)
    assert set(module.state_dict()) == set(state)
    out = module.eval()(x, x, x)
    if name == "MultiheadDilatedAttention":
        assert torch.allclose(out, wanted, atol=1e-5)
    else:
        assert out[0].shape == wanted.shape
