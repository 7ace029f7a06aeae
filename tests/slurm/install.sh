#!/usr/bin/env bash
# Installs what tests/slurm needs where it is missing: Debian's Slurm, as root (about 20 s).
set -euo pipefail
PATH="$PATH:/usr/sbin:/sbin"

missing=()
for pair in slurmctld:slurmctld slurmd:slurmd sbatch:slurm-client munged:munge; do
    command -v "${pair%:*}" >/dev/null || missing+=("${pair#*:}")
done
if ((${#missing[@]} == 0)); then exit 0; fi
echo "Installing ${missing[*]}"
if ! { apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends \
    "${missing[@]}"; }; then
    echo "Cannot install ${missing[*]}: run this as root on Debian or Ubuntu, or install Slurm by hand" >&2
    exit 1
fi
