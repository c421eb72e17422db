"""Imports an installed longspan and runs it with NumPy alone: what scripts/bare_root.sh does on a bare system."""
import os
import pickle
import subprocess
import sys

import numpy as np

import longspan

rng = np.random.default_rng(0)
PATTERNS = [
    longspan.dense(),
    longspan.dilated([32, 64], [1, 2]),
    longspan.longnet([32, 64], [1, 2]),
    longspan.local_window(32, block_size=16) | longspan.random_blocks(0.3, 7, block_size=16),
]


def forward_and_backward(arrays, pattern, causal):
    q, k, v, dout = arrays
    out, lse = longspan.attention(q, k, v, pattern, causal=causal, return_lse=True)
    return [out, *longspan.attention_backward(q, k, v, out, lse, dout, pattern, causal=causal)]


def compare(pattern, causal):
    """Forward and gradients in float32 by the fastest kernel here, against float64."""
    arrays = [rng.standard_normal((2, 100, heads, 16)) for heads in (4, 2, 2, 4)]
    exact = forward_and_backward(arrays, pattern, causal)
    fast = forward_and_backward([array.astype(np.float32) for array in arrays], pattern, causal)
    for mine, theirs in zip(fast, exact):
        np.testing.assert_allclose(mine, theirs, atol=2e-5)


def main() -> None:
    assert "site-packages" in longspan.__file__, longspan.__file__
    assert any(runs for _, runs, _ in longspan.kernels()), longspan.kernels()
    for pattern in PATTERNS:
        assert pickle.loads(pickle.dumps(pattern)) == pattern
        for causal in (False, True):
            compare(pattern, causal)
    try:
        longspan.attention(*[np.zeros((1, 8, 2, 4), np.float32)] * 2, np.zeros((1, 9, 2, 4), np.float32))
    except longspan.InvalidArgument:
        pass
    else:
        raise AssertionError("arrays of different lengths were accepted")
    try:
        longspan.torch
    except ModuleNotFoundError as error:
        assert "pip install" in str(error), error
    command = os.path.join(os.path.dirname(sys.executable), "longspan")
    shown = subprocess.run([command, "--version"], capture_output=True, text=True, check=True).stdout
    assert longspan.__version__ in shown, shown
    print(f"longspan {longspan.__version__} ({longspan.__commit__}): {len(PATTERNS)} patterns agree with float64")


if __name__ == "__main__":
    main()
