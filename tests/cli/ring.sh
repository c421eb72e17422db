# Rings from the command line: local ranks, files, traces, plans, bad input; MPI ranks where there is mpirun.
source "$(dirname "$0")/lib.sh"

has() { # has TEXT...: stdout of the last expect holds each text
  for text in "$@"; do grep -Fq -- "$text" stdout || fail "stdout lacks '$text': $(head -c 300 stdout)"; done
}
field() { python3 -c "import json,sys; d=json.load(open('stdout')); print($1)"; }
command -v python3 >/dev/null || { echo "left out: rings, whose results are read with python3"; finish; }
small=(--tokens 1003 --heads 3 --head-dim 16 --segments 64,256,2048 --dilations 1,4,8)

expect 0 "" "$longspan" ring --ranks 3 "${small[@]}" --verify --backward --json --trace trace.json
has '"bit_identical": true' '"verified": true' '"bytes_as_planned": true' '"engine": "local"' '"waited_seconds"' '"overlapped_seconds"' '"over_tolerance"' '"largest_difference"'
[ "$(field "all(r['bytes_received'] == r['planned_bytes_received'] > 0 for r in d['per_rank'])")" = True ] || fail "bytes differ from the plan"
python3 - <<'END' || fail "the trace lacks ranks"
import json
events = json.load(open("trace.json"))["traceEvents"]
assert {event["tid"] for event in events} == {0, 1, 2}
assert all(event["dur"] >= 0 for event in events if event["ph"] == "X")
END
expect 0 "" "$longspan" ring --ranks 4 "${small[@]}" --verify --dtype bf16 --causal --shards zigzag --dropout 0.1
has "verified: out and lse have the bits of one device with cpu-" "bytes moved equal the plan"
expect 0 "" "$longspan" ring --ranks 3 "${small[@]}" --verify --backward --halo-limit 20000
has "up to rounding (rounds): at most " "% of what rounding may cause"
expect 0 "" "$longspan" ring --ranks 2 "${small[@]}"
grep -Eq '^0 .* cpu-' stdout || fail "no kernel beside rank 0: $(cat stdout)"
expect 0 "" "$longspan" ring --ranks 2 "${small[@]}" --json
[ "$(field "d['kernel'].startswith('cpu-')")" = True ] || fail "the kernel is $(field "d.get('kernel')")"
expect 0 "" "$longspan" ring --ranks 2 "${small[@]}" --verify --json --link 1MB/s --latency 20ms
# Whoever begins first waits for the whole way of a message; a rank that begins later may find it half way.
[ "$(field "d['verified'] and any(r['seconds'] >= r['bytes_received'] / 1e6 + 0.02 for r in d['per_rank'])")" = True ] || fail "the link was not imitated"
expect 2 "link is '50': the unit is missing; give a rate such as 50GB/s" "$longspan" ring --ranks 2 "${small[@]}" --link 50
expect 2 "link is '0GB/s'.*out of range" "$longspan" ring --ranks 2 "${small[@]}" --link 0GB/s
expect 2 "latency is '-5us'" "$longspan" ring --ranks 2 "${small[@]}" --latency=-5us
# Predictions: exact bytes, and a step that a slower link makes longer.
expect 0 "" "$longspan" plan --ranks 4 "${small[@]}" --json
bytes=$(field "[r['bytes_received'] for r in d['ring']['per_rank']]")
expect 0 "" "$longspan" plan --ranks 4 "${small[@]}" --json --link 1GB/s --latency 5us --dtype f32
[ "$(field "[r['bytes_received'] for r in d['ring']['prediction']['per_rank']]")" = "$bytes" ] || fail "predicted bytes differ from the plan's"
[ "$(field "d['ring']['prediction']['device']['name']")" = cpu ] || fail "the device is not this one"
expect 0 "" "$longspan" plan --ranks 1024 --tokens 1T --assign all --segments 2K,1M,1T --dilations 1,512,1M --dtype bf16 --device h200 --link 400Gb/s --latency 5us
has "a ring of 1024 on h200 over 50 GB/s with 5" "predicted" "rates: measured, bench/results/h200_hopper.json" "ranks were looked at" "efficiency"
grep -q "no kernel can run" stdout && fail "a prediction for another machine needs no kernel here"
expect 0 "" "$longspan" plan --ranks 2 --device a100 --link 1GB/s
has "rates: not measured, data sheet"
# Thousands of rounds, and values far below their terms: what differs is rounding, however it looks beside a rank's
# largest value.
expect 0 "" "$longspan" ring --ranks 4 --pattern dense --tokens 8K --heads 1 --head-dim 32 --halo-limit 4096 --verify --json
[ "$(field "0.01 < d['over_tolerance'] < 1 and d['verified']")" = True ] || fail "rounds: $(field "d['over_tolerance']")"
expect 0 "" "$longspan" ring --ranks 4 --pattern dense --causal --tokens 2K --heads 1 --head-dim 64 --halo-limit 2000 --verify --backward
expect 0 "" "$longspan" ring --ranks 3 --pattern dense --tokens 1K --heads 2 --halo-limit 20000 --verify --backward --dtype bf16
expect 0 "" "$longspan" ring --ranks 1 "${small[@]}" --verify --json --kernel plain
has '"bit_identical": true'
[ "$(field "d['kernel']")" = plain ] || fail "the kernel is not named"

