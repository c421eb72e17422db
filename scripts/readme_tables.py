#!/usr/bin/env python3
"""Writes the tables of README.md and docs from bench/results, so that every number there is a committed one.

    scripts/readme_tables.py           # writes them
    scripts/readme_tables.py --check   # exit 1 if a page says something else

Rows that a result does not have are left out.
"""

import json
import sys
from pathlib import Path

from option_tables import decode_table, few_rows_table, options_table, token_table

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench" / "results"


def result(name: str) -> dict:
    return json.loads((RESULTS / f"{name}.json").read_text())


GPU_ROWS = {
    "dilated_8k": "dilated, 8,192 tokens, 8 heads of 64",
    "dilated_131k": "dilated, 131,072 tokens",
    "dilated_1m": "dilated, 1,048,576 tokens, 12 heads, dilations to 512",
    "dense_16k_d128": "dense, 16,384 tokens, 16 heads of 128",
    "gigapath_10k": "GigaPath's five branches, 10,001 tokens",
}


def faster(times: dict, kind: str = "burst", ending: str = "", digits: int = 1) -> str:
    """How many times faster the call from Python is and, where it was measured, the engine alone."""
    keys = [f"{kind}_{label}times_faster{ending}" for label in ("", "engine_")]
    return " / ".join(f"{times[key]:.{digits}f}" for key in keys if key in times)


def gpu_table() -> list[str]:
    rows = {row["name"]: row for row in result("h200_vs_torch")["rows"]}
    lines = [
        "| call from Python / engine alone | forward | times faster | forward + backward, times faster |",
        "|---|---|---|---|",
    ]
    for name, title in GPU_ROWS.items():
        forward, both = rows[name]["forward"], rows[name]["forward_backward"]
        ours = [forward[who] for who in ("longspan", "engine") if who in forward]
        time = " / ".join(f"{one['burst_ms']:#.3g}" for one in ours) + " ms"
        if ours[-1]["burst_tflops"] > 400:  # small problems wait for launches: their rate says little
            time += f", {ours[-1]['burst_tflops']:.0f} TFLOP/s"
        lines.append(f"| {title} | {time} | {faster(forward)} | {faster(both)} |")
    return lines


def cpu_table() -> list[str]:
    report = result("cpu_vs_torch")
    titles = {"dilated": "dilated", "short strands": "segments of 256 and 512", "gigapath": "GigaPath's five branches"}
    lines = ["| | type | forward, full / causal | forward + backward, full / causal |", "|---|---|---|---|"]
    groups: dict[tuple, dict[bool, dict]] = {}
    for row in report["results"]:
        groups.setdefault((row["case"], row["tokens"], row["heads"], row["head_dim"], row["dtype"]), {})[row["causal"]] = row
    for (case, tokens, heads, head_dim, dtype), rows in groups.items():
        ratios = [" / ".join(f"{rows[causal][key]:.2f}" for causal in sorted(rows)) for key in ("forward_ratio", "both_ratio")]
        lines.append(f"| {titles[case]}, {tokens:,} tokens, {heads} heads of {head_dim} | {dtype} | {ratios[0]} | {ratios[1]} |")
    return lines


