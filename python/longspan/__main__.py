"""python -m longspan: the longspan command that came with the package."""

from __future__ import annotations

import os
import sys
from pathlib import Path


def main() -> None:
    """Becomes the command, so that signals, pipes and exit codes are its own."""
    command = Path(__file__).parent / "bin" / "longspan"
    if not command.is_file():
        sys.exit("longspan: this installation came without the command; build it with cmake --preset release")
    os.execv(command, ["longspan", *sys.argv[1:]])


if __name__ == "__main__":
    main()
