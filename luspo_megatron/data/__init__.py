"""Data that goes into a step: prompts, demonstrations, packing, batch plans."""
