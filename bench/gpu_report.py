#!/usr/bin/env python3
"""Makes the committed results of scripts/gpu_check.sh from its logs, and prints a table of them.

    bench/gpu_report.py RESULTS     # RESULTS/logs -> RESULTS/h200_*.json
    bench/gpu_report.py --metrics   # what Nsight Compute is to measure

A step that did not run leaves its part out.
"""

from __future__ import annotations

import csv
import datetime
import json
import re
import sys
from pathlib import Path

#: Nsight Compute's names of what a profile reports.
METRICS = {
    "milliseconds": "gpu__time_duration.sum",
    "gigahertz": "sm__cycles_elapsed.avg.per_second",
    "tensor_pipe_percent": "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active",
    "issue_slots_percent": "sm__inst_issued.avg.pct_of_peak_sustained_active",
    "shared_memory_pipe_percent": "l1tex__data_pipe_lsu_wavefronts_mem_shared.avg.pct_of_peak_sustained_elapsed",
    "exponentials_percent": "smsp__inst_executed_pipe_xu.avg.pct_of_peak_sustained_active",
    "dram_percent": "dram__throughput.avg.pct_of_peak_sustained_elapsed",
    "l2_percent": "lts__throughput.avg.pct_of_peak_sustained_elapsed",
    **{
        f"stall_{why}": f"smsp__average_warps_issue_stalled_{why}_per_issue_active.ratio"
        for why in ("wait", "long_scoreboard", "short_scoreboard", "barrier", "dispatch_stall", "math_pipe_throttle",
                    "gmma", "not_selected", "sleeping")
    },
}  # fmt: skip
UNITS = {"ns": 1e-6, "us": 1e-3, "ms": 1.0, "s": 1e3, "Ghz": 1.0, "GHz": 1.0, "Mhz": 1e-3, "MHz": 1e-3, "hz": 1e-9}


def lines_of(path: Path) -> list[str]:
    return path.read_text(errors="replace").splitlines() if path.exists() else []


def workloads(path: Path) -> list[dict]:
    return [json.loads(line) for line in lines_of(path) if line.startswith("{")]


