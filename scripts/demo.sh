#!/usr/bin/env bash
# Builds Longspan (release) and runs its demo; arguments go to `longspan demo`, for example --tokens 64K --out report.html
set -euo pipefail
# shellcheck source=scripts/lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

require_build_packages
configure_and_build release longspan_cli longspan_library # the library, too: `cmake --install build/release` works then
exec "$repository/build/release/longspan" demo "$@"
