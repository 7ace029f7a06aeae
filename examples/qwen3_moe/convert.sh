#!/usr/bin/env bash
# Converts a checkpoint between Hugging Face and Megatron and compares the two; on the CPU, without a GPU.
#
#   HF=/models/Qwen3-30B-A3B OUT=/scratch/Qwen3-30B-A3B-megatron bash examples/qwen3_moe/convert.sh
#   MEGATRON=runs/luspo OUT=/scratch/luspo-hf sbatch examples/qwen3_moe/convert.sbatch
#   any option of tools/checkpoint_convert at the end wins, e.g. --dtype bfloat16
#
# TP, PP, EP as for hf_to_megatron.py (they only decide padding and files). Killed or requeued, the same command goes
# on; a folder OUT that is there is only compared.
# LUSPO_DRY_RUN=1: only says what it would do. Paths are seen from the repository's folder.
set -euo pipefail
cd "$(dirname "$0")/../.."
command -v luspo >/dev/null || export PATH="$PWD/.venv/bin:$PATH"

HF="${HF:-}" MEGATRON="${MEGATRON:-}"
OUT="${OUT:?name the folder to make: OUT=...}"
PYTHON="${PYTHON:-python}"
WORKERS="${WORKERS:-${SLURM_CPUS_PER_TASK:-2}}"
TOOLS=tools/checkpoint_convert
export OMP_NUM_THREADS=1

OUT_ARGS=(--out "$OUT" --workers "$WORKERS" --resume)
if [ -n "$HF" ] && [ -z "$MEGATRON" ]; then
    SOURCE="$HF"
    LAYOUT_ARGS=(--tp "${TP:-1}" --pp "${PP:-1}" --ep "${EP:-1}")
    COMMAND=("$TOOLS/hf_to_megatron.py" --hf "$HF" "${LAYOUT_ARGS[@]}" "${OUT_ARGS[@]}" "$@")
elif [ -n "$MEGATRON" ] && [ -z "$HF" ]; then
    SOURCE="$MEGATRON"
    COMMAND=("$TOOLS/megatron_to_hf.py" --megatron "$MEGATRON" "${OUT_ARGS[@]}" "$@")
else
    echo "convert.sh: name one of HF=... (to Megatron) and MEGATRON=... (to Hugging Face)" >&2
    exit 2
fi
if [ ! -d "$SOURCE" ]; then echo "convert.sh: there is no folder $SOURCE" >&2 && exit 2; fi

VERIFY=("$TOOLS/verify.py" "$SOURCE" "$OUT" --workers "$WORKERS" --quiet)
if [ "${LUSPO_DRY_RUN:-0}" = 1 ]; then
    echo "dry run: ${COMMAND[*]@Q}" && echo "dry run: ${VERIFY[*]@Q}"
    exit 0
fi
if [ ! -e "$OUT" ]; then "$PYTHON" "${COMMAND[@]}"; fi
exec "$PYTHON" "${VERIFY[@]}"
