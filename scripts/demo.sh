#!/usr/bin/env bash
# Builds Longspan (release) and runs its demo; arguments go to `longspan demo`, for example --tokens 64K --out report.html
#   --cuda   compile the GPU kernels on a machine without a GPU, too, and for all GPUs
set -euo pipefail
# shellcheck source=scripts/lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

cuda=auto
arguments=()
for argument in "$@"; do
  if [[ $argument == --cuda ]]; then cuda=yes; else arguments+=("$argument"); fi
done

require_build_packages
choose_cuda $cuda
configure_and_build release longspan_cli longspan_library # the library, too: `cmake --install build/release` works then
exec "$repository/build/release/longspan" demo "${arguments[@]}"
