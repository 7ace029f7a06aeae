"""Kernels of the loss stage; one signature, one backend a file."""
