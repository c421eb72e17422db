# Shared by the command's tests: sourced with the command and a folder as arguments. Failures are counted, not fatal.
longspan=$1
folder=$2
rm -rf "$folder"
mkdir -p "$folder"
cd "$folder" || exit 1
export NO_COLOR=1
failures=0

fail() {
  echo "FAILED: $*" >&2
  failures=$((failures + 1))
}

# expect CODE PATTERN COMMAND...: the exit code, and a regular expression that stderr must match (empty: none).
expect() {
  local code=$1 pattern=$2 got
  shift 2
  "$@" >stdout 2>stderr
  got=$?
  [ "$got" = "$code" ] || fail "exit code $got instead of $code: $* ($(head -c 300 stderr))"
  [ -z "$pattern" ] || grep -Eq -- "$pattern" stderr || fail "stderr lacks '$pattern': $* ($(head -c 300 stderr))"
}

# Writes an .npy file of zeros: npy FILE DESCR SHAPE BYTES
npy() {
  local header length
  header="{'descr': '$2', 'fortran_order': ${5:-False}, 'shape': ($3), }"
  length=$(((10 + ${#header} + 1 + 63) / 64 * 64 - 10))
  {
    printf '\x93NUMPY\x01\x00'
    printf "\\x$(printf %02x $((length & 255)))\\x$(printf %02x $((length >> 8)))"
    printf "%-$((length - 1))s\n" "$header"
    head -c "$4" /dev/zero
  } >"$1"
}

# Writes a .safetensors file: safetensors FILE JSON BYTES [LENGTH]
safetensors() {
  local length=${4:-${#2}} i
  {
    for ((i = 0; i < 8; i++)); do printf "\\x$(printf %02x $(((length >> (8 * i)) & 255)))"; done
    printf '%s' "$2"
    head -c "$3" /dev/zero
  } >"$1"
}

finish() {
  [ "$failures" = 0 ] && echo "all good"
  exit $((failures > 0))
}
