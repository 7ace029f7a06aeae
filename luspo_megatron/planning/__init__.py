"""The preflight: what a configuration would take (`luspo plan`), from its text and the model's config.json alone.

Pure Python and numpy: no torch, no GPU, no process group. The arithmetic that a person may want to check by hand is in
sizes.py (parameters, exact), memory.py (bytes per GPU), work.py (FLOPs and seconds) and batches.py.
"""
