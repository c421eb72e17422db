"""One rank of a process group for test_ring.py: runs the named checks and exits with 1 if one fails.

    python ring_worker.py CHECK,CHECK RANK SIZE FILE      FILE is where the ranks find each other
    torchrun --nproc-per-node 1 ring_worker.py nccl       one rank of NCCL, as torchrun places it
"""

import os
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist

import longspan
from longspan.torch import DilatedAttention, RingAdvancedDistributedDilatedAttention, RingDilatedAttention, shard, unshard
from longspan.torch.multihead import MultiheadDilatedAttention
from longspan.torch.process_group import ProcessGroupCommunicator
from longspan.torch.ring import RingMultiheadDilatedAttention

SEGMENTS, RATES = [16, 64, 200], [1, 2, 5]
TOKENS = 187


def uneven(size: int) -> list[int]:
    counts = [TOKENS // size + (7 if rank == 0 else 0) for rank in range(size)]
    counts[-1] = TOKENS - sum(counts[:-1])
    return counts


def rows(tensor: torch.Tensor, counts: list[int], rank: int, dim: int = 1) -> torch.Tensor:
    return tensor.narrow(dim, sum(counts[:rank]), counts[rank])


def inputs(dtype=torch.float32):
    torch.manual_seed(5)
    return [torch.randn(2, TOKENS, 6, 16, dtype=dtype) for _ in range(4)]


def check_equal(rank: int, size: int) -> None:
    """Bits forward, gradients to rounding, for both ways to keep remote rows and with a mask."""
    counts = uneven(size)
    for causal in (False, True):
        for checkpointing in (False, True):
            for masked in (False, True):
                *whole, grad = inputs()
                mask = (torch.arange(TOKENS) % 3 != 1).expand(2, TOKENS) if masked else None
                one = [x.clone().requires_grad_() for x in whole]
                want = DilatedAttention(SEGMENTS, RATES)(*one, is_causal=causal, attention_mask=mask)
                want.backward(grad)
                own = [rows(x, counts, rank).clone().requires_grad_() for x in whole]
                reports = []
                module = RingDilatedAttention(
                    SEGMENTS, RATES, use_checkpointing=checkpointing, deadline=20, monitor=reports.append
                )
                own_mask = rows(mask, counts, rank) if masked else None
                out = module(*own, is_causal=causal, attention_mask=own_mask)
                out.backward(rows(grad, counts, rank))
                assert torch.equal(out, rows(want, counts, rank)), "forward bits"
                for mine, theirs in zip(own, one):
                    torch.testing.assert_close(mine.grad, rows(theirs.grad, counts, rank), rtol=1e-5, atol=1e-6)
                assert [report.backward for report in reports] == [False, True]
                forward, backward = reports
                assert forward.rank == rank and forward.bytes_received + forward.bytes_sent > 0
                assert module.monitor.calls == 2
                assert module.get_memory_info()["forward_halo_bytes"] == forward.bytes_received
                # float32 gradients are as large as float32 rows; checkpointing moves the rows again.
                assert backward.bytes_received == forward.bytes_sent + checkpointing * forward.bytes_received


def check_dropout(rank: int, size: int) -> None:
    """The seed is the first rank's, and the same pairs are dropped as on one device."""
    counts = uneven(size)
    q, k, v, _ = inputs()
    module = RingDilatedAttention(SEGMENTS, RATES, dropout=0.3)
    torch.manual_seed(100 + rank)
    out = module(*(rows(x, counts, rank) for x in (q, k, v)))
    torch.manual_seed(100)
    seed = int(torch.randint(0x7FFF_FFFF_FFFF_FFFF, (1,), dtype=torch.int64))
    pattern = longspan.Pattern.parse(module.attention.pattern)
    want = longspan.attention(q, k, v, pattern, dropout=0.3, seed=seed)
    assert torch.equal(out, rows(want, counts, rank))


def check_multihead(rank: int, size: int) -> None:
    """Projections around the ring; both classes take the state of the one-device module."""
    torch.manual_seed(1)
    one = MultiheadDilatedAttention(48, 6, RATES, SEGMENTS)
    whole = torch.randn(2, TOKENS, 48)
    want, _ = one(whole, is_causal=True)
    counts = uneven(size)
    ring = RingMultiheadDilatedAttention(48, 6, RATES, SEGMENTS)
    advanced = RingAdvancedDistributedDilatedAttention(48, 6, SEGMENTS, RATES)
    for module in (ring, advanced):
        module.load_state_dict(one.state_dict())
        out, weights = module(rows(whole, counts, rank), is_causal=True)
        assert weights is None
        torch.testing.assert_close(out, rows(want, counts, rank), rtol=1e-5, atol=1e-6)
    report = advanced.monitor.last_forward
    assert report.messages_received + report.messages_sent > 0


def check_shard(rank: int, size: int) -> None:
    whole = torch.arange(2 * TOKENS * 3).reshape(2, TOKENS, 3)
    for layout in ("contiguous", "zigzag"):
        own = shard(whole, layout=layout)
        assert torch.equal(own, shard(whole, rank, size, layout=layout))
        assert torch.equal(unshard(own, layout=layout), whole)
        assert torch.equal(unshard([shard(whole, r, size, layout=layout) for r in range(size)], layout=layout), whole)
    q, k, v, _ = inputs()
    want = DilatedAttention(SEGMENTS, RATES)(q, k, v, is_causal=True)
    module = RingDilatedAttention(SEGMENTS, RATES, layout="zigzag")
    out = module(*(shard(x, layout="zigzag") for x in (q, k, v)), is_causal=True)
    assert torch.equal(unshard(out, layout="zigzag"), want)


def check_cuda(rank: int, size: int) -> None:
    """Ranks that share a GPU: rows go by way of the host, the bits are those of one GPU with the same kernel."""
    q, k, v, grad = (x.to("cuda", torch.bfloat16) for x in inputs())
    counts = uneven(size)
    one = [x.clone().requires_grad_() for x in (q, k, v)]
    pattern = longspan.Pattern.parse(RingDilatedAttention(SEGMENTS, RATES).attention.pattern)
    want = longspan.attention(*one, pattern, kernel="cuda-mma")
    want.backward(grad)
    for checkpointing in (False, True):
        own = [rows(x, counts, rank).clone().requires_grad_() for x in (q, k, v)]
        module = RingDilatedAttention(SEGMENTS, RATES, use_checkpointing=checkpointing, deadline=20)
        out = module(*own)
        out.backward(rows(grad, counts, rank))
        assert torch.equal(out, rows(want, counts, rank)), "forward bits"
        for mine, theirs in zip(own, one):
            torch.testing.assert_close(mine.grad, rows(theirs.grad, counts, rank), rtol=2**-6, atol=2**-7)
        assert module.monitor.bytes_received > 0


def check_nccl(rank: int, size: int) -> None:
    """One GPU: a group of one needs no messages, and its communicator can send to itself, GPU memory and the host's."""
    q, k, v, grad = (x.to("cuda", torch.bfloat16) for x in inputs())
    one, own = ([x.clone().requires_grad_() for x in (q, k, v)] for _ in range(2))
    DilatedAttention(SEGMENTS, RATES)(*one, is_causal=True).backward(grad)
    module = RingDilatedAttention(SEGMENTS, RATES, deadline=20)
    module(*own, is_causal=True).backward(grad)
    for mine, theirs in zip(own, one):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=2**-6, atol=2**-7)
    communicator = ProcessGroupCommunicator(dist.group.WORLD)
    assert communicator.takes_gpu and (communicator.rank, communicator.size) == (0, 1)
    rows_sent = torch.arange(1 << 20, device="cuda", dtype=torch.int32).view(torch.uint8)
    busy = torch.cuda.Stream()
    for attempt in range(3):
        arrived = torch.zeros_like(rows_sent)
        torch.cuda.synchronize()  # memory is ready when begin is called
        with torch.cuda.stream(busy):
            torch.cuda._sleep(200_000_000)  # a stream that computes is not waited for
        with torch.cuda.stream(busy):
            communicator.begin([(0, rows_sent)], [(0, arrived)])
            communicator.wait(20)
            assert attempt == 0 or not busy.query(), "messages waited for the computing stream"  # NCCL starts first
        with torch.cuda.stream(torch.cuda.Stream()):
            assert torch.equal(arrived, rows_sent)
    sent, got = bytearray(range(200)), bytearray(200)
    communicator.begin([(0, memoryview(sent).toreadonly())], [(0, memoryview(got))])
    communicator.wait(20)
    assert got == sent
    assert communicator._wait_on_gpu(_Never(), 0.2) is False  # torch's kernels that never end look like that


