"""The examples run, in a small size, and do what they say."""

import json
import os
import socket
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


def test_slurm_torchrun_starts_a_training_over_rings(tmp_path):
    """The job as it is written, with srun and scontrol that stand for those of one node."""
    for name, body in (("srun", 'while [ "${1#-}" != "$1" ]; do shift; done; exec "$@"'), ("scontrol", "echo localhost")):
        (tmp_path / name).write_text(f"#!/usr/bin/env bash\n{body}\n")
        (tmp_path / name).chmod(0o755)
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    environment = {
        **os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHON": sys.executable, "PROCESSES": "2",
        "SLURM_SUBMIT_DIR": str(EXAMPLES.parent), "SLURM_CPUS_PER_TASK": "2", "PORT": str(port),
    }  # fmt: skip
    small = ["--ring", "2", "--tokens", "256", "--width", "32", "--steps", "2"]
    result = subprocess.run(["bash", str(EXAMPLES / "slurm" / "ring_torchrun.sbatch"), *small], env=environment,
                            capture_output=True, text=True, timeout=300)  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert "step 1: loss" in result.stdout and "rank 0 of 2: 8 ring calls" in result.stdout, result.stdout
