# Outputs appear complete or not at all: full disks, closed pipes, existing files, signals.
source "$(dirname "$0")/lib.sh"

npy in.npy '<f4' '1, 512, 2, 64' 262144
attend=("$longspan" attend --segments 512 --dilations 1 --q in.npy --k in.npy --v in.npy)
leftovers() { [ -z "$(find . -name '.*.??????')" ] || fail "temporary files were left: $(find . -name '.*.??????')"; }

# A complete result replaces an existing file and keeps its permissions.
echo old >out.npy
chmod 640 out.npy
expect 0 "" "${attend[@]}" --out out.npy --lse lse.npy
[ "$(stat -c %s out.npy)" = 262272 ] || fail "out.npy has $(stat -c %s out.npy) bytes"
[ "$(stat -c %a out.npy)" = 640 ] || fail "out.npy has mode $(stat -c %a out.npy)"
[ "$(stat -c %s lse.npy)" = 4224 ] || fail "lse.npy has $(stat -c %s lse.npy) bytes"
cmp -s <(head -c 6 out.npy) <(printf '\x93NUMPY') || fail "out.npy has no magic"
leftovers

# Two tensors of one .safetensors file are written together, and can be read back.
expect 0 "" "${attend[@]}" --out both.safetensors#out --lse both.safetensors#lse
expect 0 "" "$longspan" attend --segments 512 --dilations 1 --q both.safetensors#out --k in.npy --v in.npy --out again.npy
grep -aq '"lse"' both.safetensors || fail "both.safetensors lacks lse"
leftovers

# A file system that is full (a limit on file size stands in for it): an error, and the old file stays as it was.
echo old >full.npy
expect 3 "cannot write 'full.npy': File too large" bash -c 'ulimit -f 64; exec "$@"' _ "${attend[@]}" --out full.npy
[ "$(cat full.npy)" = old ] || fail "full.npy was touched"
leftovers
expect 3 "No space left" "${attend[@]}" --out /dev/full
expect 3 "standard output: No space left" bash -c '"$@" >/dev/full' _ "$longspan" plan
expect 3 "standard output: No space left" bash -c '"$@" --json >/dev/full' _ "$longspan" info
expect 3 "standard output: No space left" bash -c '"$@" >/dev/full' _ "$longspan" --help
expect 3 "cannot create" "${attend[@]}" --out nowhere/out.npy
expect 3 "File too large" bash -c 'ulimit -f 4; exec "$@"' _ "$longspan" demo --tokens 64 --out page.html
[ ! -e page.html ] || fail "half a report was left"
leftovers

# The reader went away.
expect 0 "standard output: Broken pipe" bash -c '"$@" | true; [ "${PIPESTATUS[0]}" = 3 ]' _ \
  bash -c 'sleep 0.5; exec "$@"' _ "$longspan" plan
mkfifo pipe
expect 0 "cannot write 'pipe': Broken pipe" bash -c 'head -c 1 pipe >/dev/null & "$@"; [ $? = 3 ]' _ "${attend[@]}" --out pipe

# Ctrl-C: exit code 130, nothing left behind.
expect 130 "interrupted" bash -c 'exec timeout --preserve-status -s INT 1 "$@"' _ "$longspan" demo --kernel reference --tokens 32K --out page.html
[ ! -e page.html ] || fail "an interrupted demo left a report"
leftovers

finish
