# Every row of "bad input" that a command line can express: exit code 2 and a message that names what is wrong.
source "$(dirname "$0")/lib.sh"

# Options.
expect 2 "tokens is '-1'" "$longspan" plan --tokens -1
expect 2 "tokens is '12X'" "$longspan" plan --tokens 12X
expect 2 "tokens is ''" "$longspan" plan --tokens ""
expect 2 "tokens is '99999999999T'.*2\^63" "$longspan" plan --tokens 99999999999T
expect 2 "head-dim is '0'.*1 to 256" "$longspan" plan --head-dim 0
expect 2 "head-dim is '257'.*1 to 256" "$longspan" plan --head-dim 257
expect 2 "heads is '0'" "$longspan" plan --heads 0
expect 2 "kv-heads is '3'.*divide.*8" "$longspan" plan --kv-heads 3
expect 2 "dtype is 'f8'.*f32 or bf16 or f16" "$longspan" plan --dtype f8
expect 2 "layout is 'hbnd'" "$longspan" plan --layout hbnd
expect 2 "assign is 'some'" "$longspan" plan --assign some
expect 2 "phase is 'full'" "$longspan" plan --assign all --phase full
expect 2 "phase is 'torchscale'.*assign all" "$longspan" plan --phase torchscale
expect 2 "device" "$longspan" plan --device tpu
expect 2 "device" "$longspan" demo --device h200
expect 2 "link is '50GB'.*unknown unit 'GB'; give a rate such as 50GB/s" "$longspan" plan --ranks 4 --link 50GB
expect 2 "link is '0GB/s': out of range" "$longspan" plan --ranks 4 --link 0GB/s
expect 2 "latency is '5'.*unit is missing" "$longspan" plan --ranks 4 --link 1GB/s --latency 5
expect 2 "give --ranks, too" "$longspan" plan --link 1GB/s
expect 2 "give --link, too" "$longspan" plan --ranks 4 --latency 5us
expect 2 "rate is '0TFLOP/s'" "$longspan" plan --ranks 4 --link 1GB/s --rate 0TFLOP/s
expect 2 "ranks-per-device is 5: give 1 to --ranks, 4" "$longspan" plan --ranks 4 --link 1GB/s --ranks-per-device 5
expect 2 "ranks is 4097: give at most 4096" "$longspan" plan --ranks 4097 --link 1GB/s
expect 2 "ranks is 101: give at most 100, one for each token" "$longspan" plan --tokens 100 --ranks 101 --link 1GB/s
expect 2 "ranks is -1" "$longspan" plan --ranks -1
expect 2 "threads is '-2'" "$longspan" plan --threads -2
expect 2 "seed is '-1'" "$longspan" plan --seed -1
expect 2 "" "$longspan" plan --segments 0,4096,8192
expect 2 "" "$longspan" plan --dilations 1,2,0
expect 2 "" "$longspan" plan --segments "" --dilations ""
expect 2 "" "$longspan" plan --segments 2048,4096
expect 2 "comma" "$longspan" plan --segments 2048,
expect 2 "heads" "$longspan" plan --heads 2
expect 2 "dropout is '1'" "$longspan" plan --dropout 1
expect 2 "not a block pattern" "$longspan" show --pattern bigbird+bird
expect 2 "density is 2" "$longspan" show --pattern "random(2)"
expect 2 "global_tokens is 5000" "$longspan" show --pattern "global_local(5000,64)" --tokens 4096
expect 2 "block_size 24" "$longspan" show --pattern "local_window(64) block=24"
expect 2 "mask-out 'm.txt': give a file that ends in .npy" "$longspan" show --pattern bigbird --mask-out m.txt
expect 2 "svg 'm.png': give a file that ends in .svg" "$longspan" show --pattern bigbird --svg m.png
expect 2 "global_tokens is 128: the sequence has 100; give at most" "$longspan" show --pattern 'bigbird(128)' --tokens 100
expect 0 "" "$longspan" plan --pattern 'global_local(16,64)' --tokens 0
expect 0 "" "$longspan" show --pattern 'bigbird(128)' --tokens 0
expect 2 "leave --segments out" "$longspan" show --pattern bigbird --segments 64
expect 2 "belongs to --mask" "$longspan" show --block-size 32
expect 2 "head 9" "$longspan" show --head 9
expect 2 "cells is 0" "$longspan" show --cells 0
expect 2 "no block mask" "$longspan" show --pattern dense --mask-out x.npy
expect 2 "dropout is '-0.1'" "$longspan" plan --dropout -0.1
expect 0 "dropout is 1e-5: probabilities below 1/65536 drop nothing" "$longspan" plan --dropout 1e-5
expect 2 "dropout is 'nan'" "$longspan" plan --dropout nan
expect 2 "scale" "$longspan" plan --scale inf
expect 2 "scale" "$longspan" plan --scale nan
expect 2 "pattern 'nonsense'" "$longspan" plan --pattern nonsense
expect 2 "pattern.*segments|segments.*pattern" "$longspan" plan --pattern dense --segments 1
expect 2 "kernel 'fast' is unknown" "$longspan" plan --kernel fast
expect 2 "kernel 'fast' is unknown" "$longspan" info --kernel fast
expect 2 "kernel is 'fast'" "$longspan" check --kernel fast
expect 2 "case is 100000" "$longspan" check --case 100000
expect 2 "random is -1" "$longspan" check --random -1
expect 2 "random is 9223372036854775807" "$longspan" check --random 9223372036854775807
expect 2 "those choose their own" "$longspan" check --random 1 --tokens 16
expect 2 "repeat is 0" "$longspan" bench dense --tokens 16 --repeat 0
expect 2 "segments with bench dense" "$longspan" bench dense --segments 1
expect 2 "nothing to time" "$longspan" bench dense --tokens 0
expect 2 "nothing to show" "$longspan" demo --tokens 0
expect 2 "64-bit offsets" "$longspan" bench dense --tokens 1T --batch 1T
expect 3 "fewer tokens" "$longspan" bench dense --tokens 1T
# Whether the build has no CUDA, the machine no GPU, or not that many.
for command in "demo" "bench dense" "check" "attend --q a --k a --v a --out b.npy"; do
  expect 2 "device cuda:60: .*(configure with -DLONGSPAN_CUDA=ON|NVIDIA driver|nvidia-smi|give cuda:0)" \
    "$longspan" $command --device cuda:60 --tokens 64
