#!/usr/bin/env bash
# A real pretrained model through the whole loop on a CPU: fetch it, train a few steps, export, generate.
#
#   bash examples/smollm2/smollm2.sh                              one-digit sums, PP2 on 2 processes
#   GSM8K=gsm8k.jsonl bash examples/smollm2/smollm2.sh            then one step on word problems too
#   bash examples/smollm2/smollm2.sh --parallel.world-size 3 --parallel.tp 3 --parallel.pp 1
#
# GSM8K names a file with the columns question and answer (a solution whose last line is "#### 42").
set -euo pipefail
cd "$(dirname "$0")/../.."

BASE="${RUN_DIR:-runs/smollm2}"
PYTHON="${PYTHON:-python}"
EXAMPLE=examples/smollm2
MODEL="${MODEL:-runs/smollm2-model}"

"$PYTHON" "$EXAMPLE/get_model.py" --out "$MODEL"

train() { # NAME FLAGS...
    local run="$BASE/$1" n=1
    shift
    while [ -e "$run/summary.json" ]; do # a finished run stays as it is
        n=$((n + 1))
        run="${run%%.again-*}.again-$n"
    done
    luspo train --config "$EXAMPLE/smollm2.yaml" --run.dir "$run" --model.hf "$MODEL" "$@"
    "$PYTHON" "$EXAMPLE/check_export.py" --run-dir "$run" --model "$MODEL"
}

echo "== LUSPO on one-digit sums"
train sums "$@"

if [ -n "${GSM8K:-}" ] && [ -f "$GSM8K" ]; then
    echo "== LUSPO on word problems"
    # few answers are right, so length gives the groups something to tell apart
    PYTHONPATH="$EXAMPLE${PYTHONPATH:+:$PYTHONPATH}" train gsm8k --data.prompts "$GSM8K" --data.prompt-key question \
        --data.eval-prompts '' --data.size 64 --data.max-prompt-tokens 256 --run.steps 1 --rollout.prompts-per-step 2 \
        --rollout.max-response-tokens 64 --reward.terms last_number:LastNumber:1.0 overlong:1.0 \
        --reward.overlong-buffer 48 --algorithm.prompts-per-mini-batch 1 "$@"
else
    echo "== no GSM8K file (GSM8K=${GSM8K:-}): the step on word problems is left out"
fi
