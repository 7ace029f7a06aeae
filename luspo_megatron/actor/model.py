"""megatron-core's GPTModel for an Architecture, on this rank of the layout."""

from __future__ import annotations

from typing import Any

import torch

from luspo_megatron.config import ModelConfig
from luspo_megatron.parallel import ParallelLayout
from luspo_megatron.platform import platform
from luspo_megatron.weights.architecture import Architecture, find_family, padded_vocab

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def transformer_config(arch: Architecture, model: ModelConfig, layout: ParallelLayout, sequence_parallel: bool) -> Any:
    """TransformerConfig of megatron-core; packed micro-batches of different lengths need variable_seq_lengths."""
    from megatron.core.transformer import TransformerConfig

    dtype = DTYPES[model.dtype]
    options: dict[str, Any] = {
        "num_layers": arch.num_layers, "hidden_size": arch.hidden, "num_attention_heads": arch.num_heads,
        "num_query_groups": arch.num_kv_heads, "kv_channels": arch.head_dim, "ffn_hidden_size": arch.ffn,
        "normalization": "RMSNorm", "layernorm_epsilon": arch.norm_eps, "qk_layernorm": arch.qk_norm,
        "gated_linear_unit": True, "activation_func": torch.nn.functional.silu, "add_bias_linear": False,
        "add_qkv_bias": arch.qkv_bias, "attention_dropout": 0.0, "hidden_dropout": 0.0,
        "attention_softmax_in_fp32": True,
        "tensor_model_parallel_size": layout.tp, "pipeline_model_parallel_size": layout.pp,
        "context_parallel_size": layout.cp, "expert_model_parallel_size": layout.ep,
        "expert_tensor_parallel_size": layout.etp, "sequence_parallel": sequence_parallel and layout.tp > 1,
        "params_dtype": dtype, "pipeline_dtype": dtype, "bf16": dtype == torch.bfloat16,
        "perform_initialization": not model.hf, "variable_seq_lengths": True,
        # required by variable_seq_lengths even without experts
        "moe_token_dispatcher_type": "alltoall", "calculate_per_token_loss": False,
    }
    if arch.is_moe:
        options |= {
            "num_moe_experts": arch.num_experts, "moe_ffn_hidden_size": arch.moe_ffn, "moe_router_topk": arch.top_k,
            "moe_layer_freq": 1, "moe_router_dtype": "fp32", "moe_router_score_function": "softmax",
            # softmax over the chosen experts equals Hugging Face's norm_topk_prob
            "moe_router_pre_softmax": not arch.norm_topk_prob,
            "moe_router_load_balancing_type": "aux_loss" if model.router_aux_loss_coef else "none",
            "moe_aux_loss_coeff": model.router_aux_loss_coef,
        }
    if model.recompute == "full":
        options |= {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    elif model.recompute == "selective":
        options |= {"recompute_granularity": "selective"}
    options |= dict(find_family(arch.family).options)
    options |= platform().transformer_config_options(model.transformer_engine)
    return TransformerConfig(**options)


def build_model(arch: Architecture, model: ModelConfig, layout: ParallelLayout, sequence_parallel: bool) -> Any:
    """The GPTModel shard of this rank, on the platform's device, randomly initialised or empty."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel

    here = platform()
    config = transformer_config(arch, model, layout, sequence_parallel)
    gpt = GPTModel(
        config=config, transformer_layer_spec=here.layer_spec(config, model.transformer_engine),
        vocab_size=padded_vocab(arch.vocab_size, layout.tp), max_sequence_length=arch.max_positions,
        pre_process=parallel_state.is_pipeline_first_stage(), post_process=parallel_state.is_pipeline_last_stage(),
        parallel_output=True, share_embeddings_and_output_weights=arch.tied, position_embedding_type="rope",
        rotary_base=arch.rope_theta)  # type: ignore[arg-type]
    if not config.apply_rope_fusion:
        from luspo_megatron.platform.packing import PackedRotaryEmbedding

        gpt.rotary_pos_emb = PackedRotaryEmbedding(
            kv_channels=arch.head_dim, rotary_percent=1.0, rotary_base=arch.rope_theta,  # type: ignore[arg-type]
            use_cpu_initialization=config.use_cpu_initialization, cp_group=gpt.pg_collection.cp)
    if (scaling := arch.rope_scaling) is not None:
        # megatron's own switch fixes all but the factor at Llama 3.1's values
        rope = gpt.rotary_pos_emb
        rope.inv_freq = rope._apply_scaling(rope.inv_freq, scaling.factor, scaling.low_freq_factor,
                                            scaling.high_freq_factor, scaling.original_max_positions)
    if model.trainable == "no_router":
        for name, parameter in gpt.named_parameters():
            parameter.requires_grad_(".router." not in name)
    return gpt.to(here.device)
