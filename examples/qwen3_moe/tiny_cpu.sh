#!/usr/bin/env bash
# LUSPO from nothing on a laptop CPU: build a tiny Qwen3-MoE, cold-start it, train it, evaluate before and after.
#
#   bash examples/qwen3_moe/tiny_cpu.sh                       TP2 x EP2 + SP on 4 processes
#   WORLD_SIZE=2 TP=1 EP=1 PP=2 SEED=1 bash examples/qwen3_moe/tiny_cpu.sh
#   bash examples/qwen3_moe/tiny_cpu.sh --run.steps 20        any flag of `luspo train` wins
#
# Interrupted, the same command goes on where it stopped. A finished run is never overwritten.
set -euo pipefail
cd "$(dirname "$0")/../.."
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

[ -f "$MODEL/config.json" ] || "$PYTHON" "$EXAMPLE/tiny/make_tiny_model.py" --out "$MODEL" --seed "$SEED"
[ -f "$DATA/heldout.jsonl" ] || "$PYTHON" "$EXAMPLE/tiny/make_data.py" --out "$DATA" --seed "$SEED"

if [ ! -d "$SFT/export" ]; then
    echo "== cold start: supervised training on noisy demonstrations"
    luspo sft --config "$EXAMPLE/tiny_cpu_sft.yaml" --run.dir "$SFT" --run.seed "$SEED" \
        --model.hf "$MODEL" --data.path "$DATA/demos.jsonl"
fi

echo "== LUSPO"
luspo train --config "$EXAMPLE/tiny_cpu.yaml" "${RUN_ARGS[@]}" "${PARALLEL_ARGS[@]}" "${DATA_ARGS[@]}" \
    --model.hf "$SFT/export" "$@"

"$PYTHON" "$EXAMPLE/tiny/whole_time.py" --run-dir "$RUN_DIR" --seconds "$SECONDS"
