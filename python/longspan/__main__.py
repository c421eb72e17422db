"""python -m longspan: the longspan command that came with the package."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path


def main() -> None:
    """Becomes the command, so that signals, pipes and exit codes are its own. `doctor` looks at the packages first."""
    command = Path(__file__).parent / "bin" / "longspan"
    if not command.is_file():
        sys.exit("longspan: this installation came without the command; build it with cmake --preset release")
    arguments = sys.argv[1:]
    problems = list(package_problems()) if arguments[:1] == ["doctor"] else []
    for problem in problems:
        print(f"longspan: {problem}", file=sys.stderr)
    if problems:
        sys.exit(subprocess.run([str(command), *arguments]).returncode or 1)
    os.execv(command, ["longspan", *arguments])


def package_problems() -> Iterator[str]:
    """What is wrong with the Python packages here, each with the line that mends it."""
    names = ("longspan", "longspan-cpu")
    copies = [d for d in metadata.distributions() if (d.metadata["Name"] or "").lower().replace("_", "-") in names]
    if len(copies) > 1:
        found = ", ".join(f"{copy.metadata['Name']} {copy.version}" for copy in copies)
        yield f"{len(copies)} copies are installed ({found}): pip uninstall -y longspan longspan-cpu, then install one"
    try:
        torch = metadata.version("torch")
    except metadata.PackageNotFoundError:
        return
    if tuple(map(int, torch.split("+")[0].split(".")[:2])) < (2, 4):
        yield f"longspan.torch needs torch 2.4 or later, found {torch}: pip install --upgrade torch"


if __name__ == "__main__":
    main()
