"""Rings from Python: local ranks in this process, gloo groups of real processes, transports of one's own."""

import os
import pickle
import queue
import signal
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

import longspan
from longspan import _longspan
from longspan._patterns import compiled

torch = pytest.importorskip("torch")

from longspan.torch import (  # noqa: E402
    DilatedAttention,
    RingAdvancedDistributedDilatedAttention,
    RingDilatedAttention,
    RingDilatedAttentionProduction,
    RingMultiheadDilatedAttention,
    create_production_ring_attention,
    shard,
    unshard,
)
from longspan.torch import ring as ring_module, ring_calls  # noqa: E402

WORKER = Path(__file__).with_name("ring_worker.py")
EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "ring_ddp.py"
README = EXAMPLE.parents[1] / "README.md"
SEGMENTS, RATES = [16, 64, 200], [1, 2, 5]


def run_group(checks: str, size: int, tmp_path: Path) -> None:
    """Every rank a process; all must end well but for those that a check kills."""
    process = subprocess.Popen(
        [sys.executable, str(WORKER), checks, str(size), str(tmp_path / "meeting")], start_new_session=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    try:
        output = process.communicate(timeout=120)[0]
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # stopped ranks, too
        raise AssertionError(f"{checks} hangs:\n{process.communicate()[0]}") from None
    assert process.returncode == 0, output


# Several checks in one group, since most of the time goes into starting processes.
@pytest.mark.parametrize(("size", "checks"), [(2, "equal,dropout"), (3, "equal,multihead,shard"), (4, "equal,parallel,pieces")])
def test_gloo(size, checks, tmp_path):
    run_group(checks, size, tmp_path)


def test_a_stopped_rank_is_named_by_the_deadline_whatever_ranks_exchange(tmp_path):
    run_group("stopped", 3, tmp_path)


def test_a_killed_rank_is_named_whatever_ranks_exchange(tmp_path):
    run_group("killed", 6, tmp_path)


@pytest.mark.parametrize("size", [2, 3])
def test_an_error_of_a_rank_before_any_message_leaves_the_ring_as_it_was(size, tmp_path):
    run_group("local_error", size, tmp_path)


@pytest.mark.parametrize("size", [2, 3])
def test_ranks_that_disagree_are_named(size, tmp_path):
    run_group("disagree", size, tmp_path)


def test_ddp_on_another_mesh_dimension():
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    result = subprocess.run(
        [sys.executable, str(EXAMPLE), "--data", "2", "--ring", "2", "--steps", "3"],
        capture_output=True, text=True, timeout=180, env=environment,
    )  # fmt: skip
    assert result.returncode == 0, result.stdout + result.stderr
    assert "equal to one process" in result.stdout


@pytest.mark.parametrize("ring_size", [1, 2, 3, 5])
@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_local_ring(ring_size, layout, dtype):
    torch.manual_seed(0)
    whole = [torch.randn(2, 150, 6, 16, dtype=dtype) for _ in range(3)]
    grad = torch.randn(2, 150, 6, 16, dtype=dtype)
    one = [x.clone().requires_grad_() for x in whole]
    want = DilatedAttention(SEGMENTS, RATES)(*one, is_causal=True)
    want.backward(grad)
    own = [x.clone().requires_grad_() for x in whole]
    reports = []
    module = RingDilatedAttention(SEGMENTS, RATES, ring_size=ring_size, layout=layout, monitor=reports.append)
    out = module(*own, is_causal=True)
    out.backward(grad)
    assert torch.equal(out, want)
    tolerance = {"rtol": 1e-5, "atol": 1e-6} if dtype is torch.float32 else {"rtol": 2**-7, "atol": 2**-8}
    for mine, theirs in zip(own, one):
        torch.testing.assert_close(mine.grad, theirs.grad, **tolerance)
    assert len(reports) == (0 if ring_size == 1 else 2 * ring_size)
    assert {report.rank for report in reports} == (set() if ring_size == 1 else set(range(ring_size)))


def test_local_ring_masks_dropout_and_rounds():
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 150, 6, 16) for _ in range(3))
    mask = torch.rand(2, 150) < 0.7
    module = RingDilatedAttention(SEGMENTS, RATES, ring_size=3)
    assert torch.equal(module(q, k, v, attention_mask=mask), DilatedAttention(SEGMENTS, RATES)(q, k, v, attention_mask=mask))
    dropped = RingDilatedAttention(SEGMENTS, RATES, dropout=0.4, ring_size=3)
    one = DilatedAttention(SEGMENTS, RATES, attention_dropout=0.4)
    torch.manual_seed(3)
    want = one(q, k, v)
    torch.manual_seed(3)
    assert torch.equal(dropped(q, k, v), want)
    assert not torch.equal(dropped.eval()(q, k, v), want)
    rounds = RingDilatedAttention(SEGMENTS, RATES, ring_size=3, halo_limit_bytes=4000)
    torch.testing.assert_close(rounds(q, k, v), DilatedAttention(SEGMENTS, RATES)(q, k, v), rtol=1e-5, atol=1e-6)
    assert rounds.monitor.last_forward.rounds > 1