done
expect 0 "" "$longspan" plan --device cuda:60 --tokens 64
grep -Eq "no kernel can run this forward.*(cuda:60|GPU|left out of this build)" stdout || fail "plan does not say why: $(cat stdout)"

# Usage.
expect 2 "^longspan: " "$longspan"
expect 2 "did you mean bench\?" "$longspan" bnch
expect 2 "did you mean --tokens\?" "$longspan" plan --token 5
expect 2 "bench needs 'what': dilated .* or dense;" "$longspan" bench --repeat 0
expect 2 "^longspan: --batch is given twice: give it once;" "$longspan" plan --batch 1 --batch 1
expect 2 "^longspan: --repeat is given twice: give it once;" "$longspan" bench dense --repeat 1 --repeats 2
expect 2 "" "$longspan" bench sparse
expect 2 "" "$longspan" attend --q a.npy
expect 2 "unexpected argument 'extra'" "$longspan" plan extra
expect 2 "unexpected arguments 'one' 'two words' '--three'" "$longspan" plan one "two words" --three
expect 2 "'bnch' is not a command; did you mean bench\?" "$longspan" help bnch

# Options of rings that the launcher contradicts.
expect 2 "--ranks 2 in each of 3 processes" env OMPI_COMM_WORLD_SIZE=3 "$longspan" ring --ranks 2 --tokens 64
expect 2 "--ranks 2 in each of 3 processes" env SLURM_STEP_NUM_TASKS=3 "$longspan" ring --ranks 2 --tokens 64
expect 0 "" env SLURM_STEP_NUM_TASKS=1 "$longspan" ring --ranks 2 --tokens 64
expect 2 "built without MPI|3 processes were started, but MPI knows of 1" env PMI_SIZE=3 "$longspan" ring --tokens 64

# Lists in the wrong order are legal, and hardly ever meant: every command that takes a pattern says so.
for command in plan info show "demo --tokens 64" "check --heads 2" "bench dilated --tokens 64 --repeat 1" "ring --ranks 2 --tokens 64"; do
  expect 0 "warning: branch 0 has dilation 32 in segments of 1.*swapped" "$longspan" $command --segments 1,2 --dilations 32,64
  [ "$(wc -l <stderr)" = 1 ] || fail "more than one warning: $command"
