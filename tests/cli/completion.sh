# The completion file offers every command and every option that --help knows, and nothing else.
source "$(dirname "$0")/lib.sh"
source "$SOURCE_DIR/cli/completion/longspan.bash"

complete_words() { # complete_words WORD...: what is offered for the last word
  COMP_WORDS=(longspan "$@")
  COMP_CWORD=$#
  COMPREPLY=()
  _longspan
  printf '%s\n' "${COMPREPLY[@]}"
}

commands=$("$longspan" --help | sed -n '/^Subcommands:/,/^$/s/^  \([a-z]\+\) .*/\1/p' | sort)
[ -n "$commands" ] || fail "no commands in --help"
offered=$(complete_words "" | grep -v '^--' | sort)
[ "$commands" = "$offered" ] || fail "commands are '$commands', the completion offers '$offered'"
for command in $commands; do
  known=$("$longspan" "$command" --help | grep -Eo '^  (-h,)?--[a-z-]+' | grep -Eo -- '--[a-z-]+' | sort -u)
  offered=$(complete_words "$command" -- | grep '^--' | sort -u)
  [ "$known" = "$offered" ] || fail "options of $command: $(diff <(echo "$known") <(echo "$offered") | tr '\n' ' ')"
done
[ "$(complete_words plan --dtype b)" = bf16 ] || fail "--dtype b completes to $(complete_words plan --dtype b)"
[ "$(complete_words bench den)" = dense ] || fail "bench den does not complete"
touch some.npy
[ "$(complete_words attend --q so)" = some.npy ] || fail "files do not complete"

finish
