"""Prompts in, packed micro-batches out: reading, planning (schedule) and packing (collate)."""
