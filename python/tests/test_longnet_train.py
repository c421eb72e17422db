"""The training example: killed and resumed it goes on with the same losses, and four processes have those of one."""

import argparse
import importlib.util
import os
import random
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("safetensors")

SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "train_lm.py"
SMALL = ["--context", "64", "--width", "32", "--layers", "1", "--batch", "2"]
ALONE = {**os.environ, "OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    file = tmp_path_factory.mktemp("data") / "text"
    file.write_text("".join(f"{number} squared is {number * number}. " for number in range(400)))
    return str(file)


def losses(output: str) -> dict[int, str]:
    return {int(step): loss for step, loss in re.findall(r"step (\d+)/\d+  loss (\S+)", output)}


def run(*command: str) -> str:
    result = subprocess.run([sys.executable, *command], capture_output=True, text=True, timeout=200, env=ALONE)
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_killed_at_any_moment_it_resumes_with_the_same_losses(text, tmp_path):
    command = [str(SCRIPT), "--data", text, *SMALL, "--steps", "40", "--dropout", "0.1", "--gradient-checkpointing"]
    whole = run(*command, "--sample", "20")
    wanted = losses(whole)
    assert len(wanted) == 40 and float(wanted[40]) < float(wanted[1]) - 1
    assert "\nThe " in whole  # generated

    command += ["--sample", "0", "--save-every", "1", "--out", str(tmp_path)]
    process = subprocess.Popen([sys.executable, *command], stdout=subprocess.PIPE, text=True, env=ALONE)
    last = random.randint(3, 30)
    seen = ""
    for line in process.stdout:
        seen += line
        if max(losses(seen), default=0) >= last:
            break
    process.send_signal(signal.SIGKILL)
    seen += process.stdout.read()
    process.wait()
    before = losses(seen)
    after = losses(run(*command))
    assert min(after) in (max(before), max(before) + 1)  # at most the step whose checkpoint was being written
    assert {**before, **after} == wanted


FOUR = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"]


def expect_close(got: dict[int, str], wanted: dict[int, str]) -> None:
    assert got.keys() == wanted.keys()
    for step, loss in wanted.items():
        assert float(got[step]) == pytest.approx(float(loss), abs=2e-5)


@pytest.fixture(scope="module")
def one_process(text):
    return losses(run(str(SCRIPT), "--data", text, *SMALL, "--steps", "6", "--sample", "0"))


@pytest.mark.parametrize("how", [["--ring", "2"], ["--ring", "2", "--shard"], ["--shard"]], ids=" ".join)
def test_four_processes_have_the_losses_of_one(text, one_process, how):
    command = [str(SCRIPT), "--data", text, *SMALL, "--steps", "6", "--sample", "0", *how]
    expect_close(losses(run(*FOUR, *command)), one_process)


def test_a_checkpoint_goes_on_with_any_number_of_processes(text, one_process, tmp_path):
    command = [str(SCRIPT), "--data", text, *SMALL, "--sample", "0", "--out", str(tmp_path), "--steps"]
    sharded = ["--ring", "2", "--shard"]
    curve = {**losses(run(*FOUR, *command, "2", *sharded)), **losses(run(*command, "4"))}
    curve |= losses(run(*FOUR, *command, "6", *sharded))
    expect_close(curve, one_process)


def test_a_checkpoint_of_another_shape_is_refused_by_name(tmp_path):
    specification = importlib.util.spec_from_file_location("train_lm", SCRIPT)
    example = importlib.util.module_from_spec(specification)
    sys.modules["train_lm"] = example  # dataclasses look their module up
    specification.loader.exec_module(example)
    arguments = argparse.Namespace(context=64, width=16, layers=1, heads=2, batch=1, seed=0, dropout=0.0, device="cpu",
                                   gradient_checkpointing=False)  # fmt: skip
    place = example.Place()
    model = example.make_model(arguments, place)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.zeros(1, 8, dtype=torch.int64)).sum().backward()
    optimizer.step()
    file = tmp_path / "checkpoint.safetensors"
    example.save(file, 7, model, optimizer, arguments, place)
    assert os.listdir(tmp_path) == [file.name]

    again = example.make_model(arguments, place)
    fresh = torch.optim.AdamW(again.parameters())
    step, tensors = example.read(file, arguments)
    assert step == 7
    example.load_model(again, tensors)
    example.load_optimizer(again, fresh, tensors)
    assert all(map(torch.equal, model.parameters(), again.parameters()))
    for old, new in zip(optimizer.state_dict()["state"].values(), fresh.state_dict()["state"].values()):
        assert all(torch.equal(old[key], new[key]) for key in old)
    arguments.width = 32
    with pytest.raises(SystemExit, match="--width 16, this run has 32"):
        example.read(file, arguments)