# Files: the ranks together write what one device writes.
python3 - <<'END'
import struct
# Three .npy files of float32 [1, 301, 2, 8] without NumPy.
for name, seed in (("q", 1), ("k", 2), ("v", 3)):
    values = [((i * 7919 + seed * 104729) % 1000) / 500 - 1 for i in range(301 * 2 * 8)]
    header = "{'descr': '<f4', 'fortran_order': False, 'shape': (1, 301, 2, 8), }"
    header += " " * (63 - (10 + len(header)) % 64) + "\n"
    with open(f"{name}.npy", "wb") as file:
        file.write(b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header.encode())
        file.write(struct.pack(f"<{len(values)}f", *values))
END
pattern=(--segments 50,400 --dilations 1,3)
expect 0 "" "$longspan" attend --q q.npy --k k.npy --v v.npy --out one.npy "${pattern[@]}"
expect 0 "" "$longspan" ring --ranks 3 --q q.npy --k k.npy --v v.npy --out ring.npy "${pattern[@]}" --json
cmp one.npy ring.npy || fail "the ranks wrote something else than one device"
ls ./*partial 2>/dev/null && fail "a partial file is left"
# The job as it is written, with an srun that stands for one node's.
if command -v mpirun >/dev/null && ldd "$longspan" | grep -q libmpi; then
  mkdir -p stub
  printf '#!/usr/bin/env bash\nwhile [ "${1#-}" != "$1" ]; do shift; done\nexec mpirun --allow-run-as-root --oversubscribe -n 2 "$@"\n' >stub/srun
  chmod +x stub/srun
  expect 0 "" env PATH="$PWD/stub:$PATH" LONGSPAN="$longspan" TOKENS=8K SLURM_NTASKS=2 SLURM_CPUS_PER_TASK=1 bash "$SOURCE_DIR/examples/slurm/ring_mpi.sbatch"
  has '"engine": "mpi"' '"bytes_as_planned": true' "a ring of 2 on cpu over 12 GB/s"
fi
if command -v mpirun >/dev/null && "$longspan" ring --help | grep -q mpirun; then
  if mpirun --allow-run-as-root --oversubscribe -n 2 "$longspan" ring --q q.npy --k k.npy --v v.npy --out mpi.npy "${pattern[@]}" --verify --json >stdout 2>stderr; then
    has '"engine": "mpi"' '"bit_identical": true'
    cmp one.npy mpi.npy || fail "MPI ranks wrote something else than one device"
  elif ! grep -q "built without MPI\|no ranks" stderr; then
    fail "mpirun: $(head -c 500 stderr)"
  fi
  # --ranks under a launcher would be a ring in every process.
  mpirun --allow-run-as-root --oversubscribe -n 3 "$longspan" ring --ranks 2 "${small[@]}" >stdout 2>stderr &&
    fail "mpirun with --ranks ran"
  grep -q "would be 3 rings" stderr || fail "mpirun with --ranks: $(head -c 500 stderr)"
fi

expect 0 "" "$longspan" plan --ranks 8 --tokens 1M --heads 12 --dtype bf16 --assign all --segments 2K,4K,8K,16K,32K,64K,128K,256K,512K,1M --dilations 1,2,4,8,16,32,64,128,256,512 --json
has '"bytes_received": 9437184' '"naive_ring_bytes": 2818572288' '"all_gather_bytes": 38535168'
expect 0 "" "$longspan" plan --ranks 4 --tokens 4096
has "naive ring" "all-gather"

expect 0 "" "$longspan" ring --ranks 2 --tokens 64 --batch 0 --verify
has "the bits of one device, which computes nothing"

expect 2 "no ranks" "$longspan" ring "${small[@]}"
expect 2 "shards" "$longspan" ring --ranks 2 "${small[@]}" --shards diagonal
expect 2 "deadline" "$longspan" ring --ranks 2 "${small[@]}" --deadline 0
expect 2 "--q, --k and --v together" "$longspan" ring --ranks 2 --q q.npy
expect 2 "would replace" "$longspan" ring --ranks 2 --q q.npy --k k.npy --v v.npy --out q.npy
expect 2 "cuda" "$longspan" ring --ranks 2 "${small[@]}" --device cuda

# Where the system gives no threads, the command says so: stacks of a petabyte are more than there are addresses.
if (ulimit -Ss 1099511627776) 2>/dev/null; then
  without_threads() { (ulimit -Ss 1099511627776 && exec "$@"); }
  expect 3 "no thread to rank 0 of 4.*fewer --ranks" without_threads "$longspan" ring --ranks 4 "${small[@]}"
  expect 0 "" without_threads "$longspan" ring --ranks 1 "${small[@]}" --verify
fi

finish
