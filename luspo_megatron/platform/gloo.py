"""All gloo groups of a process over one gloo device.

torch gives each group a device of its own, whose thread wakes up a hundred times a second. megatron makes about sixty
groups per process, so idle ranks would cost a tenth of a core each, which is what a laptop lacks. A gloo device is made
to be shared.
"""

from __future__ import annotations

import functools
from datetime import timedelta
from typing import Any

import torch.distributed.distributed_c10d as c10d

Gloo: Any = c10d.ProcessGroupGloo


@functools.cache
def _device() -> Any:
    return Gloo.create_default_device()


class _Kind(type):
    def __instancecheck__(cls, group: object) -> bool:
        return isinstance(group, Gloo)

    def __getattr__(cls, name: str) -> Any:
        return getattr(Gloo, name)


class SharedDeviceGloo(metaclass=_Kind):
    """Stands in for torch's class: instances, attributes and isinstance are those of torch's."""

    def __new__(cls, store: Any, rank: int, size: int, timeout: timedelta = timedelta(minutes=30),
                **options: Any) -> Any:
        if any(options.values()):  # enable_reconfigure: not ours to decide
            return Gloo(store, rank, size, timeout=timeout, **options)
        settings = Gloo._Options()
        settings._timeout, settings._devices = timeout, [_device()]
        return Gloo(store, rank, size, settings)


def share_device() -> None:
    """From now on, in this process."""
    c10d.ProcessGroupGloo = SharedDeviceGloo  # type: ignore[assignment, misc]
