#!/usr/bin/env python3
"""Hugging Face folder -> Megatron torch_dist checkpoint. Runs on CPU, without a GPU and without megatron-core."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from luspo_megatron.convert.commands import hf_to_megatron  # noqa: E402

if __name__ == "__main__":
    sys.exit(hf_to_megatron())
