"""Code that runs inside an engine's processes, in the engine's own environment.

That environment has its own Python (3.11 for the CPU wheels) and none of this package's requirements, so everything
here is Python 3.11, imports the standard library, torch, xxhash and the engine, and of this package only
``luspo_megatron.weights.manifest``, ``weights.transports`` and ``errors``, which keep to the same rule. ``serve.py``
puts the package on the engine's path by itself. Tests compile all of it for 3.11.
"""
