# Names of files: what cannot work is said before any work, what goes to standard output stays free of text, and nothing
# from a file or an argument reaches the terminal as it is.
source "$(dirname "$0")/lib.sh"

npy in.npy '<f4' '1, 512, 2, 64' 262144
inputs=(--q in.npy --k in.npy --v in.npy)
attend=("$longspan" attend "${inputs[@]}")
# Too much work to be finished: whoever refuses within five seconds did so before it.
npy big.npy '<f4' '1, 262144, 2, 64' 134217728
slow=(timeout 5 "$longspan" attend --q big.npy --k big.npy --v big.npy --kernel reference)
unchanged() { [ "$(cat "$1")" = "$2" ] || fail "$1 was changed"; }
printed() { LC_ALL=C grep -Pq '[\x00-\x08\x0b-\x1f\x7f-\x9f]' "$1" && fail "control bytes reach the terminal: $(od -c "$1" | head -5)"; }

# Two outputs, or an output and an input, that are one file however they are written.
echo old >a.npy
ln -s a.npy link.npy
ln a.npy hard.npy
ln -s nowhere.npy dangling.npy
ln -s "$PWD" folder
for other in a.npy ./a.npy "$PWD/a.npy" folder/a.npy link.npy hard.npy; do
  expect 2 "lse '.*': --out 'a.npy' is the same file" "${slow[@]}" --out a.npy --lse "$other"
done
expect 2 "is the same file" "${slow[@]}" --out dangling.npy --lse nowhere.npy
expect 2 "is the same file" "${slow[@]}" --out new.npy --lse ./new.npy
expect 2 "is the same tensor" "${slow[@]}" --out s.safetensors#x --lse ./s.safetensors#x
unchanged a.npy old
ln -s in.npy in_link.npy
ln in.npy in_hard.npy
for name in ./in.npy in_link.npy in_hard.npy; do
  expect 2 "would replace the input file" "${attend[@]}" --out "$name"
  expect 2 "would replace the input file" "$longspan" ring --ranks 2 "${inputs[@]}" --out "$name"
done
npy mask.npy '|b1' '8, 8' 64
expect 2 "would replace the input file" "${attend[@]}" --mask mask.npy --out ./mask.npy
expect 2 "would replace the input file" "$longspan" ring --ranks 2 --tokens 512 --mask mask.npy --out ./mask.npy
expect 2 "would replace the input file" "$longspan" show --tokens 512 --mask mask.npy --mask-out ./mask.npy
ln -s mask.npy page.html
expect 2 "would replace the input file" "$longspan" demo --tokens 512 --mask mask.npy --out page.html
ln -s drawn.npy drawn.svg
expect 2 "is the same file" "$longspan" show --pattern bigbird --svg drawn.svg --mask-out drawn.npy
# One .safetensors file by two names holds both tensors.
expect 0 "" "${attend[@]}" --out both.safetensors#out --lse ./both.safetensors#lse
grep -aq '"lse"' both.safetensors && grep -aq '"out"' both.safetensors || fail "both.safetensors lacks a tensor"
expect 0 "" "${attend[@]}" --out /dev/null --lse /dev/null

# Names that cannot be written are found before the work.
long=$(printf 'n%.0s' $(seq 300)).npy
expect 2 "shorter name" "${slow[@]}" --out "$long"
ln -s "$long" long_link.npy
expect 2 "shorter name" "${slow[@]}" --out long_link.npy
ln -s circle.npy circle.npy
expect 2 "circle" "${slow[@]}" --out circle.npy
expect 2 "not UTF-8" "${slow[@]}" --out $'o.safetensors#\xff'
expect 2 "__metadata__" "${slow[@]}" --out o.safetensors#__metadata__
for option in --out --lse --lengths --key-mask --alibi-slopes --mask --q; do
  expect 2 "$option: give a file name" "${slow[@]}" --out x.npy $option ""
done
for option in --out --trace --q; do expect 2 "$option: give a file name" "$longspan" ring --ranks 2 $option ""; done
for option in --svg --mask-out --mask; do expect 2 "$option: give a file name" "$longspan" show $option ""; done
expect 2 "out: give a file name" "$longspan" demo --out ""

# Names say what is in a file.
for name in x.pt x.npz x x.npy.gz; do
  expect 2 "out '$name': give a file that ends in .npy or .safetensors" "${slow[@]}" --out $name
done
expect 2 "lse 'x.pt'" "${slow[@]}" --out x.npy --lse x.pt
expect 2 "ends in .npy" "$longspan" ring --ranks 2 --tokens 64 --out x.pt
expect 2 "ends in .npy" "$longspan" ring --ranks 2 --tokens 64 --out x.safetensors#x
expect 2 "ends in .json" "$longspan" ring --ranks 2 --tokens 64 --trace x.txt
expect 2 "ends in .html" "$longspan" demo --tokens 64 --out x.pdf