done
expect 0 "swapped" "$longspan" plan --pattern "longnet 4/8"
expect 0 "^$" bash -c '"$@"; echo >&2' _ "$longspan" plan --segments 32,64 --dilations 1,2

# One line for each pass, not one reason for each kernel of the build, where a GPU is asked for and none is there.
if "$longspan" info | grep -q '^GPUs  *none'; then
  for command in plan info; do
    expect 0 "" "$longspan" $command --device cuda
    [ "$(grep -c 'no kernel can run' stdout)" = 2 ] && [ "$(grep 'no kernel can run' stdout | wc -c)" -lt 500 ] ||
      fail "$command --device cuda: $(grep 'no kernel' stdout)"
  done
fi

# Files: shape [1, 16, 2, 8] float32 is 1024 bytes.
npy good.npy '<f4' '1, 16, 2, 8' 1024
npy other.npy '<f4' '1, 16, 2, 4' 512
npy rows.npy '<f4' '1, 12, 2, 8' 768
npy three.npy '<f4' '1, 16, 3, 8' 1536
npy two.npy '<f4' '2, 16, 2, 8' 2048
npy half.npy '<f2' '1, 16, 2, 8' 512
npy flat.npy '<f4' '16, 16' 1024
npy ints.npy '<i4' '1, 16, 2, 8' 1024
npy void.npy '<f4' '1, 16, 2, 0' 0
attend() {
  local code=$1 pattern=$2
  shift 2
  expect "$code" "$pattern" "$longspan" attend --segments 16 --dilations 1 --out out.npy "$@"
  [ "$code" = 0 ] || [ ! -e out.npy ] || fail "a failed attend left out.npy: $*"
  [ -z "$(find . -name '.out*')" ] || fail "a temporary file was left: $*"
  rm -f out.npy
}
attend 0 "" --q good.npy --k good.npy --v good.npy
npy empty.npy '<f4' '0, 16, 2, 8' 0
attend 0 "" --q empty.npy --k empty.npy --v empty.npy
grep -q "with nothing to compute" stdout || fail "an empty batch: $(cat stdout)"
attend 2 "cannot open 'no.npy'" --q no.npy --k good.npy --v good.npy
attend 2 "not a regular file" --q . --k good.npy --v good.npy
attend 2 "head_dim" --q good.npy --k other.npy --v other.npy
attend 2 "rows" --q good.npy --k rows.npy --v rows.npy
attend 2 "v has shape" --q good.npy --k good.npy --v rows.npy
attend 2 "heads" --q good.npy --k three.npy --v three.npy
attend 2 "batch" --q good.npy --k two.npy --v two.npy
attend 2 "dtype" --q good.npy --k half.npy --v half.npy
attend 2 "dtype" --q ints.npy --k ints.npy --v ints.npy
attend 2 "head_dim 0" --q void.npy --k void.npy --v void.npy
attend 2 "shape \[16, 16\]" --q flat.npy --k flat.npy --v flat.npy
attend 2 "dtype is bf16 and --q holds f32" --dtype bf16 --q good.npy --k good.npy --v good.npy
attend 2 "tokens is 5 and k has 16" --tokens 5 --q good.npy --k good.npy --v good.npy
attend 2 "heads is 8 and q has 2" --heads 8 --q good.npy --k good.npy --v good.npy
attend 2 "query-ranges has '3'" --query-ranges 3 --q good.npy --k good.npy --v good.npy
attend 2 "leaves the sequence" --query-ranges 10:16 --q good.npy --k good.npy --v good.npy
attend 2 "query_ranges" --query-ranges 0:3 --q good.npy --k good.npy --v good.npy
npy long.npy '<i8' '2' 16
npy floats.npy '<f4' '1' 4
npy mask.npy '|b1' '1, 9' 9
attend 2 "lengths" --lengths long.npy --q good.npy --k good.npy --v good.npy
attend 2 "lengths holds f32" --lengths floats.npy --q good.npy --k good.npy --v good.npy
attend 2 "key_mask" --key-mask mask.npy --q good.npy --k good.npy --v good.npy
attend 2 "alibi" --alibi-slopes floats.npy --q good.npy --k good.npy --v good.npy
npy much.npy '<i4' '1' 0
printf '\x11\x00\x00\x00' >>much.npy # 17 rows of 16
attend 2 "lengths.*17" --lengths much.npy --q good.npy --k good.npy --v good.npy
attend 2 "is a folder" --q good.npy --k good.npy --v good.npy --lse .
expect 2 "would replace the input" "$longspan" attend --q good.npy --k good.npy --v good.npy --out ./good.npy
expect 2 "is the same file" "$longspan" attend --segments 16 --dilations 1 --q good.npy --k good.npy --v good.npy --out o.npy --lse o.npy
expect 2 "names no tensor" "$longspan" attend --q good.npy --k good.npy --v good.npy --out o.safetensors

