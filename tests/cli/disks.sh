# Full disks, and memory that runs out: exit code 3, a message, and nothing left behind. Disks are small file systems in
# memory, which only a private mount namespace may have; where there is none, that part is left out.
if [ -z "${PRIVATE_MOUNTS:-}" ] && unshare -rm true 2>/dev/null; then
  PRIVATE_MOUNTS=1 exec unshare -rm bash "$0" "$@"
fi
source "$(dirname "$0")/lib.sh"

npy in.npy '<f4' '1, 2048, 2, 64' 1048576
inputs=(--q in.npy --k in.npy --v in.npy)
npy big.npy '<f4' '1, 262144, 2, 64' 134217728
# Too much work to be finished: whoever refuses within five seconds did so before it.
big=(--q big.npy --k big.npy --v big.npy --kernel reference)

mkdir disk
if [ -n "${PRIVATE_MOUNTS:-}" ] && mount -t tmpfs -o size=512k longspan-test disk 2>/dev/null; then
  echo old >disk/old.npy
  only_old() {
    [ "$(ls -A disk)" = old.npy ] && [ "$(cat disk/old.npy)" = old ] || fail "the disk holds $(ls -A disk): $*"
  }
  full() { # full COMMAND...: there is no space for its result, which the command says
    expect 3 "^longspan: cannot write .*No space left" "$@"
    only_old "$@"
  }
  for out in new old; do
    for layout in bnhd bhnd; do
      full timeout 5 "$longspan" ring --ranks 3 "${big[@]}" --layout $layout --out disk/$out.npy
      full timeout 5 "$longspan" attend "${big[@]}" --layout $layout --out disk/$out.npy
    done
    full "$longspan" ring --ranks 1 "${inputs[@]}" --out disk/$out.npy
    full "$longspan" show --pattern bigbird --tokens 64K --mask-out disk/$out.npy
  done
  full timeout 5 "$longspan" attend "${big[@]}" --out disk/new.safetensors#out
  full timeout 5 "$longspan" attend "${big[@]}" --out /dev/null --lse disk/new.safetensors#lse
  full "$longspan" attend "${inputs[@]}" --out disk/a.npy --lse disk/lse.npy # each alone has the space
  if command -v mpirun >/dev/null; then
    # The rank that fails takes the others with it, which would wait a minute for it.
    for out in "--out disk/new.npy" "--trace nowhere/trace.json"; do
      timeout 30 mpirun --allow-run-as-root --oversubscribe -n 2 "$longspan" ring "${inputs[@]}" $out >stdout 2>stderr
      case $? in 0 | 124) fail "mpirun $out: $(head -c 300 stderr)" ;; esac
      only_old mpirun
    done
  fi

  # The space of one result that does fit is complete.
  expect 0 "" "$longspan" attend --q in.npy --k in.npy --v in.npy --out whole.npy --segments 2048 --dilations 1
  mount -o remount,size=1200k disk
  expect 0 "" "$longspan" ring --ranks 3 "${inputs[@]}" --segments 2048 --dilations 1 --out disk/ring.npy
  cmp whole.npy disk/ring.npy || fail "the ring's file on a nearly full disk"
  rm disk/ring.npy

  # Nothing fits at all: drawings, reports, traces, and text that is redirected.
  : >disk/text
  cat /dev/zero >disk/fill 2>/dev/null
  filled() { # filled PATTERN COMMAND...
    expect 3 "$@"
    [ "$(ls -A disk | tr '\n' ' ')" = "fill old.npy text " ] || fail "the disk holds $(ls -A disk): $*"
  }
  filled "cannot write 'disk/x.svg': No space" "$longspan" show --pattern bigbird --svg disk/x.svg
  filled "cannot write 'disk/x.html': No space" "$longspan" demo --tokens 512 --out disk/x.html
  filled "cannot write 'disk/x.json': No space" "$longspan" ring --ranks 2 --tokens 256 --trace disk/x.json
  for command in plan info "show --pattern bigbird" "bench dense --tokens 64 --repeat 1" "check --case 0" "ring --ranks 2 --tokens 64" help; do
    expect 3 "standard output: No space" bash -c '"$@" >disk/text' _ "$longspan" $command
  done
  umount disk
else
  echo "left out: full disks, since this process may not mount any"
fi

# A limit on the size of files is met before the work, too.
expect 3 "cannot write 'limit.npy': File too large" bash -c 'ulimit -f 64; exec "$@"' _ timeout 5 "$longspan" attend "${big[@]}" --out limit.npy
expect 3 "cannot write 'limit.npy': File too large" bash -c 'ulimit -f 64; exec "$@"' _ timeout 5 "$longspan" ring --ranks 2 "${big[@]}" --out limit.npy
[ -z "$(find . -name '*limit*')" ] || fail "left: $(find . -name '*limit*')"

# A name that leaves no room for the temporary one, and a folder that is not there, are found before the work.
name=$(printf 'n%.0s' $(seq 251)).npy
expect 0 "" "$longspan" ring --ranks 2 --tokens 64 --out "$name"
[ -s "$name" ] || fail "a ring cannot write to a name of 255 bytes"
expect 3 "nowhere" timeout 5 "$longspan" ring --ranks 2 "${big[@]}" --out nowhere/out.npy
expect 3 "nowhere" timeout 5 "$longspan" ring --ranks 2 "${big[@]}" --trace nowhere/trace.json

# An input that becomes shorter while it is read: the page is gone, which is a signal.
cp big.npy shrinks.npy
"$longspan" attend --q big.npy --k shrinks.npy --v big.npy --kernel reference --out result.npy 2>stderr &
reader=$!
until grep -q shrinks "/proc/$reader/maps" 2>/dev/null && [ -n "$(find . -name '.result.npy.*')" ]; do
  kill -0 $reader 2>/dev/null || break
done
: >shrinks.npy
wait $reader
[ $? = 3 ] && grep -q "became shorter" stderr || fail "an input that shrinks: $(cat stderr)"
[ -z "$(find . -name '*result*')" ] || fail "left: $(find . -name '*result*')"

# Memory that runs out: threads that cannot start, tensors, workspace. (Sanitizers need terabytes of addresses.)
if (ulimit -v 4000000 && "$longspan" --version) >/dev/null 2>&1; then
  least=20000 # with which the program itself is loaded
  until (ulimit -v $least && "$longspan" --version) >/dev/null 2>&1; do least=$((least + 5000)); done
  for limit in $least $((least + 10000)) $((least + 40000)) $((least + 90000)) $((least + 240000)); do
    for command in "ring --ranks 4 --tokens 4K" "demo --tokens 512 --out page.html" "check --case 3" "show --pattern bigbird"; do
      (ulimit -v $limit && exec "$longspan" $command) >stdout 2>stderr
      code=$?
      case $code in
        0) ;;
        3) [ "$(grep -c '^longspan: ' stderr)" = 1 ] || fail "$limit KB, $command: $(cat stderr)" ;;
        127) ;; # the loader itself
        *) fail "exit code $code with $limit KB: $command ($(cat stderr))" ;;
      esac
      [ -z "$(find . -name '.page.html.*')" ] || fail "a temporary file was left with $limit KB: $command"
    done
  done
fi

finish
