#!/usr/bin/env python3
"""Writes the tables of README.md from bench/results, so that every number there is a committed one.

    scripts/readme_tables.py           # writes them
    scripts/readme_tables.py --check   # exit 1 if README.md says something else
"""

import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench" / "results"

GPU_ROWS = {
    "dilated_8k": "dilated, 8,192 tokens, 8 heads of 64",
    "dilated_131k": "dilated, 131,072 tokens",
    "dilated_1m": "dilated, 1,048,576 tokens, 12 heads, dilations to 512",
    "dense_16k_d128": "dense, 16,384 tokens, 16 heads of 128",
    "gigapath_10k": "GigaPath's five branches, 10,001 tokens",
}


def gpu_table() -> list[str]:
    rows = {row["name"]: row for row in json.loads((RESULTS / "h200_vs_torch.json").read_text())["rows"]}
    lines = ["| | forward | times faster | forward + backward, times faster |", "|---|---|---|---|"]
    for name, title in GPU_ROWS.items():
        forward, both = rows[name]["forward"], rows[name]["forward_backward"]
        time = f"{forward['longspan']['burst_ms']:.3g} ms"
        if forward["longspan"]["burst_tflops"] > 400:  # small problems wait for launches: their rate says little
            time += f", {forward['longspan']['burst_tflops']:.0f} TFLOP/s"
        lines.append(f"| {title} | {time} | {forward['burst_times_faster']:.1f} | {both['burst_times_faster']:.1f} |")
    return lines


def cpu_table() -> list[str]:
    report = json.loads((RESULTS / "cpu_vs_torch.json").read_text())
    titles = {"dilated": "dilated", "short strands": "segments of 256 and 512", "gigapath": "GigaPath's five branches"}
    lines = ["| | type | forward, full / causal | forward + backward, full / causal |", "|---|---|---|---|"]
    groups: dict[tuple, dict[bool, dict]] = {}
    for row in report["results"]:
        groups.setdefault((row["case"], row["tokens"], row["heads"], row["head_dim"], row["dtype"]), {})[row["causal"]] = row
    for (case, tokens, heads, head_dim, dtype), rows in groups.items():
        ratios = [" / ".join(f"{rows[causal][key]:.2f}" for causal in sorted(rows)) for key in ("forward_ratio", "both_ratio")]
        lines.append(f"| {titles[case]}, {tokens:,} tokens, {heads} heads of {head_dim} | {dtype} | {ratios[0]} | {ratios[1]} |")
    return lines


def main() -> int:
    path = ROOT / "README.md"
    text = written = path.read_text()
    for name, table in {"gpu": gpu_table, "cpu": cpu_table}.items():
        begin, end = f"<!-- {name} table: scripts/readme_tables.py -->\n", f"<!-- end of {name} table -->"
        before, _, rest = written.partition(begin)
        _, found, after = rest.partition(end)
        if not found:
            print(f"README.md lacks the lines {begin.strip()} and {end}", file=sys.stderr)
            return 1
        written = before + begin + "\n".join(table()) + "\n" + end + after
    if "--check" in sys.argv[1:]:
        if written != text:
            print("README.md differs from bench/results: run scripts/readme_tables.py", file=sys.stderr)
        return int(written != text)
    path.write_text(written)
    return 0


if __name__ == "__main__":
    sys.exit(main())
