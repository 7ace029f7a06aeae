#!/usr/bin/env bash
# What LUSPO, GSPO and GRPO do to the response length of the tiny Qwen3-MoE: same cold start, same prompts, 3 seeds.
#
#   bash examples/qwen3_moe/length_study.sh                     9 runs of 150 steps; half an hour to 2 hours on two cores
#   bash examples/qwen3_moe/length_study.sh --seeds 1 --run.steps 30 --algorithms luspo,gspo
#
# Interrupted, the same command goes on where it stopped. COLD_START=runs/demo-... takes the model, the prompts and the
# cold start of a demo instead of making them.
set -euo pipefail
cd "$(dirname "$0")/../.."

OUT="${OUT:-runs/length-study}"
START="${COLD_START:-$OUT/start}"
EXAMPLE=examples/qwen3_moe

bash "$EXAMPLE/tiny/cold_start.sh" "$START"

luspo study model --config "$EXAMPLE/tiny_cpu.yaml" --out "$OUT" --model.hf "$START/sft/export" \
    --data.prompts "$START/data/train.jsonl" --data.eval-prompts "$START/data/heldout.jsonl" \
    --parallel.world-size 2 --parallel.tp 1 --parallel.ep 1 "$@"
