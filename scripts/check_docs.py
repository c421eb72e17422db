#!/usr/bin/env python3
"""Checks what the pages of the repository name: files exist, links lead somewhere, tables of results are those of
bench/results, lines wrap at 120.

Prints each line that is wrong and exits with 1.
"""
import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
#: A path in backquotes that begins with one of these names a file or folder of the repository.
FOLDERS = ("include/", "src/", "cli/", "python/", "tests/", "bench/", "scripts/", "docs/", "examples/", "cmake/")
WIDTH = 120


def pages() -> list[pathlib.Path]:
    return [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")] + sorted((ROOT / "docs").glob("*.md"))


def named_files(line: str):
    """Paths in backquotes, without placeholders, command lines and what is built."""
    for text in re.findall(r"`([^`]+)`", line):
        if text.startswith(FOLDERS) and re.fullmatch(r"[\w./-]+", text):
            yield text


def exists(path: str) -> bool:
    return (ROOT / path).exists() or any(ROOT.glob(path + ".*"))


def problems(page: pathlib.Path):
    where, code = page.relative_to(ROOT), False
    for number, line in enumerate(page.read_text().splitlines(), 1):
        code ^= line.startswith("```")
        for path in named_files(line):
            if not exists(path):
                yield f"{where}:{number}: there is no {path}"
        for target in re.findall(r"\]\(([^)#\s]+)", line):
            if not code and "://" not in target and not (page.parent / target).exists():
                yield f"{where}:{number}: the link to {target} leads nowhere"
        wraps = not (code or line.startswith(("|", "    ", "!")) or "://" in line)
        if wraps and len(line) > WIDTH:
            yield f"{where}:{number}: {len(line)} columns"


def main() -> int:
    found = [problem for page in pages() for problem in problems(page)]
    print(*found, sep="\n", end="\n" if found else "")
    tables = subprocess.run([sys.executable, str(ROOT / "scripts" / "readme_tables.py"), "--check"])
    return 1 if found or tables.returncode else 0


if __name__ == "__main__":
    sys.exit(main())
