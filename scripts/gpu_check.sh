#!/usr/bin/env bash
# Tests and measures the GPU engines on a machine with a GPU, from programs that are built already (they need no CUDA
# installation there; the driver is enough).
#   scripts/gpu_check.sh PROGRAMS RESULTS [STEP...]
# PROGRAMS holds longspan, longspan_gpu_bench and the tests of tests/gpu. Python steps need torch, pytest and the longspan
# package on PYTHONPATH. Steps, all without any:
#   tests      tests of label gpu
#   commands   every command on the GPU
#   python     pytest -m gpu
#   check      longspan check --random 1000: every kernel, then the Hopper kernels alone on other cases
#   sanitizer  compute-sanitizer on a reduced set
#   bench      longspan_gpu_bench, the kernels chosen and the portable ones alone; longspan bench
#   backward   longspan_gpu_bench --backward-only, deterministic calls too; errors beside PyTorch's kernels
#   profile    Nsight Compute on three forwards and three backwards
#   modules    python -m longspan.bench at 131,072 tokens
#   lm         python -m longspan.bench lm: a training step, compiled too
#   variants   the same in other ways, and with what the GPU is busy; ten minutes, so only if it is named
#   peers      bench/gpu_vs_torch.py, the kernels chosen and the portable ones alone
#   blocks     bench/gpu_vs_torch.py --block-sparse
#   ring       rings on the GPU compared with one GPU; bench/ring.py local and gpu, which write RESULTS/ring_*.json
# The first five run side by side, several processes each; what measures runs alone. Logs go to RESULTS/logs, and
# bench/gpu_report.py makes RESULTS/h200_*.json of them.
set -uo pipefail

repository=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
programs=$(cd "${1:?folder with the built programs}" && pwd)
mkdir -p "${2:?folder for results}/logs"
results=$(cd "$2" && pwd)
shift 2
steps=${*:-tests commands python check sanitizer bench backward profile modules lm peers blocks ring}
logs=$results/logs
failed=$logs/failed
: >"$failed"

run() { # name, seconds, command...: full output in a log, the telling lines of it on the terminal if it fails
  local name=$1 seconds=$2 begin=$SECONDS
  shift 2
  if timeout "$seconds" "$@" >"$logs/$name.log" 2>&1; then
    echo "$name: passed ($((SECONDS - begin)) s)"
  else
    echo "$name: FAILED, exit status $? ($((SECONDS - begin)) s)"
    grep -E '^\[  FAILED|^FAILED|^E  |Failure|instead of|exception|[Ee]rror' "$logs/$name.log" | cut -c1-200 | head -25
    echo "$name" >>"$failed"
  fi
}

shards() { # test, processes: they share its cases
  local i
  for ((i = 0; i < $2; i++)); do
    # Few threads each: what they wait for is the reference, and there are more of them than cores.
    OMP_NUM_THREADS=2 GTEST_TOTAL_SHARDS=$2 GTEST_SHARD_INDEX=$i run "$1.$i" 400 "$programs/$1" &
  done
}