#: Workloads of longspan_gpu_bench: full and causal, where both are measured; the unit.
HOPPER_ROWS = [
    ("dense 16k d64, full / causal", ("dense16k_d64", "dense16k_d64_causal"), "tflops"),
    ("dense 16k d128", ("dense16k_d128", "dense16k_d128_causal"), "tflops"),
    ("dense 16k d192", ("dense16k_d192", "dense16k_d192_causal"), "tflops"),
    ("dense 16k d256", ("dense16k_d256", "dense16k_d256_causal"), "tflops"),
    ("131k d64, segments 2048, 4096, 8192, dilations 1, 2, 4", ("seed131k", "seed131k_causal"), "tflops"),
    ("131k d128, segments 8192 to 65536, dilations 1 to 8", ("wide131k", "wide131k_causal"), "tflops"),
    ("1M, 12 heads, dilations to 512", ("million", "million_causal"), "tflops"),
    ("strands of 64 / 128 rows, full", ("strand64", "strand128"), "tflops"),
    ("strands of 256 / 512 / 1,024 rows, full", ("strand256", "strand512", "strand1024"), "tflops"),
    ("512 strands of 2,048 rows, dilations 1 / 2 / 4 / 8, zeros included",
     ("dilation1", "dilation2", "dilation4", "dilation8"), "tflops"),
    ("the same rows 1 / 4 / 16 / 64 apart as tensors that have no others: no zeros",
     ("apart1", "apart4", "apart16", "apart64"), "tflops"),
    ("all heads, 3 branches, 65k d64", ("merged65k_d64",), "tflops"),
    ("GigaPath, float16, 10,001 / 65,536 tokens, ms", ("slide10k", "slide65k"), "ms"),
]  # fmt: skip
CUDA_ROWS = [
    ("dense, 16,384 tokens, 16 heads of 64 / causal", ("dense16k_d64", "dense16k_d64_causal")),
    ("dense, 16,384 tokens, 16 heads of 128 / causal", ("dense16k_d128", "dense16k_d128_causal")),
    ("dilated, 131,072 tokens, 8 heads of 64 / causal", ("seed131k", "seed131k_causal")),
    ("dilated, 8,192 tokens, 8 heads of 64 / causal", ("seed8k", "seed8k_causal")),
    ("dilated, 131,072 tokens, 16 heads of 128 / causal", ("wide131k", "wide131k_causal")),
    ("LongNet on all heads, 10,001 tokens, 16 heads of 48, float16", ("slide10k",)),
    ("dense, 16,384 tokens, 16 heads of 64, `deterministic`", ("dense16k_d64_deterministic",)),
    ("dense, 4,096 tokens, 8 heads of 64, exact float32", ("dense4k_f32",)),
    ("the same with `allow_tf32`", ("dense4k_tf32",)),
]
PEER_ROWS = [
    ("dense 16k d64", "dense_16k_d64"),
    ("dense 16k d128", "dense_16k_d128"),
    ("dilated 8k", "dilated_8k"),
    ("dilated 32k", "dilated_32k"),
    ("dilated 131k", "dilated_131k"),
    ("dilated 131k d128", "dilated_131k_d128"),
    ("dilated 1M", "dilated_1m"),
    ("GigaPath 10k", "gigapath_10k"),
    ("GigaPath 65k", "gigapath_65k"),
]


def workloads(name: str) -> dict[str, dict]:
    return {work["workload"]: work for work in result(name)["workloads"]}


def told(works: dict[str, dict], names: tuple[str, ...], field: str) -> str:
    digits = 3 if field.endswith("ms") else 0
    return " / ".join(f"{works[name][field]:.{digits}f}" for name in names if name in works)


def hopper_table() -> list[str]:
    chosen, portable = workloads("h200_hopper"), workloads("h200_cuda")
    lines = ["| TFLOP/s, unless named | burst | sustained | `cuda-mma`, burst |", "|---|---|---|---|"]
    for title, names, unit in HOPPER_ROWS:
        if all(name in chosen for name in names):
            fields = [told(chosen, names, f"forward_burst_{unit}"), told(chosen, names, f"forward_{unit}")]
            lines.append(f"| {title} | {' | '.join(fields)} | {told(portable, names, f'forward_burst_{unit}')} |")
    return lines


def profile_table() -> list[str]:
    lines = ["| percent of the peak | tensor pipe | issue slots | DRAM | L2 | GHz |", "|---|---|---|---|---|---|"]
    for name, facts in result("h200_hopper")["profile"].items():
        fields = ("tensor_pipe_percent", "issue_slots_percent", "dram_percent", "l2_percent")
        values = " | ".join(f"{facts[field]:.0f}" for field in fields)
        lines.append(f"| {name} | {values} | {facts['gigahertz']:.2f} |")
    return lines


#: Backwards: full and causal.
BACKWARD_ROWS = [
    ("dense 16k d64", "dense16k_d64"),
    ("dense 16k d128", "dense16k_d128"),
    ("dense 16k d192", "dense16k_d192"),
    ("dense 16k d256", "dense16k_d256"),
    ("dilated 8k d64, segments 2048, 4096, 8192, dilations 1, 2, 4", "seed8k"),
    ("the same, 32k", "seed32k"),
    ("the same, 131k", "seed131k"),
    ("1M, 12 heads, dilations to 512", "million"),
    ("131k d128, segments 8192 to 65536, dilations 1 to 8", "wide131k"),
    ("GigaPath shape, float16, N = 10,001", "slide10k"),
    ("the same, 65,536", "slide65k"),
]


