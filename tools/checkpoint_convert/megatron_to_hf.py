#!/usr/bin/env python3
"""Megatron torch_dist checkpoint -> Hugging Face folder. Runs on CPU, without a GPU and without megatron-core."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from luspo_megatron.convert.commands import megatron_to_hf  # noqa: E402

if __name__ == "__main__":
    sys.exit(megatron_to_hf())