# A link is written through, also one that leads nowhere yet.
expect 0 "" "${attend[@]}" --out dangling.npy
[ -L dangling.npy ] && [ -f nowhere.npy ] || fail "a dangling link was replaced"
rm -f nowhere.npy
expect 0 "" "$longspan" ring --ranks 2 "${inputs[@]}" --out dangling.npy
[ -L dangling.npy ] && [ -f nowhere.npy ] || fail "the ring replaced a dangling link"
mkdir there && echo old >there/real.npy && ln -s there/real.npy through.npy
expect 0 "" "$longspan" ring --ranks 2 "${inputs[@]}" --out through.npy
[ -L through.npy ] && [ "$(stat -c %s there/real.npy)" = 262272 ] || fail "the ring replaced a link"
mkfifo pipe
# Never /dev/null itself: a ring that fails this test would replace it.
mknod null c 1 3 2>/dev/null || mkfifo null
for name in null pipe -; do expect 2 "not to pipes or devices" "$longspan" ring --ranks 2 --tokens 64 --out $name; done
[ ! -f null ] && [ -p pipe ] || fail "a device or a pipe was replaced"

# Standard output: the array alone, the text beside it.
expect 0 "" "${attend[@]}" --out plain.npy
for name in - /dev/stdout; do
  expect 0 "with kernel" "${attend[@]}" --out $name
  cmp -s stdout plain.npy || fail "--out $name wrote something else than a file gets"
  "${attend[@]}" --out $name 2>/dev/null | cmp -s - plain.npy || fail "--out $name into a pipe"
done
expect 2 "json" "${attend[@]}" --out - --json
expect 2 "lse '-': --out" "${attend[@]}" --out - --lse -
expect 0 "" "$longspan" show --pattern bigbird --svg -
grep -q '^<svg' stdout && [ "$(tail -1 stdout)" = "</svg>" ] || fail "--svg - writes more than a drawing"
if command -v script >/dev/null; then
  script -qec "\"$longspan\" attend --q in.npy --k in.npy --v in.npy --out -" /dev/null </dev/null >terminal
  grep -q "terminal: redirect" terminal || fail "an array was written to a terminal: $(head -c 200 terminal)"
fi

# Nothing that a file or an argument says reaches the terminal unescaped.
hostile=("$longspan" attend --k in.npy --v in.npy --out x.npy)
escape=$'\x1b]0;owned\x07'
header='{"\u001b]0;owned\u0007\u009b31m\u202e":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}'
safetensors hostile.safetensors "$header" 4
expect 2 'x1b\]0;owned.x07.x9b31m.u202e' "${hostile[@]}" --q hostile.safetensors#q
printed stderr
npy hostile.npy "$escape" '1' 4
expect 2 'x1b\]0;owned' "${hostile[@]}" --q hostile.npy
printed stderr
for arguments in "--tokens $escape" "--$escape" "--dtype $escape" "--pattern $escape" "--kernel $escape" "--mask $escape" "$escape"; do
  expect 2 'x1b\]0;owned' "$longspan" plan $arguments
  printed stderr
done
expect 2 'x1b\]0;owned' "$longspan" "$escape"
printed stderr
expect 0 "" "${attend[@]}" --out "$escape"$'\xc2\x9b\xff.npy'
grep -Fq '\x1b]0;owned\x07\x9b\xff.npy' stdout || fail "the name is not escaped: $(cat -v stdout)"
printed stdout
expect 0 "" "${attend[@]}" --out "$escape"$'\xc2\x9b.npy' --json
printed stdout
expect 2 'line\\nbreak' "${hostile[@]}" --q $'line\nbreak'
[ "$(wc -l <stderr)" = 1 ] || fail "an error has more than one line"

# Ctrl-C while a pipe waits for its reader, and while standard output waits.
expect 130 "interrupted" timeout --preserve-status -s INT 1 "${attend[@]}" --out pipe
expect 143 "interrupted" timeout --preserve-status -s TERM 1 "${attend[@]}" --out pipe
blocked() { # a reader that opens the pipe and reads nothing
  sleep 60 <pipe &
  local reader=$! code
  timeout --preserve-status -s INT 1 "$@" >pipe 2>stderr
  code=$?
  kill $reader
  [ $code = 130 ] || fail "exit code $code instead of 130: $* ($(cat stderr))"
}
npy rows.npy '|b1' '200, 200' 40000
blocked "$longspan" show --tokens 12800 --mask rows.npy --json --cells 200
blocked "${attend[@]}" --out -

finish
