#!/usr/bin/env bash
# LUSPO from nothing on a laptop CPU: build a tiny Qwen3-MoE, cold-start it, train it, evaluate before and after.
#
#   bash examples/qwen3_moe/tiny_cpu.sh                       TP2 x EP2 + SP on 4 processes
#   WORLD_SIZE=2 TP=1 EP=1 PP=2 SEED=1 bash examples/qwen3_moe/tiny_cpu.sh
#   bash examples/qwen3_moe/tiny_cpu.sh --run.steps 20        any flag of `luspo train` wins
#   sbatch examples/qwen3_moe/tiny_cpu.sbatch                 the same over two nodes of a Slurm cluster
#
# Interrupted, the same command goes on where it stopped. A finished run is never overwritten.
# LUSPO_DRY_RUN=1: everything but the cold start and the training.
set -euo pipefail
cd "$(dirname "$0")/../.."
command -v luspo >/dev/null || export PATH="$PWD/.venv/bin:$PATH"
SECONDS=0

SEED="${SEED:-0}"
WORLD_SIZE="${WORLD_SIZE:-4}" TP="${TP:-2}" PP="${PP:-1}" EP="${EP:-2}"
BASE="${RUN_DIR:-runs/demo-tp${TP}-pp${PP}-ep${EP}-world${WORLD_SIZE}-seed${SEED}}"
PYTHON="${PYTHON:-python}"
EXAMPLE=examples/qwen3_moe

RUN_DIR="$BASE"
n=1
while grep -qs '"finished": true' "$RUN_DIR/summary.json"; do
    n=$((n + 1))
    RUN_DIR="$BASE-$n"
done
mkdir -p "$RUN_DIR"

MODEL="$RUN_DIR/model" DATA="$RUN_DIR/data" SFT="$RUN_DIR/sft"
RUN_ARGS=(--run.dir "$RUN_DIR" --run.seed "$SEED")
PARALLEL_ARGS=(--parallel.world-size "$WORLD_SIZE" --parallel.tp "$TP" --parallel.pp "$PP" --parallel.ep "$EP")
DATA_ARGS=(--data.prompts "$DATA/train.jsonl" --data.eval-prompts "$DATA/heldout.jsonl")
LAUNCH_ARGS=()
if [ -n "${SLURM_JOB_NUM_NODES:-}" ]; then
    LAUNCH_ARGS=(--launch.gpus-per-node "$(((WORLD_SIZE + SLURM_JOB_NUM_NODES - 1) / SLURM_JOB_NUM_NODES))")
fi

[ -f "$MODEL/config.json" ] || "$PYTHON" "$EXAMPLE/tiny/make_tiny_model.py" --out "$MODEL" --seed "$SEED"
[ -f "$DATA/heldout.jsonl" ] || "$PYTHON" "$EXAMPLE/tiny/make_data.py" --out "$DATA" --seed "$SEED"

TRAIN=(luspo train --config "$EXAMPLE/tiny_cpu.yaml" "${RUN_ARGS[@]}" "${PARALLEL_ARGS[@]}" "${DATA_ARGS[@]}"
    "${LAUNCH_ARGS[@]}")
if [ "${LUSPO_DRY_RUN:-0}" = 1 ]; then exec "${TRAIN[@]}" --model.hf "$MODEL" "$@"; fi

if [ ! -d "$SFT/export" ]; then
    echo "== cold start: supervised training on noisy demonstrations"
    # one process, on the first node of an allocation
    luspo sft --config "$EXAMPLE/tiny_cpu_sft.yaml" --run.dir "$SFT" --run.seed "$SEED" \
        --model.hf "$MODEL" --data.path "$DATA/demos.jsonl" --launch.launcher local
fi

echo "== LUSPO"
"${TRAIN[@]}" --model.hf "$SFT/export" "$@"

"$PYTHON" "$EXAMPLE/tiny/whole_time.py" --run-dir "$RUN_DIR" --seconds "$SECONDS"
