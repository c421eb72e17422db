"""Life in a real process: Ctrl-C, fork, threads, a missing or old torch, the command."""

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import numpy as np
import pytest

import longspan


def run_python(code: str, *, timeout: float = 60, **options) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=timeout, **options
    )


LONG_CALLS = {
    "forward": "longspan.attention(q, q, q, pattern)",
    "backward": "longspan.attention_backward(q, q, q, q, lse, q, pattern)",
    "torch": "lt.attention(x, x, x, pattern)",
    "torch ring": "lt.RingDilatedAttention([8192], [1], ring_size=3)(x, x, x)",
}


@pytest.mark.parametrize("call", LONG_CALLS)
def test_ctrl_c_stops_a_long_call_and_the_process_stays_usable(call):
    if call.startswith("torch"):
        pytest.importorskip("torch")
    code = f"""
        import signal
        import time
        import numpy as np
        import longspan
        signal.signal(signal.SIGINT, signal.default_int_handler)  # shells make what runs behind them ignore it
        if {call.startswith("torch")}:
            import torch
            import longspan.torch as lt
            x = torch.zeros(1, 1 << 19, 8, 64)
        pattern = longspan.dilated([8192], [1])
        q = np.zeros((1, 1 << 19, 8, 64), np.float32)
        lse = np.zeros((1, 8, 1 << 19), np.float32)
        print("ready", flush=True)
        try:
            {LONG_CALLS[call]}
            print("finished")
        except KeyboardInterrupt:
            print("interrupted", time.time(), flush=True)
        print(longspan.attention(q[:, :8], q[:, :8], q[:, :8]).shape)
    """
    process = subprocess.Popen([sys.executable, "-c", textwrap.dedent(code)], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout.readline() == "ready\n"
        time.sleep(1.0)  # well inside a call of half a minute at least
        sent = time.time()
        process.send_signal(signal.SIGINT)
        out, _ = process.communicate(timeout=30)
    finally:
        process.kill()
    words = out.split()
    assert words[0] == "interrupted", out
    assert float(words[1]) - sent < 1.0
    assert "(1, 8, 8, 64)" in out and process.returncode == 0


@pytest.mark.parametrize("end", ["", "dist.destroy_process_group()"])
def test_ctrl_c_ends_the_wait_for_a_rank_that_stays_silent(end, tmp_path):
    pytest.importorskip("torch")
    code = f"""
        import signal
        import sys
        import torch
        import torch.distributed as dist
        import longspan.torch as lt
        signal.signal(signal.SIGINT, signal.default_int_handler)
        rank = int(sys.argv[1])
        dist.init_process_group("gloo", init_method="file://{tmp_path}/meeting", rank=rank, world_size=2)
        x = torch.zeros(1, 8, 2, 8)
        module = lt.RingDilatedAttention([16], [1], deadline=1000, shard_lengths=[8, 8])
        module(x, x, x)
        print("ready", flush=True)
        if rank == 1:
            signal.pause()
        try:
            module(x, x, x)
        except KeyboardInterrupt:
            print("interrupted", flush=True)
        {end}
    """
    ranks = [
        subprocess.Popen([sys.executable, "-c", textwrap.dedent(code), str(rank)], stdout=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    try:
        assert [rank.stdout.readline() for rank in ranks] == ["ready\n"] * 2
        time.sleep(0.5)  # well inside the wait
        ranks[0].send_signal(signal.SIGINT)
        assert ranks[0].communicate(timeout=60)[0] == "interrupted\n"  # the deadline is far beyond
        assert ranks[0].returncode == 0
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()


def test_several_python_threads():
    rng = np.random.default_rng(0)
    inputs = [rng.standard_normal((1, 200 + 10 * i, 4, 16)).astype(np.float32) for i in range(8)]
    pattern = longspan.dilated([64, 128], [1, 2])
    expected = [longspan.attention(x, x, x, pattern, causal=True) for x in inputs]
    failures = []

    def work(index):
        for _ in range(20):
            if not np.array_equal(longspan.attention(*[inputs[index]] * 3, pattern, causal=True), expected[index]):
                failures.append(index)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(inputs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert not failures and not any(thread.is_alive() for thread in threads)


def test_other_threads_run_while_a_kernel_does():
    q = np.zeros((1, 2048, 8, 64), np.float32)
    done = threading.Event()

    def work():
        while not stop.is_set():
            longspan.attention(q, q, q)
        done.set()

    stop = threading.Event()
    thread = threading.Thread(target=work)
    thread.start()
    ticks, end = 0, time.time() + 0.5
    while time.time() < end:
        ticks += 1
        time.sleep(0.001)
    stop.set()
    assert done.wait(60)
    thread.join()
    assert ticks > 20  # with the lock held there would be one tick for each call


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_forked_children_compute():
    q = np.random.default_rng(0).standard_normal((1, 300, 4, 16)).astype(np.float32)
    expected = longspan.attention(q, q, q)  # the parent's threads exist before the fork
    children = []
    for _ in range(3):
        child = os.fork()
        if child == 0:
            ok = np.array_equal(longspan.attention(q, q, q), expected)
            os._exit(0 if ok else 1)
        children.append(child)
    deadline = time.time() + 60
    for child in children:
        while True:
            ended, status = os.waitpid(child, os.WNOHANG)
            if ended:
                break
            assert time.time() < deadline, "a forked child hangs"
            time.sleep(0.01)
        assert os.waitstatus_to_exitcode(status) == 0
    assert np.array_equal(longspan.attention(q, q, q), expected)


def test_data_loader_workers():
    torch = pytest.importorskip("torch")
    import longspan.torch as lt

    module = lt.MultiheadDilatedAttention(16, 4, [1, 2], [8, 16]).eval()

    class Rows(torch.utils.data.Dataset):
        def __len__(self):
            return 6

        def __getitem__(self, index):
            with torch.no_grad():
                return module(torch.full((1, 20, 16), float(index)))[0][0]

    here = [Rows()[i] for i in range(6)]
    there = list(torch.utils.data.DataLoader(Rows(), num_workers=2, batch_size=None, timeout=60))
    for mine, theirs in zip(here, there):
        torch.testing.assert_close(mine, theirs)


BLOCK_TORCH = """
    import sys
    sys.modules["torch"] = None     # as if it were not installed
"""


def test_import_without_torch():
    result = run_python(
        BLOCK_TORCH
        + """
    import numpy as np
    import longspan
    x = np.zeros((1, 4, 1, 8), np.float32)
    assert longspan.attention(x, x, x).shape == x.shape
    for module in ("longspan.torch", "longspan.torchscale"):
        try:
            __import__(module)
        except ModuleNotFoundError as error:
            print(error)
    """
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("pip install 'longspan[torch]'") == 2


def test_old_torch_is_named(tmp_path):
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("__version__ = '2.1.0+cpu'\n")
    result = run_python(
        f"""
        import sys
        sys.path.insert(0, {str(tmp_path)!r})
        import longspan
        try:
            import longspan.torch
        except ImportError as error:
            print(error)
        """
    )
    assert result.returncode == 0, result.stderr
    assert "needs PyTorch 2.4 or later" in result.stdout and "found 2.1.0+cpu" in result.stdout


def test_import_does_not_bring_torch_in():
    result = run_python("import sys, longspan; print('torch' in sys.modules)")
    assert result.stdout == "False\n", result.stderr


def test_the_command():
    if not (Path(longspan.__file__).parent / "bin" / "longspan").exists():
        pytest.skip("installed without the command")
    result = subprocess.run([sys.executable, "-m", "longspan", "--version"], capture_output=True, text=True, timeout=60)
    assert result.returncode == 0 and longspan.__version__ in result.stdout
    wrong = subprocess.run([sys.executable, "-m", "longspan", "nonsense"], capture_output=True, text=True, timeout=60)
    assert wrong.returncode == 2


def test_process_exits_quietly():
    result = run_python(
        """
        import longspan, numpy as np
        x = np.zeros((1, 4, 1, 8), np.float32)
        plan = longspan.plan(tokens=4, heads=1, head_dim=8)
        longspan.attention(x, x, x)
        """
    )
    assert result.returncode == 0 and result.stderr == ""


@pytest.mark.skipif(bool(longspan.info()["gpus"]), reason="there is a GPU here")
def test_benchmarks_say_what_a_gpu_needs():
    pytest.importorskip("torch")
    command = [sys.executable, "-m", "longspan.bench", "encoder", "--device", "cuda"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert result.returncode == 2 and longspan.info()["why_no_gpu"] in result.stderr


def test_long_texts_are_cut_between_characters():
    """Errors show the beginning of long patterns; half a character there would be no text."""
    for before in range(110, 125):
        text = "x" * before + "ä字🏖" * 20
        with pytest.raises(longspan.InvalidArgument) as error:
            longspan.Pattern.parse(text)
        shown = str(error.value).split("'")[1]
        assert shown.endswith("...") and text.startswith(shown[:-3]) and len(shown.encode()) >= 116
