"""luspo_megatron: RLVR training of large MoE models with LUSPO on Megatron-core shards."""

__version__ = "0.1.0"
