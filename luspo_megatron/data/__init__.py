"""Data: prompts, demonstrations, tokenizer, and the schedule of a step's batches."""
