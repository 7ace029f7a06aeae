"""megatron-core on CUDA over NCCL, with Transformer Engine's layer spec or the local one."""

from __future__ import annotations

import importlib.util
import os
from typing import Any

import torch

from luspo_megatron.errors import UserError


class CudaPlatform:
    """NCCL; Transformer Engine where wanted and importable, else the local spec with packed attention."""

    name = "cuda"
    backend = "nccl"

    def __init__(self) -> None:
        self.device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(self.device)

    def _use_te(self, choice: str) -> bool:
        if choice == "off":
            return False
        try:
            import transformer_engine.pytorch  # noqa: F401
        except (ImportError, RuntimeError, OSError) as error:  # the empty meta package raises RuntimeError
            if choice == "on":
                raise UserError(f"model.transformer_engine=on: Transformer Engine cannot be imported ({error}); "
                                "install transformer-engine[pytorch] with its CUDA half, or set it to auto or "
                                "off") from error
            return False
        return True

    def layer_spec(self, transformer_config: Any, transformer_engine: str) -> Any:
        if not self._use_te(transformer_engine):
            from luspo_megatron.platform.modules import local_block_spec

            return local_block_spec(transformer_config)
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec

        return get_gpt_decoder_block_spec(transformer_config, use_transformer_engine=True, normalization="RMSNorm")

    def transformer_config_options(self, transformer_engine: str) -> dict[str, Any]:
        te = self._use_te(transformer_engine)
        return {
            "use_cpu_initialization": False,
            # NVIDIA Apex's fused weight-gradient kernel
            "gradient_accumulation_fusion": importlib.util.find_spec("fused_weight_gradient_mlp_cuda") is not None,
            "masked_softmax_fusion": False, "persist_layer_norm": te, "bias_dropout_fusion": False,
            "bias_activation_fusion": False, "apply_rope_fusion": te, "moe_grouped_gemm": te,
        }

    def prepare_optimizer(self) -> str:
        from luspo_megatron.platform.adam import install

        return install()
