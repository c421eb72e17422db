"""Exported programs run in C++: LONGSPAN_TORCH_LIBRARY=folder of a build with -DLONGSPAN_LIBTORCH that has
liblongspan_torch.so and longspan_run_program."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

import longspan.torch as lt
from longspan._arguments import SCHEMA

FOLDER = os.environ.get("LONGSPAN_TORCH_LIBRARY")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not FOLDER, reason="set LONGSPAN_TORCH_LIBRARY to the folder of liblongspan_torch.so"),
]


def library():
    return next(Path(FOLDER).rglob("liblongspan_torch.so"))


def test_schemas_are_those_of_python():
    """In a process of its own: a schema can be defined once."""
    code = f"""
import torch
torch.ops.load_library({str(library())!r})
print(*[getattr(torch.ops.longspan, name).default._schema for name in
        ("attention", "attention_backward", "stacked_attention", "strand_linear")], sep="\\n")
"""
    found = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.split("\n")
    names = ("attention", "attention_backward", "stacked_attention", "strand_linear")
    assert found[:4] == [str(getattr(torch.ops.longspan, name).default._schema) for name in names]
    assert SCHEMA in found[0]


def modules():
    torch.manual_seed(0)
    yield "dilated", lt.DilatedAttention([16, 32], [1, 2]), [torch.randn(2, 50, 4, 8) for _ in range(3)]
    yield "layer", lt.DilatedTransformerEncoderLayer(32, 4, [16, 32], [1, 2]), [torch.randn(2, 50, 32)]
    yield "projected", lt.MultiheadDilatedAttention(32, 4, [1, 2], [1024, 4096]), [torch.randn(1, 4096, 32)]


@pytest.mark.parametrize("name, module, inputs", list(modules()))
def test_an_exported_program_runs_in_cpp(name, module, inputs, tmp_path):
    module.eval()
    with torch.no_grad():
        wanted = module(*inputs)
        wanted = wanted[0] if isinstance(wanted, tuple) else wanted
        program = torch.export.export(module, tuple(inputs))
        package = torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "program.pt2"))
    paths = [tmp_path / f"input{i}.pt" for i in range(len(inputs))]
    for path, x in zip(paths, inputs):
        torch.save(x, path)
    runner = next(Path(FOLDER).rglob("longspan_run_program"))
    libraries = str(Path(torch.__file__).parent / "lib")
    subprocess.run(
        [runner, library(), package, *paths, tmp_path / "out.pt"], check=True, env={"LD_LIBRARY_PATH": libraries}
    )
    assert torch.allclose(torch.load(tmp_path / "out.pt"), wanted, atol=1e-5)
