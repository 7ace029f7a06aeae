#!/usr/bin/env bash
# The tiny demo's task with each engine: 30 steps with the Hugging Face engine, vLLM and SGLang, from one cold start.
#
#   make test-engines                                   once: it makes the engines' environments in .venv-engines
#   bash examples/qwen3_moe/engines.sh                  about 10 minutes on two cores; any flag of `luspo train` wins
#   ENGINES="hf sglang" bash examples/qwen3_moe/engines.sh --run.steps 10
#
# The last lines are a table; the exit code is 1 when an engine's rewards differ from the Hugging Face engine's by more
# than chance. The model's attention heads are 32 wide, because vLLM on a CPU knows no 24. Interrupted, the same command
# goes on where it stopped.
set -euo pipefail
cd "$(dirname "$0")/../.."
command -v luspo >/dev/null || export PATH="$PWD/.venv/bin:$PATH"

OUT="${OUT:-runs/engines}"
ENGINES="${ENGINES:-hf vllm sglang}"
ENGINE_VENVS="${ENGINE_VENVS:-.venv-engines}"
PYTHON="${PYTHON:-python}"
EXAMPLE=examples/qwen3_moe

bash "$EXAMPLE/tiny/cold_start.sh" "$OUT" --head-dim 32

for engine in $ENGINES; do
    grep -qs '"finished": true' "$OUT/$engine/summary.json" && continue
    ENGINE_ARGS=(--rollout.engine "$engine" --rollout.start-timeout 300 --rollout.request-timeout 300)
    if [ "$engine" != hf ]; then ENGINE_ARGS+=(--rollout.engine-python "$ENGINE_VENVS/$engine/bin/python"); fi
    luspo train --config "$EXAMPLE/tiny_cpu.yaml" --run.dir "$OUT/$engine" --run.steps 30 --model.hf "$OUT/sft/export" \
        --data.prompts "$OUT/data/train.jsonl" --parallel.world-size 2 --parallel.tp 1 --parallel.pp 2 --parallel.ep 1 \
        --checkpoint.every 0 --checkpoint.export-at-end false "${ENGINE_ARGS[@]}" "$@"
done

# shellcheck disable=SC2086
"$PYTHON" "$EXAMPLE/tiny/same_rewards.py" --folder "$OUT" --engines $ENGINES
