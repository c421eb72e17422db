#!/usr/bin/env bash
# Runs the tests and benchmarks of the CUDA engine on a machine with a GPU, from programs that are built already (they need
# no CUDA installation there; the driver is enough).
#   scripts/gpu_check.sh PROGRAMS [RESULTS] [--quick]
# PROGRAMS holds gpu_engine_test, gpu_matches_reference_test, hopper_test and longspan_gpu_bench; logs, h200_cuda.json (the
# portable kernels) and h200_vs_torch.json go to RESULTS (default: the current folder). --quick leaves out the sanitizer and the
# comparison with torch.
set -uo pipefail

programs=${1:?folder with the built programs}
results=${2:-.}
quick=${3:-}
mkdir -p "$results"
failed=0

run() {  # name, seconds, command...: full output in a log, the end of it on the terminal if it fails
  local name=$1 seconds=$2 begin=$SECONDS
  shift 2
  if timeout "$seconds" "$@" >"$results/$name.log" 2>&1; then
    echo "$name: passed ($((SECONDS - begin)) s)"
  else
    echo "$name: FAILED ($((SECONDS - begin)) s)"
    grep -E '^\[  FAILED|Failure|instead of|exception|error' "$results/$name.log" | cut -c1-200 | head -25
    failed=1
  fi
}

nvidia-smi --query-gpu=name,driver_version --format=csv,noheader
run gpu_engine_test 120 "$programs/gpu_engine_test"
run gpu_matches_reference_test 180 "$programs/gpu_matches_reference_test"
run hopper_test 120 "$programs/hopper_test"
run hopper_bench 60 "$programs/longspan_gpu_bench" --forward-only
run gpu_bench 150 "$programs/longspan_gpu_bench" --kernel cuda-mma
python3 - "$results" "$(git -C "$(dirname "$0")" rev-parse --short HEAD 2>/dev/null || echo unknown)" <<'END'
import datetime, json, pathlib, subprocess, sys
results, commit = pathlib.Path(sys.argv[1]), sys.argv[2]
workloads = [json.loads(line) for line in open(results / "gpu_bench.log") if line.startswith("{")]
for w in workloads:
    print(f"{w['workload']:26} forward {w['forward_burst_ms']:8.3f} ms {w['forward_burst_tflops']:6.0f} TFLOP/s burst {w['forward_tflops']:6.0f} sustained"
          f"   backward {w['backward_burst_ms']:8.3f} ms {w['backward_burst_tflops']:6.0f} burst {w['backward_tflops']:6.0f} sustained")
smi = subprocess.run(["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"], capture_output=True, text=True)
gpu, driver = smi.stdout.splitlines()[0].split(", ")
(results / "h200_cuda.json").write_text(json.dumps(
    {"gpu": gpu, "driver": driver, "commit": commit, "date": str(datetime.date.today()),
     "command": "longspan_gpu_bench --kernel cuda-mma", "workloads": workloads}, indent=1) + "\n")
END
if [[ $quick != --quick ]]; then
  if command -v compute-sanitizer >/dev/null; then
    for tool in memcheck racecheck synccheck; do
      run "$tool" 90 compute-sanitizer --tool $tool --error-exitcode 1 "$programs/gpu_matches_reference_test" \
        --gtest_filter='*Everything/*d64:*longnet_paper_bf16_causal_d64:*groups_f16_full_d128_ragged:*Tf32*groups_f32_causal_d96'
    done
  else
    echo "compute-sanitizer: not here, left out"
  fi
  if python3 -c 'import torch, longspan' 2>/dev/null; then
    timeout 280 python3 "$(dirname "$0")/../bench/gpu_vs_torch.py" --quick --json "$results/h200_vs_torch.json"
  else
    echo "torch and the longspan package: not both here, comparison left out"
  fi
fi
exit $failed
