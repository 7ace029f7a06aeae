#!/usr/bin/env bash
# Everything that wants one GPU, under 9 minutes: loss stage (6), then a train step and a weight push (3).
# usage: benchmarks/gpu.sh [OUT_FOLDER]      output and CSV go there; --smoke as second word runs it tiny on the CPU
set -uo pipefail
cd "$(dirname "$0")/.." || exit
out=${1:-runs/gpu}
shift $(( $# > 0 ? 1 : 0 ))
mkdir -p "$out"
python=${PYTHON:-python}
export TOKENIZERS_PARALLELISM=false PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
status=0
timeout 360 "$python" -m benchmarks.gpu_loss --csv "$out/gpu_loss.csv" "$@" 2>&1 | tee "$out/gpu_loss.txt" || status=1
timeout 180 "$python" -m benchmarks.gpu_step "$@" 2>&1 | tee "$out/gpu_step.txt" || status=1
exit "$status"
