#!/usr/bin/env bash
# What a real GPU says, within 12 minutes: the STP(k) curve of SB3's and SBX's SAC on Humanoid-v5,
# with and without MPS, and the number of jobs rlq settles at by itself beside each curve's knee.
#
#   bench/gpu.sh [OUT]        OUT: a folder for the curves (JSON, PNG) and the log
#
# Needs an idle GPU, `make` having run (.venv with a CUDA build of torch and a CUDA jax), and for
# the second half nvidia-cuda-mps-control.  It starts a private rlqd and touches no other.
set -euo pipefail
cd "$(dirname "$0")/.."
out=$(mkdir -p "${1:-gpu-results}" && cd "${1:-gpu-results}" && pwd)
export PATH="$PWD/.venv/bin:$PATH"
seconds=${SECONDS_PER_POINT:-15}
jobs_max=${JOBS_MAX:-8}
settle_s=${SETTLE_S:-100}

command -v nvidia-smi >/dev/null || { echo "no nvidia-smi here: this needs a GPU" >&2; exit 2; }
{
  nvidia-smi --query-gpu=name,driver_version,memory.total,compute_mode --format=csv,noheader
  nproc; uptime
  python -c 'import torch; print("torch", torch.__version__, torch.cuda.is_available())'
  python -c 'import jax; print("jax", jax.__version__, jax.default_backend())'
} | tee "$out/machine.txt"

daemon_up() { # NAME CONFIG
  RLQ_STATE_DIR=$(mktemp -d); export RLQ_STATE_DIR
  mkdir -p "$RLQ_STATE_DIR/config/rlq"
  printf '%s\n' "$2" > "$RLQ_STATE_DIR/config/rlq/rlqd.toml"
  XDG_CONFIG_HOME=$RLQ_STATE_DIR/config rlq daemon start
}
daemon_down() {
  rlq cancel --all --now --yes >/dev/null 2>&1 || true
  rlq wait --all --timeout 30s >/dev/null 2>&1 || true
  rlq daemon stop >/dev/null 2>&1 || true
  cp "$RLQ_STATE_DIR/rlqd.log" "$out/rlqd-$1.log" 2>/dev/null || true
  rm -rf "$RLQ_STATE_DIR"
}

measure() { # NAME CONFIG
  daemon_up "$1" "$2"
  trap 'daemon_down '"$1" EXIT
  for algo in sb3 sbx; do
    echo "== $1, $algo: the curve"
    rlq calibrate --algo "$algo" --env Humanoid-v5 --device cuda --seconds "$seconds" \
      --jobs-max "$jobs_max" --set learning_starts=500 --out "$out/$1-$algo" | tee "$out/$1-$algo.txt" || true
  done
  for algo in sb3 sbx; do
    # Another signature (batch size) is new to the queue: it has to find the number by itself.
    echo "== $1, $algo: what rlq settles at, told nothing"
    rlq submit sac --algo "$algo" --env Humanoid-v5 --steps 100000000 --seeds 0-"$((jobs_max - 1))" \
      --device cuda --set learning_starts=500 --set batch_size=257 --eval-freq 0 --out "$RLQ_STATE_DIR/runs" -q
    sleep "$settle_s"
    rlq gpus | tee "$out/$1-$algo-settled.txt"
    rlq list --state RUNNING | tee -a "$out/$1-$algo-settled.txt"
    rlq why --json "$(rlq list --json --state PENDING | python -c '
import json, sys
jobs = json.load(sys.stdin)
jobs = jobs["jobs"] if isinstance(jobs, dict) else jobs
print(jobs[-1]["id"] if jobs else 1)')" | tee -a "$out/$1-$algo-settled.txt" || true
    rlq cancel --all --now --yes >/dev/null; rlq wait --all --timeout 60s >/dev/null || true
  done
  daemon_down "$1"
  trap - EXIT
}

measure time-sliced '[guard]
observe = "8s"'
if command -v nvidia-cuda-mps-control >/dev/null; then
  measure mps '[guard]
observe = "8s"
[mps]
mode = "manage"'
else
  echo "no nvidia-cuda-mps-control: MPS is not measured" | tee "$out/mps.txt"
fi
echo "results are in $out"