def backward_table() -> list[str]:
    report = result("h200_hopper_backward")
    works = workloads("h200_hopper_backward")
    portable = workloads("h200_cuda") | {work["workload"]: work for work in report["portable"]}
    lines = [
        "| backward, full / causal | TFLOP/s, burst | sustained | ms, burst | `cuda-mma`, TFLOP/s, burst | `deterministic` costs, burst |",
        "|---|---|---|---|---|---|",
    ]
    for title, name in BACKWARD_ROWS:
        names = tuple(n for n in (name, f"{name}_causal") if n in works)
        if not names:
            continue
        costs = [report["deterministic_cost"][n]["burst"] for n in names if n in report["deterministic_cost"]]
        fields = [told(works, names, f"backward_{field}") for field in ("burst_tflops", "tflops", "burst_ms")]
        fields += [told(portable, names, "backward_burst_tflops"), " / ".join(f"{cost:.2f}x" for cost in costs)]
        lines.append(f"| {title} | {' | '.join(fields)} |")
    return lines


def backward_profile_table() -> list[str]:
    columns = {
        "tensor pipe": "tensor_pipe_percent", "shared memory": "shared_memory_pipe_percent",
        "issue slots": "issue_slots_percent", "exponentials": "exponentials_percent", "L2": "l2_percent",
        "DRAM": "dram_percent",
    }  # fmt: skip
    lines = [
        f"| main kernel, percent of the peak | {' | '.join(columns)} | prepare, main, convert, us |",
        "|---" * (len(columns) + 2) + "|",
    ]
    for name, facts in result("h200_hopper_backward")["profile"].items():
        times = [facts.get(part) for part in ("prepare_milliseconds", "milliseconds", "convert_tiles_milliseconds")]
        values = [f"{facts[field]:.0f}" for field in columns.values()]
        lines.append(f"| {name} | {' | '.join(values)} | {', '.join(f'{time * 1e3:.0f}' for time in times if time)} |")
    return lines


def errors_table() -> list[str]:
    rows = result("h200_errors")["rows"]
    peers = list(rows[0]["over_peers"])
    quantities = ("out", "dq", "dk", "dv")
    lines = [
        f"| errors over those of | scores of | {' | '.join(peer.removesuffix(' views') + ': out, dq, dk, dv' for peer in peers)} |",
        "|---" * (len(peers) + 2) + "|",
    ]
    for row in rows:
        ratios = [", ".join(f"{row['over_peers'][peer][q]:.2f}" for q in quantities) for peer in peers]
        lines.append(f"| {row['name'].replace('_', ' ')} | {row['deviation_of_scores']:.0f} | {' | '.join(ratios)} |")
    return lines


def lengths_table() -> list[str]:
    """Errors by the length of a strand, on every machine that was measured."""
    quantities = ("out", "dq", "dk", "dv")
    lines = ["| | keys or rows | out, dq, dk, dv | PyTorch's fused attention: out, dq |", "|---|---|---|---|"]
    for name, machine in (("cpu_errors_by_length", "CPU"), ("h200_errors_by_length", "H200")):
        if not (RESULTS / f"{name}.json").exists():
            continue
        for row in result(name)["rows"]:
            told = {
                who: ", ".join("too large" if values[q] is None else f"{values[q]:.1e}" for q in quantities if q in values)
                for who, values in row["errors"].items()
            }
            lines.append(f"| {machine}, {row['dtype']} | {row['tokens']:,} | {told['longspan']} | {told['torch']} |")
    return lines


def peers_table() -> list[str]:
    rows = {row["name"]: row for row in result("h200_vs_torch")["rows"]}
    lines = [
        "| times faster, call from Python / engine alone | full, burst | queued | sustained | causal, burst | queued | sustained |",
        "|---|---|---|---|---|---|---|",
    ]

    def ratios(name: str, step: str) -> str:
        if step not in rows.get(name, {}):
            return " | | "
        times = rows[name][step]
        texts = []
        for kind in ("burst", "queued", "sustained"):
            text = faster(times, kind, digits=2)
            if f"{kind}_times_faster_than_eager" in times:
                text += f" (than eager {faster(times, kind, '_than_eager', 2)})"
            texts.append(text)
        return " | ".join(texts)

    for step, suffix in (("forward", ""), ("forward_backward", ", forward + backward")):
        for title, name in PEER_ROWS:
            lines.append(f"| {title}{suffix} | {ratios(name, step)} | {ratios(name + '_causal', step)} |")
    return lines


