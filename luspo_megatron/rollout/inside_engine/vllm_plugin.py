"""vLLM's end of a weight push: a weight transfer engine named ``luspo`` (--weight-transfer-config).

vLLM imports this module in every worker because of --worker-extension-cls; importing it registers the engine. The
HTTP lifecycle is vLLM's own: /init_weight_transfer_engine, /start_weight_update, /update_weights (once, with the whole
manifest), /finish_weight_update.

On CPU vLLM 0.32 packs the expert weights for its kernel once and, on a reload, keeps the old kernel: the new weights
stay unpacked and the log-probs are silently wrong by more than 1 nat. ``forget_packed_experts`` makes it pack again.
LUSPO_VLLM_KEEP_PACKED_EXPERTS=1 turns that off, for the test that shows what it is for.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.logger import init_logger
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.platforms import current_platform

from luspo_megatron.rollout.inside_engine.push import PushReceiver, check_loaded

log = init_logger("vllm.luspo")


@dataclass
class InitInfo(WeightTransferInitInfo):
    connection: dict[str, Any]


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    manifest: dict[str, Any]


def forget_packed_experts(model: torch.nn.Module) -> None:
    """Drop the fused-expert kernels on CPU, so that the reload builds them (and packs the weights) anew."""
    if not current_platform.is_cpu() or os.environ.get("LUSPO_VLLM_KEEP_PACKED_EXPERTS"):
        return
    for module in model.modules():
        method = getattr(module, "quant_method", None)
        if method is not None and getattr(method, "moe_kernel", None) is not None:
            method.moe_kernel = None


class PushEngine(WeightTransferEngine[InitInfo, UpdateInfo]):
    """One per worker. A push that breaks off leaves the weights of no version; the next whole push mends them."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo
    supports_draft_weight_update = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._push = PushReceiver(self.device)

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        parallel = self.parallel_config
        worker = parallel.data_parallel_index * parallel.world_size + parallel.rank
        self._push.connect(init_info.connection, worker)

    def start_weight_update(self) -> None:
        forget_packed_experts(self.model)
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def receive_weights(self, update_info: UpdateInfo) -> None:
        expected = {name for name, _ in self.model.named_parameters()}
        try:
            loaded = self.model.load_weights(self._push.tensors(update_info.manifest))
            check_loaded(expected, loaded, int(update_info.manifest["version"]))
        except BaseException:
            # Layers that got a part of their weights would count it towards the next push and stop loading early.
            finalize_layerwise_reload(self.model, self.model_config)
            raise

    def finish_weight_update(self) -> None:
        finalize_layerwise_reload(self.model, self.model_config)

    def shutdown(self) -> None:
        self._push.close()


class WorkerExtension:
    """What --worker-extension-cls names. It adds nothing to the workers: its module is what they need."""


if "luspo" not in WeightTransferEngineFactory._registry:
    WeightTransferEngineFactory.register_engine("luspo", PushEngine)
    log.info("weight transfer engine luspo is registered")
