#!/usr/bin/env bash
# The paper's dense recipe: LUSPO for Qwen2.5-7B on one node of 8 GPUs, engines on the trainers' GPUs.
#
#   bash examples/qwen2_5/luspo-qwen2_5_7b-1n8g.sh       (one node)
#   sbatch examples/qwen2_5/luspo-qwen2_5_7b-1n8g.sbatch
#   ENGINE=vllm MODEL=/models/Qwen2.5-7B DATA=/data RUN_DIR=/scratch/run sbatch ...
#   any flag of `luspo train` at the end wins, e.g. --run.steps 10
#
# The same command goes on where the run stopped. `luspo plan` looks at the whole first and stops what cannot fit.
# LUSPO_DRY_RUN=1: everything but the model. Paths are seen from the repository's folder.
set -euo pipefail
cd "$(dirname "$0")/../.."
command -v luspo >/dev/null || export PATH="$PWD/.venv/bin:$PATH"

NAME=luspo-qwen2_5_7b-1n8g
RECIPE="${RECIPE:-examples/qwen2_5/$NAME.yaml}"
MODEL="${MODEL:-models/Qwen2.5-7B}"
DATA="${DATA:-data}"
RUN_DIR="${RUN_DIR:-runs/$NAME}"
ENGINE="${ENGINE:-sglang}" ENGINE_TP="${ENGINE_TP:-2}" ENGINE_MEMORY="${ENGINE_MEMORY:-0.7}"
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
