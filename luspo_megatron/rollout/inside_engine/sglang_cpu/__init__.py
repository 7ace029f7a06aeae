"""Stand-ins that let real SGLang run on a CPU without its compiled kernels, for tests and tiny models.

SGLang publishes no CPU build of ``sgl_kernel``. Without AMX its model code is plain torch but for one operator and one
helper, which ``sgl_kernel`` here gives in torch; every other kernel raises NotImplementedError when called.
``torchvision`` here satisfies imports of a text-only server. serve.py puts this folder on the path when SGLang is
started with ``--device cpu``. So on CPU the scheduler, the radix cache, the HTTP server and the weight updates are
SGLang's own, the kernels are not."""

from __future__ import annotations

from typing import Any


class _NoCudaRuntime:
    """The host buffer of routed experts is registered with the CUDA runtime, which a CPU build has not."""

    def __getattr__(self, name: str) -> Any:
        class Success(int):
            value = 0

        return lambda *_, **__: Success(0)


def allow_seeds() -> None:
    """SGLang draws with a request's own seed only in deterministic mode, which it refuses with the one attention that a
    CPU has. That one works on each sequence by itself, so it is as deterministic as those it allows."""
    from sglang.srt.arg_groups import choices

    for allowed in (choices.DETERMINISTIC_ATTENTION_BACKEND_CHOICES,
                    choices.RADIX_SUPPORTED_DETERMINISTIC_ATTENTION_BACKEND):
        if "torch_native" not in allowed:
            allowed.append("torch_native")


def patch_torch() -> None:
    import torch

    if not torch.backends.cuda.is_built():
        torch.cuda.cudart = lambda: _NoCudaRuntime()  # type: ignore[assignment, return-value]
