"""The examples run, in a small size, and do what they say."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def run(*arguments: str) -> subprocess.CompletedProcess:
    alone = {**os.environ, "OMP_NUM_THREADS": "1"}  # small sizes: more threads only spin
    result = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, timeout=300, env=alone)
    assert result.returncode == 0, result.stderr
    return result


def test_swap_import_learns():
    last = run(str(EXAMPLES / "swap_import.py"), "--steps", "150").stdout.splitlines()[-1]
    assert int(last.split()[-1].rstrip("%")) > 80, last


@pytest.mark.slow
def test_retrieval_needs_the_dilated_branch(tmp_path):
    picture = tmp_path / "curve.svg"
    lines = run(str(EXAMPLES / "retrieval.py"), "--steps", "400", "--plot", str(picture)).stdout.splitlines()
    right = {line.split()[0]: int(line.split()[-1].rstrip("%")) for line in lines}  # the last line of each
    assert right["dilated"] > 90 and right["local"] < 30, right
    assert picture.read_text().count("<polyline") == 5


def test_gigapath_cpu():
    out = run(str(EXAMPLES / "gigapath_cpu.py"), "--tiles", "300", "--layers", "1", "--width", "192").stdout
    assert "slide embedding of 192 numbers" in out


def test_bench_writes_results(tmp_path):
    small = ["--tokens", "256", "--tiles", "63", "--layers", "1", "--repeats", "1", "--positions", "300", "600",
             "--context", "64"]  # fmt: skip
    run("-m", "longspan.bench", "--out", str(tmp_path), *small)
    files = sorted(file.name for file in tmp_path.iterdir())
    assert files == ["torch_decode.json", "torch_encoder.json", "torch_lm.json", "torch_module.json", "torch_overhead.json"]
    for file in tmp_path.iterdir():
        content = json.loads(file.read_text())
        assert content["machine"]["threads"] >= 1
        for result in content["results"]:
            differences = result.get("largest_difference", 0.0)
            assert max(differences.values() if isinstance(differences, dict) else [differences]) < 1e-4