def test_second_derivative_is_refused():
    q, k, v = (torch.randn(1, 90, 3, 8, requires_grad=True) for _ in range(3))
    module = RingDilatedAttention(SEGMENTS, RATES, ring_size=2)
    (grad,) = torch.autograd.grad(module(q, k, v).sum(), q, create_graph=True)
    with pytest.raises(longspan.Unsupported, match="first derivatives"):
        (q.sum() + grad.sum()).backward()


def test_a_second_backward_fetches_what_the_first_has_released():
    q, k, v = (torch.randn(1, 150, 6, 8, requires_grad=True) for _ in range(3))
    module = RingDilatedAttention(SEGMENTS, RATES, ring_size=3)
    out = module(q, k, v)
    received, grads = [module.monitor.bytes_received], []
    for _ in range(2):
        grads.append(torch.autograd.grad(out, (q, k, v), torch.ones_like(out), retain_graph=True))
        received.append(module.monitor.bytes_received)
        assert all(call.halo is None for call in out.grad_fn.calls)
    torch.testing.assert_close(grads[1], grads[0], rtol=0, atol=0)
    forward, first, second = received[0], received[1] - received[0], received[2] - received[1]
    assert forward > 0 and second == first + forward


@pytest.mark.parametrize("deterministic", [False, True])
def test_rings_follow_torchs_deterministic_algorithms(deterministic, monkeypatch):
    made = []
    monkeypatch.setattr(ring_calls, "compiled", lambda *pattern, **settings: made.append(settings) or compiled(*pattern, **settings))
    q = torch.randn(1, 90, 3, 8)
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(deterministic)
    try:
        RingDilatedAttention(SEGMENTS, RATES, ring_size=2)(q, q, q)
    finally:
        torch.use_deterministic_algorithms(before)
    assert {settings["deterministic"] for settings in made} == {deterministic}


def test_bad_arguments_are_named():
    for arguments, name in (
        ({"ring_size": 0}, "ring_size"), ({"deadline": -1}, "deadline"), ({"layout": "diagonal"}, "layout"),
        ({"ring_length": 3}, "ring_length"),
    ):  # fmt: skip
        with pytest.raises(longspan.InvalidArgument, match=name):
            RingDilatedAttention(SEGMENTS, RATES, **arguments)
    module = RingDilatedAttention(SEGMENTS, RATES, ring_size=2)
    with pytest.raises(longspan.InvalidArgument, match="query"):
        module(torch.randn(1, 20, 16), torch.randn(1, 20, 16), torch.randn(1, 20, 16))
    with pytest.raises(longspan.InvalidArgument, match="rank"):
        shard(torch.zeros(1, 4), 5, 2)
    with pytest.raises(longspan.InvalidArgument, match="rank and ring_size"):
        shard(torch.zeros(1, 4))


def test_one_process_of_several_without_a_group_is_refused(monkeypatch):
    q = torch.randn(1, 40, 3, 16)
    monkeypatch.setenv("WORLD_SIZE", "4")
    for arguments in ({}, {"ring_size": 4}):
        with pytest.raises(longspan.InvalidArgument, match="WORLD_SIZE is 4.*init_process_group.*ring_size=1") as error:
            RingDilatedAttention(SEGMENTS, RATES, **arguments)(q, q, q)
        assert error.value.argument == "process_group"
    for call in (lambda: unshard(q), lambda: shard(q)):
        with pytest.raises(longspan.InvalidArgument, match="init_process_group"):
            call()
    want = DilatedAttention(SEGMENTS, RATES)(q, q, q)
    assert torch.equal(RingDilatedAttention(SEGMENTS, RATES, ring_size=1)(q, q, q), want)
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert torch.equal(RingDilatedAttention(SEGMENTS, RATES)(q, q, q), want)


