#!/usr/bin/env bash
# Rank 1 of 3 is killed, stopped, or computes something else; the others (there: all) must raise a CommError that names a
# rank and a step, before long. Open MPI ends the survivors of a killed rank by default, so it is told not to.
#   mpi_survivors.sh MPIRUN PROGRAM kill|stop|disagree
set -u
output=$(timeout 40 "$1" --allow-run-as-root --oversubscribe --enable-recovery -n 3 "$2" "$3" 2>&1)
echo "$output"
ranks="0 2"
[ "$3" = disagree ] && ranks="0 1 2"
for rank in $ranks; do
  line=$(grep "^rank $rank: ring forward" <<<"$output" | grep "step " | grep "inputs untouched") || { echo "rank $rank did not raise"; exit 1; }
  grep -qE "on rank $rank: rank [0-9]" <<<"$line" || { echo "rank $rank names nobody: $line"; exit 1; }
done
grep -qE "on rank [02]: rank 1" <<<"$output" || { echo "nobody names rank 1"; exit 1; }
