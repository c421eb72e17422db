"""The ranks of a process group for test_ring.py: each runs the named checks and exits with 1 if one fails.

    python ring_worker.py CHECK,CHECK SIZE FILE           SIZE processes of gloo; FILE is where they find each other
    torchrun --nproc-per-node 1 ring_worker.py nccl       one rank of NCCL, as torchrun places it
"""

import contextlib
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import longspan
from longspan.torch import (
    DilatedAttention,
    RingAdvancedDistributedDilatedAttention,
    RingDilatedAttention,
    gradients,
    reduce_behind_rings,
    shard,
    unshard,
)
from longspan.torch.multihead import MultiheadDilatedAttention
from longspan.torch.process_group import ProcessGroupCommunicator, waits
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
    want = longspan.attention(*one, pattern)
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


# What a call is, by what ranks tell each other in it before and while they compute. A group's own timeout is minutes: who
# waits for that instead of the deadline runs into the timeout of the test.
CALLS = ("shard_lengths", "lengths", "mask", "dropout", "backward", "backward fetching again", "unshard")
GROUP_TIMEOUT = timedelta(minutes=10)


def ring_call(kind: str, rank: int, group: dist.ProcessGroup, deadline: float) -> Callable[[], object]:
    """A call of that kind on this rank's rows, ready to be made."""
    size = dist.get_world_size(group)
    counts = uneven(size)
    own = [rows(x, counts, rank).clone().requires_grad_() for x in inputs()[:3]]
    if kind == "unshard":
        return lambda: unshard(own[0], process_group=group, deadline=deadline)
    module = RingDilatedAttention(
        SEGMENTS, RATES, dropout=0.2 if kind == "dropout" else 0.0, process_group=group, deadline=deadline,
        shard_lengths=counts if kind == "shard_lengths" else None, use_checkpointing=kind == "backward fetching again",
    )  # fmt: skip
    mask = torch.ones(2, counts[rank], dtype=torch.bool) if kind == "mask" else None
    if kind.startswith("backward"):
        loss = module(*own).sum()
        return loss.backward
    return lambda: module(*own, attention_mask=mask)


def expect_refused(group: dist.ProcessGroup, rank: int) -> None:
    """A group that failed is refused by name, whatever uses it next."""
    q, k, v = (rows(x, uneven(dist.get_world_size(group)), rank) for x in inputs()[:3])
    for use in (
        lambda: RingDilatedAttention(SEGMENTS, RATES, process_group=group)(q, k, v),
        lambda: unshard(q, process_group=group),
    ):
        with expected(longspan.CommError, "process_group", "failed before", "step"):
            use()


@contextlib.contextmanager
def expected(kind: type[BaseException], *words: str):
    try:
        yield
    except kind as error:
        assert all(word in str(error) for word in words), (words, str(error))
    else:
        raise AssertionError(f"no {kind.__name__} with {words}")


def expect_lost_rank(call: Callable[[], object], lost: int) -> None:
    with expected(longspan.CommError, f"rank {lost} ", "nothing", "(step "):
        call()


def check_stopped(rank: int, size: int) -> None:
    """Rank 1 is stopped before a call of each kind, in a group of its own; the others raise by the deadline and say who and
    where. Then it goes on, and hears of it."""
    folder = Path(sys.argv[3] + ".stopped")
    folder.mkdir(exist_ok=True)
    for index, kind in enumerate(CALLS):
        group = dist.new_group(timeout=GROUP_TIMEOUT)
        call = ring_call(kind, rank, group, deadline=1.0)
        dist.barrier()
        if rank == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
            with expected(longspan.CommError, "rank ", "(step "):
                call()
        else:
            expect_lost_rank(call, 1)
            (folder / f"{index}.{rank}").touch()
            if rank == 0:
                while len(list(folder.glob(f"{index}.*"))) < size - 1:
                    time.sleep(0.01)
                os.kill(PIDS[1], signal.SIGCONT)
        expect_refused(group, rank)
        dist.barrier()


def check_killed(rank: int, size: int) -> None:
    """One rank after the other is killed before a call of the next kind; the two that are left to the end say who."""
    kinds = ("lengths", "mask", "dropout", "backward")
    assert size == len(kinds) + 2
    groups = [dist.new_group([0, 1, lost], timeout=GROUP_TIMEOUT) for lost in range(2, size)]
    for lost, kind, group in zip(range(2, size), kinds, groups):
        if rank not in (0, 1, lost):
            continue
        call = ring_call(kind, dist.get_rank(group), group, deadline=30.0)
        if rank == lost:
            os.kill(os.getpid(), signal.SIGKILL)
        expect_lost_rank(call, 2)
        expect_refused(group, rank)
    leave()  # the last barrier would miss ranks