def torchrun(processes: int, script: Path) -> None:
    result = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes), str(script)],
        capture_output=True, text=True, timeout=120, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize("processes", [1, 2])
def test_nothing_computes_alone_in_silence_under_torchrun(processes):
    torchrun(processes, WORKER.with_name("torchrun_worker.py"))


def test_readme_snippet_runs_under_torchrun(tmp_path):
    blocks = README.read_text().split("```python\n")[1:]
    (snippet,) = [block.split("```")[0] for block in blocks if "RingDilatedAttention" in block]
    script = tmp_path / "snippet.py"
    script.write_text(
        "import torch\ntorch.manual_seed(0)\nwhole = torch.randn(3, 1, 64, 2, 16)\n"
        "import os\nquery, key, value = whole.chunk(2, 2)[int(os.environ['RANK'])]\n" + snippet +
        "from longspan.torch import DilatedAttention\n"
        "want = DilatedAttention([2048, 131072], [1, 64])(*whole, is_causal=True)\n"
        "assert torch.equal(out, want.chunk(2, 1)[dist.get_rank()])\n"
    )  # fmt: skip
    torchrun(2, script)


def test_names_people_have():
    assert ring_module.RingDilatedAttentionV2 is RingDilatedAttention
    import longspan.torch as package

    assert package.RingDilatedAttentionV2Collective is RingDilatedAttention
    module = create_production_ring_attention(SEGMENTS, RATES, ring_size=2)
    assert isinstance(module, RingDilatedAttentionProduction) and module.config.ring_size == 2
    q = torch.randn(1, 40, 3, 16)
    assert torch.equal(module(q, q, q), DilatedAttention(SEGMENTS, RATES)(q, q, q))
    module.clear_cache()
    assert torch.equal(module(q, q, q), DilatedAttention(SEGMENTS, RATES)(q, q, q))
    copy = pickle.loads(pickle.dumps(RingDilatedAttention(SEGMENTS, RATES, ring_size=2)))
    assert torch.equal(copy(q, q, q), module(q, q, q))
    with pytest.warns(longspan.LongspanWarning, match="bucket_size_mb"):
        advanced = RingAdvancedDistributedDilatedAttention(48, 6, SEGMENTS, RATES, bucket_size_mb=25, ring_size=2)
    out, _ = advanced(torch.randn(1, 40, 48))
    assert out.shape == (1, 40, 48) and advanced.monitor.calls == 2
    out, _ = RingMultiheadDilatedAttention(48, 6, RATES, SEGMENTS, ring_size=2)(torch.randn(1, 40, 48))
    assert out.shape == (1, 40, 48)


def test_shard_and_unshard():
    whole = torch.arange(60).reshape(2, 10, 3)
    for layout in ("contiguous", "zigzag"):
        for size in (1, 2, 3, 7):
            parts = [shard(whole, rank, size, layout=layout) for rank in range(size)]
            assert torch.equal(unshard(parts, layout=layout), whole)


class QueueCommunicator(longspan.Communicator):
    """A transport in Python: queues between threads. `break_at` loses the messages of one exchange."""

    def __init__(self, rank, size, queues, break_at=None):
        self.rank, self.size, self.queues, self.break_at = rank, size, queues, break_at
        self.exchange = 0

    def begin(self, sends, receives):
        for peer, memory in sends:
            if self.exchange != self.break_at:
                self.queues[self.rank, peer].put(bytes(memory))
        self.receives = receives
        self.exchange += 1

    def wait(self, seconds):
        for peer, memory in self.receives:
            try:
                memory[:] = self.queues[peer, self.rank].get(timeout=seconds)
            except queue.Empty:
                raise RuntimeError(f"rank {peer} sent nothing") from None

    def abort(self):
        self.receives = []


class Attempt(longspan.Communicator):
    """The first of two ranks, whose peer says nothing: what its methods do is given."""

    rank, size = 0, 2

    def __init__(self, wait=lambda self: None, begin=lambda self: None):
        self.steps = {"wait": wait, "begin": begin}
        self.messages, self.aborted = [], False

    def begin(self, sends, receives):
        self.messages = [memory for _, memory in [*sends, *receives]]
        self.steps["begin"](self)

    def wait(self, seconds):
        self.steps["wait"](self)

    def abort(self):
        self.aborted = True


def call_over(communicator, ring=None):
    q = np.zeros((1, 20, 2, 8), np.float32)
    attention = _longspan.Attention(longspan.dense(), longspan.Options())
    ring = ring or longspan.Ring(attention, communicator, longspan.Shards.even(40, 2), deadline=5.0)
    ring.forward(q, q, q, np.empty_like(q))


