"""Type checkers accept the manual's Python as it stands, and know what calls return."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
# What the text around a snippet says its names are.
GIVEN = {
    "q, k, v": "import longspan\nimport numpy as np\nq, k, v = (np.zeros((1, 64, 8, 64), np.float32) for _ in range(3))\n",
    "query, key, value": "import torch\nquery, key, value = (torch.zeros(1, 64, 8, 64) for _ in range(3))\n",
}
TYPES = """
import longspan, longspan.torch, longspan.torchscale
import numpy as np
import torch
from collections.abc import Sequence
from numpy.typing import NDArray
from typing_extensions import assert_type

def check(x: torch.Tensor, a: NDArray[np.float32], blocks: longspan.BlockPattern, pattern: longspan.Pattern) -> None:
    assert_type(longspan.attention(x, x, x), torch.Tensor)
    assert_type(longspan.attention(a, a, a, blocks, causal=True), NDArray[np.float32])
    assert_type(longspan.attention(a, a, a, "bigbird", return_lse=True), tuple[NDArray[np.float32], NDArray[np.float32]])
    assert_type(longspan.torch.attention(x, x, x, blocks, scale=1.0, lengths=[3]), torch.Tensor)
    assert_type(longspan.torch.attention(x, x, x, pattern, return_lse=True), tuple[torch.Tensor, torch.Tensor])
    some: bool = len(pattern.branches) > 1
    assert_type(longspan.torch.attention(x, x, x, return_lse=some), torch.Tensor | tuple[torch.Tensor, torch.Tensor])
    assert_type(longspan.torch.attention_backward(x, x, x, x, x, x), tuple[torch.Tensor, torch.Tensor, torch.Tensor])
    assert_type(longspan.attention_backward(a, a, a, a, a, a), tuple[NDArray[np.float32], NDArray[np.float32], NDArray[np.float32]])
    assert_type(longspan.attention_received(x, x, pattern), torch.Tensor)
    assert_type(longspan.adaptive_mask(a, a, blocks), longspan.BlockMask)
    assert_type(longspan.dilated([1, 2], (1, 2)), longspan.Pattern)
    assert_type(longspan.bigbird() | longspan.strided(64), longspan.BlockPattern)
    assert_type(longspan.plan(blocks, tokens=64, heads=2, head_dim=8), longspan.Plan)
    assert_type(longspan.torchscale.installed(), list[type[torch.nn.Module]])
"""
MISTAKES = """
import longspan, longspan.torch, torch
def check(x: torch.Tensor) -> None:
    longspan.attention(x, x, x, is_causal=True)
    longspan.torch.attention(x, x, x, causal="yes")
    longspan.torch.attention(x, x, x, 7)
    longspan.dilated("1", [2])
    longspan.plan(longspan.dense(), tokens="64", heads=1, head_dim=8)
"""


def snippets(page: Path) -> str:
    """The Python of a page in one piece, after what its text takes for granted."""
    text = page.read_text()
    found = re.findall(r"^```python\n(.*?)^```", text, re.M | re.S)
    code = "\n".join(found)
    given = [lines for names, lines in GIVEN.items() if code and f"{names} = (" not in code and names in code]
    return "".join(given) + code


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("snippets")
    for page in PAGES:
        if code := snippets(page):
            (folder / f"page_{page.stem}.py").write_text(code)
    (folder / "types_of_calls.py").write_text(TYPES)
    (folder / "mistakes.py").write_text(MISTAKES)
    return folder


def checker(name: str) -> str:
    """The tool beside this interpreter or on PATH."""
    beside = [str(Path(folder).parents[2] / "bin") for folder in sys.path if folder.endswith("site-packages")]
    found = shutil.which(name, path=os.pathsep.join([*beside, os.environ.get("PATH", "")]))
    return found or pytest.skip(f"{name} is not installed")


def judge(result: subprocess.CompletedProcess, folder: Path, pattern: str) -> None:
    lines = [line for line in result.stdout.splitlines() if re.search(pattern, line)]
    assert not [line for line in lines if "mistakes.py" not in line], result.stdout[-4000:]
    wrong = {int(re.search(r"mistakes\.py:(\d+)", line).group(1)) for line in lines}
    assert wrong == {4, 5, 6, 7, 8}, result.stdout[-4000:]


@pytest.mark.slow
def test_mypy_accepts_the_manual_and_knows_types(files):
    assert len(list(files.glob("page_*.py"))) >= 4
    command = [checker("mypy"), "--strict", "--python-executable", sys.executable, "--cache-dir", str(files / "cache")]
    result = subprocess.run([*command, *map(str, files.glob("*.py"))], capture_output=True, text=True, cwd=files)
    judge(result, files, r": error:")


def test_pyright_accepts_the_manual_and_knows_types(files):
    command = [checker("pyright"), "--pythonpath", sys.executable]
    result = subprocess.run([*command, *map(str, files.glob("*.py"))], capture_output=True, text=True, cwd=files)
    if "error" not in result.stdout and result.returncode:
        pytest.skip(f"pyright does not run here: {result.stderr[-200:]}")
    judge(result, files, r" - error:")
