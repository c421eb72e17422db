#!/usr/bin/env bash
# Installs wheels on bare Debian systems, which have Python and nothing else (no compiler, no library of ours, no CUDA, no
# network), and runs them there. Needs root, debootstrap and unshare.
#   scripts/bare_root.sh FOLDER [SUITE...]
# FOLDER has the wheels of scripts/wheels.sh; suites are Debian's (default: bookworm, with Python 3.11, and trixie, 3.13).
set -euo pipefail
# shellcheck source=scripts/lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

wheels=$(cd "${1:?folder with wheels}" && pwd)
shift
suites=("$@")
((${#suites[@]})) || suites=(bookworm trixie)
[[ $(id -u) == 0 ]] || fail "chroot needs root"
have debootstrap || { can_install && install_packages debootstrap; } || fail "debootstrap is missing: $(install_line debootstrap)"

# In the root: installs one package and runs it; the seconds of each step go to stdout.
inside() {
  cat <<'END'
set -euo pipefail
package=$1
for tool in cc gcc g++ clang nvcc; do
  if command -v "$tool"; then echo "this root is not bare" >&2; exit 1; fi
done
step() { # name, command...
  local name=$1 begin=${EPOCHREALTIME/.}
  shift
  "$@" >"/work/$name.log" 2>&1 || { cat "/work/$name.log" >&2; echo "$package: $name failed" >&2; exit 1; }
  begin=$(((${EPOCHREALTIME/.} - begin) / 100000))
  echo "$package: $name $((begin / 10)).$((begin % 10)) s"
}
rm -rf /work/venv
cd /work
python3 -m venv /work/venv
step install venv/bin/python -m pip install --no-index --find-links /work/wheels "$package"
step smoke env LD_BIND_NOW=1 venv/bin/python wheel_smoke.py
step demo venv/bin/python -m longspan demo --tokens 16K
step check venv/bin/python -m longspan check --tokens 200
cat smoke.log
END
}

for suite in "${suites[@]}"; do
  root=$repository/build/bare/$suite
  if [[ ! -e $root/.complete ]]; then
    rm -rf "$root"
    say "debootstrap $suite"
    debootstrap --variant=minbase --include=python3,python3-venv "$suite" "$root" >"$root.log" 2>&1 || fail "see $root.log"
    touch "$root/.complete"
  fi
  version=$(chroot "$root" python3 -c 'import sys; print("%d.%d" % sys.version_info[:2])')
  mkdir -p "$root/work/wheels"
  rm -f "$root"/work/wheels/longspan*
  compgen -G "$root/work/wheels/numpy*" >/dev/null ||
    python3 -m pip download -q --disable-pip-version-check --only-binary :all: --python-version "$version" \
      --platform "manylinux_2_17_$(uname -m)" --platform "manylinux_2_28_$(uname -m)" --dest "$root/work/wheels" numpy
  cp "$wheels"/*.whl "$root/work/wheels"
  cp "$repository/scripts/wheel_smoke.py" "$root/work"
  inside >"$root/work/inside.sh"
  for package in longspan_cpu longspan; do
    compgen -G "$wheels/$package-[0-9]*.whl" >/dev/null || continue
    say "$package on $suite, Python $version, without a network"
    env -i PATH=/usr/sbin:/usr/bin:/sbin:/bin unshare --net --mount --pid --fork --mount-proc="$root/proc" chroot "$root" \
      bash /work/inside.sh "${package/_/-}"
  done
done
