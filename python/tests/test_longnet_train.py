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


@pytest.fixture
def example():
    specification = importlib.util.spec_from_file_location("train_lm", SCRIPT)
    module = importlib.util.module_from_spec(specification)
    sys.modules["train_lm"] = module  # dataclasses look their module up
    specification.loader.exec_module(module)
    return module


@pytest.fixture
def arguments():
    return argparse.Namespace(context=64, width=16, layers=1, heads=2, batch=1, seed=0, dropout=0.0, device="cpu",
                              gradient_checkpointing=False)  # fmt: skip


@pytest.fixture
def trained(example, arguments):
    """A model and its optimizer after a step."""
    model = example.make_model(arguments, example.Place())
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.zeros(1, 8, dtype=torch.int64)).sum().backward()
    optimizer.step()
    return model, optimizer


def test_a_checkpoint_of_another_shape_is_refused_by_name(example, arguments, trained, tmp_path):
    model, optimizer = trained
    file = tmp_path / "checkpoint.safetensors"
    example.save(file, 7, model, optimizer, arguments, example.Place())
    assert os.listdir(tmp_path) == [file.name]

    again = example.make_model(arguments, example.Place())
    fresh = torch.optim.AdamW(again.parameters())
    step, tensors = example.read_newest(file, arguments, example.Place())
    assert step == 7
    example.load_model(again, tensors)
    example.load_optimizer(again, fresh, tensors)
    assert all(map(torch.equal, model.parameters(), again.parameters()))
    for old, new in zip(optimizer.state_dict()["state"].values(), fresh.state_dict()["state"].values()):
        assert all(torch.equal(old[key], new[key]) for key in old)
    arguments.width = 32
    with pytest.raises(SystemExit, match="--width 16, this run has 32"):
        example.read_newest(file, arguments, example.Place())


def flipped(data: bytes, at: int) -> bytes:
    at %= len(data)
    return data[:at] + bytes([data[at] ^ 4]) + data[at + 1 :]


def with_metadata(data: bytes, old: bytes, new: bytes) -> bytes:
    assert data.count(old) == 1 and len(old) == len(new)
    return data.replace(old, new)


DAMAGE = {
    "a payload byte flipped": lambda data: flipped(data, len(data) - 1000),
    "the last byte flipped": lambda data: flipped(data, len(data) - 1),
    "payload zeroed": lambda data: data[:-5000] + bytes(5000),
    "a header byte flipped": lambda data: flipped(data, 100),
    "header length overwritten": lambda data: b"\xff" * 8 + data[8:],
    "another step": lambda data: with_metadata(data, b'"step":"2"', b'"step":"9"'),
    "another seed": lambda data: with_metadata(data, b'"seed\\": 0', b'"seed\\": 1'),
    "checksum renamed": lambda data: with_metadata(data, b'"checksum"', b'"checksun"'),
    "truncated": lambda data: data[: len(data) // 2],
    "a byte short": lambda data: data[:-1],
    "a byte long": lambda data: data + b"x",
    "empty": lambda data: b"",
    "other text": lambda data: b"not a checkpoint\n" * 10,
}


def test_a_damaged_checkpoint_is_named_and_the_one_before_it_used(example, arguments, trained, tmp_path, capsys):
    place, file = example.Place(), tmp_path / "checkpoint.safetensors"
    assert example.read_newest(file, arguments, place) == (0, {})
    for step in (1, 2):
        example.save(file, step, *trained, arguments, place)
    whole = {path: path.read_bytes() for path in (file, example.before(file))}
    for damage in DAMAGE.values():
        file.write_bytes(damage(whole[file]))
        step, tensors = example.read_newest(file, arguments, place)
        assert step == 1 and tensors
        said = capsys.readouterr().out
        assert f"{file} is damaged" in said and f"going on from {example.before(file)}" in said
    # What was found damaged does not take the place of the whole one before.
    example.save(file, 3, *trained, arguments, place)
    assert example.read_newest(file, arguments, place)[0] == 3
    assert example.before(file).read_bytes() == whole[example.before(file)]
    example.save(file, 4, *trained, arguments, place)
    file.unlink()  # killed between two renames
    assert example.read_newest(file, arguments, place)[0] == 3
    assert capsys.readouterr().out == ""


def test_folders_in_the_place_of_files_are_named(example, arguments, tmp_path):
    arguments.data, arguments.context, place = tmp_path, 64, example.Place()
    with pytest.raises(SystemExit, match=f"--data {tmp_path} is a folder: give a file"):
        example.train(arguments, place)
    arguments.data = tmp_path / "missing"
    with pytest.raises(SystemExit, match="is not there: give a file"):
        example.train(arguments, place)
    for name in ("checkpoint.safetensors", "checkpoint.before.safetensors"):
        folder = tmp_path / name
        folder.mkdir()
        with pytest.raises(SystemExit, match=f"{folder} is a folder, .*another --out"):
            example.read_newest(tmp_path / "checkpoint.safetensors", arguments, place)
        folder.rmdir()
    (tmp_path / "out").write_text("")
    with pytest.raises(SystemExit, match="out is a file: give a folder"):
        example.read_newest(tmp_path / "out" / "checkpoint.safetensors", arguments, place)


def test_where_every_checkpoint_is_damaged_all_are_named(example, arguments, trained, tmp_path):
    place, file = example.Place(), tmp_path / "checkpoint.safetensors"
    example.save(file, 1, *trained, arguments, place)
    one = file.read_bytes()
    for others in ([], [example.before(file)]):
        for path in (file, *others):
            path.write_bytes(flipped(one, len(one) - 8))
        with pytest.raises(SystemExit) as error:
            example.read_newest(file, arguments, place)
        assert "no checkpoint is whole" in str(error.value)
        assert all(str(path) in str(error.value) for path in (file, *others))


def test_a_run_goes_on_from_the_checkpoint_before_a_damaged_one_with_the_same_losses(text, one_process, tmp_path):
    command = [*FOUR[:-1], "2", str(SCRIPT), "--data", text, *SMALL, "--sample", "0", "--out", str(tmp_path), "--steps"]
    run(*command, "4", "--save-every", "2")
    file = tmp_path / "checkpoint.safetensors"
    file.write_bytes(flipped(file.read_bytes(), -1000))
    output = run(*command, "6", "--save-every", "2")
    assert f"{file} is damaged" in output
    expect_close(losses(output), {step: loss for step, loss in one_process.items() if step > 2})
