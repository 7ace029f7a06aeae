#!/usr/bin/env bash
# The tiny model, its prompts and its supervised cold start in FOLDER/{model,data,sft/export}; what is there is kept.
#
#   bash examples/qwen3_moe/tiny/cold_start.sh FOLDER [flags of make_tiny_model.py]
set -euo pipefail
cd "$(dirname "$0")/../../.."
command -v luspo >/dev/null || export PATH="$PWD/.venv/bin:$PATH"

FOLDER="$1"
PYTHON="${PYTHON:-python}"
EXAMPLE=examples/qwen3_moe
mkdir -p "$FOLDER"

[ -f "$FOLDER/model/config.json" ] || "$PYTHON" "$EXAMPLE/tiny/make_tiny_model.py" --out "$FOLDER/model" "${@:2}"
[ -f "$FOLDER/data/heldout.jsonl" ] || "$PYTHON" "$EXAMPLE/tiny/make_data.py" --out "$FOLDER/data"
[ -d "$FOLDER/sft/export" ] || luspo sft --config "$EXAMPLE/tiny_cpu_sft.yaml" --run.dir "$FOLDER/sft" \
    --model.hf "$FOLDER/model" --data.path "$FOLDER/data/demos.jsonl"
