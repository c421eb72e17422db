# Shared by the scripts here; sourced, never run. Finds the repository, installs what is missing, configures and builds.
# shellcheck shell=bash

repository=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
readonly repository

say() { printf '%s\n' "$*" >&2; }
fail() {
  say "$(basename "$0"): $*"
  exit 1
}
# What a run had to leave out, told again at its end.
left_out=()
leave_out() {
  left_out+=("$*")
  say "left out: $*"
}

have() { command -v "$1" >/dev/null 2>&1; }
# Libraries are only looked up where dpkg keeps the books; elsewhere CMake says what it does not find.
have_package() {
  ! have dpkg-query || [[ $(dpkg-query -W -f='${db:Status-Status}' "$1" 2>/dev/null) == installed ]]
}

# Sets `missing` to the Debian and Ubuntu packages this machine lacks of those the build needs, and `wanted` to those it
# can do without.
find_missing() {
  missing=()
  wanted=()
  have "${CXX:-c++}" || missing+=(g++)
  have cmake || missing+=(cmake)
  have ninja || missing+=(ninja-build)
  have ccache || wanted+=(ccache)
  have pkg-config || wanted+=(pkg-config)
  local package
  for package in libfmt-dev libhwy-dev libcli11-dev nlohmann-json3-dev libgtest-dev; do
    have_package "$package" || missing+=("$package")
  done
}

# Runs apt-get as root: directly, or with a sudo that asks no password.
as_root() {
  if [[ $(id -u) == 0 ]]; then
    "$@"
  else
    sudo -n "$@"
  fi
}
can_install() {
  have apt-get && { [[ $(id -u) == 0 ]] || { have sudo && sudo -n true 2>/dev/null; }; }
}
install_packages() {
  say "installing: $*"
  as_root apt-get update -q >&2
  as_root env DEBIAN_FRONTEND=noninteractive apt-get install -q -y --no-install-recommends "$@" >&2
}
install_line() { printf 'sudo apt-get update && sudo apt-get install -y --no-install-recommends %s' "$*"; }

# Makes sure that the build's own tools and libraries are there, or stops with the line that would install them.
require_build_packages() {
  local missing wanted
  find_missing
  if can_install; then
    ((${#missing[@]} + ${#wanted[@]} == 0)) || install_packages "${missing[@]}" "${wanted[@]}"
  elif ((${#missing[@]})); then
    say "These packages are missing, and this user may not install them. Run, then try again:"
    say "  $(install_line "${missing[@]}" "${wanted[@]}")"
    exit 1
  elif ((${#wanted[@]})); then
    leave_out "${wanted[*]} (to have it: $(install_line "${wanted[@]}"))"
  fi
  local version
  version=$(cmake --version | sed -n '1s/[^0-9]*//p')
  [[ $(printf '%s\n' 3.25 "$version" | sort -V | head -n 1) == 3.25 ]] ||
    fail "cmake $version is too old: 3.25 or newer is needed ($(command -v cmake))"
}

# choose_cuda yes|auto: sets cuda_arguments, what CMake is told about CUDA. GPU kernels take longer to compile than all else
# together, so they are compiled for the GPUs of this machine only, unless all were asked for (yes).
cuda_arguments=()
choose_cuda() {
  cuda_arguments=(-DLONGSPAN_CUDA=OFF)
  local code codes=()
  if [[ $1 == yes ]]; then
    cuda_arguments=(-DLONGSPAN_CUDA=ON -ULONGSPAN_CUDA_ARCHITECTURES)
    return
  fi
  for code in $(nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null | tr -d . | sort -u); do
    [[ $code =~ ^[0-9]+$ ]] && codes+=("$code-real")
  done
  local nvcc
  nvcc=$(command -v nvcc || echo /usr/local/cuda/bin/nvcc)
  if ((${#codes[@]} == 0)); then leave_out "GPU kernels: there is no NVIDIA GPU here (--cuda compiles them all the same)"
  elif ! have "$nvcc"; then leave_out "GPU kernels: there is no CUDA toolkit here (12.4 or newer; nvcc on PATH)"
  else
    # A GPU that is newer than the toolkit compiles the newest kernels for itself, from their PTX.
    for code in "${codes[@]}"; do
      if ! "$nvcc" --list-gpu-code | grep -qx "sm_${code%-real}"; then
        cuda_arguments=(-DLONGSPAN_CUDA=ON -ULONGSPAN_CUDA_ARCHITECTURES)
        return
      fi
    done
    cuda_arguments=(-DLONGSPAN_CUDA=ON "-DLONGSPAN_CUDA_ARCHITECTURES=$(IFS=';' && echo "${codes[*]}")")
    say "GPU kernels for the GPUs of this machine only: ${codes[*]%-real} (--cuda compiles them for all)"
  fi
}

# configure_and_build PRESET [TARGET...]: incremental; the output goes to stderr, since stdout belongs to the command.
configure_and_build() {
  local preset=$1
  shift
  (cd "$repository" && cmake --preset "$preset" "${cuda_arguments[@]}" && cmake --build --preset "$preset" --target "${@:-all}") >&2
}

# has_part PRESET PART: whether that build found CUDA or MPI.
has_part() { grep -q "^LONGSPAN_WITH_$2:INTERNAL=ON" "$repository/build/$1/CMakeCache.txt"; }

# Makes build/venv; returns 1, having said why, where that is not possible.
virtual_environment() {
  local folder=$repository/build/venv
  "$folder/bin/python" -m pip --version >/dev/null 2>&1 && return
  local missing=()
  have python3 || missing+=(python3)
  python3 -c 'import ensurepip' 2>/dev/null || missing+=(python3-venv)
  python3 -c 'import os, sysconfig; open(os.path.join(sysconfig.get_paths()["include"], "Python.h"))' 2>/dev/null ||
    missing+=(python3-dev)
  if ((${#missing[@]})); then
    if ! can_install; then
      leave_out "Python (to have it: $(install_line "${missing[@]}"))"
      return 1
    fi
    install_packages "${missing[@]}" || {
      leave_out "Python (apt-get could not install ${missing[*]})"
      return 1
    }
  fi
  rm -rf "$folder"
  python3 -m venv "$folder" >&2 || {
    leave_out "Python (no virtual environment could be made in $folder)"
    return 1
  }
}
pip_install() { "$repository/build/venv/bin/python" -m pip install -q --disable-pip-version-check "$@" >&2; }
