#!/usr/bin/env python3
"""Checks that #include lines only follow the architecture's arrows; docs/architecture.md has the drawing.

Prints each line that points the other way and exits with 1.
"""
import pathlib
import re
import sys

# Each room, and the rooms it may include besides itself and the public headers. A file belongs to the longest room
# that its path begins with.
FOUNDATION = {"src/util", "src/memory", "src/device", "src/pattern", "src/plan"}
ROOMS = {
    "include": set(),
    "src/util": set(),
    "src/pattern": {"src/util"},
    "src/plan": {"src/pattern", "src/util"},
    "src/device": {"src/memory", "src/util"},
    "src/memory": {"src/util"},
    # kernel.h, which every engine implements, and the lists of kernels, which name every engine.
    "src/kernels": FOUNDATION | {f"src/kernels/{engine}" for engine in ("cpu", "cuda", "hopper", "plain", "reference")},
    "src/kernels/cpu": FOUNDATION | {"src/kernels"},
    "src/kernels/plain": FOUNDATION | {"src/kernels"},
    "src/kernels/reference": FOUNDATION | {"src/kernels"},
    "src/kernels/ptx": set(),
    "src/kernels/cuda": FOUNDATION | {"src/kernels", "src/kernels/ptx"},
    "src/kernels/hopper": FOUNDATION | {"src/kernels", "src/kernels/cuda", "src/kernels/ptx"},
    "src/attention": FOUNDATION | {"src/kernels", "src/kernels/cuda", "src/kernels/plain", "src/kernels/reference"},
    "src/comm": FOUNDATION | {"src/attention"},
    # The command and the Python module see the public headers only, and tools that know nothing of attention.
    "cli": {"src/device", "src/util"},
    "python/src": {"src/util"},
}
INCLUDE_FOLDERS = ("include", "src", "cli", "python/src")
SOURCES = {".h", ".cpp", ".cu", ".cuh"}


def room_of(path: str) -> str:
    return max((room for room in ROOMS if path.startswith(room + "/")), key=len)


def resolve(root: pathlib.Path, source: pathlib.Path, name: str) -> str | None:
    """The repository's file that an include names, or None for one from elsewhere."""
    for folder in (source.parent, *(root / folder for folder in INCLUDE_FOLDERS)):
        found = (folder / name).resolve()
        if found.is_file() and found.is_relative_to(root):
            return found.relative_to(root).as_posix()
    return None


def backward_arrows(root: pathlib.Path):
    for folder in INCLUDE_FOLDERS:
        for source in sorted((root / folder).rglob("*")):
            if source.suffix not in SOURCES:
                continue
            path = source.relative_to(root).as_posix()
            room = room_of(path)
            for number, line in enumerate(source.read_text().splitlines(), 1):
                match = re.match(r'\s*#\s*include\s+["<]([^">]+)[">]', line)
                target = match and resolve(root, source, match[1])
                if target and room_of(target) not in ROOMS[room] | {room, "include"}:
                    yield f"{path}:{number}: {room} must not include {target}"


def main() -> int:
    found = list(backward_arrows(pathlib.Path(__file__).resolve().parent.parent))
    print(*found, sep="\n", end="\n" if found else "")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
