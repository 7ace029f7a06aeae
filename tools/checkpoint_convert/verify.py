#!/usr/bin/env python3
"""Compares two checkpoints of either kind tensor by tensor, and each with its manifest."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from luspo_megatron.convert.commands import verify  # noqa: E402

if __name__ == "__main__":
    sys.exit(verify())