def check_local_error(rank: int, size: int) -> None:
    """What a rank finds wrong before it sends anything leaves the ring as it was: the call, repeated, is right. Where one
    rank alone gives up, the others raise by the deadline, and so does it if it calls again."""
    counts = uneven(size)
    q, k, v, _ = inputs()
    own = [rows(x, counts, rank) for x in (q, k, v)]
    want = rows(DilatedAttention(SEGMENTS, RATES)(q, k, v), counts, rank)
    wrong = [
        lambda module: module(own[0], own[1][:, :, :4], own[2]),
        lambda module: module(own[0], own[1][:, 1:], own[2]),
        lambda module: module(own[0].double(), *own[1:]),
        lambda module: module(*own, attention_mask=torch.ones(2, 3, dtype=torch.bool)),
    ]
    for arguments in ({}, {"shard_lengths": counts}):
        module = RingDilatedAttention(SEGMENTS, RATES, deadline=20, **arguments)
        for once_before in (False, True):
            for number, call in enumerate(wrong):
                with expected(longspan.InvalidArgument, ""):
                    call(module)
                if once_before:
                    assert torch.equal(module(*own), want), number
        # One rank's error, which it mends before the others' patience ends.
        if rank == 1:
            with expected(longspan.InvalidArgument, "key"):
                wrong[1](module)
        assert torch.equal(module(*own), want)
    group = dist.new_group(timeout=GROUP_TIMEOUT)
    module = RingDilatedAttention(SEGMENTS, RATES, process_group=group, deadline=1.0)
    if rank == 1:
        with expected(longspan.InvalidArgument, "key"):
            wrong[1](module)
    else:
        expect_lost_rank(lambda: module(*own), 1)
    dist.barrier()
    with expected(longspan.CommError, "rank "):
        module(*own)
    expect_refused(group, rank)


def check_disagree(rank: int, size: int) -> None:
    """Ranks that compute different things are told so by name, all of them, and the group stays in use."""
    counts = uneven(size)
    q, k, v, _ = inputs()
    own = [rows(x, counts, rank) for x in (q, k, v)]
    mask = torch.ones(2, counts[rank], dtype=torch.bool)
    module = RingDilatedAttention(SEGMENTS, RATES, deadline=20)
    other = RingDilatedAttention([16, 64, 100], RATES, deadline=20) if rank == 1 else module
    for call in (
        lambda: other(*own),
        lambda: module(*own, is_causal=rank == 1),
        lambda: module(*own, attention_mask=mask if rank == 1 else None),
        lambda: module(*(x.double() if rank == 1 else x for x in own)),
        lambda: unshard(own[0], layout="zigzag" if rank == 1 else "contiguous", deadline=20),
    ):
        with expected(longspan.CommError, "computes something else", "rank 1 " if rank != 1 else "rank 0 "):
            call()
    assert torch.equal(module(*own), rows(DilatedAttention(SEGMENTS, RATES)(q, k, v), counts, rank))
    # Where nothing is told before, messages of other sizes do not meet: gloo would end the process.
    group = dist.new_group(timeout=GROUP_TIMEOUT)
    module = RingDilatedAttention(SEGMENTS, RATES, process_group=group, shard_lengths=counts, deadline=1.0)
    module(*own)
    with expected(longspan.CommError, "rank ", "(step "):
        module(*(x[..., : 16 if rank == 1 else 8] for x in own))
    expect_refused(group, rank)


WIDTH, HEADS = 32, 4


class Block(torch.nn.Module):
    """Attention over the ring, and parameters of its own."""

    def __init__(self, attention: torch.nn.Module) -> None:
        super().__init__()
        self.attention, self.mix = attention, torch.nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(x, is_causal=True)[0]
        return x + self.mix(x).tanh()


def blocks(make, group=None) -> torch.nn.Module:
    torch.manual_seed(0)
    keywords = {} if group is None else {"process_group": group, "deadline": 20}
    return torch.nn.Sequential(*(Block(make(WIDTH, HEADS, [1, 3], [16, 96], **keywords)) for _ in range(2)))