def cuda_table() -> list[str]:
    works = workloads("h200_cuda")
    lines = ["| bfloat16 unless said | forward | backward |", "|---|---|---|"]
    for title, names in CUDA_ROWS:
        if all(name in works for name in names):
            lines.append(f"| {title} | {told(works, names, 'forward_tflops')} | {told(works, names, 'backward_tflops')} |")
    return lines


#: Block masks over 131,072 tokens in blocks of 128: the row of the result and its title.
BLOCK_ROWS = [("blocks_128k_d64", "head dim 64"), ("blocks_128k_d128", "head dim 128")]


def block_rows() -> list[tuple[str, dict]]:
    rows = {row["name"]: row for row in result("h200_block_sparse")["rows"]}
    return [(title, rows[name]) for name, title in BLOCK_ROWS]


def short_block_table() -> list[str]:
    lines = ["| 131,072 tokens, blocks of 128 | forward, times faster | forward + backward, times faster |", "|---|---|---|"]
    for title, row in block_rows():
        lines.append(f"| {title} | {faster(row['forward'])} | {faster(row['forward_backward'])} |")
    return lines


def block_table() -> list[str]:
    """Burst and sustained, forward and forward + backward, of the engine."""
    lines = ["| blocks of 128 | forward, burst / sustained | forward + backward |", "|---|---|---|"]

    def line(title: str, row: dict, text) -> str:
        steps = [" / ".join(text(row[step], kind) for kind in ("burst", "sustained")) for step in ("forward", "forward_backward")]
        return f"| {title} | {steps[0]} | {steps[1]} |"

    for title, row in block_rows():
        lines += [
            line(f"{title}: times faster than compiled FlexAttention", row, lambda t, k: f"{t[f'{k}_engine_times_faster']:.2f}"),
            line("TFLOP/s", row, lambda t, k: f"{t['engine'][f'{k}_tflops']:.0f}"),
            line("part of our dense attention's rate over 16,384 tokens", row, lambda t, k: f"{t[f'{k}_of_dense']:.2f}"),
            line("over the same 131,072 tokens", row, lambda t, k: f"{t[f'{k}_of_dense_same']:.2f}"),
        ]
    return lines


#: Workloads of longspan_gpu_bench with block masks.
SMALL_BLOCK_ROWS = [
    ("ten blocks of 64 a row, head dim 64", "blocks64_d64"),
    ("ten blocks of 64 a row, head dim 128", "blocks64_d128"),
    ("random blocks of 128, head dim 64", "random_d64"),
    ("BigBird, blocks of 128, head dim 64", "bigbird_d64"),
]


def small_block_table() -> list[str]:
    works = workloads("h200_hopper")
    lines = ["| forward, burst / sustained | TFLOP/s | ms |", "|---|---|---|"]
    for title, name in SMALL_BLOCK_ROWS:
        fields = [" / ".join(f"{works[name][f'forward_{kind}{unit}']:.{digits}f}" for kind in ("burst_", "")) for unit, digits in (("tflops", 0), ("ms", 2))]
        lines.append(f"| {title} | {fields[0]} | {fields[1]} |")
    return lines


def adaptive_table() -> list[str]:
    """What choosing an adaptive mask adds to the forward with as many blocks, in bursts."""
    lines = ["| choosing by `adaptive` | forward takes longer by |", "|---|---|"]
    lines += [f"| {title} | {row['adaptive_choice_of_forward'] * 100:.0f}% |" for title, row in block_rows()]
    return lines


def lm_table() -> list[str]:
    """A training step of LongNetLM on both machines."""
    lines = ["| | eager | times faster | memory | compiled | times faster | memory |", "|---|---|---|---|---|---|---|"]
    for name, machine in (("torch_lm", "CPU, {} threads"), ("h200_torch_lm", "H200")):
        report = result(name)
        for row in report["results"]:
            title = machine.format(report["machine"]["threads"])
            cells = [f"{title}: {row['layers']} layers, {row['width']} wide, {row['tokens']:,} bytes, {row['dtype']}"]
            for step in ("step", "compiled_step"):
                names = step, step.replace("step", "torch_step")
                if not all(one in row["seconds"] for one in names):
                    cells += ["", "", ""]
                    continue
                times = " / ".join(f"{row['seconds'][one]['median'] * 1000:.0f}" for one in names)
                peaks = [row.get("peak_bytes", {}).get(one) for one in names]
                memory = "" if None in peaks else " / ".join(f"{peak / 1e9:.1f}" for peak in peaks) + " GB"
                cells += [f"{times} ms", f"{row['times_faster_than_torch'][step]:.2f}", memory]
            lines.append("| " + " | ".join(cells) + " |")
    return lines


