"""Options that the README's table calls fast run on the kernels that were measured: bench/results/*_cliffs.json."""

import json
from pathlib import Path

import pytest

import longspan

RESULTS = Path(__file__).resolve().parents[2] / "bench" / "results"
pytestmark = pytest.mark.skipif(not RESULTS.exists(), reason="no results beside these tests: run them in a checkout")
# What the names of CPU kernels end in is the machine's instruction set.
FAMILIES = ("cpu", "cuda-decode", "cuda-mma", "hopper-wgmma")


def family(kernel):
    return next((name for name in FAMILIES if kernel.startswith(name)), kernel)


def rows(name):
    path = RESULTS / f"{name}_cliffs.json"
    return json.loads(path.read_text())["results"] if path.exists() else []


def refused(measured):
    """Rows and passes that run on another kernel here than where they were measured."""
    found = []
    for row in measured:
        plan = longspan.plan(options=longspan.Options(**row["settings"]), **row["problem"])
        for pass_, kernel in row["kernels"].items():
            if family(plan.kernel(pass_)) != family(kernel):
                found.append((row["kind"], row["row"], pass_, kernel, plan.kernel(pass_)))
    return found


def test_options_measured_on_a_cpu_run_on_its_fast_kernel():
    measured = rows("cpu")
    assert len(measured) > 50 and all(family(name) == "cpu" for row in measured for name in row["kernels"].values())
    assert not refused(measured)


@pytest.mark.gpu
def test_options_measured_on_a_gpu_run_on_the_same_kernels():
    if [gpu["compute_capability"] for gpu in longspan.info()["gpus"][:1]] != [(9, 0)]:
        pytest.skip("measured on a Hopper")
    measured = rows("h200")
    assert measured and not refused(measured)


def test_no_option_is_far_slower_than_the_plain_call():
    """The table itself: a row that falls off its fast kernel takes several times as long."""
    for row in rows("cpu") + rows("h200"):
        for step in ("forward", "both"):
            if step in row and not row["rows"]:
                assert row[f"{step}_per_pair"] < 4, (row["kind"], row["row"], step)
