#!/usr/bin/env bash
# Builds Longspan and runs its tests: C++ by ctest, Python by pytest. Arguments:
#   --preset NAME   which build to test: ci (default), dev, release, cuda, asan, tsan
#   --cuda          compile the GPU kernels without a GPU here, too, and for all GPUs
#   --no-python     leave the Python module and its tests out
#   --all           the slow tests, too, and a wheel on a bare system
#   others go to ctest, for example -R pattern or -L install; Python is then left out
set -euo pipefail
# shellcheck source=scripts/lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

preset=ci
python=yes
cuda=auto
all=no
labels=(--label-exclude slow)
markers=(-m "not slow")
ctest_arguments=()
while (($#)); do
  case $1 in
    --preset)
      (($# > 1)) || fail "--preset needs a name"
      preset=$2
      shift
      ;;
    --preset=*) preset=${1#*=} ;;
    --no-python) python=no ;;
    --cuda) cuda=yes ;;
    --all)
      all=yes
      labels=()
      markers=()
      ;;
    -h | --help)
      sed -n '2,/^set /{/^#/s/^# \{0,1\}//p}' "${BASH_SOURCE[0]}"
      exit 0
      ;;
    *) ctest_arguments+=("$1") ;;
  esac
  shift
done
# Python runs the ordinary build only: a sanitized module needs a sanitized interpreter.
case $preset in
  asan | tsan) python=no ;;
  cuda) cuda=yes ;;
esac
((${#ctest_arguments[@]})) && python=no

# Builds the module into build/venv, incrementally, and runs python/tests.
test_python() {
  virtual_environment || return 0
  # Build requirements live in the environment, not in a fresh one per build: paths stay the same, so ninja has little
  # to do the second time.
  local requirements
  mapfile -t requirements < <(build/venv/bin/python - <<'END'
try:
    import tomllib
except ImportError:  # Python 3.10
    from pip._vendor import tomli as tomllib
print(*tomllib.load(open("pyproject.toml", "rb"))["build-system"]["requires"], sep="\n")
END
  )
  if ! pip_install "${requirements[@]}" numpy pytest; then
    leave_out "Python (pip could not install ${requirements[*]} numpy pytest)"
    return 0
  fi
  install_torch || leave_out "tests against torch (torch could not be installed)"
  pip_install safetensors || leave_out "tests of the training example (safetensors could not be installed)"
  pip_install mypy pyright || leave_out "type checkers on the manual's Python (mypy or pyright could not be installed)"
  # The build type and flags of the build above, so that ccache has its objects. Without a GPU the CUDA engine can only be
  # compiled, which that build did if asked: the module leaves it out.
  local type flags left_out=()
  choose_cuda auto 2>/dev/null
  type=$(cached CMAKE_BUILD_TYPE)
  flags=CMAKE_CXX_FLAGS_${type^^}
  CMAKE_ARGS="${CMAKE_ARGS:-} ${cuda_arguments[*]} -D$flags='$(cached "$flags")' \
-DLONGSPAN_WARNINGS_AS_ERRORS=$(cached LONGSPAN_WARNINGS_AS_ERRORS)" pip_install --no-build-isolation --no-deps \
    --force-reinstall --config-settings=cmake.build-type="$type" .
  build/venv/bin/python -m pytest -q "${markers[@]}" python/tests
  check_machine_code
}
cached() { sed -n "s/^$1:[A-Z]*=//p" "build/$preset/CMakeCache.txt"; } # a setting of that build
# torch from PyPI brings CUDA libraries on x86-64 (several GB); LONGSPAN_TORCH_INDEX names another index, such as torch's own
# of CPU-only builds, to spare them.
install_torch() {
  build/venv/bin/python -c 'import torch' 2>/dev/null && return
  say "installing torch: a large download"
  pip_install ${LONGSPAN_TORCH_INDEX:+--index-url "$LONGSPAN_TORCH_INDEX"} torch
}

# ctest looks at the machine code of the Hopper kernels where the CUDA toolkit has a disassembler. Reduced installations have
# none, but the triton that comes with torch does.
check_machine_code() {
  local folder=build/$preset dump
  has_part "$preset" CUDA && grep -q '^LONGSPAN_CUOBJDUMP:.*NOTFOUND' "$folder/CMakeCache.txt" || return 0
  dump=$(find build/venv -path '*/nvidia/bin/cuobjdump' -print -quit)
  if [[ -z $dump ]]; then
    leave_out "machine code of the Hopper kernels (no cuobjdump)"
    return 0
  fi
  python3 scripts/check_sass.py "$dump" "$folder"/src/CMakeFiles/longspan_hopper.dir/kernels/hopper/*.o
}

# A wheel for the Python here, installed and run on a bare Debian with the same one (3.12 and later share a wheel).
test_wheel() {
  local suite
  case $(build/venv/bin/python -c 'import sys; print("%d.%d" % sys.version_info[:2])') in
    3.11) suite=bookworm ;;
    3.1[2-9]) suite=trixie ;;
    *) leave_out "a wheel on a bare system (no Debian has this Python)" && return ;;
  esac
  if [[ $(id -u) != 0 ]]; then
    leave_out "a wheel on a bare system (scripts/bare_root.sh needs root)"
    return
  fi
  scripts/wheels.sh --cpu --python build/venv/bin/python --out build/wheels/dist
  scripts/bare_root.sh build/wheels/dist "$suite" >&2
}

# Rings are tested over MPI, too; the library does without.
install_mpi() {
  if have mpirun && have_package libopenmpi-dev; then return; fi
  if can_install; then install_packages libopenmpi-dev openmpi-bin || true; fi
}

# Clang is the other compiler that the library promises: it compiles it once, in seconds.
compile_with_clang() {
  have clang++ || { can_install && install_packages clang; } || true
  local cuda_arguments=(-DLONGSPAN_CUDA=OFF) # nvcc has compiled the kernels already
  if have clang++; then configure_and_build clang longspan_library
  else leave_out "the library compiled by Clang (to have it: $(install_line clang))"; fi
}

require_build_packages
install_mpi
case $preset in
  asan | tsan) ;;
  *) choose_cuda $cuda ;;
esac
configure_and_build "$preset"
has_part "$preset" MPI || leave_out "MPI (not found)"

if [[ $preset == ci ]] && ((${#ctest_arguments[@]} == 0)); then compile_with_clang; fi

cd "$repository"
ctest --preset "$preset" --parallel "$(nproc)" "${labels[@]}" "${ctest_arguments[@]}"

if [[ $python == yes ]]; then
  test_python
  if [[ $all == yes && -x build/venv/bin/python ]]; then test_wheel; fi
fi
for part in "${left_out[@]}"; do say "left out: $part"; done
say "all tests passed"