def gpu_rings_table() -> list[str]:
    lines = ["| | | one device, ms | ring of 2 | of 4 | of 8 |", "|---|---|---|---|---|---|"]
    for row in result("h200_rings")["rows"]:
        for step, title in (("forward", "forward"), ("both", "forward and backward")):
            one = row[step]["one device"]["ms"]
            rings = [f"{row[step][name]['ms'] / one:.2f}" if name in row[step] else "" for name in (f"ring of {n}" for n in (2, 4, 8))]
            lines.append(f"| {row['name']} | {title} | {one:.3f} | {' | '.join(rings)} |")
    return lines


def ring_scaling_table() -> list[str]:
    rows = {(row["kind"], row["tokens"], row["ranks"], row["device"]): row for row in result("ring_scaling")["results"]}
    lines = [
        "| predicted | tokens | ranks | received, forward | H200, 50 GB/s: step, efficiency | A100, 25 GB/s |",
        "|---|---|---|---|---|---|",
    ]
    for (kind, tokens, ranks, device), row in rows.items():
        if device != "h200":
            continue
        both = [row, rows[kind, tokens, ranks, "a100"]]
        steps = [
            f"{1e3 * (one['forward_seconds'] + one['backward_seconds']):,.1f} ms, {100 * one['efficiency']:.1f}%" for one in both
        ]
        lines.append(f"| {kind} | {tokens:,} | {ranks:,} | {row['bytes_received'] / 2**20:.1f} MiB | {steps[0]} | {steps[1]} |")
    return lines


def _milliseconds(value: float) -> str:
    return f"{value:.2g}" if value < 10 else f"{value:.0f}"


def indexing_table(name: str, kind: str) -> list[str]:
    """Rows are rates; columns the ways to pick."""
    rows = [row for row in result(name)["rows"] if kind in row and row["offset"] == 0]
    columns = list(rows[0][kind])
    lines = ["| every r-th row | " + " | ".join(f"`{one}`" if one != "longspan" else "Longspan" for one in columns) + " |",
             "|---|" + "---|" * len(columns)]  # fmt: skip
    return lines + [f"| r = {row['rate']} | " + " | ".join(_milliseconds(row[kind][one]) for one in columns) + " |" for row in rows]


def offset_table() -> list[str]:
    lines = ["| | `slice` | `unfold` | `gather` | `index_select` |", "|---|---|---|---|---|"]
    for row in result("indexing_h200")["rows"]:
        if row["rate"] > 1:
            times = [_milliseconds(row["pick_ms"][one]) for one in ("slice", "unfold", "gather", "index_select")]
            lines.append(f"| r = {row['rate']}, offset {row['offset']} | " + " | ".join(times) + " |")
    return lines


def strands_table() -> list[str]:
    lines = ["| rate | rows per strand | between first and last row | H200, ms | CPU, ms |", "|---|---|---|---|---|"]
    for gpu, cpu in zip(result("indexing_h200")["strands"], result("indexing_cpu")["strands"]):
        spans = [f"{one['rows_per_strand']:,}" for one in (gpu, cpu)]
        far = [f"{one['tokens']:,}" for one in (gpu, cpu)]
        lines.append(f"| {gpu['rate']} | {' / '.join(spans)} | {' / '.join(far)} | {gpu['ms']:.3f} | {cpu['ms']:.1f} |")
    return lines


CHOICES = {
    "dense": "every position sees all before it", "window": "the last 512 tokens", "bigbird": "64 global tokens, a window, 2% at random",
    "adaptive": "5% of blocks, chosen by the call", "dilated": "dilated, head groups: 2048/1, 8192/4, 32768/16",
    "longnet": "LongNet, all heads: the same branches",
}  # fmt: skip


