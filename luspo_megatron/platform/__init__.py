"""The only place that knows CPU from CUDA. Everything else asks `platform()`.

`LUSPO_PLATFORM=cpu` forces the CPU platform on a machine with GPUs (tests compare both).
"""

from __future__ import annotations

import functools
import os

from luspo_megatron.errors import UserError
from luspo_megatron.platform.base import Platform

__all__ = ["Platform", "platform"]


@functools.cache
def platform() -> Platform:
    """The platform of this process; the first call prepares it, so call it before importing megatron."""
    import torch

    choice = os.environ.get("LUSPO_PLATFORM", "cuda" if torch.cuda.is_available() else "cpu")
    if choice == "cuda":
        from luspo_megatron.platform.cuda import CudaPlatform as Chosen
    elif choice == "cpu":
        from luspo_megatron.platform.cpu import CpuPlatform as Chosen  # type: ignore[assignment]
    else:
        raise UserError(f"LUSPO_PLATFORM={choice}: unknown platform; use cpu or cuda")
    return Chosen()
