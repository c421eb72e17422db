# Every command on a GPU. Without one: that each says what is missing, and that everything else works as if nothing was.
source "$(dirname "$0")/lib.sh"

has() { # has TEXT...: stdout of the last expect holds each text
  for text in "$@"; do grep -Fq -- "$text" stdout || fail "stdout lacks '$text': $(head -c 300 stdout)"; done
}
npy in.npy '<f4' '1, 96, 2, 64' 49152
npy mask.npy '|b1' '1, 96' 96
attend=("$longspan" attend --segments 32,96 --dilations 1,2 --q in.npy --k in.npy --v in.npy)
blocks=("$longspan" attend --pattern 'block=16 bigbird(16,48,0.2,1)' --q in.npy --k in.npy --v in.npy)

expect 0 "" "$longspan" info --json
if grep -q '"gpus": \[\]' stdout; then
  reason=$(sed -n 's/^  "why_no_gpu": "\(.*\)",$/\1/p' stdout)
  [ -n "$reason" ] || fail "info has no GPU and does not say why: $(cat stdout)"
  for command in demo "bench dense" check "attend --q in.npy --k in.npy --v in.npy --out out.npy"; do
    expect 2 "--device cuda:0: .+; or leave --device out" "$longspan" $command --device cuda
    grep -Fq -- "$reason" stderr || fail "$command does not say '$reason': $(cat stderr)"
  done
  [ ! -e out.npy ] || fail "a refused attend left out.npy"
  expect 0 "" "$longspan" demo --tokens 512 --segments 64,128 --dilations 1,2 --json
  has '"device": "cpu"' '"verified": true'
  grep -q '"device": "cuda' stdout && fail "the demo claims a GPU"
  expect 0 "" "$longspan" plan --device cuda --dtype bf16 --json
  has '"device": "cuda:0"' '"forward": null' '"why_none": "no kernel can run this forward'
  expect 0 "" "$longspan" info --device cuda --why
  has "on cuda:0" "$reason"
  echo "skipped: what needs a GPU ($reason)"
  finish
fi

expect 0 "" "$longspan" info --device cuda --dtype bf16 --why
has "cuda:0" "compute capability" driver cuda-simt runs
expect 0 "" "$longspan" plan --device cuda --dtype bf16 --json
has '"device": "cuda:0"' '"why_none": ""'
for dtype in f32 bf16; do
  expect 0 "" "$longspan" bench dilated --device cuda --tokens 8K --dtype $dtype --repeats 2 --json
  has '"device": "cuda:0"' '"peak_source"' '"fraction_of_peak"' '"sustained_seconds"' '"gpu_driver"'
done
expect 0 "" "$longspan" bench block-sparse --device cuda --tokens 8K --dtype bf16 --repeats 2 --json
has '"device": "cuda:0"' '"sustained_seconds"'
expect 0 "" "$longspan" bench block-sparse --device cuda --tokens 8K --dtype bf16 --repeats 2 --pattern 'block=64 adaptive(0.1)' --forward-only
expect 0 "" "$longspan" bench dense --device cuda --tokens 2K --dtype f16 --forward-only
has TFLOP/s "of peak"
expect 0 "" "$longspan" demo --tokens 4K --dtype bf16 --out report.html --json
has '"device": "cpu"' '"device": "cuda:0"' '"verified": true'
grep -Fq "cuda:0" report.html || fail "the report leaves the GPU out"
expect 0 "" "$longspan" demo --tokens 4K --device cuda
has verified
expect 0 "" "$longspan" check --device cuda --random 20 --seed 3
has "every kernel agrees" cuda-simt
expect 0 "" "$longspan" check --device cuda --tokens 100 --segments 40 --dilations 3 --dtype f16
# The CPU's result to rounding, on random numbers (bytes 3e and 3f only: 0.18 to 0.75).
{ head -c 128 in.npy && tr -dc '\076\077' </dev/urandom | head -c 49152; } >in2.npy
for device in cpu cuda; do
  expect 0 "" "${attend[@]/in.npy/in2.npy}" --out $device.npy --lse ${device}_lse.npy --device $device --json
  has "\"device\": \"$device"
  expect 0 "" "${blocks[@]/in.npy/in2.npy}" --out ${device}_blocks.npy --lse ${device}_blocks_lse.npy --device $device
  for file in $device ${device}_lse ${device}_blocks ${device}_blocks_lse; do
    tail -c +129 $file.npy | od -An -v -w4 -tf4 >$file.txt
  done
done
for file in "cpu.txt cuda.txt" "cpu_lse.txt cuda_lse.txt" "cpu_blocks.txt cuda_blocks.txt" "cpu_blocks_lse.txt cuda_blocks_lse.txt"; do
  paste $file | awk '{ d = $1 - $2; if (d < 0) d = -d; if (!(d < 1e-5 || $1 == $2)) wrong++ } END { exit !(NR >= 192 && !wrong) }' ||
    fail "$file differ"
done
# A mask of zeros leaves no keys.
expect 0 "" "${attend[@]/in.npy/in2.npy}" --out gpu.npy --key-mask mask.npy --device cuda
tail -c +129 gpu.npy | tr -d '\000' | grep -q . && fail "a mask of zeros gives something"
expect 2 "head_dim 12" "$longspan" bench dense --device cuda --head-dim 12 --tokens 64
expect 3 "use fewer tokens" "$longspan" bench dense --device cuda --tokens 1G --dtype bf16

finish