def profile(path: Path, main: str = "forward") -> dict[str, dict]:
    """By workload, whose names longspan_gpu_bench prints between the profiler's lines: what the kernel `main` does, and
    the milliseconds of those around it."""
    lines = lines_of(path)
    table = [line for line in lines if line.startswith('"')]
    names = [work["workload"] for work in workloads(path)]
    if len(table) < 3:
        return {}
    rows = list(csv.reader(table))
    header, units, values = rows[0], rows[1], [row for row in rows[2:] if len(row) == len(rows[0])]
    result: dict[str, dict] = {}
    each = len(values) // max(len(names), 1)  # kernels of a call
    for i, row in enumerate(values[: each * len(names)]):
        measured = dict(zip(header, zip(row, units)))
        found = {}
        for label, metric in METRICS.items():
            if metric in measured and measured[metric][0]:
                value, unit = measured[metric]
                found[label] = round(float(value.replace(",", "")) * UNITS.get(unit, 1.0), 4)
        kernel = re.split(r"[<(]", measured["Kernel Name"][0])[0].split("::")[-1].split()[-1]
        into = result.setdefault(names[i // each], {})
        if kernel == main:
            into.update(found)
        else:
            into[f"{kernel}_milliseconds"] = found.get("milliseconds")
    return result


def deterministic_costs(works: list[dict]) -> dict[str, dict[str, float]]:
    """Times of deterministic backwards over those of the same workload without."""
    named, suffix = {work["workload"]: work for work in works}, "_deterministic"
    return {
        name.removesuffix(suffix): {
            kind: round(work[field] / named[name.removesuffix(suffix)][field], 3)
            for kind, field in (("burst", "backward_burst_ms"), ("sustained", "backward_ms"))
        }
        for name, work in named.items()
        if name.endswith(suffix) and name.removesuffix(suffix) in named
    }


def tests(logs: Path) -> dict[str, str]:
    """One line for each program; the processes that share its cases are added up."""
    counts: dict[str, list[int]] = {}
    for path in sorted(logs.glob("*_test.*.log")):
        passed, bad = counts.setdefault(path.name.split(".")[0], [0, 0])
        text = path.read_text(errors="replace")
        passed += sum(int(n) for n in re.findall(r"^\[  PASSED  \] (\d+) test", text, re.M))
        bad += sum(int(n) for n in re.findall(r"^\[  FAILED  \] (\d+) test", text, re.M))
        bad += "[  PASSED  ]" not in text
        counts[path.name.split(".")[0]] = [passed, bad]
    result = {name: f"{passed} passed, {bad} failed" for name, (passed, bad) in counts.items()}
    for line in lines_of(logs / "commands.log")[-1:]:
        result["commands (tests/cli/gpu.sh)"] = line.strip()
    for line in lines_of(logs / "pytest.log")[-1:]:
        result["pytest"] = re.sub(r"=+ ?| in [\d.]+s.*", "", line)
    for path in sorted(logs.glob("*check*.log")):
        summary = [line for line in lines_of(path) if "SUMMARY" in line]
        if summary:
            result[f"compute-sanitizer {path.stem}"] = summary[-1].strip("= ")
    return result


def facts(logs: Path, command: str) -> dict[str, str]:
    gpu, _, driver = (lines_of(logs / "gpu") or ["unknown, unknown"])[0].partition(", ")
    version = " ".join(lines_of(logs / "version"))
    commit = re.search(r"\((\w+)\)", version)
    return {
        "gpu": gpu,
        "driver": driver,
        "commit": commit.group(1) if commit else "unknown",
        "date": str(datetime.date.today()),
        "command": command,
    }


def write(path: Path, report: dict) -> None:
    path.write_text(json.dumps(report, indent=1) + "\n")
    print(f"{path.name}: {len(json.dumps(report))} bytes")


def main() -> int:
    if sys.argv[1:] == ["--metrics"]:
        print(",".join(METRICS.values()))
        return 0
    results = Path(sys.argv[1])
    logs = results / "logs"
    portable = workloads(logs / "bench_portable.log")
    chosen = workloads(logs / "bench.log") + workloads(logs / "bench_others.log")
    backward = workloads(logs / "bench_backward.log")
    for work in chosen + portable + backward:
        line = f"{work['workload']:26} {work['kernel']:14}"
        for step in ("forward", "backward"):
            if f"{step}_ms" in work:
                line += f" {step} {work[f'{step}_burst_ms']:8.3f} ms, TFLOP/s {work[f'{step}_burst_tflops']:4.0f} burst"
                line += f" {work[f'{step}_tflops']:4.0f} sustained"
        print(line)
    passed, profiled = tests(logs), profile(logs / "profile.log")
    profiled_backward, costs = profile(logs / "profile_backward.log", "backward"), deterministic_costs(backward)
    for part in (passed, profiled, profiled_backward, costs):
        for name, what in part.items():
            print(f"{name}: {what}")
    if portable:
        command = "scripts/gpu_check.sh (longspan_gpu_bench --kernel cuda-mma)"
        write(results / "h200_cuda.json", {**facts(logs, command), "workloads": portable})
    if chosen:
        command = "scripts/gpu_check.sh (longspan_gpu_bench; longspan_gpu_bench --forward-only others; ncu)"
        write(results / "h200_hopper.json", {**facts(logs, command), "profile": profiled, "workloads": chosen})
    if backward:
        command = "scripts/gpu_check.sh (longspan_gpu_bench --backward-only; ncu)"
        report = {**facts(logs, command), "profile": profiled_backward, "deterministic_cost": costs}
        report |= {"workloads": backward, "portable": workloads(logs / "bench_backward_portable.log")}
        write(results / "h200_hopper_backward.json", report)
    checks = {name: lines_of(logs / f"check_{name}.log") for name in ("every", "hopper")}
    if passed or any(checks.values()):
        report = {**facts(logs, "scripts/gpu_check.sh (tests, commands, python, check, sanitizer)"), "tests": passed}
        for name, lines in checks.items():
            text = "\n".join(lines)
            if "{" in text:
                report[f"check_{name}"] = json.loads(text[text.index("{") : text.rindex("}") + 1])
                told = report[f"check_{name}"]
                print(f"check {name}: ok {told['ok']}, {told['cases']} cases, {told['left_out']} left out")
        write(results / "h200_check.json", report)
    commands = []
    for path in sorted(logs.glob("cli_bench.*.log")):
        text = path.read_text(errors="replace")
        if "{" in text:
            commands.append(json.loads(text[text.index("{") : text.rindex("}") + 1]))
            one = commands[-1]
            rates = {step: f"{one[step]['fraction_of_peak']:.3f}" for step in ("forward", "backward") if step in one}
            print(f"longspan bench {one['bench']} {one['problem']['head_dim']}: of a matrix product's rate {rates}")
    if commands:
        (results / "h200_cli_bench.json").write_text(json.dumps(commands, indent=1) + "\n")
    modules = {path.stem: json.loads(path.read_text()) for path in sorted(logs.glob("gpu_torch_*.json"))}
    if modules:
        write(results / "h200_torch_modules.json", modules)
        for part in modules.values():
            for row in part["results"]:
                print(row["what"], row.get("causal", ""), row.get("times_faster_than_torch", row.get("microseconds")))
    for line in lines_of(logs / "errors.log"):
        print(line)
    for name in ("peers", "peers_portable", "peers_blocks"):
        for line in lines_of(logs / f"{name}.log"):
            if not line.startswith(("  ", "W")):
                print(line[:260])
    return 0


if __name__ == "__main__":
    sys.exit(main())
