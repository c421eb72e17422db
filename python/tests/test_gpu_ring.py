"""Rings over CUDA tensors: local ranks that share a GPU, and gloo ranks that do. Skipped aloud where there is no GPU."""

import pytest

import longspan

torch = pytest.importorskip("torch")

from longspan.torch import RingDilatedAttention
from test_gpu import WHY_NOT
from test_ring import run_group

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(bool(WHY_NOT), reason=f"needs a GPU: {WHY_NOT}")]

SEGMENTS, RATES = [16, 64, 200], [1, 2, 5]


@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("own_stream", [False, True])
def test_local_ranks_share_a_gpu(layout, dtype, own_stream):
    torch.manual_seed(0)
    stream = torch.cuda.Stream() if own_stream else torch.cuda.current_stream()
    with torch.cuda.stream(stream):
        whole = [torch.randn(2, 250, 6, 64, device="cuda", dtype=dtype) for _ in range(3)]
        grad = torch.randn(2, 250, 6, 64, device="cuda", dtype=dtype)
        mask = torch.rand(2, 250, device="cuda") < 0.8
        one = [x.clone().requires_grad_() for x in whole]
        module = RingDilatedAttention(SEGMENTS, RATES, ring_size=4, layout=layout)
        pattern = longspan.Pattern.parse(module.attention.pattern)
        want = longspan.attention(*one, pattern, causal=True, key_mask=mask, kernel="cuda-mma")
        want.backward(grad)
        own = [x.clone().requires_grad_() for x in whole]
        out = module(*own, is_causal=True, attention_mask=mask)
        out.backward(grad)
        assert torch.equal(out, want)
        # Sums over ranks have another order.
        tolerance = {"rtol": 1e-5, "atol": 1e-5} if dtype is torch.float32 else {"rtol": 2**-6, "atol": 2**-7}
        for mine, theirs in zip(own, one):
            torch.testing.assert_close(mine.grad, theirs.grad, **tolerance)
    assert module.monitor.calls == 8 and module.monitor.bytes_received > 0


def test_gloo_ranks_share_a_gpu(tmp_path):
    run_group("cuda", 2, tmp_path)


def test_rounds_are_refused_by_name():
    q = torch.randn(1, 100, 3, 64, device="cuda", dtype=torch.bfloat16)
    with pytest.raises(longspan.Unsupported, match="halo_limit_bytes"):
        RingDilatedAttention([100], [1], ring_size=2, halo_limit_bytes=64)(q, q, q)