def check_parallel(rank: int, size: int) -> None:
    """A ring on one dimension of a mesh, other sequences on the other: parameters after some steps are those of one process
    that saw everything, whoever averages the gradients."""
    ring = 2
    mesh = init_device_mesh("cpu", (size // ring, ring), mesh_dim_names=("data", "ring"))
    place, replica, group = mesh.get_local_rank("ring"), mesh.get_local_rank("data"), mesh.get_group("ring")
    torch.manual_seed(1)
    sequences = torch.randn(3, size // ring, 96, WIDTH)

    def train(model: torch.nn.Module, rows_of: Callable[[torch.Tensor], torch.Tensor], share: float) -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        for batch in sequences:
            optimizer.zero_grad()
            loss = model(rows_of(batch)).square().sum() / sequences[0].numel() * share
            loss.backward()
            optimizer.step()

    one = blocks(MultiheadDilatedAttention)
    train(one, lambda batch: batch, 1.0)

    def own(batch: torch.Tensor) -> torch.Tensor:
        return shard(batch[replica : replica + 1], place, ring)

    def plain() -> torch.nn.Module:
        return DistributedDataParallel(blocks(RingMultiheadDilatedAttention, group))

    def in_pieces() -> torch.nn.Module:
        model = DistributedDataParallel(blocks(RingMultiheadDilatedAttention, group), bucket_cap_mb=0.004)
        reduce_behind_rings(model, piece_bytes=1000)
        return model

    def sharded() -> torch.nn.Module:
        model = blocks(RingMultiheadDilatedAttention, group)
        for block in model:
            fully_shard(block)
        return fully_shard(model)

    for make in (plain, in_pieces, sharded):
        model = make()
        train(model, own, size)  # gradients are averaged over all processes, each of which has its share of the loss
        for (name, value), (_, want) in zip(model.named_parameters(), one.named_parameters()):
            value = value.full_tensor() if hasattr(value, "full_tensor") else value
            torch.testing.assert_close(value, want, rtol=1e-5, atol=1e-6, msg=lambda text: f"{make.__name__}, {name}: {text}")


def check_pieces(rank: int, size: int) -> None:
    """Pieces start when no ring waits, whatever else is going on, and after the patience although one does."""
    started = []
    real, gradients.all_reduce = gradients.all_reduce, lambda piece, group: (started.append(len(piece)), real(piece, group))
    try:
        model = DistributedDataParallel(torch.nn.Linear(100, 10, bias=False))
        reduce_behind_rings(model, piece_bytes=1600, patience=60.0)
        with waits:
            thread = threading.Thread(target=lambda: model(torch.ones(1, 100)).sum().backward())
            thread.start()
            thread.join(0.3)
            assert thread.is_alive() and started == [], started
        thread.join(60)
        assert not thread.is_alive() and started == [400, 400, 200], started
        torch.testing.assert_close(model.module.weight.grad, torch.ones(10, 100))
        started.clear()
        model = DistributedDataParallel(torch.nn.Linear(100, 10, bias=False))
        reduce_behind_rings(model, patience=0.01)
        with waits:
            model(torch.ones(1, 100)).sum().backward()
        assert started == [1000], started
    finally:
        gradients.all_reduce = real
    for wrong in ({"piece_bytes": 0}, {"patience": -1.0}, {"patience": float("nan")}):
        with expected(longspan.InvalidArgument, next(iter(wrong))):
            reduce_behind_rings(model, **wrong)
    with expected(longspan.InvalidArgument, "model"):
        reduce_behind_rings(model.module)


def main() -> None:
    checks = sys.argv[1].split(",")
    torch.set_num_threads(1)
    longspan.set_num_threads(1)
    if len(sys.argv) == 2:  # torchrun says the rest
        dist.init_process_group("nccl", timeout=timedelta(seconds=60))
        run(checks)
        dist.barrier()
        dist.destroy_process_group()
        return
    size, file = int(sys.argv[2]), Path(sys.argv[3])
    for rank in range(size):
        child = os.fork()  # before torch has threads, and cheaper than to import it again
        if child == 0:
            rank_of_gloo(checks, rank, size, file)
        PIDS.append(child)
    states = {}
    for _ in PIDS:
        child, status = os.wait()
        states[PIDS.index(child)] = os.waitstatus_to_exitcode(status)
    wrong = {rank: state for rank, state in states.items() if state != 0 and state != -signal.SIGKILL}
    sys.exit(f"exit codes by rank: {wrong}" if wrong else 0)


PIDS: list[int] = []


def run(checks: list[str]) -> None:
    for check in checks:
        globals()[f"check_{check}"](dist.get_rank(), dist.get_world_size())


def leave() -> None:
    sys.stdout.flush()
    os._exit(0)


def rank_of_gloo(checks: list[str], rank: int, size: int, file: Path) -> None:
    try:
        dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=size, timeout=GROUP_TIMEOUT)
        own = [None] * size
        dist.all_gather_object(own, os.getpid())
        PIDS[:] = own
        run(checks)
        dist.barrier()
        dist.destroy_process_group()
    except BaseException:
        print(f"rank {rank} of {size}:\n{traceback.format_exc()}", flush=True)
        os._exit(1)
    sys.exit(0)


if __name__ == "__main__":
    main()