def choosing_table(name: str) -> list[str]:
    lines = ["| pattern | tokens | forward, ms | forward + backward, ms | peak memory of both, MiB |", "|---|---|---|---|---|"]
    for row in sorted(result(name)["rows"], key=lambda row: list(CHOICES).index(row["pattern"])):
        lines.append(f"| {CHOICES[row['pattern']]} | {row['tokens']:,} | {_milliseconds(row['forward_ms'])} | "
                     f"{_milliseconds(row['both_ms'])} | {row['both_mib']:,.0f} |")  # fmt: skip
    return lines


def ring_link_table() -> list[str]:
    lines = ["| 16 cores, ms | ranks | link | one process | measured | predicted | ratio |", "|---|---|---|---|---|---|---|"]
    for row in result("ring_link_cpu")["results"]:
        pairs = [row["one_device_seconds"]] + [
            [row[f"{kind}_{which}_seconds"] for which in ("forward", "backward")] for kind in ("measured", "predicted")
        ]
        times = " | ".join(f"{1e3 * forward:.0f} + {1e3 * backward:.0f}" for forward, backward in pairs)
        lines.append(f"| {row['shape']} | {row['ranks']} | {row['link']}, {row['latency']} | {times} | {row['ratio']:.2f} |")
    return lines


def ring_gradients_table() -> list[str]:
    titles = {"after": "averaged after the backward", "buckets": "DDP's buckets, each at once", "pieces": "`reduce_behind_rings`"}
    lines = ["| gradients | step, ms | of which rings waited |", "|---|---|---|"]
    for name, row in result("ring_gradients")["results"].items():
        lines.append(f"| {titles[name]} | {1e3 * row['step_seconds']:,.0f} | {1e3 * row['ring_waited_seconds']:.0f} |")
    return lines


PAGES = {
    "docs/indexing.md": {
        "pick": lambda: indexing_table("indexing_h200", "pick_ms"), "pick both": lambda: indexing_table("indexing_h200", "pick_both_ms"),
        "attention": lambda: indexing_table("indexing_h200", "attention_ms"),
        "attention both": lambda: indexing_table("indexing_h200", "attention_both_ms"),
        "cpu attention": lambda: indexing_table("indexing_cpu", "attention_ms"),
        "cpu attention both": lambda: indexing_table("indexing_cpu", "attention_both_ms"),
        "cpu pick": lambda: indexing_table("indexing_cpu", "pick_ms"), "offset": offset_table, "strands": strands_table,
    },
    "docs/choosing.md": {"gpu": lambda: choosing_table("choosing_h200"), "cpu": lambda: choosing_table("choosing_cpu")},
    "README.md": {"gpu": gpu_table, "cpu": cpu_table, "blocks": short_block_table, "options": options_table},
    "docs/performance.md": {
        "peers": peers_table, "hopper": hopper_table, "profile": profile_table, "backward": backward_table,
        "backward profile": backward_profile_table, "cuda": cuda_table, "errors": errors_table,
        "lengths": lengths_table, "few rows": few_rows_table, "decode": decode_table, "token": token_table,
    },
    "docs/block_sparse.md": {"blocks": block_table, "small blocks": small_block_table, "adaptive": adaptive_table},
    "docs/longnet.md": {"lm": lm_table},
    "docs/ring.md": {
        "gpu rings": gpu_rings_table, "ring link": ring_link_table, "ring scaling": ring_scaling_table, "ring gradients": ring_gradients_table,
    },
}


def with_tables(text: str, page: str) -> str:
    for name, table in PAGES[page].items():
        begin, end = f"<!-- {name} table: scripts/readme_tables.py -->\n", f"<!-- end of {name} table -->"
        before, _, rest = text.partition(begin)
        _, found, after = rest.partition(end)
        if not found:
            sys.exit(f"{page} lacks the lines {begin.strip()} and {end}")
        text = before + begin + "\n".join(table()) + "\n" + end + after
    return text


def main() -> int:
    differs = False
    for page in PAGES:
        path = ROOT / page
        text = path.read_text()
        written = with_tables(text, page)
        if "--check" not in sys.argv[1:]:
            path.write_text(written)
        elif written != text:
            print(f"{page} differs from bench/results: run scripts/readme_tables.py", file=sys.stderr)
            differs = True
    return int(differs)


if __name__ == "__main__":
    sys.exit(main())
