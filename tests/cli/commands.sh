# Each command once, as a user would: exit codes, keys of the JSON, that help and numbers are there.
source "$(dirname "$0")/lib.sh"

has() { # has TEXT...: stdout of the last expect holds each text
  for text in "$@"; do grep -Fq -- "$text" stdout || fail "stdout lacks '$text': $(head -c 300 stdout)"; done
}

expect 0 "" "$longspan" --version
grep -Eq '^longspan [0-9]+\.[0-9]+\.[0-9]+ \(.+\)$' stdout || fail "--version says $(cat stdout)"
expect 0 "" "$longspan" --help
has "Exit codes:" "Examples:" demo attend plan info check bench
for command in demo attend plan show info check bench; do
  expect 0 "" "$longspan" "$command" --help
  has --tokens --batch --heads --kv-heads --head-dim --dtype --segments --dilations --assign --phase --pad-keys --pattern --causal \
    --dropout --layout --device --threads --kernel --seed --json
done
for command in demo attend ring plan show info doctor check bench; do
  expect 0 "" "$longspan" help $command
  diff -q stdout <("$longspan" $command --help) >/dev/null || fail "help $command differs from $command --help"
done
expect 0 "" "$longspan" help
diff -q stdout <("$longspan" --help) >/dev/null || fail "help differs from --help"

# The manual has every command in its table, and counts them.
words=(zero one two three four five six seven eight nine ten eleven twelve)
commands=$("$longspan" --help | sed -n '/^Subcommands:/,/^$/s/^  \([a-z]\+\) .*/\1/p' | grep -v '^help$' | sort)
manual=$SOURCE_DIR/docs/cli.md
in_table=$(sed -n '/^| command | does |/,/^$/s/^| `longspan \([a-z]*\).*/\1/p' "$manual" | sort)
[ "$commands" = "$in_table" ] || fail "the commands are $(echo $commands), the manual's table has $(echo $in_table)"
grep -q "^One command, ${words[$(echo "$commands" | wc -l)]} verbs" "$manual" || fail "the manual miscounts the commands"

# Sizes in powers of 1024, defaults as documented, and 2^40 tokens at once.
expect 0 "" timeout 5 "$longspan" plan --tokens 1T --json
has '"tokens": 1099511627776' '"heads": 8' '"head_dim": 64' '"dtype": "f32"' '"batch": 1' '"pattern": "longspan/1 dilated 2048/1 4096/2 8192/4"' \
  '"pairs"' '"forward_flops"' '"backward_bytes"' '"work_items"' '"forward_workspace_bytes"' '"branches"'
expect 0 "" "$longspan" plan --tokens 16 --segments 16 --dilations 1 --json
has '"pairs": 2048.0' # 8 heads of 16 x 16
expect 0 "" "$longspan" plan --tokens 128K
has "131,072 tokens"
expect 0 "" "$longspan" plan --tokens 0
! grep -q skipped stdout || fail "branches of an empty sequence are skipped: $(cat stdout)"
# Strides with very many common multiples are counted all the same, without lists of their blocks.
strides=$(for prime in 2 3 5 7 11 13 17 19 23 29 31 37 41 43 47 53; do printf '+strided(%d)' $((64 * prime)); done)
expect 0 "" timeout 20 "$longspan" plan --tokens 16M --pattern "${strides#+}" --json
has '"exact": true'
# Block patterns of any length are counted, not listed: exactly, or by the expected number of random blocks.
for pattern in 'local_window(512)' 'strided(4096)+global_local(64,512)' hierarchical; do
  expect 0 "" timeout 20 "$longspan" plan --tokens 1T --pattern "$pattern" --json
  has '"exact": true' 'are too many blocks for a mask'
done
expect 0 "" timeout 20 "$longspan" plan --tokens 8M --pattern bigbird
has "about " "% of dense attention"
# Sizes that no problem has are refused where they enter.
expect 2 "tokens is 1099511627777" "$longspan" plan --tokens 1099511627777
expect 2 "scale is 1e.300" "$longspan" plan --scale 1e300
expect 2 "ranks is 1000000000" "$longspan" plan --ranks 1000000000
expect 0 "" "$longspan" plan --pattern "longnet phase=torchscale pad_keys 64/1 128/4" --tokens 4096

# Patterns as pictures, and block masks through files and back.
expect 0 "" "$longspan" show --pattern bigbird --tokens 2048 --heads 2 --ascii --svg bigbird.svg --mask-out mask.npy
has "block=64 global_local(<=128,192)+random(0.05,0)" "64 tokens a cell" "density" "####"
expect 0 "" "$longspan" show --pattern bigbird --tokens 100
expect 0 "" "$longspan" show --pattern longformer --tokens 50
grep -Fq '</svg>' bigbird.svg || fail "no drawing in bigbird.svg"
expect 0 "" "$longspan" show --mask mask.npy --tokens 2048 --heads 2 --json
has '"active_blocks"' '"density"' '"share"' '"pairs_of_dense"' 'block_sparse block=64 heads=2 blocks=32 rows='
expect 0 "" "$longspan" show --segments 64,256 --dilations 1,4 --heads 2 --head 1 --tokens 512 --causal
has "head 1 of 2" "% of causal dense attention"
# plan and show agree on what dense attention is.
for command in plan show; do
  expect 0 "" "$longspan" "$command" --pattern dense --causal --tokens 100 --heads 1
  has "5.05 K pairs, 100% of causal dense attention"
  expect 0 "" "$longspan" "$command" --pattern 'longnet whole/2' --tokens 100 --heads 1
  has "2.50 K pairs, 25% of dense attention"
