#!/usr/bin/env bash
# Four real SAC trainings through a queue of its own: what `make run` shows.
#
# A private rlqd with a temporary state folder, so that it touches nothing of yours.  The jobs are
# short on purpose: they show the queue at work, not a trained agent.
set -euo pipefail

folder=$(mktemp -d "${TMPDIR:-/tmp}/rlq-first-sweep.XXXXXX")
export RLQ_STATE_DIR=$folder
unset RLQ_SOCKET RLQ_NO_AUTOSTART
trap 'rlq cancel --all --now --yes >/dev/null 2>&1 || true
      rlq daemon stop >/dev/null 2>&1 || true
      rm -rf "$folder"' EXIT

say() { printf '\n\033[1m$ %s\033[0m\n' "$*"; "$@"; }
[ -t 1 ] || say() { printf '\n$ %s\n' "$*"; "$@"; }

say rlq daemon start
out=$folder/runs
say rlq submit sac --algo sb3 --env Pendulum-v1 --steps 1500 --set learning_starts=200 --eval-freq 0 --eval-episodes 2 --out "$out"
say rlq submit sac --algo sbx --env Pendulum-v1 --steps 1500 --set learning_starts=200 --eval-freq 0 --eval-episodes 2 --out "$out"
say rlq submit sac --algo sb3 --env Humanoid-v5 --steps 700 --set learning_starts=200 --eval-freq 0 --eval-episodes 1 --out "$out"
say rlq submit sac --algo sbx --env Humanoid-v5 --steps 700 --set learning_starts=200 --eval-freq 0 --eval-episodes 1 --out "$out"
say rlq list
say rlq wait --all
if [ -t 1 ]; then
  say rlq history
else
  # To a pipe `rlq history` writes tab-separated fields, wider than 80 columns: the telling ones.
  printf '\n$ rlq history\n'
  rlq history | awk -F'\t' '
    NR == 1 { for (i = 1; i <= NF; i++) at[$i] = i }
    { printf "%3s  %-20s %-10s %-6s %-5s %11s %9s\n", $at["ID"], $at["NAME"], $at["STATE"],
        $at["DEVICE"], $at["CORES"], $at["STEPS_PER_S"], $at["RESULT"] }'
fi
