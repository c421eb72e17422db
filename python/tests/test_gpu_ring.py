"""Rings over CUDA tensors: local ranks that share a GPU, gloo ranks that do, and NCCL as far as one GPU goes. Skipped aloud where there is no GPU."""

import subprocess
import sys
import threading
from pathlib import Path

import pytest

import longspan

torch = pytest.importorskip("torch")

from longspan.torch import BlockSparseRingDilatedAttention, RingDilatedAttention
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
        want = longspan.attention(*one, pattern, causal=True, key_mask=mask)
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rounds(dtype):
    torch.manual_seed(0)
    whole = [torch.randn(2, 250, 6, 64, device="cuda", dtype=dtype) for _ in range(3)]
    grad = torch.randn(2, 250, 6, 64, device="cuda", dtype=dtype)
    mask = torch.rand(2, 250, device="cuda") < 0.8
    ring = RingDilatedAttention(SEGMENTS, RATES, ring_size=3, halo_limit_bytes=20000)
    pattern = longspan.Pattern.parse(ring.attention.pattern)
    one, own = ([x.clone().requires_grad_() for x in whole] for _ in range(2))
    want = longspan.attention(*one, pattern, causal=True, key_mask=mask, kernel="cuda-mma")
    out = ring(*own, is_causal=True, attention_mask=mask)
    want.backward(grad)
    out.backward(grad)
    tolerance = {"rtol": 1e-5, "atol": 1e-5} if dtype is torch.float32 else {"rtol": 2**-6, "atol": 2**-7}
    for mine, theirs in zip([out, *(x.grad for x in own)], [want, *(x.grad for x in one)]):
        torch.testing.assert_close(mine, theirs, **tolerance)
    assert ring.monitor.last_forward.rounds > 1


def test_block_masks_over_ranks():
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 256, 4, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    config = {"pattern_type": "random", "block_size": 16, "sparsity_ratio": 0.3}
    one, ring = (BlockSparseRingDilatedAttention([256], [1], config, ring_size=size) for size in (1, 3))
    torch.testing.assert_close(ring(q, k, v, is_causal=True), one(q, k, v, is_causal=True), rtol=2**-6, atol=2**-7)
    assert ring.monitor.bytes_received > 0


class Copies(longspan.Communicator):
    """Two ranks of this process that hand each other GPU memory."""

    takes_gpu = True

    def __init__(self, rank, board):
        self.rank, self.size, self.board, self.count = rank, 2, board, 0

    def begin(self, sends, receives):
        for memory in (*sends, *receives):
            assert not isinstance(memory[1], memoryview), "rows went by way of the host"
        self.receives = receives
        with self.board:
            for peer, memory in sends:
                self.board.messages[self.count, self.rank, peer] = torch.as_tensor(memory, device="cuda").clone()
            torch.cuda.current_stream().synchronize()
            self.board.notify_all()

    def wait(self, seconds):
        with self.board:
            for peer, memory in self.receives:
                key = (self.count, peer, self.rank)
                assert self.board.wait_for(lambda: key in self.board.messages, seconds), f"rank {peer} sent nothing"
                torch.as_tensor(memory, device="cuda").copy_(self.board.messages.pop(key))
        torch.cuda.current_stream().synchronize()
        self.count += 1

    def abort(self):
        pass


def test_transports_in_python_may_move_gpu_memory():
    torch.manual_seed(0)
    inputs = [torch.randn(2, 250, 6, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3)]
    grad = torch.randn_like(inputs[0])
    board = threading.Condition()
    board.messages = {}

    def run(ranks):
        module = RingDilatedAttention(SEGMENTS, RATES, ring_size=2)
        module._local = ranks
        own = [x.clone().requires_grad_() for x in inputs]
        out = module(*own)
        out.backward(grad)
        return [out.detach(), *(x.grad for x in own)]

    out, *grads = run([Copies(rank, board) for rank in range(2)])
    want, *want_grads = run([])
    assert torch.equal(out, want)
    for mine, theirs in zip(grads, want_grads):
        torch.testing.assert_close(mine, theirs, rtol=2**-6, atol=2**-7)


@pytest.mark.skipif(not torch.distributed.is_nccl_available(), reason="this torch has no NCCL")
def test_nccl_under_torchrun():
    worker = Path(__file__).with_name("ring_worker.py")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1", str(worker), "nccl"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
