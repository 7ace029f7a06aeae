#!/usr/bin/env bash
# Pass rates of a Hugging Face model on held-out prompts.
#
#   MODEL=runs/x/export PROMPTS=data/aime25.jsonl bash examples/qwen3_moe/eval.sh      (one node of 8 GPUs)
#   MODEL=runs/x/export PROMPTS=data/aime25.jsonl sbatch examples/qwen3_moe/eval.sbatch
#   any flag of `luspo eval` at the end wins, e.g. --eval.samples 64
#
# LUSPO_DRY_RUN=1: everything but the model. Paths are seen from the repository's folder.
set -euo pipefail
cd "$(dirname "$0")/../.."
command -v luspo >/dev/null || export PATH="$PWD/.venv/bin:$PATH"

MODEL="${MODEL:?name the Hugging Face folder: MODEL=...}"
PROMPTS="${PROMPTS:-data/aime24.jsonl}"
OUT="${OUT:-runs/eval-${SLURM_JOB_ID:-$(date +%Y%m%d-%H%M%S)}}"
ENGINE="${ENGINE:-sglang}" ENGINE_TP="${ENGINE_TP:-4}" NUM_ENGINES="${NUM_ENGINES:-2}"

MODEL_ARGS=(--model.hf "$MODEL" --model.dtype bfloat16)
DATA_ARGS=(--data.eval-prompts "$PROMPTS" --data.chat-template true)
case "$ENGINE" in
    sglang) FLAGS=" --tp-size $ENGINE_TP" ;;
    vllm) FLAGS=" --tensor-parallel-size $ENGINE_TP" ;;
    *) echo "ENGINE=$ENGINE: take sglang or vllm" >&2 && exit 2 ;;
esac
ENGINE_ARGS=(--rollout.engine "$ENGINE" --rollout.engine-args "$FLAGS" --rollout.num-engines "$NUM_ENGINES")
if [ -n "${ENGINE_PYTHON:-}" ]; then ENGINE_ARGS+=(--rollout.engine-python "$ENGINE_PYTHON"); fi
SAMPLING_ARGS=(--eval.samples 16 --eval.temperature 1.0 --rollout.max-response-tokens 32768)

exec luspo eval --out "$OUT" "${MODEL_ARGS[@]}" "${DATA_ARGS[@]}" "${ENGINE_ARGS[@]}" "${SAMPLING_ARGS[@]}" "$@"