done
# Pictures fit the terminal, and show several heads.
expect 0 "" env COLUMNS=40 "$longspan" show --tokens 8K --head 0,7
has "head 0 of 8" "head 7 of 8" "share of pairs that attend"
awk 'length($0) > 40 && !/tokens, head|attention/ { exit 1 }' <(LC_ALL=C.UTF-8 sed 's/[^ -~]/x/g' stdout) || fail "a line is wider than the terminal"
expect 0 "" "$longspan" show --segments 16,32,64 --dilations 1,2,4 --heads 3 --head 0,1,2 --tokens 64 --svg heads.svg
for text in "head 2, 64 tokens" "key position" "query position" "share of pairs that attend" "<title>dilated 16/1 32/2 64/4</title>"; do
  grep -Fq -- "$text" heads.svg || fail "the drawing lacks $text"
done
expect 2 "head 9" "$longspan" show --head 0,9
expect 2 "head" "$longspan" show --head ,
expect 0 "" "$longspan" check --pattern 'block=16 local_window(48)+random(0.2,3)' --tokens 200 --heads 2 --head-dim 16
expect 0 "" "$longspan" check --pattern 'adaptive(0.3) block=16' --tokens 200 --heads 2 --head-dim 16 --causal
expect 0 "" "$longspan" demo --pattern 'adaptive(0.3) block=16' --tokens 600 --heads 2 --json
has '"verified": true'
expect 0 "" "$longspan" bench block-sparse --tokens 1024 --repeat 1 --json
has '"bench": "block-sparse"' 'random(0.05,0)' '"gflops"'

expect 0 "" "$longspan" info
has plain reference threads caches instructions "plan cache" "memory pool"
grep -Eq '^(GPUs +none: .+|cuda:0 +.+compute capability)' stdout || fail "info says nothing about GPUs: $(cat stdout)"
expect 0 "" "$longspan" info --why --json --kernel plain
has '"instruction_sets"' '"plan_cache"' '"host_memory"' '"kernels"' '"reason"' '"chosen"'

expect 0 "" "$longspan" doctor
has processor threads "agree with float64" "all is well"
expect 0 "" "$longspan" doctor --json
has '"ok": true' '"findings"' '"what": "plain"'
expect 0 "" env OMP_NUM_THREADS=1 LONGSPAN_FORCE_KERNEL=plain "$longspan" doctor
has "-> unset LONGSPAN_FORCE_KERNEL"

expect 0 "" "$longspan" demo --tokens 2048 --segments 256,512 --dilations 1,2 --out report.html --json
has '"verified": true' '"tokens": 2048' '"extra_bytes"' '"dense_score_bytes": 134217728.0' '"checks"' '"report": "report.html"'
for text in '<svg' 'prefers-color-scheme: dark' 'Verified against' '</html>'; do
  grep -Fq -- "$text" report.html || fail "the report lacks $text"
done
grep -Eq 'https?://|src=|@import|<script|<link' report.html && fail "the report reaches for the network"
expect 0 "" "$longspan" demo --tokens 1000 --assign all --segments 100,333 --dilations 1,3 --causal --dtype bf16 --kv-heads 2 --layout bhnd
has "verified" dq dk dv lse
expect 0 "" "$longspan" demo --tokens 300 --pattern "longnet long=skip 100/1 400/2" --dropout 0.1 --kernel plain --json
has '"verified": true' '"kernel": "plain"'

expect 0 "" "$longspan" check --random 3 --seed 5
has "every kernel agrees" plain reference bf16
expect 0 "" "$longspan" check --random 1 --seed 5 --case 2 --kernel plain --json
has '"ok": true' '"cases": 1' '"over_tolerance"'
expect 0 "" "$longspan" check --case 3 --kernel plain
expect 0 "" "$longspan" check --tokens 100 --segments 40 --dilations 3 --dtype f16

expect 0 "" "$longspan" bench dilated --tokens 1024 --repeat 1 --json
has '"gflops"' '"peak_gflops"' '"peak_source"' '"fraction_of_peak"' '"extra_bytes"' '"kernel"' '"threads"' '"forward"' '"backward"' '"tokens": 1024'
expect 0 "" "$longspan" bench dense --tokens 256 --repeats 1 --forward-only --causal # the other spelling
has forward GFLOP/s "peak of the forward"
expect 0 "" "$longspan" ring --ranks 2 --tokens 64 --repeats 2

# Progress and notes stay off stdout, and colours off pipes.
expect 0 "" env -u NO_COLOR "$longspan" check --case 0 --kernel plain
grep -q $'\x1b' stdout stderr && fail "escape codes in a pipe"

finish
