"""The policy that trains: megatron-core shards, one optimizer, the loss stage, checkpoints."""
