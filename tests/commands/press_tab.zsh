# SPDX-License-Identifier: Apache-2.0
# Prints what an interactive zsh offers when TAB is pressed after "dlcp WORDS", a line for each argument after the second.
# The first is the folder of _dlcp, the second an empty folder.
zmodload zsh/zpty
script=$1 answers=$2
shift 2

await() {
  repeat 1500; do [[ -e $answers/$1 ]] && return; sleep 0.02; done
  print -u2 "zsh does not answer"
  exit 1
}

# The wrapper of compadd writes what each call would offer; those with -O, -A or -D only compute.
zpty shell "TERM=dumb zsh -f -i"
zpty -w shell "fpath=(${(q)script} \$fpath); autoload -Uz compinit; compinit -u -d ${(q)answers}/dump
compadd() {
  if [[ \${@[1,(i)(-|--)]} != *-(O|A|D)\ * ]]; then
    local -a hits; builtin compadd -A hits \"\$@\"; print -rl -- \$hits >>${(q)answers}/offered
  fi
  builtin compadd \"\$@\"
}
press() { : >${(q)answers}/offered; zle complete-word; zle kill-buffer; mv ${(q)answers}/offered ${(q)answers}/answer }
zle -N press; bindkey '^I' press; : >${(q)answers}/ready"
await ready
for words; do
  zpty -n -w shell "dlcp $words"$'\t'
  await answer
  offered=(${(f)"$(<$answers/answer)"})
  print -r -- ${(u)offered}
  rm $answers/answer
done
zpty -d shell
