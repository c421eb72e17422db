"""Tables of what options cost, from bench/results/*_cliffs.json and *_decode.json, for readme_tables.py."""

import json
from pathlib import Path

RESULTS = Path(__file__).resolve().parent.parent / "bench" / "results"

#: Columns: the result, the kind of kernels, the type, and the column's title.
COLUMNS = [
    ("h200_cliffs", "hopper", "bf16", "H200, bf16"),
    ("h200_cliffs", "portable", "bf16", "other GPUs, bf16"),
    ("h200_cliffs", "hopper", "f32", "GPUs, f32"),
    ("cpu_cliffs", "cpu", "bf16", "CPU, bf16"),
    ("cpu_cliffs", "cpu", "f32", "CPU, f32"),
]
TITLES = {
    "key_mask": "`key_mask`, 90% of keys at random", "padding": "`key_mask` without the last 10%",
    "lengths": "`lengths` without the last 10%", "alibi": "ALiBi", "dropout": "dropout 0.1",
    "deterministic": "`deterministic`",
}  # fmt: skip


def result(name: str) -> dict | None:
    path = RESULTS / f"{name}.json"
    return json.loads(path.read_text()) if path.exists() else None


def columns() -> list[tuple[str, dict[str, dict]]]:
    """Title and rows by name of each column that has been measured."""
    found = []
    for name, kind, dtype, title in COLUMNS:
        report = result(name)
        rows = {} if report is None else {row["row"]: row for row in report["results"] if (row["kind"], row["problem"]["dtype"]) == (kind, dtype)}
        if rows:
            found.append((title, rows))
    return found


def ratio(value: float) -> str:
    return f"{value:.2f}" if value < 10 else f"{value:.0f}"


def cell(row: dict | None) -> str:
    """Time over the plain call's for each kept pair, forward and forward + backward; the peer's time over ours."""
    if row is None:
        return ""
    steps = [step for step in ("forward", "both") if step in row]
    own = " / ".join(ratio(row[f"{step}_per_pair"]) for step in steps)
    peers = [ratio(row[f"peer_over_ours_{step}"]) if f"peer_over_ours_{step}" in row else "-" for step in steps]
    return f"{own} ({' / '.join(peers)})"


def kernels(rows: dict[str, dict], few_rows: bool) -> str:
    names = dict.fromkeys(name for row in rows.values() if bool(row["rows"]) == few_rows for name in row["kernels"].values())
    return ", ".join(f"`{name}`" for name in names)


def options_table(few_rows: bool = False) -> list[str]:
    """What runs how fast where."""
    made = [(title, rows) for title, rows in columns() if any(bool(row["rows"]) == few_rows for row in rows.values())]
    names = dict.fromkeys(name for _, rows in made for name, row in rows.items() if bool(row["rows"]) == few_rows)
    lines = ["| | " + " | ".join(title for title, _ in made) + " |", "|---" * (len(made) + 1) + "|"]
    lines.append("| kernel | " + " | ".join(kernels(rows, few_rows) for _, rows in made) + " |")
    for name in names:
        title = " + ".join(TITLES.get(part, part) for part in name.split()) if set(name.split()) <= {*TITLES, "causal"} else name
        lines.append(f"| {title} | " + " | ".join(cell(rows.get(name)) for _, rows in made) + " |")
    return lines


def few_rows_table() -> list[str]:
    return options_table(few_rows=True)


def decode_table() -> list[str]:
    """bench/gpu_decode.py: one call of many in a graph."""
    lines = ["| | us | best of PyTorch's, us | ours over it | TB/s |", "|---|---|---|---|---|"]
    for row in (result("h200_decode") or {"rows": []})["rows"]:
        times = dict(row["graph_us"])
        own = times.pop("longspan")
        peer = min(times.values()) if times else None
        cells = [f"{own:.1f}", f"{peer:.1f}" if peer else "", f"{own / peer:.2f}" if peer else ""]
        speed = f"{row['terabytes_per_second']:.2f}" if "terabytes_per_second" in row else ""
        lines.append(f"| {row['name']} | {' | '.join(cells)} | {speed} |")
    return lines


def token_table() -> list[str]:
    """A token through DilatedCache, and tokens a second of the language model."""
    report = result("h200_decode") or {}
    lines = ["| | eager | as a graph |", "|---|---|---|"]
    for row in report.get("tokens", []):
        lines.append(f"| {row['name']} | {row['eager_us']:.0f} us | {row['graph_us']:.0f} us |")
    for row in report.get("generate", []):
        rates = [row.get(f"{kind}_tokens_per_second") for kind in ("eager", "graph")]
        cells = " | ".join(f"{rate:.0f} tokens/s" if rate else "" for rate in rates)
        lines.append(f"| {row['whose']}, {row['context']:,} tokens before | {cells} |")
    return lines
