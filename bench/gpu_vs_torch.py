#!/usr/bin/env python3
"""Longspan and its best PyTorch peers on one GPU, in one run.

Ours: longspan_gpu_bench (the engine itself, one JSON line per workload). Peers: what a PyTorch user composes from slices
and scaled_dot_product_attention, with copies or with strided views, on every backend that takes them; the fastest counts.
Both are timed by CUDA events, sustained (back to back) and in bursts (median of 7 after a pause of 0.25 s).

    python3 bench/gpu_vs_torch.py --engine build/cuda/bench/longspan_gpu_bench --json bench/results/h200_cuda.json
"""
import argparse
import json
import math
import pathlib
import statistics
import subprocess
import sys
import time

import torch
import torch.nn.functional as functional
from torch.nn.attention import SDPBackend, sdpa_kernel

SEEDS = ([2048, 4096, 8192], [1, 2, 4])
SLIDE = ([1024, 5792, 32768, 185363, 1048576], [1, 2, 4, 8, 16])
# name: tokens, heads, head_dim, segments, dilations, all heads in every branch, dtype
WORKLOADS = {
    "dense16k_d64": (16384, 16, 64, [16384], [1], False, torch.bfloat16),
    "dense16k_d128": (16384, 16, 128, [16384], [1], False, torch.bfloat16),
    "seed8k": (8192, 8, 64, *SEEDS, False, torch.bfloat16),
    "seed32k": (32768, 8, 64, *SEEDS, False, torch.bfloat16),
    "seed131k": (131072, 8, 64, *SEEDS, False, torch.bfloat16),
    "million": (1048576, 12, 64, [2048, 8192, 32768, 131072, 1048576], [1, 4, 16, 64, 512], False, torch.bfloat16),
    "wide131k": (131072, 16, 128, [8192, 16384, 32768, 65536], [1, 2, 4, 8], False, torch.bfloat16),
    "slide10k": (10001, 16, 48, *SLIDE, True, torch.float16),
}
BACKENDS = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}


def timed(body, repeats):
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    for _ in range(repeats):
        body()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / repeats


def measure(body):
    first = timed(body, 3)
    sustained = timed(body, max(3, min(500, int(150 / max(first, 1e-3)))))
    time.sleep(0.25)
    return {"ms": sustained, "burst_ms": statistics.median(timed(body, 1) for _ in range(7))}


def head_groups(heads, count):
    """First and last head of each branch: the remainder goes to the first ones."""
    begin = 0
    for index in range(count):
        size = heads // count + (index < heads % count)
        yield begin, begin + size
        begin += size