# Headers that lie. Each replaces q.
lie() { attend 2 "$1" --q lie.npy --k good.npy --v good.npy; }
npy lie.npy '<f4' '1, 16, 2, 8' 1000 && lie "truncated"
npy lie.npy '<f4' '1, 16, 2, 8' 1025 && lie "more than one array"
npy lie.npy '<f4' '1, 16, 2, 8' 1024 True && lie "Fortran"
npy lie.npy '>f4' '1, 16, 2, 8' 1024 && lie "big-endian"
npy lie.npy '<c8' '1, 16, 2, 8' 2048 && lie "element type '<c8'"
npy lie.npy '<u2' '1, 16, 2, 8' 512 && lie "say so with --dtype bf16"
npy lie.npy '<f4' '4611686018427387904, 4611686018427387904, 2, 8' 1024 && lie "overflows"
npy lie.npy '<f4' '99999999999999999999, 1, 2, 8' 1024 && lie "overflows"
npy lie.npy '<f4' '-1, 16, 2, 8' 1024 && lie "negative"
npy lie.npy '<f4' '0, 4611686018427387904, 4611686018427387904, 8' 0 && lie "overflows"
npy lie.npy '<f4' '1, 16, 2, 8, 1, 1, 1, 1, 1' 1024 && lie "9 dimensions"
printf 'hello, I am no array at all, sorry' >lie.npy && lie "magic"
: >lie.npy && lie "magic"
printf '\x93NUMPY\x02\x00\xff\xff\xff\xff{}' >lie.npy && lie "header of 4294967295 bytes"
printf '\x93NUMPY\x09\x00\x02\x00{}' >lie.npy && lie "version 9"

tensor='"shape":[1,16,2,8],"data_offsets":[0,1024]'
safe() {
  safetensors lie.safetensors "$2" "$3" ${4:-}
  attend 2 "$1" --q lie.safetensors#q --k good.npy --v good.npy
}
safe "no tensor 'q'; it holds: p" "{\"p\":{\"dtype\":\"F32\",$tensor}}" 1024
safe "outside" "{\"q\":{\"dtype\":\"F32\",$tensor}}" 1000
safe "outside" '{"q":{"dtype":"F32","shape":[1,16,2,8],"data_offsets":[1024,0]}}' 1024
safe "needs 1024 bytes" '{"q":{"dtype":"F32","shape":[1,16,2,8],"data_offsets":[0,1020]}}' 1024
safe "overflows" '{"q":{"dtype":"F32","shape":[4611686018427387904,16,2,8],"data_offsets":[0,1024]}}' 1024
safe "whole number" '{"q":{"dtype":"F32","shape":[1,16,2,-8],"data_offsets":[0,1024]}}' 1024
safe "whole number" '{"q":{"dtype":"F32","shape":[1,16,2,1e300],"data_offsets":[0,1024]}}' 1024
safe "whole number" '{"q":{"dtype":"F32","shape":[1,16,2,8],"data_offsets":[0,18446744073709551615]}}' 1024
safe "element type 'C64'" "{\"q\":{\"dtype\":\"C64\",$tensor}}" 1024
safe "lacks" '{"q":{"dtype":"F32"}}' 1024
safe "twice" "{\"q\":{\"dtype\":\"F32\",$tensor},\"q\":{\"dtype\":\"F32\",$tensor}}" 1024
safe "not JSON" '{"q":' 1024
safe "nests too deeply" '{"q":[[[[[[[[]]]]]]]]}' 1024
safe "header of 72057594037927936 bytes" "{}" 10 72057594037927936
safe "truncated" "{}" 10 5000
printf 'abc' >lie.safetensors
attend 2 "truncated" --q lie.safetensors#q --k good.npy --v good.npy

finish
