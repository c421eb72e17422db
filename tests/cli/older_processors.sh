#!/usr/bin/env bash
# On x86 processors that lack instruction sets, as QEMU's user mode emulates them: no illegal instruction, the kernel
# that fits, the same random masks.
source "$SOURCE_DIR/tests/cli/lib.sh"
qemu=$(command -v qemu-x86_64-static || command -v qemu-x86_64) || {
  echo "skipped: no qemu-x86_64 (apt-get install qemu-user-static)"
  exit 77
}

mask() { "$@" "$longspan" show --pattern 'block=32 local_window(256)+random(0.05,7)' --tokens 8K; }
here=$(mask)
# A processor and the fastest kernel it has; f16c is asked for beside AVX2.
while read -r processor kernel; do
  expect 0 "" "$qemu" -cpu "$processor" "$longspan" info
  grep -m 1 ' runs ' stdout | grep -q "^$kernel " || fail "$processor does not run $kernel: $(grep -m 1 ' runs ' stdout)"
  expect 0 "" "$qemu" -cpu "$processor" "$longspan" check --tokens 200
  [ "$(mask "$qemu" -cpu "$processor")" = "$here" ] || fail "$processor draws another random mask"
done <<'END'
Conroe plain
Nehalem cpu-sse4
Haswell,-f16c cpu-sse4
Haswell cpu-avx2
END
finish
