"""Timing of functions that alternate, and what a result file says about the machine."""

from __future__ import annotations

import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

import longspan


def gpu_seconds(function: Callable[[], object], calls: int) -> float:
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    for _ in range(calls):
        function()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / calls / 1000


def gpu_profile(function: Callable[[], object], kernels: int = 0) -> dict[str, object]:
    """host_seconds until a call returns while the GPU waits for it, busy_seconds of the GPU in a call, and the longest
    kernels: name, how many, seconds of all."""
    taken = []
    for _ in range(3):
        torch.cuda.synchronize()
        start = time.perf_counter()
        function()
        taken.append(time.perf_counter() - start)
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        function()
        torch.cuda.synchronize()
    ran = [event for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    result = {"host_seconds": min(taken), **busy([(e.name, e.time_range.start, e.time_range.end) for e in ran])}
    result["kernels"] = result["kernels"][:kernels]
    return result if kernels else {key: value for key, value in result.items() if key != "kernels"}


def busy(spans: list[tuple[str, float, float]]) -> dict[str, object]:
    """Of kernels that may overlap, (name, begin, end) in microseconds: the time in which any ran, and each name's own."""
    total, last = 0.0, float("-inf")
    names: dict[str, list[float]] = {}
    for name, begin, end in sorted(spans, key=lambda span: span[1]):
        total += max(0.0, end - max(begin, last))
        last = max(last, end)
        names.setdefault(name, []).append(end - begin)
    longest = sorted(([name[:160], len(each), sum(each) * 1e-6] for name, each in names.items()), key=lambda row: -row[2])
    return {"busy_seconds": total * 1e-6, "kernels": longest}


def alternate(
    functions: dict[str, Callable[[], object]], repeats: int, device: str = "cpu"
) -> dict[str, dict[str, float]]:
    """Seconds of each function: median and best of `repeats`. They take turns, so that a busy machine slows all alike;
    the pause lets torch's threads, which spin after a call, go to sleep. On a GPU a sample is the device's own time of
    one call among many back to back."""
    samples: dict[str, list[float]] = {name: [] for name in functions}
    calls = {name: 1 for name in functions}
    for name, function in functions.items():
        function()
        if device != "cpu":
            calls[name] = max(3, min(100, int(0.05 / gpu_seconds(function, 3))))
    for _ in range(repeats):
        for name, function in functions.items():
            if device != "cpu":
                samples[name].append(gpu_seconds(function, calls[name]))
                continue
            time.sleep(0.03)
            start = time.perf_counter()
            function()
            samples[name].append(time.perf_counter() - start)
    return {name: {"median": statistics.median(taken), "best": min(taken)} for name, taken in samples.items()}


def microseconds(function: Callable[[], object], repeats: int, calls: int = 10) -> float:
    """Best time of one call, for functions too short to time alone."""
    function()
    best = float("inf")
    for _ in range(repeats):
        start = time.perf_counter()
        for _ in range(calls):
            function()
        best = min(best, (time.perf_counter() - start) / calls)
    return best * 1e6


def gpu_facts() -> dict[str, object]:
    """The GPU, its driver and cuDNN; empty where there is none."""
    if not torch.cuda.is_available():
        return {}
    asked = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        driver = subprocess.run(asked, capture_output=True, text=True, check=True).stdout.split()[0]
    except (OSError, subprocess.CalledProcessError, IndexError):
        driver = "unknown"
    return {"gpu": torch.cuda.get_device_name(), "driver": driver, "cudnn": torch.backends.cudnn.version()}


def without_folders(arguments: list[str]) -> list[str]:
    """Arguments as a result file may keep them: of absolute paths, which name folders of one machine, only the end."""
    return [Path(argument).name if Path(argument).is_absolute() else argument for argument in arguments]


def machine() -> dict[str, object]:
    """What the numbers depend on."""
    model = platform.processor()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        lines = cpuinfo.read_text().splitlines()
        names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
        model = names[0] if names else model
    return {
        "cpu": model, **gpu_facts(), "command": " ".join(["python -m longspan.bench", *without_folders(sys.argv[1:])]),
        "threads": longspan.num_threads(), "load_average": os.getloadavg()[0], "python": platform.python_version(),
        "torch": torch.__version__, "longspan": longspan.__version__, "commit": longspan.__commit__,
        "date": time.strftime("%Y-%m-%d"),
    }  # fmt: skip
