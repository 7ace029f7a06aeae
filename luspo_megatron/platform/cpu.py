"""megatron-core on CPU over gloo: torch names that mean CUDA are pointed at the CPU, for this process.

megatron-core calls torch.cuda directly in many places. This module replaces those names once, before megatron is
imported, so that "cuda" means the CPU, streams and events are no-ops (CPU work is already in order), and the CUDA
generator is torch's default one. It changes torch for the whole process: only worker processes may call it.
Left out: CUDA graphs, paged stash, fp8.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import types
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.utils._device as device_modes

from luspo_megatron.platform.gloo import share_device

CPU = torch.device("cpu")
FACTORIES = ("tensor", "empty", "zeros", "ones", "full", "arange", "rand", "randn", "randint", "eye", "linspace",
             "empty_like", "zeros_like", "ones_like", "full_like")


class CpuPlatform:
    """gloo, the local layer spec, PlainAdam."""

    name = "cpu"
    backend = "gloo"
    device = CPU

    def __init__(self) -> None:
        _patch_once()
        # oneDNN keeps what it has built for the last 1024 shapes, half a megabyte each (kernels/products.py), and the
        # number of response rows differs with every micro-batch.
        os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "64")

    def layer_spec(self, transformer_config: Any, transformer_engine: str) -> Any:
        from luspo_megatron.platform.modules import local_block_spec

        return local_block_spec(transformer_config)

    def transformer_config_options(self, transformer_engine: str) -> dict[str, Any]:
        return {
            "use_cpu_initialization": True, "gradient_accumulation_fusion": False, "masked_softmax_fusion": False,
            "persist_layer_norm": False, "bias_dropout_fusion": False, "bias_activation_fusion": False,
            "apply_rope_fusion": False, "moe_grouped_gemm": False,
        }

    def prepare_optimizer(self) -> str:
        from luspo_megatron.platform.adam import install

        return install()


@functools.cache
def _patch_once() -> None:
    _redirect_devices()
    _neutral_streams()
    _redirect_rng()
    _no_compile()
    _uneven_collectives()
    share_device()
    # these import megatron, so they come last
    _patch_megatron()


def _is_cuda(device: Any) -> bool:
    if isinstance(device, torch.device):
        return device.type == "cuda"
    return isinstance(device, str) and device.startswith("cuda")


def _redirect_devices() -> None:
    def factory_on_cpu(create: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(create)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            if kwargs:
                if _is_cuda(kwargs.get("device")):
                    kwargs["device"] = CPU
                if kwargs.get("pin_memory"):
                    kwargs["pin_memory"] = False
            return create(*args, **kwargs)

        return wrapped

    # `with torch.device("meta")` knows the factories by identity and lists them on first use: before they are replaced.
    device_modes._device_constructors()
    for name in FACTORIES:
        setattr(torch, name, factory_on_cpu(getattr(torch, name)))
    tensor: Any = torch.Tensor
    to, as_type = tensor.to, tensor.type

    def to_cpu(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return to(self, *[CPU if _is_cuda(a) else a for a in args],
                  **{k: CPU if _is_cuda(v) else v for k, v in kwargs.items()})

    def type_as_cuda(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        # megatron's gradient buffers compare type strings with "torch.cuda.FloatTensor"
        if args or kwargs:
            return as_type(self, *args, **kwargs)
        return as_type(self).replace("torch.", "torch.cuda.", 1)

    tensor.cuda = lambda self, *args, **kwargs: self
    tensor.to, tensor.type = to_cpu, type_as_cuda
    tensor.record_stream = lambda self, stream: None
    torch.cuda.current_device = lambda: CPU  # type: ignore[assignment, return-value]
    _set_constant(None, "set_device", "synchronize", "empty_cache")
    _set_constant(1, "device_count")
    _set_constant(False, "is_current_stream_capturing")
    _set_constant(0, "memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved")


def _set_constant(value: Any, *names: str) -> None:
    for name in names:
        # one function object per name: dynamo's rule map rejects an object reachable under two torch names
        setattr(torch.cuda, name, lambda *args, **kwargs: value)


class _Stream:
    device = CPU

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
    def wait_stream(self, *args: Any) -> None: ...
    def wait_event(self, *args: Any) -> None: ...
    def synchronize(self) -> None: ...

    def record_event(self, *args: Any) -> _Event:
        return _Event()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Stream)

    def __hash__(self) -> int:
        return 0

    @staticmethod
    def priority_range() -> tuple[int, int]:
        return 0, 0


class _Event:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
    def record(self, *args: Any) -> None: ...
    def wait(self, *args: Any) -> None: ...
    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True

    def elapsed_time(self, other: _Event) -> float:
        return 0.0


def _neutral_streams() -> None:
    cuda: Any = torch.cuda
    cuda.Stream, cuda.Event = _Stream, _Event
    cuda.stream = lambda stream: contextlib.nullcontext()
    _set_constant(_Stream(), "current_stream", "default_stream")
    cuda.nvtx.range_push = lambda *args, **kwargs: 0
    cuda.nvtx.range_pop = lambda *args, **kwargs: 0


def _redirect_rng() -> None:
    generator = torch.default_generator
    for module in (torch.cuda, torch.cuda.random):
        holder: Any = module
        holder.manual_seed = lambda seed: generator.manual_seed(int(seed)) and None
        holder.manual_seed_all = lambda seed: generator.manual_seed(int(seed)) and None
        holder.get_rng_state = lambda device=None: generator.get_state()
        holder.set_rng_state = lambda state, device=None: generator.set_state(state) and None


def _no_compile() -> None:
    # megatron.core.jit compiles at import; inductor on CPU costs minutes and gains nothing here
    torch.compile = lambda model=None, **_: model if model is not None else (lambda f: f)  # type: ignore[assignment]


def _uneven_collectives() -> None:
    """gloo has no all_gather / reduce_scatter of unequal parts; the alltoall dispatcher with ETP > 1 needs them."""
    all_gather, reduce_scatter = dist.all_gather, dist.reduce_scatter

    def uneven_all_gather(outputs: list[torch.Tensor], tensor: torch.Tensor, group: Any = None,
                          async_op: bool = False) -> Any:
        if len({o.shape for o in outputs}) == 1:
            return all_gather(outputs, tensor, group=group, async_op=async_op)
        me = dist.get_rank(group)
        for i, output in enumerate(outputs):
            if i == me:
                output.copy_(tensor)
            dist.broadcast(output, group_src=i, group=group)
        return None

    def uneven_reduce_scatter(output: torch.Tensor, inputs: list[torch.Tensor], op: Any = dist.ReduceOp.SUM,
                              group: Any = None, async_op: bool = False) -> Any:
        if len({i.shape for i in inputs}) == 1:
            return reduce_scatter(output, inputs, op=op, group=group, async_op=async_op)
        me = dist.get_rank(group)
        for i, part in enumerate(inputs):
            total = part.clone()
            dist.all_reduce(total, op=op, group=group)
            if i == me:
                output.copy_(total)
        return None

    patched: Any = dist
    patched.all_gather, patched.reduce_scatter = uneven_all_gather, uneven_reduce_scatter


def _patch_megatron() -> None:
    try:
        import triton  # noqa: F401
    except ImportError:  # the pipeline schedules import GPU kernels that need the name only
        stub: Any = types.ModuleType("megatron.core.transformer.moe.ops.paged_stash")

        def gpu_only(*args: Any, **kwargs: Any) -> None:
            raise RuntimeError("paged stash needs triton and CUDA")

        stub.GLOBAL_BLOCK_SIZE, stub.paged_stash_copy_kernel, stub.paged_stash_pop_kernel = 1024, gpu_only, gpu_only
        sys.modules[stub.__name__] = stub

    generator = torch.default_generator
    import megatron.core.tensor_parallel.random as megatron_random
    import megatron.core.transformer.moe.token_dispatcher as dispatcher

    megatron_random._get_cuda_rng_state = lambda device="cuda", clone=False, graph_safe=False: generator.get_state()
    megatron_random._set_cuda_rng_state = (
        lambda state, device=-1, graph_safe=False: generator.set_state(state) and None)

    def split_sizes_to_host(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        # already on the host, but all_to_all wants an array of split sizes, not a tensor
        return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor

    dispatcher.maybe_move_tensor_to_cpu = split_sizes_to_host
