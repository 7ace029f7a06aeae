#!/usr/bin/env bash
# LUSPO for Qwen3-235B-A22B on 16 nodes of 8 GPUs: 8 nodes train, 8 generate.
#
#   bash examples/qwen3_moe/luspo-qwen3_235b_a22b-16n8g.sh       (inside an allocation: salloc --nodes=16)
#   sbatch examples/qwen3_moe/luspo-qwen3_235b_a22b-16n8g.sbatch
#   ENGINE=vllm MODEL=/models/Qwen3-235B-A22B-Instruct-2507 DATA=/data RUN_DIR=/scratch/run sbatch ...
#   any flag of `luspo train` at the end wins, e.g. --run.steps 10
#
# The same command goes on where the run stopped. `luspo plan` looks at the whole first and stops what cannot fit.
# LUSPO_DRY_RUN=1: everything but the model. Paths are seen from the repository's folder.
set -euo pipefail
cd "$(dirname "$0")/../.."
command -v luspo >/dev/null || export PATH="$PWD/.venv/bin:$PATH"

NAME=luspo-qwen3_235b_a22b-16n8g
RECIPE="${RECIPE:-examples/qwen3_moe/$NAME.yaml}"
MODEL="${MODEL:-models/Qwen3-235B-A22B-Instruct-2507}"
DATA="${DATA:-data}"
RUN_DIR="${RUN_DIR:-runs/$NAME}"
ENGINE="${ENGINE:-sglang}" ENGINE_TP="${ENGINE_TP:-8}" ENGINE_MEMORY="${ENGINE_MEMORY:-0.85}"
GPU_MEMORY="${GPU_MEMORY:-80}"

# Overlap of tensor-parallel communication with compute needs one hardware queue.
export CUDA_DEVICE_MAX_CONNECTIONS=1

RUN_ARGS=(--run.dir "$RUN_DIR")
if [ -n "${SLURM_ARRAY_TASK_ID:-}" ]; then  # sbatch --array=0-3: one seed, and one folder, per task
    RUN_ARGS=(--run.dir "$RUN_DIR/seed-$SLURM_ARRAY_TASK_ID" --run.seed "$SLURM_ARRAY_TASK_ID")
fi
MODEL_ARGS=(--model.hf "$MODEL")
DATA_ARGS=(--data.prompts "$DATA/dapo-math-17k.jsonl" --data.eval-prompts "$DATA/aime24.jsonl")
case "$ENGINE" in
    sglang) FLAGS=" --tp-size $ENGINE_TP --mem-fraction-static $ENGINE_MEMORY" ;;
    vllm) FLAGS=" --tensor-parallel-size $ENGINE_TP --gpu-memory-utilization $ENGINE_MEMORY" ;;
    *) echo "ENGINE=$ENGINE: take sglang or vllm" >&2 && exit 2 ;;
esac
ENGINE_ARGS=(--rollout.engine "$ENGINE" --rollout.engine-args "$FLAGS")
if [ -n "${ENGINE_PYTHON:-}" ]; then ENGINE_ARGS+=(--rollout.engine-python "$ENGINE_PYTHON"); fi

ARGS=(--config "$RECIPE" "${RUN_ARGS[@]}" "${MODEL_ARGS[@]}" "${DATA_ARGS[@]}" "${ENGINE_ARGS[@]}" "$@")
luspo plan --gpu-memory "$GPU_MEMORY" "${ARGS[@]}"
exec luspo train "${ARGS[@]}"