step_tests() {
  local test
  for test in "$programs"/*_test; do
    case $test in
      */hopper_backward_test | */hopper_blocks_test) shards "${test##*/}" 8 ;;
      */gpu_matches_reference_test | */hopper_test | */gpu_block_sparse_test) shards "${test##*/}" 4 ;;
      *) shards "${test##*/}" 1 ;;
    esac
  done
}
step_commands() {
  run commands 200 bash "$repository/tests/cli/gpu.sh" "$programs/longspan" "$logs/commands" &
}
step_python() {
  (cd "$repository" && run pytest 240 python3 -m pytest -q -m gpu -p no:cacheprovider python/tests/test_gpu.py \
    python/tests/test_gpu_ring.py) &
}
step_check() {
  run check_every 200 "$programs/longspan" check --device cuda --random 1000 --json &
  run check_hopper 120 "$programs/longspan" check --device cuda --random 1000 --seed 1 --kernel hopper-wgmma --json &
}
step_sanitizer() {
  local tool
  if ! command -v compute-sanitizer >/dev/null; then
    echo "compute-sanitizer: not here, left out"
    return
  fi
  for tool in memcheck racecheck synccheck; do
    run "$tool" 90 compute-sanitizer --tool $tool --error-exitcode 1 "$programs/gpu_matches_reference_test" \
      --gtest_filter='*Everything/*d64:*longnet_paper_bf16_causal_d64:*groups_f16_full_d128_ragged:*groups_bf16_full_d64:*Tf32*groups_f32_causal_d96' &
    run "$tool.hopper" 90 compute-sanitizer --tool $tool --error-exitcode 1 "$programs/hopper_test" \
      --gtest_filter='*Matches*slide_bf16*:*Matches*slide_d256_f16_causal:*Matches*groups_d192_bf16:*Matches*packed_strands_f16' &
    run "$tool.hopper_blocks" 90 compute-sanitizer --tool $tool --error-exitcode 1 "$programs/hopper_blocks_test" \
      --gtest_filter='*Matches*gaps_of_entries_128_bf16:*Matches*local_ranges_128_f16' &
    run "$tool.hopper_backward" 90 compute-sanitizer --tool $tool --error-exitcode 1 "$programs/hopper_backward_test" \
      --gtest_filter='*Matches*dense_ragged_bf16:*Matches*short_wide_f16_causal:*Matches*groups_d72_bf16:*Matches*slide_d40_bf16:*Matches*slide_d256_f16_causal' &
  done
}
step_bench() {
  local i=0 problem
  wait
  run bench 150 "$programs/longspan_gpu_bench"
  run bench_others 90 "$programs/longspan_gpu_bench" --forward-only others
  run bench_portable 150 "$programs/longspan_gpu_bench" --kernel cuda-mma
  for problem in 'dense --heads 16 --tokens 16K --head-dim 64' 'dense --heads 16 --tokens 16K --head-dim 128' \
    'dilated --tokens 128K' 'dilated --tokens 128K --causal'; do
    # shellcheck disable=SC2086
    run "cli_bench.$((i++))" 40 "$programs/longspan" bench $problem --dtype bf16 --device cuda --json
  done
}
step_backward() {
  local workloads=() wide name
  wait
  for name in dense16k_d64 dense16k_d128 seed8k seed32k seed131k million wide131k; do
    workloads+=("$name" "${name}_causal" "${name}_deterministic" "${name}_causal_deterministic")
  done
  wide=(dense16k_d192 dense16k_d192_causal dense16k_d256 dense16k_d256_causal)
  run bench_backward 120 "$programs/longspan_gpu_bench" --backward-only "${workloads[@]}" slide10k slide65k "${wide[@]}"
  run bench_backward_portable 30 "$programs/longspan_gpu_bench" --backward-only --kernel cuda-mma "${wide[@]}"
  run errors 90 python3 "$repository/bench/gpu_errors.py" --json "$results/h200_errors.json"
}
step_profile() {
  wait
  if ! command -v ncu >/dev/null; then
    echo "ncu: not here, left out"
    return
  fi
  run profile 90 ncu --clock-control none --csv --page raw --kernel-name regex:forward \
    --metrics "$(python3 "$repository/bench/gpu_report.py" --metrics)" \
    "$programs/longspan_gpu_bench" --forward-only --once dense16k_d64 strand256 slide10k
  run profile_backward 90 ncu --clock-control none --csv --page raw --kernel-name 'regex:^(prepare|backward|convert)' \
    --metrics "$(python3 "$repository/bench/gpu_report.py" --metrics)" \
    "$programs/longspan_gpu_bench" --backward-only --once dense16k_d64 dense16k_d128 seed8k seed131k_causal
}
step_modules() {
  wait
  run modules 150 python3 -m longspan.bench module encoder overhead --device cuda --tokens 131072 --out "$logs"
}
step_lm() {
  wait
  run lm 150 python3 -m longspan.bench lm --device cuda --compiled --out "$results" && mv "$results/gpu_torch_lm.json" "$results/h200_torch_lm.json"
}
step_variants() {
  wait
  run variants 590 python3 -m longspan.bench lm --device cuda --kernels 25 --out "$logs" --variants \
    eager eager+joint layers layers+separate layers:captured layers:captured+separate eager:captured \
    model model:captured model:reduce-overhead
  grep '^  [a-z]' "$logs/variants.log"
}
step_peers() {
  wait
  run peers 280 python3 "$repository/bench/gpu_vs_torch.py" --json "$results/h200_vs_torch.json"
  run peers_portable 100 python3 "$repository/bench/gpu_vs_torch.py" --quick --kernel cuda-mma \
    --json "$results/h200_vs_torch_portable.json" 'dense*' 'dilated_8k*' 'dilated_131k*' gigapath_10k
}
step_blocks() {
  wait
  run peers_blocks 200 python3 "$repository/bench/gpu_vs_torch.py" --block-sparse --json "$results/h200_block_sparse.json"
}
step_ring() {
  local dtype ring=("$programs/longspan" ring --device cuda --verify --json) far=(--segments "2048,32768,131072" --dilations "1,16,64")
  for dtype in bf16 f16 f32; do
    run "ring_verify.$dtype" 60 "${ring[@]}" --ranks 3 --dtype $dtype --backward &
  done
  run ring_verify.rounds 60 "${ring[@]}" --ranks 3 --dtype bf16 --backward --halo-limit 1M &
  run ring_verify.4 60 "${ring[@]}" --ranks 4 --tokens 131072 "${far[@]}" &
  run ring_verify.3 60 "${ring[@]}" --ranks 3 --tokens 100003 "${far[@]}" &
  wait
  run ring_local 120 python3 "$repository/bench/ring.py" --longspan "$programs/longspan" --results "$results" local
  run ring_gpu 60 python3 "$repository/bench/ring.py" --longspan "$programs/longspan" --results "$results" gpu
}

nvidia-smi --query-gpu=name,driver_version --format=csv,noheader | tee "$logs/gpu"
"$programs/longspan" --version | tee "$logs/version"
for step in $steps; do
  if ! declare -F "step_$step" >/dev/null; then
    echo "gpu_check.sh: no step is called '$step'; they are in its first lines" >&2
    exit 2
  fi
  "step_$step"
done
wait
python3 "$repository/bench/gpu_report.py" "$results"
[[ ! -s $failed ]]
