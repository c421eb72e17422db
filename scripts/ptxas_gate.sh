#!/usr/bin/env bash
# Compiles a file of asynchronous matrix products (a CMake compiler launcher) and fails where the assembler says that it
# serialised them (C7510 to C7515) or ignored the hand-over of registers (C7508): right results at half the speed, which no
# test would see. The assembler's other remarks are left out; it must be asked for them (-Xptxas=-v).
set -uo pipefail
report=$(mktemp)
trap 'rm -f "$report"' EXIT
"$@" 2>"$report"
status=$?
grep -vE '^ptxas info|^ *[0-9]+ bytes stack frame|^$' "$report" >&2
if grep -E 'C75(08|1[0-5])' "$report" >&2; then
  echo "ptxas_gate.sh: see 'What the build checks' in docs/hopper.md" >&2
  exit 1
fi
exit $status
