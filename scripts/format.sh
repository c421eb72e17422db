#!/usr/bin/env bash
# Checks the C++ formatting of every tracked file; --fix rewrites them. Give files to look at those only.
set -euo pipefail
# shellcheck source=scripts/lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

mode=(--dry-run --Werror)
if [[ ${1:-} == --fix ]]; then
  mode=(-i)
  shift
fi
have clang-format || fail "clang-format is missing: $(install_line clang-format)"
cd "$repository"
files=("$@")
((${#files[@]})) || mapfile -t files < <(git ls-files '*.h' '*.cpp' '*.cu' '*.cuh')
clang-format "${mode[@]}" "${files[@]}"
