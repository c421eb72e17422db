#!/usr/bin/env python3
"""Writes what linking against an older glibc takes: start files, and shared libraries that have its symbols and nothing
behind them. They come from the package ziglang of PyPI, which has the symbols of every glibc since 2.0.

    python scripts/glibc_stubs.py x86_64 2.17 build/glibc-2.17
"""
import os
import pathlib
import re
import shlex
import shutil
import subprocess
import sys
import tempfile


def zig_link_line(processor: str, glibc: str, folder: pathlib.Path) -> list[str]:
    """How zig would link an empty program, which makes it compile the stubs."""
    source = folder / "empty.c"
    source.write_text("int main(void) { return 0; }\n")
    command = [sys.executable, "-m", "ziglang", "build-exe", "-target", f"{processor}-linux-gnu.{glibc}", "-lc", str(source),
               f"-femit-bin={folder / 'empty'}", "--verbose-link"]
    caches = {"ZIG_GLOBAL_CACHE_DIR": str(folder / "global"), "ZIG_LOCAL_CACHE_DIR": str(folder / "local")}
    done = subprocess.run(command, env=os.environ | caches, capture_output=True, text=True)
    lines = [line for line in done.stderr.splitlines() if line.startswith("ld.lld") and "Scrt1.o" in line]
    if done.returncode or not lines:
        sys.exit(f"glibc_stubs.py: {shlex.join(command)} failed:\n{done.stderr}")
    return shlex.split(lines[-1])


def write_stubs(line: list[str], out: pathlib.Path) -> None:
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    loader = pathlib.Path(line[line.index("-dynamic-linker") + 1]).name
    shared = []
    for path in map(pathlib.Path, line):
        name = path.name
        if re.fullmatch(r"S?crt\w+\.o|libc_nonshared\.a", name):
            shutil.copy(path, out)
        elif re.fullmatch(r"lib\w+\.so\.\d+", name):
            name = loader if name.startswith("libld.") else name
            shutil.copy(path, out / name)
            shared.append(name)
    shutil.copy(out / "Scrt1.o", out / "crt1.o")
    for name in shared:
        if name not in (loader, "libc.so.6"):
            (out / name.split(".so")[0]).with_suffix(".so").symlink_to(name)
    (out / "libc.so").write_text(f"GROUP({out}/libc.so.6 {out}/libc_nonshared.a AS_NEEDED({out}/{loader}))\n")


def main() -> None:
    if len(sys.argv) != 4:
        sys.exit(__doc__)
    processor, glibc, out = sys.argv[1:]
    with tempfile.TemporaryDirectory() as folder:
        write_stubs(zig_link_line(processor, glibc, pathlib.Path(folder)), pathlib.Path(out).resolve())


if __name__ == "__main__":
    main()
