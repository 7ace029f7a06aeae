"""Checkpoint conversion between Hugging Face folders and Megatron's torch_dist folders, in both directions."""
