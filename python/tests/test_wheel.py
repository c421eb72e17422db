"""A wheel is built from the tree, installed into an empty environment and used there."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

SMOKE = """
import numpy as np
import longspan

x = np.random.default_rng(0).standard_normal((1, 100, 4, 16)).astype(np.float32)
fast = longspan.attention(x, x, x, longspan.dilated([32, 64], [1, 2]), causal=True)
exact = longspan.attention(*[x.astype(np.float64)] * 3, longspan.dilated([32, 64], [1, 2]), causal=True)
assert np.abs(fast - exact).max() < 1e-5
assert "site-packages" in longspan.__file__
print(longspan.__version__)
"""


def run(*command, **options):
    result = subprocess.run([*map(str, command)], capture_output=True, text=True, timeout=1500, **options)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("scikit_build_core", "nanobind")),
    reason="building needs scikit-build-core and nanobind in this environment",
)
@pytest.mark.slow
def test_wheel_in_an_empty_environment(tmp_path):
    run(
        sys.executable, "-m", "pip", "wheel", "--no-build-isolation", "--no-deps", "--wheel-dir", tmp_path, ROOT
    )
    (wheel,) = tmp_path.glob("longspan-*.whl")
    run(sys.executable, "-m", "venv", tmp_path / "empty")
    python = tmp_path / "empty" / "bin" / "python"
    run(python, "-m", "pip", "install", wheel)
    clean = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "LD_LIBRARY_PATH")}
    version = run(python, "-c", SMOKE, cwd=tmp_path, env=clean).strip()
    assert version in run(python, "-m", "longspan", "--version", cwd=tmp_path, env=clean)
    assert version in run(python.parent / "longspan", "--version", cwd=tmp_path, env=clean)
    names = run(python, "-m", "zipfile", "-l", wheel)
    assert "longspan/py.typed" in names and "longspan/_longspan.pyi" in names
    assert "tests/" not in names