def raising(error):
    def step(_):
        raise error

    return step


@pytest.mark.parametrize("method", ["begin", "wait"])
def test_what_is_no_error_leaves_a_communicator_as_it_is(method):
    """KeyboardInterrupt and the like end the call as themselves, and the ring with it."""
    for stop in (KeyboardInterrupt(), SystemExit(3), GeneratorExit("over")):
        communicator = Attempt(**{method: raising(stop)})
        with pytest.raises(type(stop)) as caught:
            call_over(communicator)
        assert caught.value is stop and communicator.aborted


def test_errors_without_a_text_are_named_by_their_type():
    for error, words in (
        (TimeoutError(), r"step 0\).*: TimeoutError"),
        (RuntimeError("rank 1 is \udcff away"), r"step 0\).*: rank 1 is \\udcff away"),
    ):
        for method in ("begin", "wait"):
            with pytest.raises(longspan.CommError, match=words):
                call_over(Attempt(**{method: raising(error)}))


def test_rings_over_one_communicator_fail_together():
    communicator = Attempt(wait=raising(RuntimeError("lost")))
    attention = _longspan.Attention(longspan.dense(), longspan.Options())
    one, two = (longspan.Ring(attention, communicator, longspan.Shards.even(40, 2)) for _ in range(2))
    with pytest.raises(longspan.CommError, match="lost"):
        call_over(communicator, one)
    with pytest.raises(longspan.CommError, match="failed before.*lost"):
        call_over(communicator, two)


@pytest.mark.parametrize("failing", [{}, {"wait": raising(RuntimeError())}, {"begin": raising(KeyboardInterrupt())}])
def test_messages_are_of_no_use_after_their_exchange(failing):
    communicator = Attempt(**failing)
    with pytest.raises((longspan.CommError, KeyboardInterrupt)):  # the peer sent nothing
        call_over(communicator)
    assert len(communicator.messages) == 2
    for memory in communicator.messages:
        with pytest.raises(ValueError, match="released memoryview"):
            memory[0] = 1


def test_what_is_sent_is_read_only():
    def step(self):
        self.read_only = [memory.readonly for memory in self.messages]

    communicator = Attempt(begin=step)
    with pytest.raises(longspan.CommError):
        call_over(communicator)
    assert communicator.read_only == [True, False]


def test_arrays_over_a_message_that_outlive_the_exchange_are_an_error():
    def hold(self):
        self.arrays = [np.frombuffer(memory, np.uint8) for memory in self.messages]
        self.cycle = self.arrays

    def let_go(self):
        hold(self)
        del self.arrays, self.cycle

    with pytest.raises(longspan.CommError, match="still holds an array over a message's memory after wait"):
        call_over(Attempt(wait=hold))
    with pytest.raises(longspan.CommError, match="no message"):
        call_over(Attempt(wait=let_go))


@pytest.mark.parametrize("break_at", [None, 1])
def test_a_communicator_of_ones_own(break_at):
    """NumPy arrays over a transport written in Python; errors keep what it said."""
    size, tokens = 3, 90
    queues = {(a, b): queue.Queue() for a in range(size) for b in range(size)}
    rng = np.random.default_rng(1)
    q, k, v = (rng.standard_normal((1, tokens, 2, 16), dtype=np.float32) for _ in range(3))
    attention = _longspan.Attention(longspan.longnet([16, 90], [1, 3]), longspan.Options())
    want = longspan.attention(q, k, v, longspan.longnet([16, 90], [1, 3]))
    shards = longspan.Shards.even(tokens, size)
    results, errors = [None] * size, [None] * size

    def run(rank):
        communicator = QueueCommunicator(rank, size, queues, break_at if rank == 1 else None)
        ring = longspan.Ring(attention, communicator, shards, deadline=1.0)
        (start, count), = shards.ranges(rank)
        own = [np.ascontiguousarray(x[:, start : start + count]) for x in (q, k, v)]
        out = np.empty_like(own[0])
        try:
            ring.forward(*own, out)
            results[rank] = (start, count, out)
        except longspan.CommError as error:
            errors[rank] = str(error)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if break_at is None:
        for start, count, out in results:
            assert np.array_equal(out, want[:, start : start + count])
    else:
        assert "rank 1 sent nothing" in errors[0] and "step 1" in errors[0]
        assert "rank 1 sent nothing" in errors[2]