class _Never:
    """A work that takes longer than anyone waits."""

    def wait(self) -> None:
        torch.cuda._sleep(2_000_000_000)


def check_silent(rank: int, size: int) -> None:
    """Rank 1 stops taking part; the others raise in time and say who is missing."""
    q, k, v, _ = inputs()
    counts = uneven(size)
    module = RingDilatedAttention(SEGMENTS, RATES, deadline=1.5, shard_lengths=counts)
    module(*(rows(x, counts, rank) for x in (q, k, v)))
    if rank == 1:
        time.sleep(6)
        os._exit(0)
    begin = time.monotonic()
    try:
        module(*(rows(x, counts, rank) for x in (q, k, v)))
    except longspan.CommError as error:
        assert "rank 1 sent nothing" in str(error) and "step" in str(error), str(error)
        assert time.monotonic() - begin < 5
        os._exit(0)  # gloo would wait for the missing rank on the way out
    raise AssertionError("a silent rank went unnoticed")


def check_disagree(rank: int, size: int) -> None:
    q, k, v, _ = inputs()
    counts = uneven(size)
    module = RingDilatedAttention([16, 64, 100 + rank], RATES, deadline=3)
    try:
        module(*(rows(x, counts, rank) for x in (q, k, v)))
    except longspan.CommError as error:
        assert "computes something else" in str(error) or "rank" in str(error)
        os._exit(0)
    raise AssertionError("ranks that disagree went unnoticed")


def main() -> None:
    checks = sys.argv[1].split(",")
    torch.set_num_threads(1)
    longspan.set_num_threads(1)
    if len(sys.argv) == 2:  # torchrun says the rest
        dist.init_process_group("nccl", timeout=timedelta(seconds=60))
    else:
        rank, size, file = int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
        dist.init_process_group(
            "gloo", init_method=f"file://{file}", rank=rank, world_size=size, timeout=timedelta(seconds=60)
        )
    rank, size = dist.get_rank(), dist.get_world_size()
    for check in checks:
        globals()[f"check_{check}"](rank, size)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
