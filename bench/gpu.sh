#!/usr/bin/env bash
# What a real GPU says, within 12 minutes: the STP(k) curve of SB3's and SBX's SAC on Humanoid-v5,
# with and without MPS, and the number of jobs rlq settles at by itself beside each curve's knee.
#
#   bench/gpu.sh [OUT]        OUT: a folder for the curves (JSON, PNG), the words and the logs
#
# Needs an idle GPU, `make` having run (.venv with a CUDA build of torch and a CUDA jax), and for
# the second half nvidia-cuda-mps-control.  It starts a private rlqd and touches no other.  What
# no longer fits into MINUTES is left out, and said so; the most telling parts come first.
#
#   MINUTES=12 JOBS_MAX=5 SECONDS_PER_POINT=6 SETTLE_S=70     as they are by default
#   MINUTES=40 JOBS_MAX=12 SECONDS_PER_POINT=20 SETTLE_S=240  with more time
#   DEVICE=cpu ENV_ID=Pendulum-v1 JOBS_MAX=2                  a rehearsal without a GPU
set -euo pipefail
cd "$(dirname "$0")/.."
out=$(mkdir -p "${1:-gpu-results}" && cd "${1:-gpu-results}" && pwd)
export PATH="$PWD/.venv/bin:$PATH"
device=${DEVICE:-cuda}
env_id=${ENV_ID:-Humanoid-v5}
seconds=${SECONDS_PER_POINT:-6}
jobs_max=${JOBS_MAX:-5}
settle_s=${SETTLE_S:-70}
ends_at=$(($(date +%s) + 60 * ${MINUTES:-12}))
# A small buffer: memory is not what is measured here.
settings=(--set learning_starts=500 --set buffer_size=50000)

die() { echo "$1" >&2; exit 2; }
left() { echo $((ends_at - $(date +%s))); }
# An import, a context, a compilation, and the measurement: seconds for each job.
declare -A start_s=([sb3]=10 [sbx]=18)

command -v rlq >/dev/null || die "no rlq here: run make first"
algos=()
{
  date; nproc; uptime
  if [ "$device" = cuda ]; then
    nvidia-smi --query-gpu=name,driver_version,memory.total,compute_mode --format=csv,noheader
  fi
} > "$out/machine.txt" || die "no nvidia-smi that works here: this needs a GPU"
if python -c 'import sys, torch
print("torch", torch.__version__, "CUDA", torch.version.cuda)
sys.exit(sys.argv[1] == "cuda" and not torch.cuda.is_available())' "$device" >> "$out/machine.txt" 2>&1
then algos+=(sb3); else echo "torch finds no GPU: SB3 is not measured" | tee -a "$out/machine.txt"; fi
# Without this it would take three quarters of the GPU just to be asked.
if XLA_PYTHON_CLIENT_PREALLOCATE=false python -c 'import sys, jax
print("jax", jax.__version__, jax.default_backend())
sys.exit(sys.argv[1] == "cuda" and jax.default_backend() != "gpu")' "$device" >> "$out/machine.txt" 2>&1
then algos+=(sbx); else echo "jax finds no GPU: SBX is not measured" | tee -a "$out/machine.txt"; fi
cat "$out/machine.txt"
[ ${#algos[@]} -gt 0 ] || die "neither torch nor jax can use the GPU"

name=
daemon_up() { # NAME CONFIG
  name=$1
  RLQ_STATE_DIR=$(mktemp -d); export RLQ_STATE_DIR
  trap daemon_down EXIT
  mkdir -p "$RLQ_STATE_DIR/config/rlq"
  printf '%s\n' "$2" > "$RLQ_STATE_DIR/config/rlq/rlqd.toml"
  XDG_CONFIG_HOME=$RLQ_STATE_DIR/config rlq daemon start
}
daemon_down() {
  trap - EXIT
  nothing_runs
  rlq profile > "$out/$name-profile.txt" 2>&1 || true
  rlq daemon stop >/dev/null 2>&1 || true
  cp "$RLQ_STATE_DIR/rlqd.log" "$out/$name-rlqd.log" 2>/dev/null || true
  # What a job that failed said last.
  tail -n 40 "$RLQ_STATE_DIR"/logs/* > "$out/$name-jobs.log" 2>/dev/null || true
  rm -rf "$RLQ_STATE_DIR"
}
nothing_runs() {
  rlq cancel --all --now --yes >/dev/null 2>&1 || true
  rlq wait --all --timeout 30s -q >/dev/null 2>&1 || true
}

fits() { # SECONDS WHAT
  [ "$(left)" -ge "$1" ] && return
  echo "== $2: left out, it takes some $1 s and $(left) s are left" | tee -a "$out/left-out.txt"
  return 1
}

curve() { # ALGO
  local needs=$(((start_s[$1] + seconds * 3 / 2) * jobs_max))
  fits $needs "$name, $1: the curve" || return 0
  echo "== $name, $1: the curve ($(left) s left)"
  # It may yet take longer than that, and then ends without a figure.
  timeout "$(($(left) + 1))" rlq calibrate --algo "$1" --env "$env_id" --device "$device" --seconds "$seconds" \
    --jobs-max "$jobs_max" "${settings[@]}" --out "$out/$name-$1" 2>&1 |
    tee "$out/$name-$1-curve.txt" || echo "the curve failed: see $out/$name-jobs.log"
  nothing_runs
}

choice() { # ALGO
  fits $((settle_s + 15)) "$name, $1: rlq's choice" || return 0
  # Another signature (batch size) is new to the queue: it has to find the number by itself.
  echo "== $name, $1: what rlq settles at, told nothing ($(left) s left)"
  rlq submit sac --algo "$1" --env "$env_id" --steps 100000000 --seeds 0-23 --device "$device" \
    "${settings[@]}" --set batch_size=257 --eval-freq 0 --checkpoint-freq 0 --no-save-buffer \
    --cores 1 --out "$RLQ_STATE_DIR/runs-$1" -q >/dev/null || return 0
  sleep "$settle_s"
  {
    rlq gpus
    rlq list --state RUNNING
    last=$(rlq list --json --state PENDING | python -c '
import json, sys
print(max((job["id"] for job in json.load(sys.stdin)["jobs"]), default=""))')
    [ -z "$last" ] || rlq why "$last"
    rlq profile
  } 2>&1 | tee "$out/$name-$1-choice.txt" || true
  nothing_runs
}

guard='[guard]
observe = "5s"
'
daemon_up time-sliced "$guard"
for algo in "${algos[@]}"; do curve "$algo"; choice "$algo"; done
daemon_down
if [ "$device" = cuda ] && command -v nvidia-cuda-mps-control >/dev/null; then
  daemon_up mps "$guard"'[mps]
mode = "manage"'
  for algo in "${algos[@]}"; do curve "$algo"; done
  for algo in "${algos[@]}"; do choice "$algo"; done
  daemon_down
else
  echo "no nvidia-cuda-mps-control: MPS is not measured" | tee "$out/mps.txt"
fi
echo "results are in $out"
