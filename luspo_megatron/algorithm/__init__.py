"""Pure functions on tensors: advantages, objectives, statistics. Knows torch and types, nothing of megatron."""
