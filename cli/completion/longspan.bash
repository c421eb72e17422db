# Bash completion of the longspan command. A test compares these words with what `longspan COMMAND --help` says.

_longspan() {
  local current="${COMP_WORDS[COMP_CWORD]}" previous="${COMP_WORDS[COMP_CWORD - 1]}" command="" word
  local commands="demo attend ring plan show info doctor check bench help"
  local problem="--tokens --batch --heads --kv-heads --head-dim --dtype --segments --dilations --assign --phase --pad-keys
    --pattern --mask --block-size --causal --dropout --scale --layout --device --threads --kernel --seed --json --help"
  for word in "${COMP_WORDS[@]:1:COMP_CWORD-1}"; do
    case " $commands " in *" $word "*) command="$word"; break ;; esac
  done

  local choices=""
  case "$previous" in
    --dtype) choices="f32 bf16 f16" ;;
    --assign) choices="groups all" ;;
    --phase) choices="paper torchscale" ;;
    --layout) choices="bnhd bhnd" ;;
    --device) choices="cpu cuda" ;;
    --shards) choices="even zigzag" ;;
    --mask | --mask-out | --svg | --q | --k | --v | --out | --lse | --lengths | --key-mask | --alibi-slopes | --trace)
      compopt -o filenames 2>/dev/null
      mapfile -t COMPREPLY < <(compgen -f -- "$current")
      return
      ;;
    --tokens | --batch | --heads | --kv-heads | --head-dim | --segments | --dilations | --pattern | --block-size | --head | --cells | --dropout | --scale | \
      --threads | --kernel | --seed | --random | --case | --query-ranges | --ranks | --deadline | --halo-limit | --repeat | --repeats | \
      --link | --latency | --rate | --ranks-per-device)
      return # a value that only the user knows
      ;;
    *)
      case "$command" in
        "") choices="$commands --help --version" ;;
        demo) choices="$problem --out" ;;
        attend) choices="$problem --q --k --v --out --lse --lengths --key-mask --alibi-slopes --query-ranges" ;;
        ring) choices="$problem --ranks --shards --backward --verify --deadline --halo-limit --link --latency --repeat --q --k --v --out
          --trace" ;;
        plan) choices="$problem --ranks --link --latency --rate --ranks-per-device" ;;
        show) choices="$problem --head --cells --svg --mask-out --ascii" ;;
        info) choices="$problem --why" ;;
        doctor) choices="--json --help" ;;
        check) choices="$problem --random --case" ;;
        help) choices="$commands --help" ;;
        bench) choices="dilated dense block-sparse $problem --repeat --forward-only" ;;
      esac
      ;;
  esac
  mapfile -t COMPREPLY < <(compgen -W "$choices" -- "$current")
}

complete -F _longspan longspan