def by_groups(q, k, v, segments, dilations, causal, copies):
    """Each branch on its own heads: slice, attend, put back. With copies, or on strided views of one batch entry."""
    batch, tokens, heads, dim = q.shape
    out = torch.zeros_like(q)
    for index, ((begin, end), segment, dilation) in enumerate(zip(head_groups(heads, len(segments)), segments, dilations)):
        segment = min(segment, tokens)

        def strands(tensor):
            view = tensor.view(tokens // segment, segment, heads, dim)[:, index % dilation :: dilation, begin:end]
            return view.transpose(1, 2)

        rows = [strands(t).contiguous() if copies else strands(t) for t in (q, k, v)]
        strands(out).copy_(functional.scaled_dot_product_attention(*rows, is_causal=causal))
    return out


def all_heads(q, k, v, segments, dilations):
    """Every branch on all heads, mixed by their softmax denominators (flash's own lse): N need not divide."""
    batch, tokens, heads, dim = q.shape
    outs, sums = [], []
    for segment, dilation in zip(segments, dilations):
        segment = min(segment, tokens)
        pad = -tokens % segment
        padded = [functional.pad(t, (0, 0, 0, 0, 0, pad)).view(-1, segment, heads, dim) for t in (q, k, v)]
        out = torch.zeros_like(padded[0])
        lse = torch.full((out.shape[0], segment, heads), -math.inf, device=q.device)
        for phase in range(dilation):
            chosen = slice(phase, heads, dilation)
            rows = [t[:, phase::dilation, chosen].transpose(1, 2) for t in padded]
            if rows[0].shape[1] == 0 or rows[0].shape[2] == 0:
                continue
            part, part_lse = torch.ops.aten._scaled_dot_product_flash_attention(*rows)[:2]
            out[:, phase::dilation, chosen] = part.transpose(1, 2)
            lse[:, phase::dilation, chosen] = part_lse.transpose(1, 2)
        outs.append(out.reshape(1, -1, heads, dim)[:, :tokens])
        sums.append(lse.reshape(1, -1, heads)[:, :tokens])
    weights = torch.softmax(torch.stack(sums), dim=0).to(q.dtype)
    return sum(out * weight.unsqueeze(-1) for out, weight in zip(outs, weights))


def peers(spec, causal):
    tokens, heads, dim, segments, dilations, everywhere, dtype = spec
    make = lambda: torch.randn(1, tokens, heads, dim, device="cuda", dtype=dtype, requires_grad=True)
    q, k, v, dout = make(), make(), make(), torch.randn(1, tokens, heads, dim, device="cuda", dtype=dtype)
    variants = {}
    if everywhere:
        variants["flash composition"] = (None, lambda: all_heads(q, k, v, segments, dilations))
    else:
        for name, backend in BACKENDS.items():
            for copies in (True, False):
                label = f"{name} {'copies' if copies else 'views'}"
                variants[label] = (backend, lambda copies=copies: by_groups(q, k, v, segments, dilations, causal, copies))
    results = {}
    for label, (backend, body) in variants.items():
        try:
            with sdpa_kernel([backend] if backend else list(BACKENDS.values())):
                with torch.no_grad():
                    forward = measure(body)

                def both():
                    q.grad = k.grad = v.grad = None
                    body().backward(dout)

                results[label] = {"forward": forward, "forward_backward": measure(both)}
        except RuntimeError as error:
            results[label] = {"error": str(error).splitlines()[0]}
    return results


def best(results, what, how):
    times = [entry[what][how] for entry in results.values() if what in entry]
    return min(times) if times else math.nan


def gemm_peak():
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    return 2 * 8192**3 / measure(lambda: a @ b)["burst_ms"] * 1e-9


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", required=True, help="path of longspan_gpu_bench")
    parser.add_argument("--json", type=pathlib.Path, help="write all numbers here")
    parser.add_argument("--commit", default="unknown")
    parser.add_argument("workloads", nargs="*", help=f"default: all of {', '.join(WORKLOADS)}, full and causal")
    arguments = parser.parse_args()
    names = arguments.workloads or [n + c for n in WORKLOADS for c in ("", "_causal") if n + c != "slide10k_causal"]
    driver = subprocess.run(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"], capture_output=True, text=True)
    report = {
        "gpu": torch.cuda.get_device_name(),
        "driver": driver.stdout.strip(),
        "torch": torch.__version__,
        "commit": arguments.commit,
        "command": " ".join(sys.argv),
        "gemm_peak_tflops": gemm_peak(),
        "workloads": {},
    }
    print(f"{'workload':22} {'ours fwd':>9} {'TFLOP/s':>8} {'peer fwd':>9} {'ratio':>6}   {'ours f+b':>9} {'bwd TF/s':>8} {'peer f+b':>9} {'ratio':>6}   (burst, ms)")
    for name in names:
        causal = name.endswith("_causal")
        run = subprocess.run([arguments.engine, name], capture_output=True, text=True)
        if run.returncode != 0 or not run.stdout.strip():
            print(f"{name:22} engine: {run.stderr.strip() or 'no such workload'}")
            continue
        ours = json.loads(run.stdout)
        theirs = peers(WORKLOADS[name.removesuffix("_causal")], causal)
        torch.cuda.empty_cache()
        report["workloads"][name] = {"longspan": ours, "peers": theirs}
        both = ours["forward_burst_ms"] + ours["backward_burst_ms"]
        peer, peer_both = best(theirs, "forward", "burst_ms"), best(theirs, "forward_backward", "burst_ms")
        print(
            f"{name:22} {ours['forward_burst_ms']:9.3f} {ours['forward_burst_tflops']:8.0f} {peer:9.3f} {peer / ours['forward_burst_ms']:6.2f}   "
            f"{both:9.3f} {ours['backward_burst_tflops']:8.0f} {peer_both:9.3f} {peer_both / both:6.2f}",
            flush=True,
        )
        if arguments.json:
            arguments.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
